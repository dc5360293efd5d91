"""The router of replicas: what its score prefers, whom it looks at, and what makes it forget."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Medium
from headrace.core.types.packed import pack
from headrace.server.routing.holders import HolderIndex
from headrace.server.routing.replica_load import REPORT_S, LoadReport, Sent
from headrace.server.routing.replica_router import PAGE_SIZE, ReplicaRouter, page_names
from headrace.server.routing.score import HOLDERS, OTHERS, Candidate, best, score, shortlist

COST = (0.0, 0.001)  # a millisecond a token
TURN = 10 * PAGE_SIZE  # tokens of the prompts here but one: ten full pages


def prompt(text: int, tokens: int = TURN + 1) -> bytes:
    return pack([text] * tokens)


class Bench:
    """A router of some replicas, which report queues in seconds."""

    def __init__(self, *queued: float, seed: int = 1, sent_s: float = 300.0) -> None:
        self.router = ReplicaRouter(len(queued), random.Random(seed), sent_s)
        self.now = 0.0
        self.all = range(len(queued))
        self.report(*queued)

    def report(self, *queued: float, asked_at: float | None = None) -> None:
        for number, seconds in enumerate(queued):
            report = LoadReport(seconds, COST)
            self.router.reported(number, report, self.now if asked_at is None else asked_at, self.now)

    def send(self, sent_to: bytes, replicas: Sequence[int] | None = None, salt: str = "") -> Sent:
        sent = self.router.choose(sent_to, salt, self.all if replicas is None else replicas, self.now)
        self.router.posted(sent, self.now)
        return sent

    def served(self, text: bytes, replicas: Sequence[int] | None = None, salt: str = "") -> int:
        """The replica of a prompt that is answered at once."""
        sent = self.send(text, replicas, salt)
        self.router.done(sent)
        return sent.replica

    def store(self, replica: int, text: bytes, medium: Medium = "GPU") -> tuple[int, ...]:
        names = tuple(page_names(text, "", PAGE_SIZE))
        event = BlockStored(
            block_hashes=names, parent_block_hash=None, token_ids=(), block_size=PAGE_SIZE, medium=medium
        )
        self.router.apply(replica, (event,))
        return names


def test_a_holder_is_preferred_until_its_queue_is_eight_times_what_it_saves() -> None:
    """The prefix saves 0.640 s, which weigh 5.12."""
    for longer, expected in ((5.1, 2), (5.2, None)):
        bench = Bench(0.0, 0.0, longer, 0.0)
        bench.store(2, prompt(7))
        assert (bench.served(prompt(7)) == 2) is (expected == 2)


def test_the_longest_prefix_wins_among_equal_queues_and_a_prefix_that_all_have_draws_nothing() -> None:
    bench = Bench(*[0.0] * 12)
    for number in bench.all:
        bench.store(number, prompt(7, PAGE_SIZE + 1))
    bench.store(9, prompt(7, 5 * PAGE_SIZE + 1))
    bench.store(4, prompt(7, 7 * PAGE_SIZE + 1))
    assert bench.served(prompt(7)) == 4
    bench.report(*[0.0 if number == 11 else 9.0 for number in bench.all])
    hits = {Bench.served(bench, prompt(text, PAGE_SIZE + 1), [3, 11]) for text in range(50)}
    assert hits == {11}


@pytest.mark.parametrize(("near", "far"), [("GPU", "CPU"), ("CPU", "DISK"), ("GPU", "DISK")])
def test_a_nearer_tier_is_preferred_and_a_far_one_to_none(near: Medium, far: Medium) -> None:
    bench = Bench(0.0, 0.0, 0.0)
    bench.store(1, prompt(7), far)
    bench.store(2, prompt(7), near)
    assert bench.served(prompt(7)) == 2
    bench = Bench(0.0, 0.0, 0.0)
    bench.store(1, prompt(7), far)
    assert bench.served(prompt(7)) == 1


def test_a_page_that_moved_to_the_host_tier_is_still_held() -> None:
    bench = Bench(0.0, 0.0)
    names = bench.store(1, prompt(7))
    bench.store(1, prompt(7), "CPU")
    bench.router.apply(1, (BlockRemoved(block_hashes=names),))
    assert bench.served(prompt(7)) == 1
    bench.router.apply(1, (BlockRemoved(block_hashes=names), BlockRemoved(block_hashes=names, medium="CPU")))
    bench.report(0.0, 1.0)
    assert bench.served(prompt(7)) == 0, "nothing is held any more, and the queue decides"


def test_the_next_turn_goes_where_the_last_one_went_and_another_salt_does_not() -> None:
    for seed in range(20):
        bench = Bench(*[0.0] * 20, seed=seed)
        first = bench.served(prompt(7))
        assert bench.served(prompt(7, TURN + 100)) == first
        bench.report(*[5.0 if number == first else 0.0 for number in bench.all])
        assert bench.served(prompt(7), salt="other") != first


def test_what_was_sent_is_forgotten_after_a_while_and_what_is_stored_is_not() -> None:
    for stored in (False, True):
        bench = Bench(0.0, 0.0, sent_s=300.0)
        assert bench.served(prompt(7), [1]) == 1
        if stored:
            bench.store(1, prompt(7))
        bench.now = 299.0
        bench.report(0.0, 3.0)
        assert bench.served(prompt(7), [0, 1]) == 1, "it is remembered, and that renews it"
        bench.now = 600.0
        bench.report(0.0, 3.0)
        assert bench.served(prompt(7), [0, 1]) == (1 if stored else 0)


def test_a_reset_forgets_the_cache_and_the_load_of_one_replica_alone() -> None:
    for clear in (
        lambda bench: bench.router.reset(1),
        lambda bench: bench.router.apply(1, (AllBlocksCleared(),)),
        lambda bench: bench.router.paged(1, 2 * PAGE_SIZE),
    ):
        bench = Bench(0.0, 0.0, 0.0)
        bench.store(1, prompt(7))
        bench.store(2, prompt(8))
        clear(bench)
        bench.report(0.0, 1.0, 1.0)
        assert bench.served(prompt(7)) == 0
        assert bench.served(prompt(8)) == 2
    bench = Bench(9.0, 9.0)
    bench.router.reset(1)
    assert bench.served(prompt(1)) == 1, "its queue is not known any more"


def test_prompts_count_from_their_choice_until_a_report_that_has_them() -> None:
    bench = Bench(0.0, 0.5)
    first = bench.send(prompt(1))
    assert first.replica == 0
    assert bench.served(prompt(2)) == 1, "0.641 s were sent to the other one"
    bench.now = 1.0
    bench.report(0.641, 0.5, asked_at=0.5)
    assert bench.served(prompt(3)) == 1
    bench.report(0.3, 0.5, asked_at=0.5)
    assert bench.served(prompt(4)) == 0, "the report was asked for after the prompt was posted: it has it"
    late = bench.router.choose(prompt(5), "", [0], bench.now)  # not posted: its pages are not reserved yet
    bench.now = 2.0
    bench.report(0.0, 0.5)
    assert bench.served(prompt(6)) == 1, "no report can have what was not posted"
    bench.router.done(late)
    bench.router.done(late)
    assert bench.served(prompt(9)) == 0


def test_an_old_report_does_not_count_and_neither_does_what_is_done() -> None:
    bench = Bench(9.0, 0.0)
    bench.now = REPORT_S + 1
    sent = bench.send(prompt(1), [1])
    assert bench.served(prompt(2)) == 0
    bench.router.done(sent)
    assert {bench.served(prompt(text)) for text in range(10, 40)} == {0, 1}


def test_without_any_report_tokens_are_compared() -> None:
    router = ReplicaRouter(2, random.Random(1))
    sent = [router.choose(prompt(text, tokens), "", [0, 1], 0.0) for text, tokens in ((1, 900), (2, 500), (3, 300))]
    assert sent[1].replica != sent[0].replica
    assert sent[2].replica == sent[1].replica, "800 tokens there, 900 at the other"
    follow = router.choose(prompt(1, 1200), "", [0, 1], 0.0)
    assert follow.replica == sent[0].replica, "896 of its tokens are there"


def test_one_hot_or_failing_replica_leaves_the_affinity_of_the_others() -> None:
    bench = Bench(*[0.0] * 8)
    homes = {text: bench.served(prompt(text), [text % 8]) for text in range(100, 140)}
    bench.report(1000.0, *[0.0] * 7)
    bench.router.avoid(1, until=5.0)
    for text, home in homes.items():
        chosen = bench.served(prompt(text))
        assert chosen not in (0, 1)
        assert chosen == home or home in (0, 1)
    assert bench.served(prompt(101), [1]) == 1, "there is no other"
    bench.now = 6.0
    bench.report(*[0.0] * 8)
    assert bench.served(prompt(105), [0, 1]) == 1, "it is chosen again, for what it holds"


def test_replicas_with_pages_of_different_sizes_are_compared_in_tokens() -> None:
    bench = Bench(0.0, 0.0)
    bench.router.paged(1, 16)
    names = tuple(page_names(prompt(7), "", 16))
    assert len(names) == 40
    event = BlockStored(block_hashes=names, parent_block_hash=None, token_ids=(), block_size=16)
    bench.router.apply(1, (event,))
    bench.store(0, prompt(7, 9 * PAGE_SIZE))
    assert bench.served(prompt(7)) == 1


def test_the_last_token_is_always_computed() -> None:
    assert len(page_names(prompt(1, 128), "", 64)) == 1
    assert len(page_names(prompt(1, 129), "", 64)) == 2


@given(st.lists(st.sets(st.integers(0, 99)), max_size=8), st.integers(1, 100), st.integers())
def test_few_replicas_are_scored_however_many_there_are(sets: list[set[int]], count: int, seed: int) -> None:
    """The longest prefixes are among them, each replica once, and at least OTHERS others if there are as many."""
    seen: set[int] = set()
    groups = []
    for group in sets:
        groups.append(sorted(number for number in group - seen if number < count))
        seen |= group
    found = shortlist(groups, range(count), random.Random(seed))
    assert len(found) == len(set(found)) == min(count, len(found))
    assert len(found) <= HOLDERS + OTHERS
    assert set(found) <= set(range(count))
    holders = [number for group in groups for number in group]
    assert len(set(found) & set(holders)) >= min(HOLDERS, len(holders))
    assert len(found) >= min(count, OTHERS)
    first = next((group for group in groups if group), [])
    assert len(set(first) & set(found)) >= min(HOLDERS, len(first))
    assert found == shortlist(groups, range(count), random.Random(seed))


@given(st.lists(st.builds(Candidate, *[st.floats(0, 1e6)] * 3), min_size=1))
def test_the_best_has_the_least_score(candidates: list[Candidate]) -> None:
    assert score(candidates[best(candidates)]) == min(map(score, candidates))


@given(st.integers(), st.lists(st.tuples(st.integers(0, 5), st.integers(1, 400)), max_size=40))
def test_equal_seeds_make_equal_choices(seed: int, prompts: list[tuple[int, int]]) -> None:
    runs = []
    for _ in range(2):
        bench = Bench(*[0.0] * 20, seed=seed)
        runs.append([bench.send(prompt(text, tokens)).replica for text, tokens in prompts])
    assert runs[0] == runs[1]


EVENTS = st.tuples(
    st.sampled_from(("stored", "removed", "sent", "clear")),
    st.integers(0, 3),
    st.lists(st.integers(0, 6), max_size=4),
    st.sampled_from(("GPU", "CPU", "DISK")),
)


@given(st.lists(EVENTS, max_size=60))
def test_the_index_knows_what_a_plain_table_knows_and_keeps_nothing_else(events: list[tuple]) -> None:  # type: ignore[type-arg]
    index = HolderIndex(sent_s=10.0)
    tiers: set[tuple[int, int, str]] = set()
    sent: dict[tuple[int, int], float] = {}
    for now, (kind, replica, pages, medium) in enumerate(events):
        if kind == "stored":
            index.stored(replica, pages, medium)
            tiers |= {(replica, page, medium) for page in pages}
        elif kind == "removed":
            index.removed(replica, pages, medium)
            for page in pages:
                tiers.discard((replica, page, medium))
                if medium == "GPU" or not any((replica, page, other) in tiers for other in ("GPU", "CPU", "DISK")):
                    sent.pop((replica, page), None)
        elif kind == "sent":
            index.sent(replica, pages, float(now))
            sent |= {(replica, page): now + 10.0 for page in pages}
        else:
            index.clear(replica)
            tiers = {entry for entry in tiers if entry[0] != replica}
            sent = {key: until for key, until in sent.items() if key[0] != replica}
        for each in range(4):
            index.expire(each, float(now))
        sent = {key: until for key, until in sent.items() if until > now}
        held = {(replica, page) for replica, page, _ in tiers} | set(sent)
        for page in range(7):
            found = [number for _, numbers in index.prefixes([page], 0b1111) for number in numbers]
            assert found == sorted(replica for replica, other in held if other == page)
        assert len(index) == len({page for _, page in held})
    for replica in range(4):
        index.clear(replica)
    assert len(index) == 0
