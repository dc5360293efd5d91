"""The replay of a trace: arrivals in virtual time, the choice of a replica for each, and what became of it."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil

import msgspec

from headrace.core.config import SchedulerConfig
from headrace.core.messages.kv_events import KvEventMessage
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.packed import ITEM_BYTES
from headrace.core.types.requests.kv_hints import Retain
from headrace.core.types.requests.request import Promise
from headrace.core.types.requests.terms import RequestTerms
from headrace.scheduler.costs.chunking import Cost
from headrace.scheduler.twin.forecast import Copied
from headrace.testing.world import World
from headrace.tools.simulate.replay.conversations import AnsweredTurn, answered, conversations, generated
from headrace.tools.simulate.replay.decode_server import DecodeTier, ReplayDecodeServer
from headrace.tools.simulate.replay.growth import growths
from headrace.tools.simulate.replay.hedges import ReplayHedges, slowed
from headrace.tools.simulate.replay.hints import Hints, turns
from headrace.tools.simulate.replay.replica import HostTier, ReplayReplica
from headrace.tools.simulate.replay.routing import ReplayRouter, RouterFactory, ScoreRouter
from headrace.tools.simulate.replay.workload import TraceRequest, packed_tokens, prompt

REFUSED = 429
STUCK = "not_ended"  # code of a request that no event can end any more
NEVER_S = 1e9  # of deadlines: modelled stages and peers do not fail
OPEN_S = 300.0  # for which an open prompt lives and its KV is retained, as --open-seconds of servers says


class ReplaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a trace is replayed on."""

    scheduler: SchedulerConfig
    """Of every replica. Its kv_pages are the pool; its deadlines never pass."""

    costs: tuple[Cost, ...]
    """Of each stage."""

    replicas: int = 1
    siblings: bool = False
    """Each replica fetches prefixes from the others."""

    router: RouterFactory
    time_scale: float = 1.0
    """Every arrival time is multiplied by it."""

    fetch_tokens_s: float | None = None
    """Tokens a second whose KV decode peers fetch from each replica; None: at once."""

    host: HostTier = HostTier()

    retries: int = 0
    """How often a client that is refused with 429 comes again, after the seconds that Retry-After says."""

    objective_s: Callable[[int], float] | None = None
    """Seconds that a prompt of so many tokens asks for as slo_ttft_ms; None: it asks for nothing."""

    decode: DecodeTier | None = None
    """Decode servers, which have prompts computed; None: decode peers take any KV at once."""

    hints: Hints | None = None
    """What clients say of their conversations; None: there are no conversations, and no tenants but the trace's."""

    returns: bool | None = None
    """Decode servers offer the KV of turns back. None: conversations are not looked for, and answers are no part of
    the turns behind them."""

    open: bool | None = None
    """Next turns are open prompts, which grow until they arrive; None: conversations are not looked for."""

    cancels: bool = False
    """Stages of replicas can give up a pass of open prompts, so that those need not be short."""

    hedge: float = 0.0
    """A second replica gets a prompt whose first token takes so many times as long as forecast; 0: never."""

    slow: float = 1.0
    """Passes of the first replica take so many times as long, in spells (hedges.py)."""

    copied: Copied | None = None
    """Makes the copies of the scheduler that forecasts need; None: there are none, and nothing is promised."""

    latency_s: float = 0.0
    """Seconds until a request reaches the scheduler. What an answer takes to its client is little, and counted here."""


