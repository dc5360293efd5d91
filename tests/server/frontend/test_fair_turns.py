"""Turns at compiling constraints: bounded, and no client has them all."""

import asyncio

import pytest

from headrace.core.types.errors import HeadraceError
from headrace.server.frontend.grammar_checker import FairTurns
from tests.server.fakes import in_loop


class Bench:
    """Clients that have turns until they are told to end them."""

    def __init__(self, at_a_time: int = 2, most_waiting: int = 4) -> None:
        self.turns = FairTurns("constraints", at_a_time=at_a_time, most_waiting=most_waiting)
        self.running: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(self, *names: str) -> None:
        """Each name is of a client, and a number."""
        for name in names:
            self._ends[name] = asyncio.Event()
            self._tasks[name] = asyncio.create_task(self._have(name))
        await asyncio.sleep(0.001)

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await self._tasks[name]
        await asyncio.sleep(0.001)

    async def give_up(self, name: str) -> None:
        self._tasks[name].cancel()
        await asyncio.gather(self._tasks[name], return_exceptions=True)
        await asyncio.sleep(0.001)

    async def _have(self, name: str) -> None:
        async with self.turns.turn(name[0]):
            self.running.append(name)
            try:
                await self._ends[name].wait()
            finally:
                self.running.remove(name)


@in_loop
async def test_one_turn_is_left_for_others() -> None:
    bench = Bench()
    await bench.ask("a1", "a2", "a3")
    assert bench.running == ["a1"]
    await bench.ask("b1")
    assert bench.running == ["a1", "b1"]
    await bench.end("a1")
    assert bench.running == ["b1", "a2"]


@in_loop
async def test_clients_come_in_turn() -> None:
    bench = Bench(at_a_time=1)
    await bench.ask("a1", "a2", "a3", "b1", "c1")
    order = []
    for _ in range(5):
        (name,) = bench.running
        order.append(name)
        await bench.end(name)
    assert order == ["a1", "a2", "b1", "c1", "a3"], "a2 was first in line before there were others"


@in_loop
async def test_too_many_are_refused_but_not_those_of_a_client_with_few() -> None:
    bench = Bench()
    await bench.ask("a1", "a2", "a3", "a4", "a5", "x1")
    with pytest.raises(HeadraceError) as refused:
        async with bench.turns.turn("a"):
            pass
    assert (refused.value.info.status, refused.value.info.retry_after_s) == (429, 2.0)
    await bench.ask("b1", "b2")
    assert "x1" in bench.running
    await bench.end("x1")
    assert "b1" in bench.running


@in_loop
async def test_who_gives_up_leaves_its_place() -> None:
    bench = Bench()
    await bench.ask("a1", "a2", "a3")
    await bench.give_up("a2")
    await bench.end("a1")
    assert bench.running == ["a3"]
    await bench.give_up("a3")
    assert bench.running == []
    await bench.ask("a4")
    assert bench.running == ["a4"]
