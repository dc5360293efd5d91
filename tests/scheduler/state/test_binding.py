"""Binding of requests to data-parallel replicas."""

import pytest

from headrace.core.messages.orders import Forward, Order, ReplicaOrder
from headrace.core.messages.stage_events import PlanDone, SampledToken, StageFailed
from headrace.core.types.errors import STAGE_FAILED
from headrace.core.types.requests.request import Discard, SendTo
from tests.scheduler.bench import PAGE, Bench


class Replicas(Bench):
    """A server of several replicas with one stage each."""

    def __init__(self, dp: int = 2, **changes: object) -> None:
        super().__init__(up=False, dp=dp, **changes)
        self.up()

    def up(self) -> None:
        for rank in self.config.layout.ranks:
            self.do(self.ready(rank))

    def replica(self, rid: str) -> int:
        request = self.scheduler._state.requests.live(rid)
        assert request is not None
        return request.replica

    def forwards(self) -> list[tuple[int, Forward]]:
        """Plan once."""
        effects = self._keep(self.scheduler.plan(self.now))
        return [(one.replica, one.order) for one in effects if isinstance(one, ReplicaOrder) and is_forward(one.order)]  # type: ignore[misc]

    def run(self, seconds: float = 0.001) -> None:
        """Compute all that can be computed; every token sampled is 1."""
        while forwards := self.forwards():
            for replica, forward in forwards:
                self.report(replica, forward, seconds)

    def report(self, replica: int, forward: Forward, seconds: float = 0.001) -> None:
        samples = tuple(SampledToken(row.request, 1) for row in forward.rows if row.sample is not None)
        rank = self.config.layout.sampler(replica)
        self.do(PlanDone(stage=rank, seq=forward.seq, duration_s=seconds, samples=samples))


def is_forward(order: Order) -> bool:
    return isinstance(order, Forward)


def prompt(tokens: int, first: int = 0) -> list[int]:
    return [(first + index) % 1000 for index in range(tokens)]


def test_least_load_with_it() -> None:
    bench = Replicas(dp=3)
    found = []
    for number, tokens in enumerate((30, 10, 20, 5, 5)):
        bench.submit(str(number), prompt(tokens, 100 * number))
        found.append(bench.replica(str(number)))
    # Loads before each: 0 0 0, 30 0 0, 30 10 0, 30 10 20, 30 15 20.
    assert found == [0, 1, 2, 1, 1]


def test_ties_go_to_fewer_running_then_to_the_lower_number() -> None:
    bench = Replicas(dp=2, pipeline_depth=0)
    bench.submit("a", prompt(4), max_tokens=50)
    assert bench.replica("a") == 0
    bench.forwards()  # a is planned: no load is left, and replica 0 has a running request
    bench.submit("b", prompt(4, 500))
    assert bench.replica("b") == 1


def test_prefix_is_followed_until_the_load_outweighs_it() -> None:
    bench = Replicas(dp=2)
    bench.submit("first", prompt(32), route=Discard(), max_tokens=1)
    bench.run()
    bench.submit("same", [*prompt(32), 990], route=Discard(), max_tokens=1)
    assert bench.replica("same") == 0, "32 of its 33 tokens are cached there"
    bench.submit("other", prompt(20, 300), route=Discard(), max_tokens=1)
    assert bench.replica("other") == 1, "1 token waits at replica 0, none at replica 1"
    busy = [*prompt(32), *prompt(60, 700)]
    bench.submit("busy", busy, route=Discard(), max_tokens=1)
    assert bench.replica("busy") == 0, "1 + 60 against 20 + 92"
    bench.submit("again", [*prompt(32), 980], route=Discard(), max_tokens=1)
    assert bench.replica("again") == 1, "61 + 1 against 20 + 33"


def test_loads_are_seconds_once_every_replica_is_measured() -> None:
    """The squared part counts: a long prompt is more load than two short ones of as many tokens."""
    bench = Replicas(dp=2, prefix_cache=False, max_model_len=4096, kv_pages=4096, chunk_tokens=64)
    for replica in bench.scheduler._state.replicas:
        replica.costs.start([(1e-6, 1e-6, 0.0)])
    bench.submit("long", prompt(1000), route=Discard())
    bench.submit("short", prompt(600), route=Discard())
    bench.submit("shorter", prompt(401), route=Discard())
    assert [bench.replica(rid) for rid in ("long", "short", "shorter")] == [0, 1, 1]


