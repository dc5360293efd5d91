"""State machine of rooms: when to load KV, to write it, and what to tell both sides. Pure: no sockets, no clock.

    WAITING ──request, its KV held, all decode ranks──► LOADING ──Loaded──► WRITING ──► LANDING ──► (gone, success told)
       │ abort, failure, timeout                           │ abort, failure    │ abort, lost, silence
       └───────────────────────────────────────────────────┴───────────────────┴──► ENDED ──both sides know──► (gone)

A room comes from two sides in any order: the router's request, and the messages of the decode ranks. While bytes may
be on their way to a rank, nothing is told of an end and no page of the pool is given back: first the writes end, or the
NIXL agent that makes them is destroyed (StopWrites). So a rank that gets ABORT_ACK or a failure may use its pages
again.
"""

import math
from collections import Counter, deque

from headrace.core.stats import Counters, Sample, Stats
from headrace.core.types import refusals
from headrace.core.types.errors import CANCELLED, NO_PEER, PEER_GONE, ErrorInfo
from headrace.core.types.kv.geometry import Geometry
from headrace.gateway.sglang_nixl.decode_rank import DecodeRank, RankWrite, fit, why_unfit
from headrace.gateway.sglang_nixl.records import (
    Effect,
    HeldPrompt,
    RoomEnded,
    RoomLimits,
    RoomPhase,
    RoomRecord,
    StopWrites,
    Tell,
    WriteKv,
    WriteRow,
)
from headrace.gateway.sglang_nixl.wire import Abort, Address, Registration, RoomTarget, abort_ack, kv_status
from headrace.peer.commands import (
    CancelLoad,
    Loaded,
    LoadFailed,
    LoadKv,
    LoadResult,
    ReleaseLoad,
    RenewLease,
)

OUTCOMES = ("handed_over", "aborted", "failed")


