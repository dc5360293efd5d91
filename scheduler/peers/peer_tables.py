"""The servers that KV goes to and comes from, and the requests at each."""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from headrace.core.incoming import IncomingState, TransferKey
from headrace.core.messages.peers import PeerJoined, PrefillUp
from headrace.core.types.requests.request import FetchFrom
from headrace.scheduler.requests.record import Request

MAX_CHANGES = 32


@dataclass(slots=True, eq=False)
class DecodePeer:
    """A decode peer with an open session."""

    hello: PeerJoined
    """What it said of itself."""

    joined: float
    """Time at which its session began."""

    last_ack: dict[int, float]
    """By stage of ours, the time at which it joined or acknowledged a chunk of that stage, of any request."""

    requests: dict[int, Request] = field(default_factory=dict)
    """Live requests whose pages it has reserved, by arrival number."""

    ending: bool = False
    """The control endpoint has been told to end its session."""

    @property
    def owner(self) -> str:
        """Who its shares are those of: the CURVE key, however many sessions it has; without keys, the session."""
        return f"key {self.hello.key}" if self.hello.key else self.hello.session


@dataclass(slots=True, frozen=True)
class SessionChange:
    """A session of a decode peer has begun or ended."""

    at: float
    peer: str
    up: bool
    text: str
    """How KV moves, or why it has ended."""


class DecodePeerTable:
    """Decode peers by session."""

    def __init__(self) -> None:
        self._peers: dict[str, DecodePeer] = {}
        self._owners: Counter[str] = Counter()  # sessions of each
        self.changes: deque[SessionChange] = deque(maxlen=MAX_CHANGES)
        """The last sessions that have begun or ended, oldest first."""

    @property
    def owners(self) -> int:
        """Number of owners of peers."""
        return len(self._owners)

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[DecodePeer]:
        return iter(self._peers.values())

    def __contains__(self, session: str) -> bool:
        return session in self._peers

    def __getitem__(self, session: str) -> DecodePeer:
        return self._peers[session]

    def get(self, session: str) -> DecodePeer | None:
        """The peer with this session."""
        return self._peers.get(session)

    def join(self, hello: PeerJoined, stages: Iterable[int], now: float) -> DecodePeer:
        """A peer was welcomed. stages: ours, which it acknowledges chunks of."""
        peer = self._peers[hello.session] = DecodePeer(hello, now, dict.fromkeys(stages, now))
        self.changes.append(SessionChange(now, hello.name, True, f"KV moves by {hello.terms.backend}"))
        self._owners[peer.owner] += 1
        return peer

    def leave(self, session: str, reason: str, now: float) -> DecodePeer | None:
        """A session has ended; None when there was none."""
        peer = self._peers.pop(session, None)
        if peer is not None:
            self._owners[peer.owner] -= 1
            self._owners += Counter()  # without those that have none
            self.changes.append(SessionChange(now, peer.hello.name, False, reason))
        return peer

    def attach(self, request: Request) -> None:
        """The peer in request.outgoing has reserved pages for it. Raises KeyError for an unknown session."""
        if request.outgoing is not None:
            self._peers[request.outgoing.session].requests[request.arrival] = request

    def detach(self, request: Request) -> None:
        """The request has ended."""
        if request.outgoing is not None and (peer := self._peers.get(request.outgoing.session)) is not None:
            peer.requests.pop(request.arrival, None)

    def is_host(self, host: str) -> bool:
        """Whether a peer at this address has a session."""
        return bool(host) and any(peer.hello.host == host for peer in self)

    def name_of(self, request: Request) -> str:
        """The name of the peer that has reserved pages for it; "" if none has, or it is gone."""
        outgoing = request.outgoing
        peer = self._peers.get(outgoing.session) if outgoing is not None else None
        return peer.hello.name if peer is not None else ""

    def check(self, requests: Iterable[Request]) -> Iterator[str]:
        """Requests that are listed at the wrong peer, or at none."""
        expected: dict[str, set[int]] = {session: set() for session in self._peers}
        for request in requests:
            if request.outgoing is not None and not request.ended and request.outgoing.session in expected:
                expected[request.outgoing.session].add(request.arrival)
        for session, peer in self._peers.items():
            if peer.requests.keys() != expected[session]:
                yield f"peer {peer.hello.name} has requests {set(peer.requests)}; it should have {expected[session]}"


