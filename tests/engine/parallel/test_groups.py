"""How groups are made: bound to a GPU or through host memory, named, and in the same order at all ranks."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from headrace.core.config import EngineConfig, Links, ModelConfig, StageConfig, TransferConfig
from headrace.core.types.ranks.external import ExternalMember
from headrace.core.types.ranks.layout import Layout
from headrace.engine.collectives import torch_collectives
from headrace.engine.collectives.graphed import GraphedCollectives
from headrace.engine.collectives.host_staged import HostStaged
from headrace.engine.collectives.operations import LinkBroken
from headrace.engine.collectives.torch_collectives import TorchCollectives
from headrace.engine.parallel import groups
from headrace.engine.parallel.groups import Groups, join_groups, link_way
from headrace.engine.parallel.pipeline import carrier

GPU = torch.device("cuda", 1)
TIMEOUT_S = 30.0
Made = tuple[str, tuple[int, ...]]


class Group(SimpleNamespace):
    """Stands in for dist.ProcessGroup."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


class Torch:
    """Stands in for torch.distributed: what is asked of it, in order."""

    ProcessGroup = object

    def __init__(self) -> None:
        self.world: dict[str, Any] = {}
        self.errors_left = False
        """To us, before there was a group."""
        self.made: list[Made] = []
        self.members_only: set[str] = set()
        self.timeouts: dict[str, float] = {}

    def init_process_group(self, backend: str, **given: Any) -> None:
        self.world = {"backend": backend, **given}

    def get_backend(self) -> str:
        return str(self.world["backend"])

    def get_world_size(self) -> int:
        return int(self.world["world_size"])

    def new_group(
        self,
        ranks: list[int],
        timeout: timedelta,
        backend: str | None,
        *,
        use_local_synchronization: bool,
        group_desc: str,
    ) -> Group:
        self.made.append((group_desc, tuple(ranks)))
        self.timeouts[group_desc] = timeout.total_seconds()
        if use_local_synchronization:
            self.members_only.add(group_desc)
        return Group(group_desc=group_desc, ranks=ranks)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Torch:
    made = Torch()
    for module in (groups, torch_collectives):
        monkeypatch.setattr(module, "dist", made)
    monkeypatch.setattr(groups, "_store", lambda *_: HashStore())
    monkeypatch.setattr(groups, "meet", lambda *_: HashStore())
    monkeypatch.setattr(groups, "common_terms", lambda *_: {})
    monkeypatch.setattr(groups, "on_one_machine", lambda group, _: group)
    monkeypatch.setattr(groups, "leave_errors_to_us", lambda: setattr(made, "errors_left", not made.world))
    return made


def config(layout: Layout, rank: int, links: Links = "device", **given: Any) -> StageConfig:
    return StageConfig(
        rank=rank, layout=layout, links=links, endpoint="", rendezvous="127.0.0.1:1", model=ModelConfig(),
        engine=EngineConfig(expert_parallel=layout.dp > 1 or "member" in given, overlap=layout.dp > 1),
        transfer=TransferConfig(), stage_timeout_s=TIMEOUT_S, **given,
    )  # fmt: skip


def join(fake: Torch, settings: StageConfig, device: torch.device = GPU) -> Groups:
    fake.made.clear()
    return join_groups(settings, device)


@pytest.mark.parametrize("device", [GPU, torch.device("cpu")], ids=str)
def test_groups_are_named_by_what_they_are_for_and_made_in_one_order(fake: Torch, device: torch.device) -> None:
    layout = Layout(2, 2, 2)
    orders = []
    for rank in layout.ranks:
        join(fake, config(layout, rank), device)
        orders.append(list(fake.made))
    assert all(order == orders[0] for order in orders)
    names = {name for name, _ in orders[0]}
    assert names - {"hidden"} == {"tp", "dp", "ep", "second dp", "second ep", "tokens"}
    assert ("hidden" in names) == (device.type != "cpu")


