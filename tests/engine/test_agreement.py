"""Agreement of servers with a scheduler each: votes through one all-reduce, and the passes that follow from them."""

import queue
import random
from collections import deque
from contextlib import suppress

import pytest
from torch import Tensor

from headrace.core.config import SchedulerConfig
from headrace.core.messages.frontend import Submit
from headrace.core.messages.orders import AnyOrder, Forward, PlanRow, ReleaseRequest, ReplicaOrder, ShutdownStage
from headrace.core.messages.stage_events import PlanDone, SampledToken, StageReady
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.packed import pack
from headrace.core.types.ranks.coordinate import Agreement, Rules, Vote, coordinate, vote
from headrace.core.types.requests.request import Discard, SamplingParams
from headrace.engine.agreement import BUSY_TICKS, AgreementBroken, FollowedPasses, PassSource, VotedPasses, agree
from headrace.engine.collectives.operations import Alone, Collectives, Done, LinkBroken
from headrace.scheduler.scheduler import Scheduler
from tests.engine.collectives.threads import Meeting, ThreadCollectives, run_ranks
from tests.engine.votes import RULES, rounds


@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_ranks_agree_on_is_what_one_planner_decides(size: int) -> None:
    """The specification's V4: coordinate() of all votes, whichever rank asks."""
    asked = rounds(size, 60)

    def work(group: Collectives) -> list[Agreement]:
        return [agree(votes[group.rank], group, rules) for votes, rules in asked]

    expected = [coordinate(votes, rules) for votes, rules in asked]
    assert any(each is not None and each.cut for each in expected)
    assert any(each is not None and each.idle for each in expected)
    assert run_ranks(size, work) == [expected] * size


def test_one_all_reduce_of_four_numbers_for_each_rank() -> None:
    def work(group: Collectives) -> list[str]:
        assert isinstance(group, ThreadCollectives)
        agree(Vote(5, 8, True, 1), group, Rules())
        return group.operations

    assert run_ranks(3, work) == [["all_reduce (4, 3) torch.int32"]] * 3


def test_a_vote_that_comes_back_altered_is_not_acted_on() -> None:
    """Two servers with the same number add their votes up in one column."""

    class Doubled(Alone):
        size = 2

        def all_reduce(self, x: Tensor) -> Done:
            return Done(x * 2)

    with pytest.raises(AgreementBroken, match="rank 0 has voted"):
        agree(Vote(3, 3, False), Doubled(), Rules())
    with pytest.raises(AgreementBroken, match="nothing to agree on"):
        agree(Vote(3, 3, False), Alone(), Rules())


class Inbox:
    """Orders of a rank, as its compute loop has them."""

    def __init__(self, *orders: AnyOrder) -> None:
        self.arriving: queue.Queue[AnyOrder] = queue.Queue()
        self.queued: deque[AnyOrder] = deque(orders)
        self.waits: list[float | None] = []

    def idle(self, timeout_s: float | None) -> None:
        self.waits.append(timeout_s)
        with suppress(queue.Empty):
            self.queued.append(self.arriving.get(timeout=timeout_s))

    def take(self, passes: PassSource) -> AnyOrder:
        while not self.arriving.empty():
            self.queued.append(self.arriving.get_nowait())
        return passes.next(self.queued, self.idle)


class Others(Alone):
    """The votes of rank 0 among two. The other one has so many tokens in one vote after the other, then none."""

    size = 2

    def __init__(self, *tokens: int) -> None:
        self.votes: list[int] = []  # tokens that rank 0 has voted for
        self._tokens = deque(tokens)

    def all_reduce(self, x: Tensor) -> Done:
        self.votes.append(int(x[0, 0]))
        others = self._tokens.popleft() if self._tokens else 0
        x[:2, 1] = others
        return Done(x)


def forward(seq: int, *counts: int) -> Forward:
    return Forward(seq=seq, rows=tuple(PlanRow(seq, 0, count, b"") for count in counts))


def test_a_rank_without_a_plan_takes_part_in_the_passes_of_others() -> None:
    """S4: it gets the same agreement; seq 0, since it is no order of its scheduler."""

    def work(group: Collectives) -> list[AnyOrder]:
        inbox = Inbox(*(forward(seq, 7, seq) for seq in (1, 2, 3) if group.rank == 0))
        passes = VotedPasses(group, RULES[1])
        return [inbox.take(passes) for _ in range(3)]

    agreed = [coordinate([vote([7, seq], RULES[1]), vote([], RULES[1])], RULES[1]) for seq in (1, 2, 3)]
    first, second = run_ranks(2, work)
    plans = [forward(seq, 7, seq) for seq in (1, 2, 3)]
    assert first == [
        Forward(seq=plan.seq, rows=plan.rows, agreement=each) for plan, each in zip(plans, agreed, strict=True)
    ]
    assert second == [Forward(seq=0, rows=(), agreement=each) for each in agreed]


