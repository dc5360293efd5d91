"""Bodies that are being received take bounded memory over all connections. Over a real HTTP server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from urllib.parse import urlsplit

import pytest

from headrace.core.types.errors import HeadraceError
from headrace.server.frontend.service import Service
from headrace.server.http import body as bodies
from headrace.server.http.body import BODIES, LEAST_BYTES, BodyBudget
from headrace.text.tokenizer import Tokenizer
from tests.server.fakes import FakeLink, in_loop, listening, running

LARGEST = 1 << 20
HALF = LARGEST // 2
ROOM = 4 * HALF  # of all that are being received


@pytest.fixture(autouse=True)
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODIES", ROOM // LARGEST)
    monkeypatch.setattr(bodies, "LEAST_BYTES", 0)


class Sender:
    """A connection with one request, whose body is sent by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def head(self, size: int | None, more: str = "") -> None:
        length = "transfer-encoding: chunked" if size is None else f"content-length: {size}"
        self._writer.write(f"POST /tokenize HTTP/1.1\r\nhost: here\r\n{more}{length}\r\n\r\n".encode())

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def announce(self) -> None:
        """Declare the largest body; returns when the server wants it."""
        await self.head(LARGEST, "expect: 100-continue\r\n")
        assert (await self.answer())[0] == 100

    async def half(self) -> None:
        """Half of the largest body."""
        await self.send(b'{"prompt":"' + b"x" * (HALF - 11))

    async def answer(self) -> tuple[int, str]:
        """Status and head of the answer."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        return int(head.split()[1]), head

    def close(self) -> None:
        self._writer.close()


class Clients:
    """Connections to a server, closed at the end, and what it says that bodies take."""

    def __init__(self, service: Service, url: str, opened: AsyncExitStack) -> None:
        self._service = service
        self._port = urlsplit(url).port
        self._opened = opened

    async def sender(self) -> Sender:
        made = Sender(*await asyncio.open_connection("127.0.0.1", self._port))
        self._opened.callback(made.close)
        return made

    async def half_sent(self, count: int) -> list[Sender]:
        """Half-sent bodies that have arrived."""
        before = self.value("http_body_bytes")
        senders = [await self.sender() for _ in range(count)]
        for sender in senders:
            await sender.announce()  # all of them find room
        for sender in senders:
            await sender.half()
        await self.until(before + count * HALF)
        return senders

    def value(self, name: str) -> float:
        return next(sample.value for sample in self._service.metrics.statistics().samples if sample.name == name)

    async def until(self, taken: float) -> None:
        while self.value("http_body_bytes") != taken:
            await asyncio.sleep(0.005)


@asynccontextmanager
async def clients_of(tokenizer: Tokenizer) -> AsyncIterator[Clients]:
    async with (
        running(FakeLink(), tokenizer, max_body_bytes=LARGEST) as service,
        listening(service) as url,
        AsyncExitStack() as opened,
    ):
        yield Clients(service, url, opened)


@in_loop
async def test_a_body_that_does_not_fit_is_refused_before_it_is_read(tokenizer: Tokenizer) -> None:
    async with clients_of(tokenizer) as clients:
        await clients.half_sent(4)
        late = await clients.sender()
        await late.head(LARGEST)
        status, head = await late.answer()
        assert status == 503
        assert "retry-after: 1\r\n" in head
        assert clients.value("http_bodies_refused_total") == 1
        assert clients.value("http_body_bytes") == ROOM, "those before it stay"


@in_loop
async def test_a_body_without_a_size_is_refused_on_the_way(tokenizer: Tokenizer) -> None:
    async with clients_of(tokenizer) as clients:
        await clients.half_sent(3)
        late = await clients.sender()
        await late.head(None)
        await late.send(b"%x\r\n%s\r\n" % (HALF - 100, b"x" * (HALF - 100)))
        await clients.until(ROOM - 100)
        await late.send(b"80\r\n" + b"x" * 128 + b"\r\n")
        assert (await late.answer())[0] == 503
        await clients.until(3 * HALF)
        assert clients.value("http_bodies_refused_total") == 1


@in_loop
async def test_what_comes_at_once_is_served_when_there_is_no_room(tokenizer: Tokenizer) -> None:
    async with clients_of(tokenizer) as clients:
        await clients.half_sent(4)
        small = await clients.sender()
        await small.head(15)
        await small.send(b'{"prompt":"ab"}')
        assert (await small.answer())[0] == 200


@in_loop
async def test_room_comes_back_when_bodies_are_whole_or_their_clients_gone(tokenizer: Tokenizer) -> None:
    async with clients_of(tokenizer) as clients:
        first, second, *_ = await clients.half_sent(4)
        first.close()
        await clients.until(3 * HALF)
        await second.send(b"x" * (HALF - 2) + b'"}')
        assert (await second.answer())[0] in (200, 400)
        await clients.until(2 * HALF)
        await clients.half_sent(2)


@in_loop
async def test_room_comes_back_from_bodies_that_stall_or_are_refused(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with clients_of(tokenizer) as clients:
        large = await clients.sender()
        await large.head(None)
        await large.send(b"%x\r\n%s\r\n" % (LARGEST + 1, b"x" * (LARGEST + 1)))
        assert (await large.answer())[0] == 413
        assert clients.value("http_body_bytes") == 0
        monkeypatch.setattr(bodies, "SILENCE_S", 0.2)
        stalled = await clients.sender()
        await stalled.announce()
        await stalled.half()
        assert (await stalled.answer())[0] == 408
        assert clients.value("http_body_bytes") == 0


@pytest.mark.parametrize("largest", [1, 16 << 20])
def test_how_much_room_there_is(largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    budget, room = BodyBudget(largest), max(LEAST_BYTES, BODIES * largest)
    budget.take(room)
    with pytest.raises(HeadraceError, match=f"take {room} bytes, and the limit for all of them is {room}"):
        budget.take(1)


def test_a_tenant_with_all_of_the_room_leaves_some_for_another() -> None:
    budget = BodyBudget(LARGEST)
    budget.take(ROOM, "greedy")
    with pytest.raises(HeadraceError, match="bodies that are being received"):
        budget.check(1, "greedy")
    budget.take(LARGEST, "modest")
    with pytest.raises(HeadraceError):
        budget.check(LARGEST, "modest")
    budget.give_back(LARGEST, "modest")
    budget.give_back(ROOM, "greedy")
    budget.check(ROOM, "greedy")
