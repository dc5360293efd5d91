"""Stage processes with tiers: pages leave the pool and come back, bit for bit, also after a restart."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.core.messages.orders import DropPages, LoadPages, PlanRow, StorePages
from headrace.core.messages.stage_events import PagesFound, PagesLoaded, PagesStored, SampledToken
from headrace.core.types import packed
from headrace.core.types.kv.kv_tiers import DISK, HOST, Tier
from headrace.engine.kv.tiers.record import HEADER_BYTES
from tests.engine.kv.tiers.pages import header
from tests.engine.kv.tiers.stage_group import StageGroup
from tests.engine.models import GREEDY, Saved, random_tokens

SIZE = 16  # tokens of a page
COUNT = 4  # pages of the prefix
PROMPT = random_tokens(COUNT * SIZE + 1)
HEADERS = tuple(header(page) for page in range(COUNT))


@pytest.fixture(params=[(3,), pytest.param((2, 1), marks=pytest.mark.full)], ids=["pp 1", "pp 2"])
def groups(
    request: pytest.FixtureRequest, saved: Callable[[str], Saved], tmp_path: Path
) -> Iterator[Callable[[], StageGroup]]:
    """Starts a group of stages with both tiers, after the one before has ended."""
    made: list[StageGroup] = []

    def start() -> StageGroup:
        tiers = {"host_pages": 20, "disk_path": str(tmp_path / "kv"), "disk_gib": 1}
        made.append(StageGroup(saved("llama").folder, tmp_path, request.param, len(made), **tiers))
        return made[-1]

    yield start
    for group in made:
        group.kill()


def last_row(request: int, pages: range) -> PlanRow:
    """The last token of the prompt, over a prefix that is in these pages; its own page follows them."""
    own = packed.pack([*pages, pages.stop])
    return PlanRow(request, COUNT * SIZE, 1, own, packed.pack(PROMPT[-1:]), sample=GREEDY)


def prefix_row(request: int, tokens: list[int]) -> PlanRow:
    return PlanRow(request, 0, COUNT * SIZE, packed.pack(range(COUNT)), packed.pack(tokens[: COUNT * SIZE]))


def store(group: StageGroup, tier: Tier, slots: range, sources: range = range(COUNT), from_host: bool = False) -> int:
    headers = HEADERS if tier == DISK else ()
    return group.order(
        StorePages(
            seq=0,
            tier=tier,
            sources=packed.pack(sources),
            slots=packed.pack(slots),
            headers=headers,
            from_host=from_host,
        )
    )


def load(group: StageGroup, tier: Tier, slots: range, pages: range) -> list[list[int]]:
    """The pages that failed, by stage."""
    seq = group.order(LoadPages(seq=0, tier=tier, slots=packed.pack(slots), pages=packed.pack(pages)))
    answers = group.wait(PagesLoaded)
    assert {answer.seq for answer in answers} == {seq}
    return [packed.unpack(answer.failed).tolist() for answer in answers]


def compute(group: StageGroup) -> list[SampledToken]:
    """The prompt from its first token, in pages from 0 on, and a store to both tiers right behind its prefix."""
    group.forward(prefix_row(1, PROMPT))
    seqs = [store(group, HOST, range(10, 10 + COUNT)), store(group, DISK, range(COUNT))]
    computed = group.forward(last_row(1, range(COUNT)))
    for seq in seqs:
        answers = group.wait(PagesStored)
        assert all((answer.seq, answer.failed) == (seq, b"") for answer in answers)
        assert all(answer.written_bytes > 0 for answer in answers)
    return computed


def test_pages_come_back_from_both_tiers_and_after_a_restart(groups: Callable[[], StageGroup], tmp_path: Path) -> None:
    group = groups()
    good: list[list[int]] = [[] for _ in range(group.stages)]
    assert all(ready.host_pages == 20 and ready.disk_pages > 1000 for ready in group.ready)
    assert all(found.slots == b"" and found.last for found in group.wait(PagesFound))
    computed = compute(group)
    group.forward(prefix_row(2, random_tokens(COUNT * SIZE, seed=9)))  # over the same pages
    assert group.forward(last_row(1, range(COUNT))) != computed, "the prefix matters"

    assert load(group, HOST, range(10, 10 + COUNT), range(10, 10 + COUNT)) == good
    assert group.forward(last_row(1, range(10, 10 + COUNT))) == computed
    assert load(group, DISK, range(COUNT), range(20, 20 + COUNT)) == good
    assert group.forward(last_row(1, range(20, 20 + COUNT))) == computed

    store(group, DISK, range(30, 30 + COUNT), sources=range(10, 10 + COUNT), from_host=True)
    assert all(answer.failed == b"" for answer in group.wait(PagesStored))
    group.order(DropPages(seq=0, tier=HOST, slots=packed.pack([11])))
    store(group, HOST, range(1), sources=range(1))
    group.wait(PagesStored)  # stores wait for the drops before them; loads do not
    assert load(group, HOST, range(10, 10 + COUNT), range(30, 30 + COUNT)) == [[1]] * group.stages
    group.end()

    again = groups()
    for found in again.wait(PagesFound):
        slots = packed.unpack(found.slots).tolist()
        assert slots == [*range(COUNT), *range(30, 30 + COUNT)]
        assert found.headers == HEADERS * 2
    assert load(again, HOST, range(10, 11), range(1)) == [[0]] * again.stages, "memory does not survive"
    assert load(again, DISK, range(30, 30 + COUNT), range(5, 5 + COUNT)) == good
    assert again.forward(last_row(1, range(5, 5 + COUNT))) == computed

    flip_a_byte(next((tmp_path / "kv").glob(f"*-stage{again.stages - 1}-*/segment-*.kv")), slot=2)
    assert load(again, DISK, range(COUNT), range(COUNT)) == [*good[1:], [2]]
    again.end()


def flip_a_byte(segment: Path, slot: int) -> None:
    """In the page of one of the slots from 0 on, which were written in order and all with headers of HEADERS."""
    data = bytearray(segment.read_bytes())
    second = data.index(b"HRKVPAGE", HEADER_BYTES)
    data[slot * second + HEADER_BYTES + 77] ^= 4
    segment.write_bytes(data)