class RoomTable:
    """All rooms and decode ranks. Appends effects, which the caller applies in order.

    geometry: of the pool, whose page size is the decode engines'. now: seconds of the monotonic clock, in every method.
    """

    def __init__(self, geometry: Geometry, limits: RoomLimits) -> None:
        self.effects: deque[Effect] = deque()
        self._geometry = geometry
        self._limits = limits
        self._rooms: dict[int, RoomRecord] = {}
        self._by_load: dict[str, RoomRecord] = {}  # those that have not ended
        self._ended: dict[int, None] = {}  # numbers of those that have, and of which one side knows nothing yet
        self._early: dict[str, dict[int, RoomRecord]] = {}  # waiting for their request, by the host that opened them
        self._ranks: dict[str, DecodeRank | str] = {}  # by agent; a text: why it is not served
        self._unverified: set[str] = set()  # agents whose engines have not said yet how they are set up
        self._addresses: dict[Address, str] = {}  # agents by their ranks' addresses
        self._serials = 0
        self._counters = Counters()
        for outcome in OUTCOMES:
            self._counters.add("rooms_ended_total", 0, (outcome,))
        self._counters.add("tokens_written_total", 0)

    def __len__(self) -> int:
        """Rooms that have not ended."""
        return len(self._by_load)

    def is_registered(self, agent: str) -> bool:
        """Whether a decode rank with this agent has registered, fit or not."""
        return agent in self._ranks

    def is_rank(self, address: Address) -> bool:
        """Whether a decode rank with this address has registered."""
        return address in self._addresses

    def rank(self, agent: str) -> DecodeRank | None:
        """The decode rank with this agent, if it has registered and fits."""
        known = self._ranks.get(agent)
        return known if isinstance(known, DecodeRank) else None

    def requests(self) -> list[str]:
        """Those that have no answer yet."""
        return [room.request for room in self._by_load.values() if room.request]

    def statistics(self) -> Stats:
        """Rooms that are open, and counters."""
        return Stats((Sample("rooms_open", len(self)), *self._counters.snapshot()))

    def register(self, registration: Registration, now: float, *, verified: bool = True) -> str:
        """A decode rank tells of its memory. Returns why it is not served; "" if it is. verified: False if its rooms
        are to wait for verify()."""
        agent = registration.agent
        if agent in self._ranks:
            known = self._ranks[agent]
            return known if isinstance(known, str) else ""
        replaced = self._addresses.get(registration.address)  # by a process that was started after it
        if replaced is None and len(self._ranks) >= self._limits.ranks:
            replaced = self._oldest_rank()
        if replaced is not None:
            self._forget_rank(replaced, now)
        self._addresses[registration.address] = agent
        try:
            self._ranks[agent] = fit(registration, self._geometry)
        except ValueError as error:
            self._ranks[agent] = str(error)
            return str(error)
        if not verified:
            self._unverified.add(agent)
        return ""

    def verify(self, agent: str, wrong: str, now: float) -> None:
        """An engine has said how it is set up: its rank is served, or, with a reason, is not."""
        if agent not in self._unverified:
            return
        self._unverified.remove(agent)
        if wrong:
            self._ranks[agent] = wrong
        for room in [room for room in self._by_load.values() if agent in room.targets]:
            if wrong:
                self._give_up(room, _unfit(wrong), now)
            elif room.phase is RoomPhase.WAITING:
                self._begin(room, now)

    def expect(self, request: str, number: int, now: float) -> None:
        """A request with this room has come. Answered once by RoomEnded, when the room has ended."""
        room = self._room(number, now)
        if room is None:
            self.effects.append(RoomEnded(request, refusals.ROOMS_OPEN.error(most=self._limits.rooms)))
        elif room.request:
            message = f"bootstrap_room {number} is in use by another request"
            self.effects.append(RoomEnded(request, ErrorInfo(code="room_in_use", message=message, status=409)))
        elif room.phase is RoomPhase.ENDED:
            room.request = request
            self.effects.append(RoomEnded(request, room.error))
            if not room.load:  # an abort came before, and is counted as of a room now
                self._counters.add("rooms_ended_total", labels=("aborted",))
            self._forget_if_known(room)
        else:
            room.request = request
            self._not_early(room)

    def hold(self, request: str, number: int, held: HeldPrompt, now: float) -> None:
        """A prefill server holds the KV for a request. That of a room that has ended is released."""
        room = self._rooms.get(number)
        if room is None or room.request != request or room.phase is not RoomPhase.WAITING or room.held is not None:
            load = self._load_id(number)
            self.effects += (RenewLease(id=load, ticket=held.ticket), CancelLoad(id=load))
            return
        room.held = held
        room.deadline = now + self._limits.bootstrap_s
        self.effects.append(RenewLease(id=room.load, ticket=held.ticket))
        self._begin(room, now)

    def withdraw(self, request: str, number: int, error: ErrorInfo, now: float) -> None:
        """The prefill server has failed a request, or its client is gone."""
        room = self._rooms.get(number)
        if room is not None and room.request == request:
            self._give_up(room, error, now)

    def target(self, target: RoomTarget, now: float) -> None:
        """A decode rank tells where it wants a room's KV."""
        room = self._room(target.room, now, target.address.host)
        if room is None:
            self._refuse(target, f"{self._limits.rooms} rooms are open")
        elif room.phase is RoomPhase.ENDED:
            room.targets[target.agent] = target
            self._refuse(target, room.error.message if room.error is not None else "the room has ended")
            self._forget_if_known(room)
        elif target.agent in room.targets:
            if target != room.targets[target.agent]:  # the engine knows the two by one name: neither can go on
                message = f"bootstrap_room {target.room} is in use by two requests at the decode engine"
                self._give_up(room, _failed("room_in_use", message), now)
        elif room.complete:
            self._refuse(target, "the room is in use by another decode engine")
        else:
            room.targets[target.agent] = target
            rank = self._ranks.get(target.agent, "it has not registered here since this gateway was started")
            if isinstance(rank, str):
                self._give_up(room, _unfit(rank), now)
            else:
                self._begin(room, now)

    def abort(self, abort: Abort, now: float) -> None:
        """A decode rank gives a room up; it is acknowledged as soon as nothing is being written for it."""
        room = self._rooms.get(abort.room)
        if room is None or room.phase is RoomPhase.ENDED:
            self._acknowledge(abort.room, abort.address, abort.generation)
            if room is None:  # its request is still to come, or the room has ended for another reason
                self._remember(RoomRecord(abort.room, "", now + self._limits.forget_s, RoomPhase.ENDED), _aborted())
            return
        addresses = [target.address for target in room.targets.values()]
        if room.complete and abort.address is not None and abort.address not in addresses:
            self._acknowledge(abort.room, abort.address, abort.generation)  # nothing is written to this one
            return
        if abort.address is not None and abort.generation is not None:
            room.acks[abort.address] = abort.generation
        self._give_up(room, _aborted(), now)

    def handle(self, result: LoadResult, now: float) -> None:
        """A result of the peer thread."""
        room = self._by_load.get(result.id)
        if room is None or room.phase is not RoomPhase.LOADING:
            if isinstance(result, Loaded):
                self.effects.append(ReleaseLoad(id=result.id))  # it came before CancelLoad was taken
            return
        if isinstance(result, LoadFailed):
            room.phase = RoomPhase.WAITING  # there is nothing to cancel
            room.held = None
            self._end(room, _failed(result.code, result.message), now)
        elif isinstance(result, Loaded):
            room.loaded = result
            room.phase, room.deadline = RoomPhase.WRITING, now + self._limits.write_s
            if ranks := tuple(one for one in self._writes(room) if one.target.pages):
                first_page = result.at // self._geometry.page_size
                self.effects.append(WriteKv(load=room.load, first_page=first_page, tokens=result.count, ranks=ranks))
            else:  # the engine has all of it
                self._land(room, now)

    def written(self, load: str, lost: str, now: float) -> None:
        """The writes of a WriteKv or WriteRow have ended. lost: why some of them cannot; "" if all are done."""
        room = self._by_load.get(load)
        if room is None or not room.writing:
            return
        if lost:
            self.effects.append(StopWrites(tuple(room.targets)))
            self._end(room, room.error or _failed(PEER_GONE, f"writing to the decode engine: {lost}"), now)
        elif room.error is not None:
            self._end(room, room.error, now)
        elif room.phase is RoomPhase.WRITING:
            self._land(room, now)
        else:
            self._end(room, None, now)

    def tick(self, now: float) -> None:
        """End what has passed its deadline."""
        for room in [room for room in self._rooms.values() if room.deadline <= now]:
            if room.phase is RoomPhase.ENDED:
                self._forget(room)
            elif room.writing:
                self.effects.append(StopWrites(tuple(room.targets)))
                message = f"writing to the decode engine has not ended within {self._limits.write_s:g} s"
                self._end(room, room.error or _failed("timeout", message, 504), now)
            elif room.phase is RoomPhase.WAITING:
                message = f"{self._missing(room)} within {self._limits.bootstrap_s:g} s"
                self._end(room, _failed(NO_PEER, message, 504), now)

    def next_deadline(self) -> float | None:
        """When to call tick() next; None for no deadline."""
        soonest = min((room.deadline for room in self._rooms.values()), default=math.inf)
        return None if soonest == math.inf else soonest

    def _room(self, number: int, now: float, host: str = "") -> RoomRecord | None:
        """The room of this number, made if necessary. host: of the decode engine that asks for it, "" for a request.
        None when there are too many. Those that wait for their request give way: the oldest of the host with the most,
        so that one that opens rooms without end has them from itself."""
        room = self._rooms.get(number)
        if room is not None:
            return room
        if len(self._by_load) >= self._limits.rooms:
            if not self._early:
                return None
            most = max(self._early, key=lambda one: len(self._early[one]) + (one == host))
            oldest = next(iter(self._early[most].values()))
            self._end(oldest, refusals.ROOM_GAVE_WAY.error(most=self._limits.rooms), now)
        room = RoomRecord(number, self._load_id(number), now + self._limits.bootstrap_s, host=host)
        self._rooms[number] = self._by_load[room.load] = room
        if host:
            self._early.setdefault(host, {})[number] = room
        return room

    def _not_early(self, room: RoomRecord) -> None:
        """Its request has come, or it has ended."""
        rooms = self._early.get(room.host, {})
        if rooms.pop(room.number, None) is not None and not rooms:
            del self._early[room.host]

    def _remember(self, room: RoomRecord, error: ErrorInfo) -> None:
        """Keep how a room has ended for the side that has not come yet. It takes no open room's place; of too many the
        oldest is forgotten."""
        room.error = error
        self._rooms[room.number] = room
        self._ended[room.number] = None
        if len(self._ended) > self._limits.rooms:
            self._forget(self._rooms[next(iter(self._ended))])

    def _forget(self, room: RoomRecord) -> None:
        del self._rooms[room.number]
        self._ended.pop(room.number, None)

    def _load_id(self, number: int) -> str:
        self._serials += 1
        return f"room:{number}/{self._serials}"

    def _missing(self, room: RoomRecord) -> str:
        """What has not come for a room."""
        if not room.request:
            return f"no request has come for bootstrap_room {room.number}"
        if not self._unverified.isdisjoint(room.targets):
            return f"the decode engine of bootstrap_room {room.number} has not answered GET /server_info"
        return f"no decode engine has asked for bootstrap_room {room.number}"

    def _begin(self, room: RoomRecord, now: float) -> None:
        """Load the KV, if all of both sides is there."""
        held = room.held
        if held is None or not room.complete or not self._unverified.isdisjoint(room.targets):
            return
        writes = self._writes(room)
        if wrong := why_unfit(writes, held.tokens, self._geometry.page_size):
            self._end(room, _failed("bad_reservation", wrong), now)
            return
        start = min(writes[0].target.prefix, held.tokens - 1)  # the first token comes with the last one at least
        room.phase, room.deadline = RoomPhase.LOADING, math.inf  # the peer thread has timeouts of its own
        self.effects.append(
            LoadKv(id=room.load, ticket=held.ticket, start=start, tokens=held.tokens, prompt_hash=held.prompt_hash)
        )

    def _writes(self, room: RoomRecord) -> tuple[RankWrite, ...]:
        found = ((self._ranks.get(agent), target) for agent, target in room.targets.items() if not target.dummy)
        return tuple(RankWrite(rank, target) for rank, target in found if isinstance(rank, DecodeRank))

    def _land(self, room: RoomRecord, now: float) -> None:
        """Write the metadata row, now that all KV is there."""
        assert room.loaded is not None, "only what was loaded is written"
        room.phase, room.deadline = RoomPhase.LANDING, now + self._limits.write_s
        first_page = room.loaded.at // self._geometry.page_size
        self.effects.append(
            WriteRow(
                load=room.load,
                room=room.number,
                first_page=first_page,
                first=room.loaded.first,
                ranks=self._writes(room),
            )
        )

    def _give_up(self, room: RoomRecord, error: ErrorInfo, now: float) -> None:
        """End a room at once, or as soon as its writes have ended."""
        if room.writing:
            room.error = room.error or error
        elif room.phase is not RoomPhase.ENDED:
            self._end(room, error, now)

    def _end(self, room: RoomRecord, error: ErrorInfo | None, now: float) -> None:
        """End a room of which nothing is being written any more: the only place that gives its KV back."""
        if room.writing:
            self.effects.append(ReleaseLoad(id=room.load))
        elif room.held is not None:
            self.effects.append(CancelLoad(id=room.load))
        reason = None if error is None else error.message
        for address in dict.fromkeys(target.address for target in room.targets.values() if not target.dummy):
            if address not in room.acks:
                self.effects.append(Tell(address, tuple(kv_status(room.number, reason))))
        for address, generation in room.acks.items():
            self._acknowledge(room.number, address, generation)
        if room.request:
            self.effects.append(RoomEnded(room.request, error))
        outcome = "handed_over" if error is None else "aborted" if error.code == CANCELLED else "failed"
        self._counters.add("rooms_ended_total", labels=(outcome,))
        if error is None and room.loaded is not None:
            self._counters.add("tokens_written_total", room.loaded.count)
        del self._by_load[room.load]
        self._not_early(room)
        room.phase, room.deadline = RoomPhase.ENDED, now + self._limits.forget_s
        room.held = room.loaded = None
        if error is None:
            self._forget(room)
        else:
            self._remember(room, error)
            self._forget_if_known(room)

    def _forget_if_known(self, room: RoomRecord) -> None:
        """Remove a room that has ended once both sides have come."""
        if room.request and room.complete:
            self._forget(room)

    def _refuse(self, target: RoomTarget, reason: str) -> None:
        self.effects.append(Tell(target.address, tuple(kv_status(target.room, reason))))

    def _acknowledge(self, number: int, address: Address | None, generation: int | None) -> None:
        if address is not None and generation is not None:
            self.effects.append(Tell(address, tuple(abort_ack(number, generation))))

    def _oldest_rank(self) -> str:
        """The one that gives way to another: the oldest of the host with the most."""
        (host, _), *_ = Counter(address.host for address in self._addresses).most_common(1)
        return next(agent for address, agent in self._addresses.items() if address.host == host)

    def _forget_rank(self, agent: str, now: float) -> None:
        """Forget a decode rank that was replaced: its process is gone."""
        for room in [room for room in self._by_load.values() if agent in room.targets]:
            self._give_up(room, _failed(PEER_GONE, "the decode engine was started again"), now)
        known = self._ranks.pop(agent)
        self._unverified.discard(agent)
        if isinstance(known, DecodeRank):
            self.effects.append(StopWrites((agent,)))
        for address in [address for address, name in self._addresses.items() if name == agent]:
            del self._addresses[address]


def _failed(code: str, message: str, status: int = 502) -> ErrorInfo:
    return ErrorInfo(code=code, message=message, status=504 if code == "timeout" else status)


def _unfit(why: str) -> ErrorInfo:
    return _failed("unfit", f"the decode engine cannot be served: {why}")


def _aborted() -> ErrorInfo:
    return ErrorInfo(code=CANCELLED, message="the decode engine has aborted the request", status=499)
