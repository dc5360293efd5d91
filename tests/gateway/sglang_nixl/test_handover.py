"""KV of a real prefill server in the memory of a scripted SGLang decode side, by NIXL.

What arrives is compared with what a Headrace decode peer gets of the same prompt.
"""

import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from headrace.core.types.errors import ErrorInfo
from headrace.core.types.kv.geometry import ceil_div
from headrace.gateway.sglang_nixl.handover import HandoverOptions, KvHandover
from headrace.gateway.sglang_nixl.records import HeldPrompt, RoomLimits
from headrace.peer.commands import Loaded, TicketRef
from tests.e2e.harness import Server, pages_in_use, wait_until
from tests.gateway.sglang_nixl.decode_engine import DecodeEngine
from tests.gateway.sglang_nixl.prefill_side import (
    GEOMETRY,
    HOST,
    MODEL,
    POISON,
    arrived,
    decode_engine,
    limits,
    tokens,
    untouched,
)

pytestmark = pytest.mark.nixl

PAGE = 32
POOL_PAGES = 160
ROOM = (1 << 62) + 77


class Side:
    """The handover, and what a front end does with it."""

    def __init__(self, server: Server, page_size: int = PAGE, rooms: RoomLimits | None = None) -> None:
        self.server = server
        self.answers: dict[str, ErrorInfo | None] = {}
        self._answered = threading.Condition()
        self.handover = KvHandover(
            replace(GEOMETRY, page_size=page_size),
            HandoverOptions(host=HOST, bootstrap_port=0, rooms=rooms or RoomLimits()),
            limits(server, POOL_PAGES * PAGE // page_size, page_size),
            name="gateway",
            max_model_len=4096,
            ended=self._ended,
        )
        self.handover.start()

    def _ended(self, request: str, error: ErrorInfo | None) -> None:
        with self._answered:
            assert request not in self.answers
            self.answers[request] = error
            self._answered.notify_all()

    def prefill(self, prompt: list[int], ticket: str, **options: Any) -> dict[str, Any]:
        """As a router's request that is passed on: the prefill server holds the KV, and says where."""
        body = {"prompt": prompt, "kv_transfer_params": {"do_remote_decode": True, "transfer_id": ticket}, **options}
        answer = self.server.post("/v1/completions", {"model": MODEL, **body})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def ask(self, room: int, prompt: list[int], **options: Any) -> str:
        """A router's request, up to the KV that is held; its name."""
        request = f"request-{room}-{time.monotonic_ns()}"
        self.handover.rooms.expect(request, room)
        self.handover.rooms.hold(request, room, self.held(prompt, request, **options))
        return request

    def held(self, prompt: list[int], ticket: str, **options: Any) -> HeldPrompt:
        params = self.prefill(prompt, ticket, **options)["kv_transfer_params"]
        place = TicketRef(
            name=params["ticket"],
            host=params["remote_host"],
            port=params["remote_port"],
            fingerprint=params["fingerprint"],
            wait=False,
        )
        return HeldPrompt(ticket=place, tokens=params["remote_num_tokens"], prompt_hash=params["prompt_hashes"][0])

    def answer(self, request: str, timeout_s: float = 60.0) -> ErrorInfo | None:
        with self._answered:
            assert self._answered.wait_for(lambda: request in self.answers, timeout_s), "no answer"
            return self.answers[request]

    def close(self) -> None:
        self.handover.stop()


@pytest.fixture
def start(server: Server, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Starts a side and as many decode ranks as wanted, registered."""
    with ExitStack() as opened:

        def begin(ranks: int = 1, page_size: int = PAGE, rooms: RoomLimits | None = None) -> Any:
            side = opened.enter_context(closing(Side(server, page_size, rooms)))
            engines = [opened.enter_context(closing(engine(side, tmp_path, ranks, rank))) for rank in range(ranks)]
            for one in engines:
                one.register()
            return side, *engines

        yield begin
    wait_until(lambda: pages_in_use(server) == 0, 20, "all pages of the prefill server are back")


@pytest.fixture(scope="module")
def shared(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Side, DecodeEngine]]:
    """A side and a decode engine that outlive the test: NIXL's agents take seconds to start."""
    with closing(Side(server)) as side, closing(engine(side, tmp_path_factory.mktemp("shared"))) as one:
        one.register()
        yield side, one


ROOMS = count(ROOM)


@pytest.fixture
def pair(shared: tuple[Side, DecodeEngine], server: Server) -> Iterator[tuple[Side, DecodeEngine, int]]:
    """The two, with nothing in the engine's memory, and a room that was never used."""
    side, one = shared
    one.memory[:] = POISON
    yield side, one, next(ROOMS)
    wait_until(lambda: pages_in_use(server) == 0, 20, "all pages of the prefill server are back")


def engine(side: Side, folder: Path, ranks: int = 1, rank: int = 0) -> DecodeEngine:
    page_size = side.handover.staging.geometry.page_size
    return decode_engine(folder, side.handover.bootstrap_port, page_size, ranks, rank)


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 1000])
@pytest.mark.parametrize("engine_first", [False, True], ids=["request first", "engine first"])
def test_kv_and_first_token_are_those_that_a_headrace_peer_gets(
    pair: Any, reference: Any, length: int, engine_first: bool
) -> None:
    side, one, room = pair
    prompt = tokens(length)
    pages = [int(page) for page in np.random.default_rng(length).permutation(60)[: ceil_div(length, PAGE)]]
    if engine_first:
        one.order("room", room=room, pages=pages, aux_index=3)
    request = side.ask(room, prompt, temperature=0, logprobs=3)
    if not engine_first:
        one.order("room", room=room, pages=pages, aux_index=3)
    assert one.status(room) == ("4", "")
    assert side.answer(request) is None
    expected, loaded = reference(prompt)
    np.testing.assert_array_equal(arrived(one, pages, length), expected)
    assert untouched(one, pages, length), "the rest of the last page, and all other pages"
    check_row(one, 3, loaded, room)


