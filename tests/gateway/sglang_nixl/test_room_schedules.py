"""Rooms under random schedules: nothing is told or given back while bytes may be on their way, and all ends."""

import random
from typing import Any

import pytest

from headrace.gateway.sglang_nixl.records import RoomEnded, StopWrites, Tell, WriteKv, WriteRow
from headrace.peer.commands import CancelLoad, LoadCancelled, LoadFailed, LoadKv, ReleaseLoad, RenewLease
from tests.gateway.sglang_nixl.room_bench import Bench

PORTS = {"agent-1": 7001, "agent-2": 7002}


class Schedule:
    """Random steps of all sides, and what follows from them."""

    def __init__(self, seed: int) -> None:
        self.rng, self.bench = random.Random(seed), Bench()
        self.requests: dict[str, int] = {}  # all, with their rooms
        self.unanswered: set[str] = set()
        self.holding: set[str] = set()  # whose KV a prefill server is still computing
        self.leases: set[str] = set()  # tickets that are to be released, by load
        self.loading: dict[str, int] = {}  # first page, by load
        self.pages: dict[str, int] = {}  # of the pool, by load
        self.writing: dict[str, tuple[int, set[str], bool]] = {}  # room, agents, whether it is the row; by load
        self.landed: set[int] = set()  # rooms whose row has landed, and which may be told of success
        self.free = list(range(0, 400, 4))
        self.outcomes: list[str] = []

    def note(self, effects: list[Any]) -> None:
        """Check and remember what the rooms ask of others."""
        for effect in effects:
            match effect:
                case RenewLease(id=load):
                    self.leases.add(load)
                case LoadKv(id=load):
                    assert load in self.leases
                    self.loading[load] = effect.start
                case CancelLoad(id=load):
                    assert load not in self.pages
                    self.leases.remove(load)
                    if self.loading.pop(load, None) is not None and self.rng.random() < 0.5:
                        self.bench.table.handle(LoadCancelled(id=load), self.bench.now)
                        assert self.bench.effects() == []
                case ReleaseLoad(id=load):
                    _, agents, _ = self.writing.pop(load, (0, set(), False))
                    assert not agents, "the bytes are still read"
                    self.free.append(self.pages.pop(load))
                    self.leases.remove(load)
                case WriteKv() | WriteRow():
                    assert effect.load in self.pages
                    assert effect.load not in self.writing
                    agents = {one.target.agent for one in effect.ranks}
                    room = int(effect.load.removeprefix("room:").partition("/")[0])
                    self.writing[effect.load] = room, agents, isinstance(effect, WriteRow)
                case StopWrites(agents=stopped):
                    lost = [load for load, (_, agents, _) in self.writing.items() if agents & set(stopped)]
                    for load in lost:
                        self.writing[load] = self.writing[load][0], set(), False  # still to be reported
                case Tell(address=address, frames=frames):
                    self.check_told(address.port, [bytes(frame) for frame in frames])
                case RoomEnded(request=request, error=error):
                    self.unanswered.remove(request)
                    self.holding.discard(request)
                    self.outcomes.append(error.code if error is not None else "ok")

    def check_told(self, port: int, frames: list[bytes]) -> None:
        room = int(frames[1])
        agents = {agent for number, agents, _ in self.writing.values() if number == room for agent in agents}
        assert port not in {PORTS[agent] for agent in agents}, "bytes may still arrive"
        if frames[0] == b"KV_STATUS" and frames[2] == b"4":
            assert room in self.landed
            self.landed.remove(room)

    def step(self) -> None:
        """Something happens."""
        rng, bench, kind = self.rng, self.bench, self.rng.randrange(12)
        if kind < 2:
            request, room = f"r{len(self.requests)}", rng.randrange(6)
            self.requests[request] = room
            self.unanswered.add(request)
            self.holding.add(request)
            self.note(bench.expect(room, request))
        elif kind < 4 and self.holding:
            request = rng.choice(sorted(self.holding))
            self.holding.remove(request)
            act = bench.hold if rng.random() < 0.8 else bench.withdraw
            self.note(act(self.requests[request], request))
        elif kind < 6:
            agent = rng.choice(sorted(PORTS))
            changes: dict[str, Any] = {"prefix": 16} if rng.random() < 0.3 else {}
            self.note(bench.target(rng.randrange(6), agent=agent, port=PORTS[agent], **changes))
        elif kind == 6:
            agent = rng.choice(sorted(PORTS))
            bench.register(agent=agent, port=PORTS[agent])
            self.note(bench.effects())
        elif kind == 7:
            generation = rng.choice((None, 1, 2))
            self.note(bench.abort(rng.randrange(6), port=rng.choice(sorted(PORTS.values())), generation=generation))
        elif kind == 8 and self.loading:
            self.load(rng.choice(sorted(self.loading)))
        elif kind < 11 and self.writing:
            self.write(rng.choice(sorted(self.writing)))
        elif rng.random() < 0.1:
            self.note(bench.wait(rng.choice((1.0, 31.0, 100.0))))

    def load(self, load: str) -> None:
        start = self.loading.pop(load)
        if self.rng.random() < 0.2:
            self.leases.remove(load)
            self.bench.table.handle(LoadFailed(id=load, code="x", message="m"), self.bench.now)
            self.note(self.bench.effects())
            return
        self.pages[load] = self.free.pop(0)
        self.note(self.bench.loaded(load, start=start, page=self.pages[load]))

    def write(self, load: str) -> None:
        room, agents, row = self.writing.pop(load)
        lost = "" if agents and self.rng.random() < 0.9 else "gone"
        if lost and agents:  # it is not known that nothing is on its way: the rooms have to see to that
            self.writing[load] = room, agents, row
        elif row:
            self.landed.add(room)
        effects = self.bench.written(load, lost)
        if lost and agents:
            assert isinstance(effects[0], StopWrites)
            del self.writing[load]
        self.note(effects)

    def finish(self) -> None:
        """Let all that goes on come to its end."""
        for request in sorted(self.holding):
            self.note(self.bench.withdraw(self.requests[request], request))
        self.holding.clear()
        for _ in range(10):
            for load in sorted(self.loading):
                self.load(load)
            for load in sorted(self.writing):
                self.write(load)
            self.note(self.bench.wait(400.0))
        assert [self.unanswered, self.leases, self.pages, self.writing] == [set(), set(), {}, {}]
        assert (len(self.bench.table), self.bench.table.next_deadline()) == (0, None)


@pytest.mark.parametrize("block", range(4))
def test_all_ends_and_nothing_is_told_too_early(block: int) -> None:
    outcomes = set()
    for seed in range(block * 60, block * 60 + 60):
        schedule = Schedule(seed)
        for _ in range(120):
            schedule.step()
        schedule.finish()
        outcomes |= set(schedule.outcomes)
    assert outcomes >= {"ok", "cancelled", "peer_gone", "room_in_use", "no_peer", "unfit", "timeout", "x"}
