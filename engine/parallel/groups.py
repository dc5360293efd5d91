"""Process groups of the ranks of a server (torch.distributed, NCCL or Gloo).

    world    all ranks: hidden states, point to point
    tp       the shards of one stage: all-reduces and gathers of sharded layers, through shared memory if all are on the
             CPU of one machine
    dp       the same shard of one stage in all replicas: exchange of tokens between experts by all-gather
    ep       all ranks of one stage, of all replicas: exchange of tokens between experts by all-to-all
    second   dp and ep once more, for the second halves of passes that are cut (dual-batch overlap)
    tokens   all ranks of one replica: sampled tokens, over a communicator of their own
    votes    the first shards of servers with a scheduler each that share experts: what they agree on
    told     the shards of one such server: the first tells the others, on the hosts
    loaded   all ranks of such servers: those that have loaded wait for the others, longer than for a pass
    hidden   a rank and the one of the next stage, with NCCL: in a group of more, where communicators exist from the
             start, a receive that is posted ahead would hold up the send behind it

GPUs are linked by NCCL (--links device), or through host memory, by Gloo (--links host): NCCL refuses two ranks that
share a GPU. With NCCL every group is bound to the rank's device, and torch's watchdog, which would end the process when
a rank is gone, leaves that to engine/outbox.py.

Servers that share experts (--dp-external) are the replicas of one world.

Creating a group is a collective operation of all ranks, its members or not: every rank creates all groups of all kinds,
in the same order, before it computes anything.
"""

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # public in torch.distributed, but typed here only

from headrace.core.config import Links, StageConfig
from headrace.core.types.ranks.layout import Layout
from headrace.engine.collectives.graphed import GraphedCollectives
from headrace.engine.collectives.host_staged import HostStaged
from headrace.engine.collectives.operations import Alone, Collectives, LinkBroken
from headrace.engine.collectives.shared_memory import on_one_machine
from headrace.engine.collectives.torch_collectives import TorchCollectives, make_group
from headrace.engine.collectives.watch import OperationWatch, leave_errors_to_us
from headrace.engine.parallel.meeting import FORMING_S, common_terms, listen, meet

log = logging.getLogger(__name__)

LOADING_S = 3600.0  # longest time by which a server that shares experts may load later than another one


WATCHDOG_TIMES = 2  # --stage-timeout for torch's watchdog, which is to notice nothing before engine/outbox.py does

Way = Literal["host", "device", "staged"]
"""How ranks are linked: on the CPU, GPUs by NCCL, GPUs through host memory."""


class Groups(NamedTuple):
    """The groups that one rank is a member of."""

    tp: Collectives = Alone()
    """The shards of its stage and replica."""
    dp: Collectives = Alone()
    """The same shard of its stage in all replicas, where they share experts."""
    ep: Collectives = Alone()
    """All ranks of its stage, where they share experts."""
    second_dp: Collectives = Alone()
    second_ep: Collectives = Alone()
    """The same for the second halves of passes, where passes are cut."""
    tokens: dist.ProcessGroup | None = None
    """The ranks of its replica; None where it is the only one."""
    votes: Collectives | None = None
    """The ranks that vote, of all servers that share experts; None where this one does not vote."""
    told: Collectives | None = None
    """The shards of its server, where servers share experts and have several."""
    loaded: Collectives | None = None
    """All ranks of all servers that share experts, on the hosts, for waits as long as loading takes."""
    incoming: dist.ProcessGroup | None = None
    outgoing: dist.ProcessGroup | None = None
    """With the rank of the stage before, and of the next one; None for the world."""
    staged: bool = False
    """Tensors on the device go through host memory."""
    watch: OperationWatch | None = None
    """Is told what is under way among devices, where the host does not wait for it."""


class Making(NamedTuple):
    """How groups are made."""

    timeout_s: float
    """Of one operation."""
    collectives: Callable[[dist.ProcessGroup], Collectives] = TorchCollectives

    def of(self, name: str, ranks: range, rank: int) -> Collectives | None:
        """Make a group, see make_group(). None where this rank is no member."""
        made = make_group(ranks, self.timeout_s, name=name)
        return self.collectives(made) if rank in ranks else None


def join_groups(config: StageConfig, device: torch.device) -> Groups:
    """Form the world and all groups of it. With a single rank there are none, and nothing is done.

    Servers that share experts meet first, and wait for one another without end. Raises LinkBroken when a rank is
    missing or the rendezvous cannot be reached, ConfigError for a server that does not fit the others.
    """
    layout, rank = config.shared_layout, config.shared_rank
    if len(layout.ranks) == 1:
        return Groups()
    way = _join_world(config, device)
    engine, timeout_s, staged = config.engine, config.stage_timeout_s, way == "staged"
    watch = OperationWatch() if way == "device" else None
    making = Making(
        timeout_s * WATCHDOG_TIMES if way == "device" else timeout_s,
        lambda group: HostStaged(TorchCollectives(group)) if staged else TorchCollectives(group, watch),
    )
    groups = make_groups(layout, rank, making, experts=engine.expert_parallel, overlap=engine.overlap)
    groups = groups._replace(staged=staged, watch=watch)
    if way == "device":
        groups = _add_hidden_groups(groups, layout, rank, making)
    if layout.tp > 1 and way == "device":
        groups = groups._replace(tp=GraphedCollectives(groups.tp))
    if layout.tp > 1 and way == "host":
        groups = groups._replace(tp=on_one_machine(groups.tp, timeout_s))
    return groups if config.member is None else _add_vote_groups(groups, config, making)


