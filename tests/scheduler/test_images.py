"""Images of prompts: what rows say of them, and that no prompt takes another's image for its own."""

from typing import Any

import msgspec
import pytest

from headrace.core.messages.orders import PlanRow, PrepareReceive, SendChunk
from headrace.core.messages.peers import PeerReserved
from headrace.core.messages.stage_events import KvReceived
from headrace.core.types.packed import pack, prompt_hash, unpack
from headrace.core.types.requests.images import ImageInput, images_digest
from headrace.core.types.requests.request import FetchFrom, FirstToken, SendTo
from headrace.core.types.requests.reservation import Reservation
from tests.scheduler.bench import PAGE, Bench

LENGTH = 20
FIRST = ImageInput("a" * 64, 3, 6, 2, 3, mrope=True, pixels=b"1234", shape=(1,))
SECOND = ImageInput("b" * 64, 12, 1, 1, 1, mrope=True)
NEXT = LENGTH - 3  # of the first image's 6 tokens, rotary positions count 3


def submit(bench: Bench, rid: str, *images: ImageInput, **fields: Any) -> None:
    bench.submit(rid, LENGTH, images=images, image_digest=images_digest(images), **fields)


def row(bench: Bench, token: int = 7) -> PlanRow:
    """Compute the only row of the next pass."""
    forward = bench.plan()
    assert forward is not None
    (found,) = forward.rows
    bench.done(forward, *[token] if found.sample is not None else [])
    return found


def axes(found: PlanRow) -> list[list[int]]:
    positions = unpack(found.rotary).tolist()
    return [positions[at : at + found.count] for at in range(0, len(positions), found.count)]


def test_images_come_with_the_first_row_that_computes_them_and_positions_with_every_row() -> None:
    bench = Bench(pipeline_depth=0, chunk_tokens=5)
    submit(bench, "a", FIRST, SECOND, max_tokens=3)
    found = [row(bench) for _ in range(6)]
    assert [each.images for each in found] == [(FIRST, SECOND), (), (), (), (), ()]
    assert axes(found[0]) == [[0, 1, 2, 3, 3], [0, 1, 2, 3, 3], [0, 1, 2, 3, 4]]
    assert axes(found[1]) == [[3, 3, 3, 3, 6], [3, 4, 4, 4, 6], [5, 3, 4, 5, 6]]
    assert [axes(each) for each in found[4:]] == [[[NEXT]] * 3, [[NEXT + 1]] * 3]
    bench.assert_empty()


def test_rows_before_the_first_image_say_nothing_and_text_has_none() -> None:
    bench = Bench(pipeline_depth=0, chunk_tokens=3)
    submit(bench, "a", FIRST, max_tokens=1)
    first = row(bench)
    assert (first.images, first.rotary) == ((), b"")
    assert row(bench).images == (FIRST,)
    bench = Bench(pipeline_depth=0)
    bench.submit("b", LENGTH, max_tokens=1)
    plain = row(bench)
    assert (plain.images, plain.rotary) == ((), b"")


def test_the_cache_tells_images_apart() -> None:
    """The tokens are the same ones."""
    other = msgspec.structs.replace(FIRST, digest="c" * 64)
    bench = Bench(pipeline_depth=0, chunk_tokens=64)
    submit(bench, "a", FIRST, max_tokens=1)
    assert row(bench).start == 0
    for rid, images in (("b", (other,)), ("c", ())):
        submit(bench, rid, *images, max_tokens=1)
        assert row(bench).start == 0
    submit(bench, "d", FIRST, max_tokens=1)
    again = row(bench)
    assert (again.start, again.images) == (16, ())  # the image is in the pages that were found
    bench.assert_empty()


def test_pages_before_an_image_are_shared_with_prompts_that_have_others() -> None:
    bench = Bench(pipeline_depth=0, chunk_tokens=64)
    submit(bench, "a", FIRST, max_tokens=1)
    assert row(bench).start == 0
    submit(bench, "b", FIRST, SECOND, max_tokens=1)  # on the fourth page
    found = row(bench)
    assert (found.start, found.images) == (3 * PAGE, (SECOND,))
    submit(bench, "c", msgspec.structs.replace(FIRST, start=PAGE), max_tokens=1)
    assert row(bench).start == 0  # the first page of the others has an image
    submit(bench, "d", msgspec.structs.replace(SECOND, start=PAGE), max_tokens=1)
    assert row(bench).start == PAGE
    bench.assert_empty()


def test_a_preempted_request_brings_its_images_again() -> None:
    bench = Bench(kv_pages=12, pipeline_depth=0, prefix_cache=False)
    for rid in ("old", "young"):
        submit(bench, rid, FIRST, max_tokens=20)
    seen = []
    for _ in range(60):
        forward = bench.plan()
        if forward is None:
            break
        seen += [each.request for each in forward.rows if each.images]
        bench.done(forward, *[7 for each in forward.rows if each.sample is not None])
    preempted = bench.metric("preemptions_total")
    assert preempted >= 1
    assert len(set(seen)) == len(seen) == 2 + preempted


def test_what_is_handed_over_says_where_rotary_positions_go_on() -> None:
    bench = Bench(pipeline_depth=0)
    bench.join()
    submit(bench, "a", FIRST, route=SendTo("t"), max_tokens=5)
    bench.reserve("t", LENGTH)
    row(bench)
    row(bench)
    last = bench.last(SendChunk).last
    assert last is not None
    assert last.next_position == NEXT


@pytest.mark.parametrize(("position", "code"), [(NEXT, ""), (0, "bad_metadata"), (NEXT + 1, "bad_metadata")])
def test_a_decode_server_goes_on_where_its_own_images_say(position: int, code: str) -> None:
    bench = Bench(pipeline_depth=0)
    bench.prefill_up()
    submit(bench, "a", FIRST, route=FetchFrom("p", "a"), max_tokens=5)
    expect = bench.last(PrepareReceive)
    bench.expecting(expect.request)
    first = FirstToken(42, LENGTH, 0, next_position=position)
    bench.do(KvReceived(stage=0, request=expect.request, first=first, bytes=100, chunks=1))
    if code:
        assert bench.error("a").code == code
        return
    assert axes(row(bench)) == [[NEXT]] * 3


@pytest.mark.parametrize("images", [(FIRST,), (), (msgspec.structs.replace(FIRST, digest="c" * 64),)])
def test_a_peer_with_other_images_is_refused(images: tuple[ImageInput, ...]) -> None:
    """Its token ids are the same ones."""
    bench = Bench(pipeline_depth=0)
    bench.join()
    submit(bench, "a", FIRST, route=SendTo("t"), max_tokens=5)
    reservation = Reservation(
        ticket="t",
        generation=1,
        prompt_tokens=LENGTH,
        cached_tokens=0,
        pages=pack(range(500, 500 + -(-LENGTH // PAGE))),
        row=7,
        prompt_hash=prompt_hash(pack(range(LENGTH)), images_digest(images)),
    )
    bench.do(PeerReserved(session="s", reservation=reservation))
    if images == (FIRST,):
        assert row(bench).images == (FIRST,)
        return
    assert bench.error("a").code == "bad_reservation"
    assert "token ids and images" in bench.error("a").message
