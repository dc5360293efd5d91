"""Cache events: a router that gets only them knows what is in the prefix tree."""

from collections import Counter

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.config import SchedulerConfig
from headrace.core.messages.kv_events import BlockRemoved, BlockStored, KvEvent
from headrace.core.types.packed import pack, unpack
from headrace.scheduler.kv.cache_events import CacheEventLog
from headrace.scheduler.kv.kv_cache import KvCache, Lease
from headrace.scheduler.kv.node import Node
from headrace.scheduler.kv.prefix_tree import PrefixTree
from headrace.scheduler.scheduler import Effect, Event, Scheduler
from headrace.testing.scenario import Scenario, Shape
from headrace.testing.server import SimulatedServer
from headrace.testing.simulator import Simulation
from tests.scheduler.kv.test_prefix_tree import inserted
from tests.scheduler.router import Router, digest, name_of, root, short

SALTS = st.sampled_from(["", "x"])


def contents(tree: PrefixTree) -> dict[int, tuple[int | None, tuple[int, ...]]]:
    """What a router should know, from the tree's own keys."""
    found = {}
    digests: dict[Node, bytes] = {}
    for node in tree.walk():  # parents first
        above, tokens = node.parent, tuple(unpack(node.key))
        assert above is not None, "roots are not walked"
        top = above.parent is None
        parent = root(above.key.decode()) if top else digests[above]
        digests[node] = digest(parent, tokens)
        found[short(digests[node])] = (None if top else short(parent), tokens)
    return found


class Followed(Scheduler):
    """Compares router and tree whenever effects come out."""

    def __init__(self, config: SchedulerConfig, router: Router) -> None:
        super().__init__(config)
        self._router = router

    def handle(self, event: Event, now: float) -> list[Effect]:
        return self._heard(super().handle(event, now))

    def plan(self, now: float) -> list[Effect]:
        return self._heard(super().plan(now))

    def tick(self, now: float) -> list[Effect]:
        return self._heard(super().tick(now))

    def _heard(self, effects: list[Effect]) -> list[Effect]:
        for effect in effects:
            if isinstance(effect, KvEvent):
                self._router.hear(effect)
        assert self._router.pages == contents(self._state.replicas[0].cache._tree)
        return [effect for effect in effects if not isinstance(effect, KvEvent)]


class FollowedSimulation(Simulation):
    def __init__(self, scenario: Scenario) -> None:
        self.routers: list[Router] = []
        super().__init__(scenario)

    def _new_server(self, name: str, other: SchedulerConfig | None = None) -> SimulatedServer:
        server = super()._new_server(name, other)
        router = Router()
        self.routers.append(router)
        server.config = msgspec.structs.replace(server.config, kv_events=True)
        server.scheduler = Followed(server.config, router)
        return server


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 32), shape=st.sampled_from(["colocated", "pair"]), cancel=st.sampled_from([0.1, 0.8]))
def test_after_every_event_of_a_schedule_the_router_knows_the_tree(seed: int, shape: Shape, cancel: float) -> None:
    simulation = FollowedSimulation(Scenario(seed=seed, shape=shape, cancel=cancel, crash=0.3))
    assert simulation.run().violations == []


def test_such_schedules_store_remove_and_clear() -> None:
    kinds: Counter[str] = Counter()
    for seed in range(40):
        simulation = FollowedSimulation(Scenario(seed=seed, crash=1.0))
        simulation.run()
        for router in simulation.routers:
            kinds.update(router.kinds)
    assert min(kinds[name] for name in ("BlockStored", "BlockRemoved", "AllBlocksCleared")) > 40


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(SALTS, st.lists(st.integers(0, 2), min_size=1, max_size=9), st.booleans()), max_size=25),
    st.integers(3, 10),
)
def test_events_do_not_depend_on_how_often_they_are_taken(steps: list[tuple[str, list[int], bool]], pool: int) -> None:
    """Nothing depends on how often the events are taken."""
    events, router, leases = CacheEventLog(2), Router(), list[Lease]()
    cache = KvCache(pool, 2, events=events)
    for salt, tokens, look in steps:
        lease = cache.acquire(pack(tokens), salt)
        if lease is None and leases:
            cache.release(leases.pop(0))
        elif lease is not None:
            cache.publish(lease, pack(tokens), len(tokens))
            leases.append(lease)
        if look:
            for event in events.take():
                router.hear(event)
            assert router.pages == contents(cache._tree)
    for event in events.take():
        router.hear(event)
    assert router.pages == contents(cache._tree)


def test_pages_in_a_row_share_an_event_and_a_branch_begins_another() -> None:
    events = CacheEventLog(1)
    tree = PrefixTree(events)
    first = inserted(tree, None, "", pack([1]), 0)
    second = inserted(tree, first, "", pack([2]), 1)
    inserted(tree, second, "", pack([-3]), 2)
    inserted(tree, first, "", pack([4]), 3)
    tree.evict(2)
    names = [name_of("", [(1,), (2,), (-3,)][:count]) for count in (1, 2, 3)]
    branch = name_of("", [(1,), (4,)])
    assert events.take() == [
        BlockStored(block_hashes=tuple(names), parent_block_hash=None, token_ids=(1, 2, -3), block_size=1),
        BlockStored(block_hashes=(branch,), parent_block_hash=names[0], token_ids=(4,), block_size=1),
        BlockRemoved(block_hashes=(names[2], names[1])),
    ]
    assert events.take() == []


def test_equal_prompts_of_two_tenants_have_different_names() -> None:
    events = CacheEventLog(1)
    names = [events.stored(None, salt, pack([7])) for salt in (b"", b"a", b"b")]
    assert len(set(names)) == 3
    assert CacheEventLog(1).stored(None, b"a", pack([7])) == names[1], "every server says the same"


def test_without_kv_events_nothing_is_collected() -> None:
    cache = KvCache(4, 1)
    lease = cache.acquire(pack([1, 2]), "")
    assert lease is not None
    cache.publish(lease, pack([1, 2]), 2)
    assert [node.digest for node in lease.path] == [None, None]
    assert Scheduler(SchedulerConfig(kv_pages=4, chunk_tokens=16))._state.replicas[0].cache_events is None