def test_nothing_is_computed_while_no_rank_has_a_token_and_a_plan_that_comes_is_voted_on_at_once() -> None:
    group, inbox = Others(), Inbox()
    passes = VotedPasses(group, Rules(), tick_s=0.25)
    inbox.arriving.put(ReleaseRequest(seq=1, request=3))
    inbox.arriving.put(forward(2, 9))
    assert inbox.take(passes) == ReleaseRequest(seq=1, request=3)
    inbox = Inbox()
    inbox.arriving.put(forward(2, 9))
    inbox.queued.clear()
    order = passes.next(inbox.queued, inbox.idle)
    assert (order.seq, group.votes, inbox.waits) == (2, [0, 9], [0.25]), "a tick that the plan has ended"


def test_a_group_that_has_been_idle_for_long_votes_less_often_until_the_next_pass() -> None:
    group, inbox = Others(*[0] * (BUSY_TICKS + 2), 4, 0, 4), Inbox()
    passes = VotedPasses(group, Rules(), tick_s=0.0, long_tick_s=0.001)
    for _ in range(2):
        inbox.take(passes)
    assert inbox.waits == [0.0] * BUSY_TICKS + [0.001, 0.001, 0.0]


def test_a_rank_votes_at_once_after_a_pass() -> None:
    """Others may have more to compute; only a vote without tokens is followed by a wait."""
    group, inbox = Others(4, 4, 0, 4), Inbox()
    passes = VotedPasses(group, Rules(), tick_s=0.0)
    found = [inbox.take(passes) for _ in range(3)]
    assert [each.agreement for each in found if isinstance(each, Forward)] == [Agreement((0, 4))] * 3
    assert inbox.waits == [0.0]


def test_the_vote_on_the_next_plan_travels_during_the_pass() -> None:
    group, inbox = Others(), Inbox(forward(1, 5), ReleaseRequest(seq=2, request=1), forward(3, 6))
    passes = VotedPasses(group, Rules())
    assert inbox.take(passes).seq == 1
    assert group.votes == [5, 6], "before the first pass is computed"
    assert [inbox.take(passes).seq for _ in range(2)] == [2, 3]
    assert group.votes == [5, 6], "once for each plan"


def test_a_plan_that_comes_after_the_vote_waits_for_the_next_pass() -> None:
    """The others compute a pass on the vote without it."""
    group = Others(4)
    passes, inbox = VotedPasses(group, Rules()), Inbox()
    joined = inbox.take(passes)
    inbox.queued.append(forward(7, 3))
    own = inbox.take(passes)
    assert isinstance(joined, Forward)
    assert isinstance(own, Forward)
    assert (joined.seq, joined.agreement) == (0, Agreement((0, 4)))
    assert (own.seq, own.agreement) == (7, Agreement((3, 0)))


class Feed(Inbox):
    """Orders that come at random times, until every rank has computed all of its own."""

    def __init__(self, rank: int, done: list[int], plans: int) -> None:
        super().__init__()
        self._random = random.Random(rank)
        self._done = done
        self._all = plans * len(done)
        self._left = [forward(1 + index, self._random.randint(1, 50)) for index in range(plans)]

    def feed(self) -> None:
        if sum(self._done) == self._all:
            raise LinkBroken("all is done")
        if self._left and self._random.random() < 0.5:
            self.queued.append(self._left.pop(0))

    def idle(self, timeout_s: float | None) -> None:
        self.feed()


@pytest.mark.parametrize("replicas", [2, 3])
def test_ranks_whose_orders_come_at_random_times_compute_the_same_passes(replicas: int) -> None:
    plans = 30
    meeting = Meeting(replicas, deadline_s=5.0)
    done = [0] * replicas

    def work(group: Collectives) -> list[Forward]:
        inbox, found = Feed(group.rank, done, plans), list[Forward]()
        passes = VotedPasses(ThreadCollectives(meeting, group.rank), RULES[1])
        with suppress(LinkBroken):
            while True:
                inbox.feed()
                order = inbox.take(passes)
                assert isinstance(order, Forward)
                found.append(order)
                done[group.rank] += order.seq > 0
        meeting.leave("all is done")
        return found

    executed = run_ranks(replicas, work)
    common = min(len(each) for each in executed)
    for rank, found in enumerate(executed):
        assert [each.seq for each in found if each.seq] == list(range(1, 1 + plans))
        assert [each.agreement for each in found[:common]] == [each.agreement for each in executed[0][:common]]
        for each in found:
            assert each.agreement is not None
            assert each.agreement.tokens[rank] == sum(row.count for row in each.rows)