class ReplayOutcome(msgspec.Struct, gc=False):
    """What became of one request."""

    tokens: int
    arrival_s: float
    """Virtual seconds since the start."""

    replica: int = 0
    first_token_s: float | None = None
    """Seconds from the first arrival to the first token; None if there was none."""

    cached_tokens: int = 0
    error: str = ""
    """Code of the error that it ended with."""

    attempts: int = 1
    """How often it was submitted."""

    tenant: str = ""
    turn: int = 0
    """Of its conversation, from 1; 0 where that was not looked at."""

    generated: int = 0
    """Tokens that a decode server of the replay has generated."""

    end_s: float | None = None
    """Seconds from the first arrival to the last of these."""

    remote: bool = True
    """A prefill server has computed the prompt."""

    queue_s: float = 0.0
    """Seconds in the queue of the server that it was sent to; 0 for one that ended with an error."""

    promise: Promise | None = None
    """Of its time to first token; None: nothing was promised."""

    @property
    def token_s(self) -> float | None:
        """Seconds per generated token after the first one; None where there is none."""
        if self.end_s is None or self.first_token_s is None or self.generated < 2:
            return None
        return (self.end_s - self.first_token_s) / (self.generated - 1)


class ReplayResult(msgspec.Struct, frozen=True):
    """A finished replay."""

    outcomes: tuple[ReplayOutcome, ...]
    """In the order of the trace."""

    busy_s: tuple[float, ...]
    """Seconds of computing of the busiest stage, by replica."""

    seconds: float
    """Virtual time from the first arrival to the last first token."""

    plans: int
    """Forward passes of all replicas."""

    hedges: int = 0
    """Second replicas that were started."""

    offers: dict[str, int] = {}
    """KV that decode servers have offered back: how much was taken and has come, and why the rest has not."""

    decode_busy_s: tuple[float, ...] = ()
    """As busy_s, of the decode servers."""