def test_pinned() -> None:
    bench = Replicas(dp=2)
    for number in range(3):
        bench.submit(str(number), prompt(10, 100 * number), replica=1)
    assert [bench.replica(str(number)) for number in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("replica", [-1, 2])
def test_pinned_to_none(replica: int) -> None:
    bench = Replicas(dp=2)
    bench.submit("a", replica=replica)
    error = bench.error()
    assert (error.status, error.field) == (400, "data_parallel_rank")
    assert f"no data-parallel rank {replica}; this server has 2" in error.message


def test_bound_when_it_enters_waiting() -> None:
    """A request is bound to the least loaded replica of the time at which its peer has reserved."""
    bench = Replicas(dp=2)
    bench.join()
    bench.submit("a", prompt(10), route=SendTo("t"))
    assert bench.replica("a") == 0
    bench.submit("b", prompt(50, 300), replica=0)
    bench.reserve("t", 10)
    assert bench.replica("a") == 1
    bench.submit("c", prompt(10, 600))
    assert bench.replica("c") == 1, "10 + 10 against 50 + 10"


def test_stays_bound_until_preempted() -> None:
    """Two requests outgrow the pool of replica 0; the one that gives up its pages goes to the idle replica 1."""
    bench = Replicas(dp=2, kv_pages=6, prefix_cache=False, pipeline_depth=0)
    bench.submit("hog", prompt(20, 500), replica=1)
    bench.submit("a", prompt(2 * PAGE), max_tokens=12)
    bench.submit("b", prompt(2 * PAGE, 100), max_tokens=12)
    bench.abort("hog")
    while not bench.metric("preemptions_total"):
        assert [bench.replica(rid) for rid in "ab"] == [0, 0]
        for replica, forward in bench.forwards():
            bench.report(replica, forward)
    assert [bench.replica(rid) for rid in "ab"] == [0, 1]
    bench.run()
    assert [bench.finished(rid).usage.completion_tokens for rid in "ab"] == [12, 12]


def test_a_restart_of_the_group_binds_anew() -> None:
    bench = Replicas(dp=2)
    bench.submit("a", prompt(40))
    bench.do(StageFailed(stage=1, message="killed"))
    assert bench.error("a").code == STAGE_FAILED
    assert "rank 1 (stage 0, replica 1, shard 0) failed: killed" in bench.error("a").message
    bench.up()
    bench.submit("b", prompt(40))
    bench.submit("c", prompt(8, 100))
    assert [bench.replica(rid) for rid in "bc"] == [0, 1]
    bench.run()


def test_replicas_are_planned_beside_each_other() -> None:
    """Free-running: each has its own credits; a plan that is not done holds up no other replica."""
    bench = Replicas(dp=2, pipeline_depth=0)
    bench.submit("a", prompt(40), route=Discard(), replica=0)
    bench.submit("b", prompt(40, 100), route=Discard(), replica=1)
    first = bench.forwards()
    assert sorted(replica for replica, _ in first) == [0, 1]
    assert len({forward.seq for _, forward in first}) == 2
    assert all(forward.agreement is None for _, forward in first)
    assert bench.forwards() == []
    done = next((replica, forward) for replica, forward in first if replica == 1)
    bench.report(*done)
    assert [replica for replica, _ in bench.forwards()] == [1]


def test_orders_of_all_and_of_one() -> None:
    bench = Replicas(dp=2)
    bench.join()
    bench.submit("a", prompt(10), route=Discard(), max_tokens=1, replica=1)
    bench.run()
    kinds = {
        (type(one.order if isinstance(one, ReplicaOrder) else one).__name__, isinstance(one, ReplicaOrder))
        for one in bench.seen
        if isinstance(one, Order)
    }
    assert kinds == {("BeginEpoch", False), ("AdmitPeer", False), ("Forward", True), ("ReleaseRequest", True)}