def test_a_world_of_gpus_is_bound_to_its_device_and_leaves_errors_to_us(fake: Torch) -> None:
    found = join(fake, config(Layout(2, 1, 2), 1))
    assert fake.world["backend"] == "nccl"
    assert fake.world["device_id"] == GPU
    assert fake.world["timeout"].total_seconds() == 2 * TIMEOUT_S, "our own bound comes first"
    assert set(fake.timeouts.values()) == {2 * TIMEOUT_S}
    assert fake.errors_left
    assert found.watch is not None
    assert isinstance(found.tp, GraphedCollectives)
    assert isinstance(found.tp._group, TorchCollectives)


def test_hidden_states_between_gpus_have_a_group_for_each_two_ranks(fake: Torch) -> None:
    """In one of all ranks a receive that is posted ahead would hold up the send behind it."""
    found = join(fake, config(Layout(3, 1, 2), 3))
    hidden = [ranks for name, ranks in fake.made if name == "hidden"]
    assert hidden == [(0, 2), (1, 3), (2, 4), (3, 5)]
    incoming, outgoing = found.incoming, found.outgoing
    assert incoming is not None
    assert outgoing is not None
    assert (incoming.ranks, outgoing.ranks) == ([1, 3], [3, 5])  # type: ignore[attr-defined]
    first, last = (join(fake, config(Layout(3, 1, 2), rank)) for rank in (0, 5))
    assert first.incoming is None
    assert last.outgoing is None


def test_groups_on_the_hosts_beside_gpus_are_made_by_their_members_alone(fake: Torch) -> None:
    """Others would enter a split of NCCL's communicator, which members do not come to."""
    member = ExternalMember(0, 2, "127.0.0.1", 1)
    join(fake, config(Layout(1, 1, 2), 0, member=member))
    assert fake.members_only == {"votes", "told"}
    fake.members_only.clear()
    join(fake, config(Layout(1, 1, 2), 0, "host", member=member))
    assert not fake.members_only


def test_links_through_host_memory(fake: Torch) -> None:
    found = join(fake, config(Layout(2, 1, 2), 1, "host"))
    assert fake.world["backend"] == "gloo"
    assert fake.world["device_id"] is None
    assert isinstance(found.tp, HostStaged)
    assert found.watch is None, "operations fail by themselves"
    assert "hidden" not in {name for name, _ in fake.made}
    assert type(carrier(found, GPU)).__name__ == "StagedCarrier"
    assert type(carrier(join(fake, config(Layout(2, 1, 2), 1)), GPU)).__name__ == "DirectCarrier"


def ways(monkeypatch: pytest.MonkeyPatch, gpus: list[str], links: Links = "auto") -> set[str]:
    """What ranks on these GPUs find."""
    own = threading.local()
    monkeypatch.setattr(groups, "_gpu", lambda _: own.gpu)
    store = HashStore()

    def find(rank: int) -> str:
        own.gpu = gpus[rank]
        return link_way(links, GPU, store, rank, len(gpus))

    with ThreadPoolExecutor(len(gpus)) as ranks:
        return set(ranks.map(find, range(len(gpus))))


def test_ranks_that_share_a_gpu_are_linked_through_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ways(monkeypatch, ["a", "b", "c"]) == {"device"}
    assert ways(monkeypatch, ["a", "b", "a"]) == {"staged"}, "all of them, also the one that shares none"
    assert ways(monkeypatch, ["a", "a"], "device") == {"device"}
    assert ways(monkeypatch, ["a", "b"], "host") == {"staged"}
    assert link_way("host", torch.device("cpu"), HashStore(), 0, 2) == "host", "nothing is staged on a CPU"


def test_a_rank_that_does_not_tell_its_gpu_breaks_the_link(fake: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.1))
    monkeypatch.setattr(groups, "_store", lambda *_: store)
    monkeypatch.setattr(groups, "_gpu", lambda _: "a")
    with pytest.raises(LinkBroken, match="could not be formed"):
        join(fake, config(Layout(2, 1, 1), 0, "auto"))
