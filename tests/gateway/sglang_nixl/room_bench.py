"""A RoomTable under a virtual clock, with the thread's part and the decode engines played by hand."""

from typing import Any, TypeVar

from headrace.core.types.errors import ErrorInfo
from headrace.core.types.kv.geometry import Geometry, ceil_div
from headrace.core.types.requests.request import FirstToken
from headrace.gateway.sglang_nixl.records import HeldPrompt, RoomEnded, RoomLimits, Tell
from headrace.gateway.sglang_nixl.rooms import RoomTable
from headrace.gateway.sglang_nixl.wire import Abort, Registration, RoomTarget, parse
from headrace.peer.commands import Loaded, TicketRef
from tests.gateway.sglang_nixl import decode_frames
from tests.gateway.sglang_nixl.decode_frames import DIM, HEADS, LAYERS, PAGE, PAGE_BYTES

GEOMETRY = Geometry("float32", LAYERS, HEADS, DIM, PAGE)
LIMITS = RoomLimits(bootstrap_s=300.0, write_s=30.0, forget_s=60.0, rooms=20, ranks=4)
FIRST = FirstToken(42, prompt_tokens=40, cached_tokens=0)
TOKENS = 40
PAGES = [4, 5, 9]
T = TypeVar("T")


def held(ticket: str = "t", tokens: int = TOKENS) -> HeldPrompt:
    return HeldPrompt(ticket=TicketRef(name=ticket, host="127.0.0.1", port=7000), tokens=tokens, prompt_hash="hash")


class Bench:
    """Takes steps of all sides. Each returns the effects that it had."""

    def __init__(self, limits: RoomLimits = LIMITS) -> None:
        self.now, self.table = 0.0, RoomTable(GEOMETRY, limits)

    def effects(self) -> list[Any]:
        found = list(self.table.effects)
        self.table.effects.clear()
        return found

    def register(self, verified: bool = True, **changes: Any) -> str:
        if (ranks := changes.get("tp_size", 1)) > 1:
            changes.setdefault("page_bytes", PAGE_BYTES // ranks)
        message = parse(decode_frames.registration(**changes))
        assert isinstance(message, Registration)
        return self.table.register(message, self.now, verified=verified)

    def verify(self, agent: str = "agent-1", wrong: str = "") -> list[Any]:
        self.table.verify(agent, wrong, self.now)
        return self.effects()

    def expect(self, room: int = 7, request: str = "r") -> list[Any]:
        self.table.expect(request, room, self.now)
        return self.effects()

    def hold(self, room: int = 7, request: str = "r", tokens: int = TOKENS) -> list[Any]:
        self.table.hold(request, room, held(f"ticket-{room}", tokens), self.now)
        return self.effects()

    def withdraw(self, room: int = 7, request: str = "r", code: str = "prompt_too_long") -> list[Any]:
        self.table.withdraw(request, room, ErrorInfo(code=code, message="refused", status=400), self.now)
        return self.effects()

    def target(self, room: int = 7, tokens: int = TOKENS, **changes: Any) -> list[Any]:
        prefix = changes.get("prefix", 0)
        pages = changes.pop("pages", [2 * n for n in range(ceil_div(tokens, PAGE) - prefix // PAGE)])
        message = parse(decode_frames.room(room, pages, **changes))
        assert isinstance(message, RoomTarget)
        self.table.target(message, self.now)
        return self.effects()

    def abort(self, room: int = 7, **changes: Any) -> list[Any]:
        message = parse(decode_frames.abort(room, **changes))
        assert isinstance(message, Abort)
        self.table.abort(message, self.now)
        return self.effects()

    def loaded(self, load: str, start: int = 0, tokens: int = TOKENS, page: int = 2) -> list[Any]:
        at, count = page * PAGE + start % PAGE, tokens - start
        self.table.handle(Loaded(id=load, at=at, start=start, count=count, first=FIRST, seconds=0.1), self.now)
        return self.effects()

    def written(self, load: str, lost: str = "") -> list[Any]:
        self.table.written(load, lost, self.now)
        return self.effects()

    def wait(self, seconds: float) -> list[Any]:
        self.now += seconds
        self.table.tick(self.now)
        return self.effects()


def only(kind: type[T], effects: list[Any]) -> T:
    [found] = [effect for effect in effects if isinstance(effect, kind)]
    return found


def told(effects: list[Any]) -> list[tuple[int, list[bytes]]]:
    """Messages to decode ranks, with their ports."""
    return [(effect.address.port, list(effect.frames)) for effect in effects if isinstance(effect, Tell)]


def ended(effects: list[Any]) -> list[tuple[str, str, int]]:
    """Requests that were answered, with the code and status of the error."""
    answers = [effect for effect in effects if isinstance(effect, RoomEnded)]
    return [(one.request, one.error.code, one.error.status) if one.error else (one.request, "", 200) for one in answers]
