"""Session table of the control endpoint: decides about peers' messages, sessions and tickets. Pure; time is an
argument.

(connection) ──Hello──► checked ──Welcome──► session ──Reserve──► ticket open ──Failed/Finished/Cancelled──► ended
                          │ Refuse             │ Goodbye, silence, a second Hello of the same instance
                          ▼                    ▼
                        nothing              PeerGone
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from headrace.core.config import TransferConfig
from headrace.core.messages.peers import (
    ControlServerEffect,
    EndPeer,
    PeerCancelled,
    PeerEvent,
    PeerGone,
    PeerJoined,
    PeerReleased,
    PeerRenewed,
    PeerReserved,
)
from headrace.core.runtime.rate_limit import TokenBucket
from headrace.core.stats import Counters
from headrace.core.types.errors import NOT_READY
from headrace.core.types.packed import packed_length
from headrace.core.types.peers.allow_list import canonical
from headrace.core.types.peers.session_terms import PeerTerms
from headrace.transfer.control.backend_health import BackendHealth
from headrace.transfer.control.session import (
    BURST,
    MESSAGES_PER_S,
    UNKNOWN,
    MessageSender,
    OpenTicket,
    PeerSession,
    failed,
    final_reply,
    renewal_limit,
    reservation_refusal,
)
from headrace.transfer.control.session_shares import gives_way
from headrace.transfer.protocol import checksum, matching, messages
from headrace.transfer.protocol.matching import BackendOffer
from headrace.transfer.protocol.messages import (
    Cancel,
    Cancelled,
    ControlMessage,
    Goodbye,
    Hello,
    PeerMessage,
    Ping,
    Pong,
    Refuse,
    Reserve,
    Welcome,
)

RESTARTED = "the stages of this server have started again"
IGNORED_KEPT = 1024  # connections whose messages are dropped


class SessionOutcome(NamedTuple):
    """What follows from a message, a command or the passing of time."""

    replies: list[tuple[bytes, ControlMessage]]
    """Messages to send, each with the route of its connection."""
    events: list[PeerEvent]
    """For the scheduler."""


class SessionTable:
    """The sessions of a control endpoint.

    Args:
        new_session: makes session secrets that cannot be guessed.

    Attributes:
        counters: of refusals, malformed and stale messages.
    """

    def __init__(self, config: TransferConfig, new_session: Callable[[], str]) -> None:
        self._config = config
        self._new_session = new_session
        self._checksums = checksum.kinds(config.checksum)
        self._offer: BackendOffer | None = None
        self._by_route: dict[bytes, PeerSession] = {}
        self._by_session: dict[str, PeerSession] = {}
        self._health = BackendHealth()
        self._ignored: dict[bytes, None] = {}  # connections that sent too much, the oldest first
        self.counters = Counters()

    @property
    def peers(self) -> int:
        """Number of open sessions."""
        return len(self._by_session)

    @property
    def open_tickets(self) -> int:
        """Number of tickets that peers have reserved and that have not ended."""
        return sum(len(peer.tickets) for peer in self._by_session.values())

    def ready(self, offer: BackendOffer) -> None:
        """Let peers join from now on.

        Sessions that were welcomed to another offer (the stages have started again, and listen elsewhere) are over; the
        next tick, which is due at once, ends them.
        """
        self._offer = offer

    def receive(
        self, route: bytes, message: PeerMessage, now: float, sender: MessageSender = UNKNOWN
    ) -> SessionOutcome:
        """Handle a message of the connection with this route. sender: of a Hello."""
        if (cut := self._limit_rate(route, now)) is not None:
            return cut
        if isinstance(message, Hello):
            return self._hello(route, message, sender, now)
        peer = self._by_route.get(route)
        if peer is None:
            return self._refuse(route, messages.NO_SESSION, "this connection has no session: say hello first")
        peer.last_heard = now
        match message:
            case Reserve():
                peer.last_active = now
                return self._reserve(peer, message)
            case Cancel():
                return self._cancel(peer, message)
            case Ping():
                return SessionOutcome([(route, Pong(number=message.number))], self._renewals(peer, message, now))
            case Goodbye():
                return self._drop(peer, f"goodbye: {message.reason}")

    def malformed(self, route: bytes, why: str, now: float) -> SessionOutcome:
        """Handle a message that could not be decoded. The session of its connection, if it has one, goes on."""
        if (cut := self._limit_rate(route, now)) is not None:
            return cut
        self.counters.add("malformed_frames_total", labels=("control",))
        return self._refuse(route, messages.BAD_MESSAGE, why)

    def tell(self, effect: ControlServerEffect, now: float) -> SessionOutcome:
        """Carry out an effect of the scheduler: end a ticket or a session. Does nothing when the session has ended."""
        peer = self._by_session.get(effect.session)
        if peer is None:
            return SessionOutcome([], [])
        if isinstance(effect, EndPeer):
            if effect.backend_failed:
                self._health.failed(peer.hello.name, peer.welcome.backend, now)
            return SessionOutcome([(peer.route, Goodbye(reason=effect.reason))], self._drop(peer, effect.reason).events)
        peer.last_active = now
        peer.end(effect.ticket, effect.generation)
        return SessionOutcome([(peer.route, final_reply(effect))], [])

    def has_session(self, route: bytes) -> bool:
        """Whether the connection has a session."""
        return route in self._by_route

    def lose(self, route: bytes, reason: str) -> SessionOutcome:
        """End the session of a connection that cannot be written to: its peer is gone, or reads too slowly."""
        peer = self._by_route.get(route)
        return self._drop(peer, reason) if peer else SessionOutcome([], [])

    def tick(self, now: float) -> SessionOutcome:
        """End the sessions of peers that were silent for too long, and those of stages that are gone."""
        over = [peer for peer in self._by_session.values() if peer.offer != self._offer]
        ended = _join(self._drop(peer, RESTARTED) for peer in over)
        ended.replies.extend((peer.route, Goodbye(reason=RESTARTED)) for peer in over)
        silent = [peer for peer in self._by_session.values() if self._deadline(peer) <= now]
        reason = f"silent for {self._config.peer_timeout_s:g} s"
        return _join([ended, *(self._drop(peer, reason) for peer in silent)])

    def next_deadline(self) -> float | None:
        """When tick() has to be called next."""
        return min((self._deadline(peer) for peer in self._by_session.values()), default=None)

    def close(self, reason: str) -> SessionOutcome:
        """End every session, with a goodbye."""
        goodbyes: list[tuple[bytes, ControlMessage]] = [(route, Goodbye(reason=reason)) for route in self._by_route]
        return SessionOutcome(
            goodbyes, _join(self._drop(peer, reason) for peer in list(self._by_session.values())).events
        )

    def _deadline(self, peer: PeerSession) -> float:
        return peer.last_heard + self._config.peer_timeout_s if peer.offer == self._offer else 0.0

    def _limit_rate(self, route: bytes, now: float) -> SessionOutcome | None:
        """End the session of a connection that exceeds the message rate, and ignore the connection from then on."""
        if route in self._ignored:
            self.counters.add("stale_messages_total", labels=("cut_off",))
            return SessionOutcome([], [])
        peer = self._by_route.get(route)
        if peer is None or not peer.rate.exceeded(now):
            return None
        self._ignored[route] = None
        if len(self._ignored) > IGNORED_KEPT:
            del self._ignored[next(iter(self._ignored))]
        reason = f"more than {MESSAGES_PER_S:g} messages a second"
        return SessionOutcome([(route, Goodbye(reason=reason))], self._drop(peer, reason).events)

    def _hello(self, route: bytes, hello: Hello, sender: MessageSender, now: float) -> SessionOutcome:
        same_route = self._by_route.get(route)
        if same_route is not None and same_route.hello == hello:  # a repeated hello gets the same answer
            same_route.last_heard = now
            return SessionOutcome([(route, same_route.welcome)], [])
        if self._offer is None:
            return self._refuse(route, NOT_READY, "the stages of this server are still loading")
        refusal = matching.check_hello(self._offer, self._checksums, hello)
        if refusal is not None:
            return self._refuse(route, refusal.code, refusal.message)
        old = [p for p in self._by_session.values() if p.route == route or p.hello.instance == hello.instance]
        displaced = SessionOutcome([], [])
        if len(self._by_session) - len(old) >= self._config.max_peers:
            found = self._make_room(sender, now)
            if found is None:
                limit = self._config.max_peers
                return self._refuse(route, messages.TOO_MANY_PEERS, f"{limit} peers here, which is the limit")
            displaced = found
        dropped = _join([displaced, *(self._drop(peer, "it said hello again") for peer in old)])
        avoided = self._health.avoided(hello.name, self._offer.backends, now)
        choice = matching.choose_backend(self._offer, hello, avoided)
        welcome = self._welcome(self._offer, hello, choice.backend)
        rate = same_route.rate if same_route is not None else TokenBucket(now, MESSAGES_PER_S, BURST)
        renewals = same_route.renewals if same_route is not None else renewal_limit(now, welcome.heartbeat_s)
        peer = PeerSession(
            route,
            hello,
            self._offer,
            welcome,
            sender,
            last_heard=now,
            last_active=now,
            rate=rate,
            renewals=renewals,
        )
        self._by_route[route] = self._by_session[peer.session] = peer
        joined = PeerJoined(
            name=hello.name,
            terms=PeerTerms(
                session=peer.session,
                geometries=hello.geometries,
                window_bytes=welcome.window_bytes,
                backend=choice.backend,
                memory=hello.memory,
            ),
            key=sender.key,
            host=canonical(sender.host),
            backend_reason=choice.reason,
        )
        return SessionOutcome([*dropped.replies, (route, welcome)], [*dropped.events, joined])

    def _make_room(self, sender: MessageSender, now: float) -> SessionOutcome | None:
        """End the session that gives way to a new one; None if there is none."""
        limit, idle_s = self._config.max_peers, self._config.peer_timeout_s
        found = gives_way(self._by_session.values(), sender.owner, limit, now, idle_s)
        if found is None:
            return None
        self.counters.add("sessions_displaced_total", labels=(found.cause,))
        goodbye = (found.session.route, Goodbye(reason=messages.text(found.reason)))
        return SessionOutcome([goodbye], self._drop(found.session, found.reason, displaced=True).events)

    def _welcome(self, offer: BackendOffer, hello: Hello, backend: str) -> Welcome:
        return Welcome(
            protocol=messages.VERSION,
            session=self._new_session(),
            instance=offer.instance,
            fingerprint=offer.fingerprint,
            stages=offer.stages(),
            max_model_len=min(offer.max_model_len, hello.max_model_len),
            max_tickets=self._config.max_tickets_per_peer,
            window_bytes=min(self._config.window_bytes, hello.window_bytes),
            checksum=matching.choose_checksum(self._checksums, hello.checksums),
            backend=backend,
            heartbeat_s=self._config.peer_timeout_s / 3,
            timeout_s=self._config.peer_timeout_s,
            components=matching.components_of(offer.geometries),
            model=offer.model[: messages.MAX_NAME_CHARS],
        )

    def _reserve(self, peer: PeerSession, reserve: Reserve) -> SessionOutcome:
        current = peer.tickets.get(reserve.ticket)
        known = max(current.generation if current else -1, peer.ended.get(reserve.ticket, -1))
        if reserve.generation <= known:
            self.counters.add("stale_messages_total", labels=("reserve",))
            return SessionOutcome([], [])
        error = reservation_refusal(peer, reserve, self._config.max_tickets_per_peer)
        if error is not None:
            self.counters.add("reservations_refused_total", labels=(error.code,))
            peer.end(reserve.ticket, reserve.generation)  # a late copy of the message must not revive it
            return SessionOutcome([(peer.route, failed(reserve.ticket, reserve.generation, error))], [])
        pages = packed_length(reserve.pages)
        peer.tickets[reserve.ticket] = OpenTicket(reserve.generation, pages)
        peer.pages += pages
        return SessionOutcome([], [PeerReserved(session=peer.session, reservation=reserve.reservation)])

    def _renewals(self, peer: PeerSession, ping: Ping, now: float) -> list[PeerEvent]:
        """The tickets that a ping renews; none if the peer renews too many."""
        if not ping.renew:
            return []
        if peer.renewals.exceeded(now, len(ping.renew)):
            self.counters.add("stale_messages_total", labels=("too_many_renewals",))
            return []
        return [PeerRenewed(session=peer.session, tickets=ping.renew)]

    def _cancel(self, peer: PeerSession, cancel: Cancel) -> SessionOutcome:
        current = peer.tickets.get(cancel.ticket)
        if current is None or current.generation != cancel.generation:
            unknown = current is None and cancel.generation > peer.ended.get(cancel.ticket, -1)
            peer.end(cancel.ticket, cancel.generation)
            reply = Cancelled(ticket=cancel.ticket, generation=cancel.generation)
            # A held request may wait for a ticket that was never reserved: its name gives the right to release it.
            released = PeerReleased(session=peer.session, ticket=cancel.ticket, reason=cancel.reason)
            return SessionOutcome([(peer.route, reply)], [released] if unknown else [])
        if current.cancelling:
            self.counters.add("stale_messages_total", labels=("cancel",))
            return SessionOutcome([], [])
        current.cancelling = True
        event = PeerCancelled(
            session=peer.session, ticket=cancel.ticket, generation=cancel.generation, reason=cancel.reason
        )
        return SessionOutcome([], [event])

    def _drop(self, peer: PeerSession, reason: str, *, displaced: bool = False) -> SessionOutcome:
        del self._by_route[peer.route]
        del self._by_session[peer.session]
        self.counters.add("peers_gone_total")
        return SessionOutcome(
            [], [PeerGone(session=peer.session, reason=reason, name=peer.hello.name, displaced=displaced)]
        )

    def _refuse(self, route: bytes, code: str, message: str) -> SessionOutcome:
        self.counters.add("refusals_total", labels=("control", code))
        return SessionOutcome([(route, Refuse(code=code, message=messages.text(message)))], [])


def _join(outcomes: Iterable[SessionOutcome]) -> SessionOutcome:
    joined = SessionOutcome([], [])
    for outcome in outcomes:
        joined.replies.extend(outcome.replies)
        joined.events.extend(outcome.events)
    return joined