class Replay:
    """One run of a trace through Schedulers. Deterministic: equal settings and requests give equal results."""

    def __init__(
        self,
        settings: ReplaySettings,
        requests: Sequence[TraceRequest],
        progress: Callable[[int], None] = lambda _ended: None,
    ) -> None:
        """requests: by arrival. progress: called with the number of requests that have ended."""
        self._settings = settings
        self._requests = requests
        self._progress = progress
        self._world = World(0)
        self._outcomes: list[ReplayOutcome] = []
        self._turns = turns(requests, settings.hints, settings.time_scale) if settings.hints is not None else []
        self._answered: list[AnsweredTurn] = answered(requests) if settings.returns is not None else []
        looked_for = settings.open, settings.hints, settings.returns
        self._turn_numbers = (
            [seen.turn for seen, _ in conversations(requests)] if looked_for != (None, None, None) else []
        )
        self._opened: dict[int, int] = {}  # requests that have an open prompt, and the server that has it
        self._left = len(requests)
        self._last_token_at = 0.0
        followed = settings.replicas > 1 or settings.decode is not None
        scheduler = self._scheduler = msgspec.structs.replace(
            settings.scheduler,
            kv_events=followed,
            bootstrap_timeout_s=NEVER_S,
            transfer_timeout_s=NEVER_S,
            stage_timeout_s=NEVER_S,
        )
        self._router: ReplayRouter | None = None
        self._hedges: ReplayHedges | None = None
        self._decodes: list[ReplayDecodeServer] = []
        self._replicas = [
            ReplayReplica(
                self._world,
                f"replica-{number}",
                scheduler,
                settings.costs,
                settings.fetch_tokens_s,
                settings.host,
                self._first_token,
                self._ended,
                partial(self._cached, number),
                cancels=settings.cancels,
                slowed=slowed(self._world, 1.0 if number else settings.slow),
                copied=settings.copied,
                promise=self._promise,
            )
            for number in range(settings.replicas)
        ]
        named = {f"replica-{number}": replica for number, replica in enumerate(self._replicas)}
        for name, replica in named.items() if settings.siblings else ():
            replica.connect({other: one for other, one in named.items() if other != name})
        if settings.replicas > 1 and settings.decode is None:
            self._router = settings.router(self._replicas, scheduler.page_size)
            if settings.hedge and isinstance(self._router, ScoreRouter):
                self._hedges = ReplayHedges(self._world, self._router, self._replicas, settings.hedge)
        if settings.decode is not None:
            tier = msgspec.structs.replace(
                settings.decode,
                fetch_tokens_s=settings.fetch_tokens_s,
                returns=bool(settings.returns),
                open=bool(settings.open),
            )
            self._decodes = [self._decode_server(number, tier) for number in range(tier.servers)]

    def _decode_server(self, number: int, tier: DecodeTier) -> ReplayDecodeServer:
        config, replicas = self._scheduler, self._replicas
        return ReplayDecodeServer(self._world, number, config, tier, replicas, self._token, self._served)

    def run(self) -> ReplayResult:
        """Run until every request has ended."""
        self._await_arrival(0)
        self._await_growth()
        while self._left and self._world.step():
            pass
        for outcome in self._outcomes:
            if outcome.first_token_s is None and not outcome.error:
                outcome.error = STUCK
        began = self._outcomes[0].arrival_s if self._outcomes else 0.0
        return ReplayResult(
            tuple(self._outcomes),
            tuple(max(replica.pipeline.busy_s) for replica in self._replicas),
            max(0.0, self._last_token_at - began),
            sum(replica.pipeline.plans for replica in self._replicas),
            0 if self._hedges is None else self._hedges.started,
            dict(sum((replica.returns.results for replica in self._replicas), Counter())),
            tuple(max(server.pipeline.busy_s) for server in self._decodes),
        )

    def _await_arrival(self, number: int) -> None:
        if number < len(self._requests):
            at = self._requests[number].arrival_s * self._settings.time_scale
            self._world.at(at, lambda: self._arrive(number))

    def _arrive(self, number: int) -> None:
        request = self._requests[number]
        self._await_arrival(number + 1)
        outcome = ReplayOutcome(request.tokens, self._world.now, tenant=self._tenant(number))
        if self._turn_numbers:
            outcome.turn = self._turn_numbers[number]
        self._outcomes.append(outcome)
        self._send(number)
        if request.cancel_s is not None:
            self._world.at(self._world.now + request.cancel_s, lambda: self._cancel(number))

    def _await_growth(self) -> None:
        """Next turns are opened, and grow."""
        if self._settings.open:
            prompts = [turn.segments for turn in self._answered] or [request.segments for request in self._requests]
            for number, steps in growths(self._requests, prompts).items():
                for step in steps:
                    at = step.at_s * self._settings.time_scale
                    self._world.at(at, partial(self._grow, number, step.tokens))

    def _grow(self, number: int, tokens: int) -> None:
        """The client of a request to come opens its prompt, or appends to it."""
        rid, prompt = str(number), self._text(number)[: tokens * ITEM_BYTES]
        terms = msgspec.structs.replace(self._terms(number), slo_ttft_s=None, retain=Retain.of_open_prompt(OPEN_S))
        server = self._opened.get(number)
        if server is None:
            server = self._opened[number] = self._choose_decode() if self._decodes else self._choose(rid, prompt, terms)
            if self._router is not None:
                self._router.answered(rid)
        if self._decodes:
            self._decodes[server].change(rid, prompt, terms)
        else:
            replica = self._replicas[server]
            self._later(lambda: replica.open_prompts.change(rid, prompt, terms))

    def _send(self, number: int) -> None:
        """The client of a request sends it, for the first time or again."""
        rid, text, terms, outcome = str(number), self._text(number), self._terms(number), self._outcomes[number]
        opened = self._opened.get(number)
        if self._decodes:
            request, chosen = self._requests[number], self._choose_decode() if opened is None else opened
            self._decodes[chosen].submit(rid, text, request.tokens, generated(request), terms)
            return
        outcome.replica = self._choose(rid, text, terms, opened)
        replica = self._replicas[outcome.replica]
        if self._hedges is not None:
            self._hedges.sent(rid, outcome.replica, text, terms)
        self._later(lambda: replica.submit(rid, text, terms, outcome.attempts))

    def _cancel(self, number: int) -> None:
        """The client of a request gives it up, if it has not ended."""
        rid, chosen = str(number), self._outcomes[number].replica
        if self._decodes:
            for server in self._decodes:
                server.cancel(rid)
        else:
            running = {rid: chosen} if self._hedges is None else self._hedges.running(rid, chosen)
            for name, replica in running.items():
                self._later(partial(self._replicas[replica].cancel, name))

    def _choose(self, rid: str, prompt: bytes, terms: RequestTerms, opened: int | None = None) -> int:
        """The server of a request; the one that has its open prompt, if one has."""
        if self._router is None:
            return 0
        return self._router.choose(rid, prompt, self._world.now, terms.prefix_salt, opened)

    def _choose_decode(self) -> int:
        """The decode server with the fewest open requests; of equal ones the first."""
        return min(range(len(self._decodes)), key=lambda number: self._decodes[number].open_requests)

    def _later(self, action: Callable[[], None]) -> None:
        """What a client sends reaches the scheduler."""
        if self._settings.latency_s:
            self._world.at(self._world.now + self._settings.latency_s, action)
        else:
            action()

    def _text(self, number: int) -> bytes:
        """Packed tokens of a prompt, and of its answer where conversations have them."""
        return packed_tokens(self._answered[number].segments) if self._answered else prompt(self._requests[number])

    def _tenant(self, number: int) -> str:
        return self._turns[number].tenant if self._turns else self._requests[number].tenant

    def _terms(self, number: int) -> RequestTerms:
        objective_s, tenant = self._settings.objective_s, self._tenant(number)
        request = self._requests[number]
        slo = request.slo_ttft_s if objective_s is None else objective_s(request.tokens)
        if not self._turns:
            return RequestTerms(tenant=tenant, slo_ttft_s=slo, priority=request.priority)
        turn = self._turns[number]  # tenants of servers have salts of their own
        return RequestTerms(tenant=tenant, slo_ttft_s=slo, cache_salt=tenant, retain=turn.retain, session=turn.session)

    def _token(self, rid: str) -> None:
        """A decode server has a token of a request."""
        outcome = self._outcomes[int(rid)]
        outcome.generated += 1
        outcome.end_s = self._last_token_at = self._world.now
        outcome.end_s -= outcome.arrival_s
        if outcome.first_token_s is None:
            outcome.first_token_s = outcome.end_s

    def _promise(self, rid: str, promise: Promise) -> None:
        self._outcomes[int(rid)].promise = promise

    def _served(self, rid: str, cached_tokens: int, queue_s: float, remote: bool, error: ErrorInfo | None) -> None:
        """A request has ended at its decode server."""
        self._outcomes[int(rid)].remote = remote
        self._ended(rid, cached_tokens, queue_s, error)

    def _cached(self, replica: int, event: KvEventMessage) -> None:
        for server in self._decodes:
            server.observe(replica, event)
        if self._router is not None:
            self._router.observe(replica, event)

    def _first_token(self, rid: str) -> None:
        """A server without decode servers in front of it has the first token of a request."""
        if self._decodes:
            return
        if self._router is not None:
            self._router.answered(rid)
        if self._hedges is not None:
            if (won := self._hedges.first_token(rid)) is None:
                return
            rid = won
        outcome = self._outcomes[int(rid)]
        if outcome.first_token_s is None:
            self._last_token_at = self._world.now
            outcome.first_token_s = self._world.now - outcome.arrival_s

    def _ended(self, rid: str, cached_tokens: int, queue_s: float, error: ErrorInfo | None) -> None:
        if self._router is not None:
            self._router.answered(rid)
        if self._hedges is not None:
            if (left := self._hedges.ended(rid, error)) is None:
                return
            rid = left
        outcome = self._outcomes[int(rid)]
        retry_s = error.retry_after_s if error is not None and error.status == REFUSED else None
        if retry_s is not None and outcome.attempts <= self._settings.retries:
            outcome.attempts += 1
            wait_s = max(1, ceil(retry_s))  # as HTTP has it
            self._world.at(self._world.now + wait_s, lambda: self._send(int(rid)))
            return
        outcome.cached_tokens, outcome.queue_s = cached_tokens, queue_s
        outcome.error = "" if error is None else error.code
        self._left -= 1
        self._progress(len(self._requests) - self._left)
