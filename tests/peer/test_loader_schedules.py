"""A KvLoader under random schedules of commands and events."""

import random
from typing import Any

import pytest

from headrace.core.messages.frontend import AddPrefill, RemovePrefill
from headrace.core.messages.orders import CancelReceive, CloseSession, PrepareReceive
from headrace.core.messages.peers import AskCancel, AskReserve, TicketCancelled, TicketFailed
from headrace.core.messages.replies import PrefillState
from headrace.core.messages.stage_events import KvReceived, ReceivePrepared, SessionClosed
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.kv.backends import SHM, ZMQ
from headrace.peer.commands import (
    AnyResult,
    CancelLoad,
    Loaded,
    ReleaseLoad,
    RenewLease,
)
from headrace.peer.loader import METADATA_ROWS
from tests.peer.loader_bench import CONTROL, FIRST, Bench, ticket


class Schedule:
    """Random steps of both sides, and what has become of the loads. Sessions are of any backend; writers has what
    prefill servers may write into, as a process does that knows nothing of cancels until it is told."""

    def __init__(self, seed: int) -> None:
        self.rng, self.bench = random.Random(seed), Bench()
        self.writers: dict[tuple[str, str, int], set[int]] = {}
        self.cancels: list[AskCancel] = []
        self.closing: list[str] = []  # sessions whose end is not confirmed
        self.states: dict[str, PrefillState] = {}  # by names of AddPrefill
        self.open_names: dict[str, bool] = {}  # whether a load was asked for
        self.answered: dict[str, AnyResult] = {}
        self.prepared: dict[int, PrepareReceive] = {}
        self.asks: list[AskReserve] = []
        self.backends: dict[str, str] = {}  # by session
        self.kept: set[str] = set()  # names of AddPrefill
        self.up, self.number = False, 0

    def note(self, asked: list[Any]) -> None:
        """Check and remember what the loader asks of others, and its answers."""
        for one in asked:
            if isinstance(one, PrepareReceive):
                taken = [page for other in self.prepared.values() for page in memoryview(other.pages).cast("i")]
                pages = set(memoryview(one.pages).cast("i"))
                assert not set(taken) & pages
                assert not any(pages & written for written in self.writers.values())
                assert one.row not in {other.row for other in self.prepared.values()}
                self.prepared[one.request] = one
                self.note(self.bench.hear(ReceivePrepared(stage=0, request=one.request)))
            elif isinstance(one, CancelReceive):
                del self.prepared[one.request]
            elif isinstance(one, AskReserve):
                self.asks.append(one)
                if self.backends[one.session] == SHM:
                    written = one.reservation
                    self.writers[one.session, written.ticket, written.generation] = set(
                        memoryview(written.pages).cast("i")
                    )
            elif isinstance(one, AskCancel):
                self.cancels.append(one)
            elif isinstance(one, CloseSession):
                self.closing.append(one.session)
        for answer in self.bench.answers():
            if isinstance(answer, PrefillState):
                assert self.states[answer.name] != answer, "only changes are told"
                self.states[answer.name] = answer
                continue
            assert answer.id not in self.answered
            self.answered[answer.id] = answer

    def step(self) -> None:
        """Something happens."""
        rng, bench, kind = self.rng, self.bench, self.rng.randrange(12)
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
            done = self.prepared.pop(serial)
            self.writers.pop((done.session, done.ticket, done.generation), None)
            self.note(bench.hear(KvReceived(stage=0, request=serial, first=FIRST, bytes=1, chunks=1)))
        elif kind == 6 and self.asks:
            ask = rng.choice(self.asks)
            error = ErrorInfo(code="x", message="m", status=500)
            key = {"session": ask.session, "ticket": ask.reservation.ticket, "generation": ask.reservation.generation}
            if self._same_session(ask):
                self.writers.pop((ask.session, ask.reservation.ticket, ask.reservation.generation), None)
                self.note(bench.hear(TicketFailed(**key, error=error)))
        elif kind in (7, 8) and self.cancels + self.closing:
            self._confirm()
        elif kind == 9:
            self._keep()
        else:
            self.note(bench.wait(rng.choice((0.0, 1.0, 12.0))))
        self.up = self.up and bench.connected
        for name, state in self.states.items():
            assert state.up == (self.up and name in self.kept)

    def finish(self) -> None:
        """The owner lets go of everything."""
        for name, loading in list(self.open_names.items()):
            loaded = isinstance(self.answered.get(name), Loaded)
            self.note(self.bench.do(ReleaseLoad(id=name) if loaded else CancelLoad(id=name)))
            assert not loading or name in self.answered
        self.note(self.bench.wait(60))
        for name in list(self.kept):
            self.kept.discard(name)
            self.note(self.bench.do(RemovePrefill(name=name)))
        self.note(self.bench.wait(60))
        while self.cancels or self.closing:
            self._confirm()
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
            self.bench.backend = self.rng.choice((SHM, SHM, ZMQ))
            self.backends[f"s{self.bench.sessions + 1}"] = self.bench.backend
            self.note(self.bench.up())

    def _confirm(self) -> None:
        """A cancel is answered, or an ended session is revoked; both may take long, and cancels of a session that has
        ended are never answered."""
        if self.cancels and self.rng.random() < 0.5:
            cancel = self.cancels.pop(self.rng.randrange(len(self.cancels)))
            if self._same_session(cancel):
                key = cancel.session, cancel.ticket, cancel.generation
                self.writers.pop(key, None)
                self.note(self.bench.hear(TicketCancelled(session=key[0], ticket=key[1], generation=key[2])))
        elif self.closing:
            session = self.closing.pop(self.rng.randrange(len(self.closing)))
            self.writers = {key: pages for key, pages in self.writers.items() if key[0] != session}
            self.note(self.bench.hear(SessionClosed(stage=0, session=session)))

    def _same_session(self, ask: AskReserve | AskCancel) -> bool:
        return self.up and ask.session == f"s{self.bench.sessions}"

    def _keep(self) -> None:
        """The owner wants a session, or lets go of it."""
        name = self.rng.choice(("one name", "another"))
        if name in self.kept:
            self.kept.discard(name)
            self.note(self.bench.do(RemovePrefill(name=name)))
        else:
            self.kept.add(name)
            self.states[name] = PrefillState(name=name, up=False)
            self.note(self.bench.do(AddPrefill(name=name, endpoint=CONTROL)))


@pytest.mark.parametrize("seed", range(60))
def test_random_schedules_answer_every_load_once_and_end_empty(seed: int) -> None:
    """The other side does anything at any time. Pages that are expected never overlap, nor does a load get any that a
    prefill server may still write into; the owner hears of each load once, and knows which servers are up."""
    schedule = Schedule(seed)
    for _ in range(300):
        schedule.step()
    schedule.finish()
    assert schedule.bench.empty()
    assert sorted(schedule.bench.loader._rows) == list(range(METADATA_ROWS))