def make_groups(layout: Layout, rank: int, making: Making, *, experts: bool = False, overlap: bool = False) -> Groups:
    """Create all groups of a layout within the world; returns those of this rank.

    experts: the ranks of a stage share experts. overlap: passes may be cut in halves. Raises LinkBroken when a rank is
    gone.
    """
    groups = Groups()
    for first in layout.ranks[:: layout.tp] if layout.tp > 1 else ():
        groups = groups._replace(tp=making.of("tp", layout.shards(first), rank) or groups.tp)
    if experts:
        dp, ep = _expert_groups(layout, rank, making)
        groups = groups._replace(dp=dp, ep=ep)
    if experts and overlap:
        dp, ep = _expert_groups(layout, rank, making, "second ")
        groups = groups._replace(second_dp=dp, second_ep=ep)
    for replica in range(layout.dp):
        members = layout.replica_ranks(replica)
        if len(members) > 1:
            made = make_group(members, making.timeout_s, name="tokens")
            if rank in members:
                groups = groups._replace(tokens=made)
    return groups


def _expert_groups(
    layout: Layout, rank: int, making: Making, which: Literal["", "second "] = ""
) -> tuple[Collectives, Collectives]:
    """Create the dp and ep groups of all stages. Returns those of this rank."""
    dp: Collectives = Alone()
    ep: Collectives = Alone()
    for stage in range(layout.pp):
        for shard in range(layout.tp if layout.dp > 1 else 0):
            dp = making.of(f"{which}dp", layout.across_replicas(layout.rank(stage, 0, shard)), rank) or dp
        members = layout.stage_ranks(stage)
        if len(members) > 1:
            ep = making.of(f"{which}ep", members, rank) or ep
    return dp, ep


def _add_hidden_groups(groups: Groups, layout: Layout, rank: int, making: Making) -> Groups:
    """Create a group for each two ranks between which hidden states pass, and add those of this rank."""
    apart = layout.dp * layout.tp
    for first in layout.ranks[:-apart]:
        made = make_group((first, first + apart), making.timeout_s, name="hidden")
        if rank == first:
            groups = groups._replace(outgoing=made)
        if rank == first + apart:
            groups = groups._replace(incoming=made)
    return groups


def _add_vote_groups(groups: Groups, config: StageConfig, making: Making) -> Groups:
    """Create the groups in which servers that share experts agree, and add those of this rank."""
    layout, rank, timeout_s = config.shared_layout, config.shared_rank, config.stage_timeout_s
    voting = layout.across_replicas(0)
    groups = groups._replace(loaded=TorchCollectives(make_group(layout.ranks, LOADING_S, "gloo", "loaded")))
    if config.dp_sync == "device":
        groups = groups._replace(votes=making.of("votes", voting, rank))
    else:
        made = make_group(voting, timeout_s, "gloo", "votes")
        groups = groups._replace(votes=TorchCollectives(made) if rank in voting else None)
    for first in voting if layout.tp > 1 else ():
        made = make_group(layout.shards(first), timeout_s, "gloo", "told")
        if rank in layout.shards(first):
            groups = groups._replace(told=TorchCollectives(made))
    return groups


def leave_groups() -> None:
    """Leave the world and all groups, if they were formed."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _join_world(config: StageConfig, device: torch.device) -> Way:
    """Form the world. Returns how its ranks are linked."""
    rank, size = config.shared_rank, len(config.shared_layout.ranks)
    timeout = timedelta(seconds=config.stage_timeout_s)
    try:
        if config.member is not None:
            store, timeout = meet(config, common_terms(config)), timedelta(seconds=FORMING_S)
        else:
            # A store that outlives groups (torchrun hosts one) may hold keys of an earlier group: each has its own
            # prefix.
            store = PrefixStore(f"headrace-{config.epoch}-{config.session}", _store(config, size, timeout))
        way = link_way(config.links, device, store, rank, size)
        if way == "device":
            leave_errors_to_us()
            timeout *= WATCHDOG_TIMES
        dist.init_process_group(
            "nccl" if way == "device" else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=device if way == "device" else None,
        )
    except (RuntimeError, OSError) as error:
        raise LinkBroken(f"the group of stages could not be formed: {error}") from error
    return way


def link_way(links: Links, device: torch.device, store: Store, rank: int, size: int) -> Way:
    """How ranks are linked, the same for all of them. auto: by NCCL unless two of them share a GPU, which each tells
    the others through the store.

    Raises RuntimeError when a rank does not tell in time, or the store is gone.
    """
    if device.type == "cpu":
        return "host"
    if links != "auto":
        return "device" if links == "device" else "staged"
    store.set(f"gpu-{rank}", _gpu(device))
    gpus = [store.get(f"gpu-{each}") for each in range(size)]
    shared = size - len(set(gpus))
    if rank == 0 and shared:
        log.info("%d ranks share %d GPUs: they are linked through host memory", size, size - shared)
    return "staged" if shared else "device"


def _gpu(device: torch.device) -> str:
    """Names a GPU, on any machine."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _store(config: StageConfig, size: int, timeout: timedelta) -> TCPStore:
    """The rendezvous store at HOST:PORT. Rank 0 opens it, unless a launcher such as torchrun already hosts it."""
    host, _, port = config.rendezvous.rpartition(":")
    host = host.strip("[]")
    opens = config.rank == 0 and not config.rendezvous_hosted
    return TCPStore(
        host, int(port), size, is_master=opens, timeout=timeout, wait_for_workers=False,
        master_listen_fd=listen(host, int(port)) if opens else None,
    )  # fmt: skip
