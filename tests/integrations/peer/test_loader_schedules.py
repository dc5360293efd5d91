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


@pytest.mark.parametrize("seed", range(60))
def test_random_schedules_answer_every_load_once_and_end_empty(seed: int) -> None:
    """The other side does anything at any time. Pages that are expected never overlap, and the owner hears of each load
    once."""
    rng, bench = random.Random(seed), Bench()
    open_names: dict[str, bool] = {}  # whether a load was asked for
    answered: dict[str, AnyResult] = {}
    expects: dict[int, PrepareReceive] = {}
    asks: list[AskReserve] = []
    up, number = False, 0

    def note(asked: list[Any]) -> None:
        for one in asked:
            if isinstance(one, PrepareReceive):
                taken = [page for other in expects.values() for page in memoryview(other.pages).cast("i")]
                assert not set(taken) & set(memoryview(one.pages).cast("i"))
                assert one.row not in {other.row for other in expects.values()}
                expects[one.request] = one
                note(bench.hear(ReceivePrepared(stage=0, request=one.request)))
            elif isinstance(one, CancelReceive):
                del expects[one.request]
            elif isinstance(one, AskReserve):
                asks.append(one)
        for answer in bench.answers():
            assert answer.id not in answered
            answered[answer.id] = answer

    for _ in range(300):
        step = rng.randrange(9)
        names = list(open_names)
        if step == 0:
            number += 1
            open_names[str(number)] = False
            note(bench.do(RenewLease(id=str(number), ticket=ticket(str(number)))))
        elif step in (1, 2) and names:
            name = rng.choice(names)
            if not open_names[name]:
                open_names[name] = True
                note(bench.load(name, tokens=rng.randint(2, 200), start=rng.randint(0, 1)))
        elif step == 3 and names:
            name = rng.choice(names)
            if isinstance(answered.get(name), Loaded):
                note(bench.do(ReleaseLoad(id=name)))
                del open_names[name]
            elif rng.random() < 0.3:
                note(bench.do(CancelLoad(id=name)))
                del open_names[name]
        elif step == 4:
            if up and rng.random() < 0.5:
                up = False
                note(bench.down())
            elif not up and bench.connected:
                up = True
                note(bench.up())
        elif step == 5 and expects:
            serial = rng.choice(list(expects))
            del expects[serial]
            note(bench.hear(KvReceived(stage=0, request=serial, first=FIRST, bytes=1, chunks=1)))
        elif step == 6 and asks:
            ask = rng.choice(asks)
            error = ErrorInfo(code="x", message="m", status=500)
            key = {"session": ask.session, "ticket": ask.ticket, "generation": ask.generation}
            note(bench.hear(TicketFailed(**key, error=error)))
        else:
            note(bench.wait(rng.choice((0.0, 1.0, 12.0))))
        up = up and bench.connected
    for name, loading in list(open_names.items()):
        note(bench.do(ReleaseLoad(id=name) if isinstance(answered.get(name), Loaded) else CancelLoad(id=name)))
        assert not loading or name in answered
    note(bench.wait(60))
    for name in [name for name, answer in answered.items() if isinstance(answer, Loaded)]:
        note(bench.do(ReleaseLoad(id=name)))
    assert bench.empty()
    assert sorted(bench.loader._rows) == list(range(METADATA_ROWS))