def check_row(one: DecodeEngine, row: int, loaded: Loaded, room: int) -> None:
    first = loaded.first
    assert first.logprob is not None
    top = len(first.logprob.top_ids)
    assert top == 3
    assert struct.unpack_from("<i", one.aux(0, row)) == (first.token,)
    assert struct.unpack_from("<4i", one.aux(1, row)) == (0, 0, 0, 0), "nothing was cached"
    assert struct.unpack_from("<f", one.aux(2, row))[0] == pytest.approx(first.logprob.logprob)
    assert struct.unpack_from("<i", one.aux(3, row)) == (first.logprob.token,)
    assert struct.unpack_from(f"<{top}f", one.aux(4, row)) == pytest.approx(first.logprob.top_logprobs)
    assert struct.unpack_from(f"<{top}i", one.aux(5, row)) == first.logprob.top_ids
    assert struct.unpack_from("<2Q", one.aux(9, row)) == (room, 0)
    for buffer in range(10):
        assert set(one.aux(buffer, row + 1)) == {POISON}
        assert buffer not in (6, 7, 8) or set(one.aux(buffer, row)) == {POISON}, "draft data is left alone"


@pytest.mark.parametrize(("prefix", "length"), [(64, 200), (192, 200), (192, 192)])
def test_what_the_engine_has_is_not_written_again(pair: Any, reference: Any, prefix: int, length: int) -> None:
    side, one, room = pair
    prompt, pages = tokens(length), list(range(10, 10 + ceil_div(length, PAGE) - prefix // PAGE))
    request = side.ask(room, prompt, temperature=0, logprobs=3)
    one.order("room", room=room, pages=pages, prefix=prefix, aux_index=0)
    assert (one.status(room), side.answer(request)) == (("4", ""), None)
    expected, loaded = reference(prompt)
    np.testing.assert_array_equal(arrived(one, pages, length - prefix), expected[:, :, :, prefix:])
    assert untouched(one, pages, length - prefix)
    check_row(one, 0, loaded, room)


@pytest.mark.parametrize(("ranks", "page_size"), [(2, 32), (4, 16), (1, 1)])
def test_other_degrees_of_tensor_parallelism_and_page_sizes(
    start: Any, reference: Any, ranks: int, page_size: int
) -> None:
    side, *engines = start(ranks, page_size)
    prompt = tokens(300)
    pages = [int(page) for page in np.random.default_rng(1).permutation(ceil_div(300, page_size) + 20)]
    pages = pages[: ceil_div(300, page_size)]
    request = side.ask(ROOM, prompt, temperature=0, logprobs=3)
    for one in engines:
        one.order("room", room=ROOM, pages=pages, ranks=ranks, aux_index=2)
    assert side.answer(request) is None
    expected, loaded = reference(prompt)
    for rank, one in enumerate(engines):
        assert one.status(ROOM) == ("4", "")
        heads = slice(rank * one.setup.heads, (rank + 1) * one.setup.heads)
        np.testing.assert_array_equal(arrived(one, pages, 300), expected[:, :, heads])
        assert untouched(one, pages, 300)
        check_row(one, 2, loaded, ROOM)


def test_rooms_one_after_the_other_and_side_by_side(pair: Any, reference: Any) -> None:
    side, one, _ = pair
    prompts = {next(ROOMS): tokens(73 + 40 * number, number) for number in range(8)}
    at = 0
    places: dict[int, list[int]] = {}
    for row, (room, prompt) in enumerate(prompts.items()):
        places[room] = list(range(at, at + ceil_div(len(prompt), PAGE)))
        at += len(places[room])
        one.order("room", room=room, pages=places[room], aux_index=row)
    requests = {room: side.ask(room, prompt) for room, prompt in prompts.items()}
    for row, (room, prompt) in enumerate(prompts.items()):
        assert (side.answer(requests[room]), one.status(room)) == (None, ("4", ""))
        np.testing.assert_array_equal(arrived(one, places[room], len(prompt)), reference(prompt)[0])
        assert struct.unpack_from("<Q", one.aux(9, row)) == (room,)


def test_an_abort_in_the_middle_is_acknowledged_and_nothing_arrives_afterwards(pair: Any) -> None:
    side, one, _ = pair
    prompt, pages = tokens(4000), list(range(125))
    for number in range(10):
        room = next(ROOMS)
        one.memory[:] = POISON
        one.order("room", room=room, pages=pages, aux_index=0)
        request = side.ask(room, prompt)
        while number and not (one.kv[0, 0, 0] != POISON).any() and request not in side.answers:
            time.sleep(0.0005)
        one.order("abort", room=room, generation=number + 1)
        assert one.messages("ABORT_ACK", room) == [["ABORT_ACK", str(room), "0", str(number + 1)]]
        seen = one.memory.copy()
        answer = side.answer(request)
        assert answer is None or answer.code == "cancelled"
        time.sleep(0.1)
        np.testing.assert_array_equal(one.memory, seen)


def test_a_decode_engine_that_is_killed_frees_its_rooms_and_another_one_is_served(
    start: Any, reference: Any, tmp_path: Path
) -> None:
    side, one = start(rooms=RoomLimits(write_s=2.0))
    prompt = tokens(4000)
    one.order("room", room=ROOM, pages=list(range(125)), aux_index=0)
    waiting = side.ask(ROOM, prompt)
    while not (one.kv[0, 0, 0] != POISON).any() and waiting not in side.answers:
        time.sleep(0.0005)
    one.kill()
    error = side.answer(waiting)
    assert error is None or error.code in ("peer_gone", "timeout")
    with closing(engine(side, tmp_path)) as other:
        other.register()
        other.order("room", room=ROOM + 1, pages=list(range(125)), aux_index=0)
        request = side.ask(ROOM + 1, prompt)
        assert (side.answer(request), other.status(ROOM + 1)) == (None, ("4", ""))
        np.testing.assert_array_equal(arrived(other, list(range(125)), 4000), reference(prompt)[0])


def test_a_decode_engine_that_dies_or_is_stopped_before_it_is_written_to(start: Any, tmp_path: Path) -> None:
    side, one = start(rooms=RoomLimits(write_s=2.0))
    one.order("room", room=ROOM, pages=list(range(125)), aux_index=0)
    one.order("room", room=ROOM + 1, pages=list(range(125)), aux_index=0)
    one.order("abort", room=5, generation=1)
    one.messages("ABORT_ACK", 5)  # all are taken
    one.kill()
    begun = time.monotonic()
    error = side.answer(side.ask(ROOM, tokens(4000)))
    assert error is not None
    assert error.code in ("peer_gone", "timeout")
    assert time.monotonic() - begun < 10
    with closing(engine(side, tmp_path)) as other:
        other.register()
        other.order("room", room=ROOM + 2, pages=list(range(125)), aux_index=0)
        other.order("abort", room=5, generation=1)
        other.messages("ABORT_ACK", 5)
        other.send_signal(signal.SIGSTOP)
        error = side.answer(side.ask(ROOM + 2, tokens(4000)))
        assert error is not None
        assert error.code == "timeout"
        before = other.kv.copy()
        other.send_signal(signal.SIGCONT)
        time.sleep(0.5)
        assert other.status(ROOM + 2) == ("0", "writing to the decode engine has not ended within 2 s")
        np.testing.assert_array_equal(other.kv, before)


def test_rooms_with_one_side_only_end(start: Any) -> None:
    side, one = start(rooms=RoomLimits(bootstrap_s=1.0))
    one.order("room", room=ROOM, pages=[1], aux_index=0)
    assert one.status(ROOM) == ("0", f"no request has come for bootstrap_room {ROOM} within 1 s")
    error = side.answer(side.ask(ROOM + 1, tokens(20)))
    assert error is not None
    assert (error.code, error.status) == ("no_peer", 504)
    one.order("room", room=ROOM + 1, pages=[1], aux_index=0)
    assert one.status(ROOM + 1)[0] == "0", "late"
    assert (one.memory == POISON).all()


def test_pages_of_another_prompt_are_refused_and_nothing_is_written(pair: Any) -> None:
    side, one, room = pair
    one.order("room", room=room, pages=[1, 2], aux_index=0)
    error = side.answer(side.ask(room, tokens(20)))
    assert error is not None
    assert error.code == "bad_reservation"
    assert one.status(room) == ("0", error.message)
    assert (one.memory == POISON).all()
