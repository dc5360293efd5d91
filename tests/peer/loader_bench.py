"""A KvLoader driven by hand, without sockets or a clock."""

from typing import Any

from headrace.core.messages.orders import PrepareReceive
from headrace.core.messages.peers import AskReserve, ConnectPrefill, DisconnectPrefill, PrefillDown, PrefillUp
from headrace.core.messages.stage_events import ReceivePrepared
from headrace.core.types.kv.backends import ZMQ
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.peers.allow_list import allowed_prefills
from headrace.core.types.peers.session_terms import PrefillTerms
from headrace.core.types.requests.request import FirstToken
from headrace.peer.commands import AnyCommand, AnyResult, LoadKv, TicketRef
from headrace.peer.loader import KvLoader
from headrace.peer.records import PeerLimits

FIRST = FirstToken(token=5, prompt_tokens=10, cached_tokens=0)
CONTROL = "tcp://127.0.0.1:7000"
PAGES = 4


def ticket(name: str = "t", **changes: Any) -> TicketRef:
    return TicketRef(**{"name": name, "host": "127.0.0.1", "port": 7000, **changes})


class Bench:
    """A KvLoader and its time; every step returns the effects that it asked for."""

    def __init__(self, backend: str = ZMQ, page_tokens: int = 64) -> None:
        """backend: of its sessions."""
        rules = allowed_prefills((), ("127.0.0.0/8",))
        self.limits = PeerLimits(
            fingerprint="f", rules=rules, pages=PAGES, page_tokens=page_tokens, connect_timeout_s=10, load_timeout_s=30
        )
        self.backend = backend
        self.loader, self.now, self.sessions = KvLoader(self.limits), 100.0, 0
        self.connected = False

    def do(self, command: AnyCommand) -> list[Any]:
        self.loader.apply(command, self.now)
        return self.asked()

    def hear(self, event: Any) -> list[Any]:
        self.loader.handle(event, self.now)
        return self.asked()

    def wait(self, seconds: float) -> list[Any]:
        self.now += seconds
        self.loader.tick(self.now)
        return self.asked()

    def asked(self) -> list[Any]:
        asked = list(self.loader.effects)
        self.loader.effects.clear()
        for one in asked:
            if isinstance(one, ConnectPrefill | DisconnectPrefill):
                self.connected = isinstance(one, ConnectPrefill)
        return asked

    def answers(self) -> list[AnyResult]:
        answers = list(self.loader.results)
        self.loader.results.clear()
        return answers

    def up(self, name: str = CONTROL) -> list[Any]:
        self.sessions += 1
        geometry = Geometry("float32", 1, 1, 1, 16)
        event = PrefillUp(
            name=name,
            terms=PrefillTerms(
                session=f"s{self.sessions}",
                endpoints=("tcp://x:1",),
                geometries=(geometry,),
                window_bytes=1,
                backend=self.backend,
            ),
        )
        return self.hear(event)

    def down(self, reason: str = "silent", session: str | None = "", unfit: bool = False) -> list[Any]:
        session = f"s{self.sessions}" if session == "" else session
        return self.hear(PrefillDown(name=CONTROL, session=session, reason=reason, unfit=unfit))

    def load(self, name: str = "a", tokens: int = 10, start: int = 0, **changes: Any) -> list[Any]:
        command = LoadKv(id=name, ticket=ticket(name, **changes), start=start, tokens=tokens, prompt_hash="h")
        return self.do(command)

    def reserved(self, name: str = "a", tokens: int = 10, start: int = 0) -> AskReserve:
        """Load a ticket as far as its reservation."""
        [expect] = [one for one in self.load(name, tokens, start) if isinstance(one, PrepareReceive)]
        [ask] = self.hear(ReceivePrepared(stage=0, request=expect.request))
        assert isinstance(ask, AskReserve)
        self.serial = expect.request
        return ask

    def empty(self) -> bool:
        pages = self.loader.staging_pages.free_pages, self.loader.stopping_pages
        return len(self.loader) == 0 and pages == (PAGES, 0)
