"""A KvLoader under random schedules of commands and events."""

import random
from typing import Any

import pytest

from headrace.core.messages.orders import CancelReceive, PrepareReceive
from headrace.core.messages.peers import AskReserve, TicketFailed
from headrace.core.messages.stage_events import KvReceived, ReceivePrepared
from headrace.core.types.errors import ErrorInfo
from headrace.integrations.peer.commands import AnyResult, CancelLoad, Loaded, ReleaseLoad, RenewLease
from headrace.integrations.peer.loader import METADATA_ROWS
from tests.integrations.peer.loader_bench import FIRST, Bench, ticket


class Schedule:
    """Random steps of both sides, and what has become of the loads."""

    def __init__(self, seed: int) -> None:
        self.rng, self.bench = random.Random(seed), Bench()
        self.open_names: dict[str, bool] = {}  # whether a load was asked for
        self.answered: dict[str, AnyResult] = {}
        self.prepared: dict[int, PrepareReceive] = {}
        self.asks: list[AskReserve] = []
        self.up, self.number = False, 0

    def note(self, asked: list[Any]) -> None:
        """Check and remember what the loader asks of others, and its answers."""
        for one in asked:
            if isinstance(one, PrepareReceive):
                taken = [page for other in self.prepared.values() for page in memoryview(other.pages).cast("i")]
                assert not set(taken) & set(memoryview(one.pages).cast("i"))
                assert one.row not in {other.row for other in self.prepared.values()}
                self.prepared[one.request] = one
                self.note(self.bench.hear(ReceivePrepared(stage=0, request=one.request)))
            elif isinstance(one, CancelReceive):
                del self.prepared[one.request]
            elif isinstance(one, AskReserve):
                self.asks.append(one)
        for answer in self.bench.answers():
            assert answer.id not in self.answered
            self.answered[answer.id] = answer

    def step(self) -> None:
        """Something happens."""
        rng, bench, kind = self.rng, self.bench, self.rng.randrange(9)
        names = list(self.open_names)
        if kind == 0:
            self.number += 1
            self.open_names[str(self.number)] = False
            self.note(bench.do(RenewLease(id=str(self.number), ticket=ticket(str(self.number)))))
        elif kind in (1, 2, 3) and names:
            self._use(rng.choice(names), load=kind < 3)
        elif kind == 4:
            self._connection()
        elif kind == 5 and self.prepared:
            serial = rng.choice(list(self.prepared))
            del self.prepared[serial]
            self.note(bench.hear(KvReceived(stage=0, request=serial, first=FIRST, bytes=1, chunks=1)))
        elif kind == 6 and self.asks:
            ask = rng.choice(self.asks)
            error = ErrorInfo(code="x", message="m", status=500)
            key = {"session": ask.session, "ticket": ask.ticket, "generation": ask.generation}
            self.note(bench.hear(TicketFailed(**key, error=error)))
        else:
            self.note(bench.wait(rng.choice((0.0, 1.0, 12.0))))
        self.up = self.up and bench.connected

    def finish(self) -> None:
        """The owner lets go of everything."""
        for name, loading in list(self.open_names.items()):
            loaded = isinstance(self.answered.get(name), Loaded)
            self.note(self.bench.do(ReleaseLoad(id=name) if loaded else CancelLoad(id=name)))
            assert not loading or name in self.answered
        self.note(self.bench.wait(60))
        for name in [name for name, answer in self.answered.items() if isinstance(answer, Loaded)]:
            self.note(self.bench.do(ReleaseLoad(id=name)))

    def _use(self, name: str, *, load: bool) -> None:
        """Load under a name, or let go of it."""
        if load and not self.open_names[name]:
            self.open_names[name] = True
            self.note(self.bench.load(name, tokens=self.rng.randint(2, 200), start=self.rng.randint(0, 1)))
        elif not load and isinstance(self.answered.get(name), Loaded):
            self.note(self.bench.do(ReleaseLoad(id=name)))
            del self.open_names[name]
        elif not load and self.rng.random() < 0.3:
            self.note(self.bench.do(CancelLoad(id=name)))
            del self.open_names[name]

    def _connection(self) -> None:
        """Lost or made."""
        if self.up and self.rng.random() < 0.5:
            self.up = False
            self.note(self.bench.down())
        elif not self.up and self.bench.connected:
            self.up = True
            self.note(self.bench.up())


@pytest.mark.parametrize("seed", range(60))
def test_random_schedules_answer_every_load_once_and_end_empty(seed: int) -> None:
    """The other side does anything at any time. Pages that are expected never overlap, and the owner hears of each load
    once."""
    schedule = Schedule(seed)
    for _ in range(300):
        schedule.step()
    schedule.finish()
    assert schedule.bench.empty()
    assert sorted(schedule.bench.loader._rows) == list(range(METADATA_ROWS))