def test_shards_follow_what_the_first_one_has_voted() -> None:
    """An order reaches them before or after the vote: they compute it in the pass that it was voted for."""

    def work(told: Collectives) -> list[tuple[int, Agreement | None]]:
        plan = forward(4, 6)
        if told.rank == 0:
            inbox = Inbox(plan)
            passes: PassSource = VotedPasses(Others(3, 0, 5), Rules(multiple=2), shards=told, tick_s=0.0)
        else:
            inbox, passes = Inbox(), FollowedPasses(told, 2)
            inbox.arriving.put(plan) if told.rank == 1 else inbox.queued.append(plan)
        found = [inbox.take(passes) for _ in range(2)]
        return [(each.seq, each.agreement) for each in found if isinstance(each, Forward)]

    assert run_ranks(3, work) == [[(4, Agreement((6, 3))), (0, Agreement((0, 5)))]] * 3


def test_shards_hear_of_an_idle_group_now_and_then() -> None:
    """A wait of theirs is bounded by the timeout of their group."""

    def work(told: Collectives) -> int:
        inbox = Inbox()
        passes: PassSource = FollowedPasses(told, 2)
        if told.rank == 0:
            passes = VotedPasses(Others(*[0] * 250, 5), Rules(), shards=told, tick_s=0.0)
        inbox.take(passes)
        assert isinstance(told, ThreadCollectives)
        return len(told.operations)

    assert run_ranks(2, work) == [3, 3]


def test_a_shard_with_another_order_than_the_first_one_does_not_compute_it() -> None:
    def work(told: Collectives) -> AnyOrder:
        if told.rank == 0:
            return Inbox(forward(4, 6)).take(VotedPasses(Others(), Rules(), shards=told))
        return Inbox(forward(5, 6)).take(FollowedPasses(told, 2))

    with pytest.raises(AgreementBroken, match="the next pass is order 4, and this shard's next order is 5"):
        run_ranks(2, work)


@pytest.mark.parametrize("seq", [0, 9])
def test_the_end_waits_for_no_vote(seq: int) -> None:
    end = ShutdownStage(seq=seq)

    class Gone(Alone):
        def all_reduce(self, x: Tensor) -> Done:
            raise LinkBroken("nobody is there")

    assert Inbox(end).take(VotedPasses(Gone(), Rules())) == end
    assert Inbox(end).take(FollowedPasses(Gone(), 2)) == end


def test_one_planner_and_the_all_reduce_decide_alike() -> None:
    """check_agreement: what the scheduler of several replicas orders, beside what their ranks would agree on."""
    dp, rules = 3, Rules(multiple=2, pad="max")
    scheduler = Scheduler(SchedulerConfig(dp=dp, lockstep=True, rules=rules, chunk_tokens=64, kv_pages=1000))
    for rank in range(dp):
        scheduler.handle(
            StageReady(
                stage=rank, geometry=Geometry("float32", 1, 1, 1, 16), fingerprint="f", data_port=1, kv_pages=1000,
                vocab_size=100,
            ),
            0.0,
        )  # fmt: skip
    generator = random.Random(0)
    for index in range(12):
        prompt = pack(generator.choices(range(100), k=generator.randint(1, 200)))
        sampling = SamplingParams(temperature=0.0, max_tokens=generator.randint(1, 4))
        scheduler.handle(Submit(rid=str(index), prompt=prompt, sampling=sampling, route=Discard()), 0.0)
    ordered: list[list[Forward]] = []
    for turn in range(60):
        effects = scheduler.plan(0.1 * turn)
        forwards = {
            each.replica: each.order
            for each in effects
            if isinstance(each, ReplicaOrder) and isinstance(each.order, Forward)
        }
        if not forwards:
            continue
        ordered.append([forwards[replica] for replica in range(dp)])
        for replica, order in forwards.items():
            samples = tuple(SampledToken(row.request, 5) for row in order.rows if row.sample is not None)
            scheduler.handle(PlanDone(stage=replica, seq=order.seq, duration_s=0.1, samples=samples), 0.1 * turn)
    assert len({each.agreement for orders in ordered for each in orders}) > 3

    def work(group: Collectives) -> list[Agreement]:
        counts = [[row.count for row in orders[group.rank].rows] for orders in ordered]
        return [agree(vote(each, rules), group, rules) for each in counts]

    assert run_ranks(dp, work) == [[orders[0].agreement for orders in ordered]] * dp