@dataclass(slots=True, eq=False)
class PrefillPeer:
    """A prefill server that KV is fetched from."""

    name: str
    hellos: dict[int, PrefillUp] = field(default_factory=dict)
    """What it said of itself in the open sessions, by the replica of ours that each is of."""

    requests: dict[int, Request] = field(default_factory=dict)
    """Live requests that are fetched from it, by arrival number."""

    joined: float = 0.0
    """Time at which the newest of these sessions began."""

    def session(self, replica: int) -> str | None:
        """The open session of a replica of ours; None while it is down."""
        hello = self.hellos.get(replica)
        return None if hello is None else hello.session


class PrefillTable:
    """Prefill servers by name, the fetches from them, and ended sessions whose access is being revoked."""

    def __init__(self) -> None:
        self._servers: dict[str, PrefillPeer] = {}
        self._fetches: dict[TransferKey, Request] = {}
        self._revoking: dict[str, set[int]] = {}

    def __iter__(self) -> Iterator[PrefillPeer]:
        return iter(self._servers.values())

    def __getitem__(self, name: str) -> PrefillPeer:
        return self._servers[name]

    def get(self, name: str) -> PrefillPeer | None:
        """The server with this name."""
        return self._servers.get(name)

    def session(self, name: str, replica: int) -> str | None:
        """The open session of a replica of ours with the server of this name; None when it is down or unknown."""
        server = self._servers.get(name)
        return None if server is None else server.session(replica)

    def any_session(self, name: str) -> str | None:
        """An open session with the server of this name, of any replica."""
        server = self._servers.get(name)
        return None if server is None else next((hello.session for hello in server.hellos.values()), None)

    def add(self, name: str) -> None:
        """Know a server by this name."""
        self._servers.setdefault(name, PrefillPeer(name))

    def remove(self, name: str) -> None:
        """Forget a server. Raises KeyError for an unknown name."""
        del self._servers[name]

    def attach(self, request: Request, route: FetchFrom) -> PrefillPeer:
        """The request will be fetched from its server. Raises KeyError for an unknown one."""
        server = self._servers[route.prefill]
        server.requests[request.arrival] = request
        return server

    def detach(self, request: Request) -> None:
        """The request has ended."""
        if isinstance(request.route, FetchFrom) and (server := self._servers.get(request.route.prefill)) is not None:
            server.requests.pop(request.arrival, None)

    def start_fetch(self, request: Request) -> None:
        """request.incoming begins: messages about it are matched from now on."""
        if request.incoming is not None:
            self._fetches[request.incoming.key] = request

    def fetched(self, key: TransferKey) -> Request | None:
        """The request whose KV comes under this key: live, or still holding the pages that it comes into."""
        return self._fetches.get(key)

    @property
    def quarantined_pages(self) -> int:
        """Pages of requests that have ended, which a prefill server may still write into."""
        ended = (request.incoming for request in self._fetches.values() if request.ended)
        return sum(one.pages for one in ended if one is not None and one.remote_writes)

    def end_fetch(self, request: Request) -> None:
        """All KV has arrived, or the request's pages are free. Does nothing if the fetch has ended before."""
        if request.incoming is not None:
            self._fetches.pop(request.incoming.key, None)

    def revoke(self, session: str, stages: Iterable[int]) -> None:
        """A session has ended: each stage has to confirm that its pool cannot be written through it any more."""
        self._revoking[session] = set(stages)

    def revoked(self, session: str, stage: int) -> list[Request] | None:
        """A stage has confirmed. Once all have, returns the requests that were fetched through the session."""
        stages = self._revoking.get(session)
        if stages is None:
            return None
        stages.discard(stage)
        if stages:
            return None
        del self._revoking[session]
        return [
            request
            for request in self._fetches.values()
            if request.incoming is not None and request.incoming.session == session
        ]

    def forget_revocations(self) -> None:
        """The pools that could have been written are gone."""
        self._revoking.clear()

    def check(self, requests: Iterable[Request]) -> Iterator[str]:
        """Fetches that are not listed, and requests that are listed and have ended."""
        expected, live = {}, set()
        for request in requests:
            if request.incoming is not None and request.incoming.state is not IncomingState.RECEIVED:
                expected[request.incoming.key] = request
            if not request.ended:
                live.add(request.arrival)
        if expected != self._fetches:
            yield f"fetches {set(self._fetches)} are listed; there are {set(expected)}"
        for server in self._servers.values():
            if gone := server.requests.keys() - live:
                yield f"prefill server {server.name} has requests {gone}, which have ended"
