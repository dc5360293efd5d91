"""Drives one Scheduler by hand: events in, effects kept, integrity checked after every step."""

from typing import TypeVar

import msgspec

from headrace.core.config import SchedulerConfig
from headrace.core.messages.frontend import Abort, AddPrefill, Submit
from headrace.core.messages.orders import Forward, SendChunk
from headrace.core.messages.peers import PeerJoined, PeerReserved, PrefillUp
from headrace.core.messages.replies import RequestFailed, RequestFinished, Tokens
from headrace.core.messages.stage_events import (
    ChunkAcked,
    PlanDone,
    ReceiveCancelled,
    ReceivePrepared,
    SampledToken,
    SendCancelled,
    StageReady,
)
from headrace.core.stats import Stats
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.packed import pack, unpack
from headrace.core.types.peers.session_terms import PeerTerms, PrefillTerms
from headrace.core.types.requests.draft import NO_DRAFT, DraftTerms
from headrace.core.types.requests.request import SamplingParams
from headrace.core.types.requests.reservation import Reservation
from headrace.core.types.requests.terms import RequestTerms
from headrace.scheduler.scheduler import Effect, Event, Scheduler

E = TypeVar("E")
PAGE = 4


def geometry(page_size: int = PAGE) -> Geometry:
    return Geometry("float32", 1, 1, 1, page_size)


def config(**changes: object) -> SchedulerConfig:
    settings: dict[str, object] = {
        "page_size": PAGE,
        "kv_pages": 64,
        "max_model_len": 128,
        "vocab_size": 1000,
        "chunk_tokens": 16,
        "pipeline_depth": 1,
    }
    return SchedulerConfig(**(settings | changes))  # type: ignore[arg-type]


class Bench:
    """seen: every effect so far. now: moved by hand; deadlines fire in wait()."""

    def __init__(self, up: bool = True, **changes: object) -> None:
        self.config = config(**changes)
        self.scheduler = Scheduler(self.config)
        self.now = 100.0
        self.seen: list[Effect] = []
        if up:
            self.up()

    def up(self) -> None:
        for stage in range(self.config.stages):
            self.do(self.ready(stage))

    def ready(self, stage: int, **changes: object) -> StageReady:
        up = StageReady(
            stage=stage,
            geometry=geometry(self.config.page_size),
            fingerprint="f",
            data_port=1,
            kv_pages=self.config.kv_pages,
            vocab_size=1000,
        )
        return msgspec.structs.replace(up, **changes)

    def do(self, event: Event) -> list[Effect]:
        """Handle an event; do not plan."""
        return self._keep(self.scheduler.handle(event, self.now))

    def plan(self) -> Forward | None:
        """Plan once."""
        effects = self._keep(self.scheduler.plan(self.now))
        forwards = [effect for effect in effects if isinstance(effect, Forward)]
        assert len(forwards) <= 1
        return forwards[0] if forwards else None

    def wait(self, seconds: float) -> list[Effect]:
        """Let time pass, deadline by deadline."""
        end = self.now + seconds
        effects: list[Effect] = []
        while (deadline := self.scheduler.next_deadline()) is not None and deadline <= end:
            self.now = max(self.now, deadline)
            effects += self._keep(self.scheduler.tick(self.now))
        self.now = end
        return effects

    def submit(self, rid: str = "a", tokens: int | list[int] = 10, **fields: object) -> list[Effect]:
        prompt = list(range(tokens)) if isinstance(tokens, int) else tokens
        sampling, terms = (
            kind(**{name: fields.pop(name) for name in list(fields) if name in kind.__struct_fields__})
            for kind in (SamplingParams, RequestTerms)
        )
        return self.do(Submit(rid=rid, prompt=pack(prompt), sampling=sampling, terms=terms, **fields))  # type: ignore[arg-type]

    def abort(self, rid: str = "a", finish: bool = False) -> list[Effect]:
        return self.do(Abort(rid=rid, finish=finish))

    def done(self, forward: Forward, *tokens: int, stage: int | None = None, seconds: float = 0.003) -> list[Effect]:
        """Report a plan computed; tokens for its sampled rows, in order. seconds: so few that the next is not held back
        (batching/planner.py)."""
        rows = [row for row in forward.rows if row.sample is not None]
        assert len(rows) == len(tokens)
        samples = tuple(SampledToken(row.request, token) for row, token in zip(rows, tokens, strict=True))
        last = self.config.stages - 1 if stage is None else stage
        return self.do(PlanDone(stage=last, seq=forward.seq, duration_s=seconds, samples=samples))

    def compute(self, *tokens: int) -> None:
        """Plan and report until nothing is left to plan; the given tokens are sampled in turn."""
        left = list(tokens)
        while (forward := self.plan()) is not None:
            count = sum(row.sample is not None for row in forward.rows)
            self.done(forward, *[left.pop(0) for _ in range(count)])
            if not left and tokens:
                return

    # Peers, as a prefill server sees them.

    def join(self, session: str = "s", page_size: int = PAGE, key: str = "") -> list[Effect]:
        pools = (geometry(page_size),)
        return self.do(
            PeerJoined(name="peer", terms=PeerTerms(session=session, geometries=pools, window_bytes=1 << 20), key=key)
        )

    def reserve(
        self,
        ticket: str = "t",
        tokens: int = 10,
        *,
        session: str = "s",
        generation: int = 1,
        cached: int = 0,
        page_size: int = PAGE,
        wait: bool = True,
        draft: DraftTerms = NO_DRAFT,
    ) -> list[Effect]:
        count = -(-tokens // page_size) - cached // page_size
        return self.do(
            PeerReserved(
                session=session,
                reservation=Reservation(
                    ticket=ticket,
                    generation=generation,
                    prompt_tokens=tokens,
                    cached_tokens=cached,
                    pages=pack(range(500, 500 + count)),
                    row=7,
                    wait=wait,
                    draft=draft,
                ),
            )
        )

    def ack(self, send: SendChunk, stage: int = 0) -> list[Effect]:
        return self.do(ChunkAcked(stage=stage, request=send.request, chunk=send.chunk, bytes=100))

    def quiet(self, request: int, stage: int = 0) -> list[Effect]:
        return self.do(SendCancelled(stage=stage, request=request))

    # Prefill servers, as a decode server sees them.

    def prefill_up(self, session: str = "p1") -> list[Effect]:
        self.do(AddPrefill(name="p", endpoint="tcp://x:1"))
        return self.do(
            PrefillUp(
                name="p",
                terms=PrefillTerms(
                    session=session, endpoints=("tcp://x:2",), geometries=(geometry(),), window_bytes=1 << 20
                ),
            )
        )

    def expecting(self, request: int, stage: int = 0) -> list[Effect]:
        return self.do(ReceivePrepared(stage=stage, request=request))

    def forgotten(self, request: int, stage: int = 0) -> list[Effect]:
        return self.do(ReceiveCancelled(stage=stage, request=request))

    # What was seen.

    def all(self, kind: type[E]) -> list[E]:
        return [effect for effect in self.seen if isinstance(effect, kind)]

    def one(self, kind: type[E]) -> E:
        found = self.all(kind)
        assert len(found) == 1, found
        return found[0]

    def last(self, kind: type[E]) -> E:
        return self.all(kind)[-1]

    def error(self, rid: str = "a") -> ErrorInfo:
        return next(effect.error for effect in self.seen if isinstance(effect, RequestFailed) and effect.rid == rid)

    def finished(self, rid: str = "a") -> RequestFinished:
        return next(effect for effect in self.seen if isinstance(effect, RequestFinished) and effect.rid == rid)

    def tokens(self, rid: str = "a") -> list[int]:
        return [token for effect in self.all(Tokens) if effect.rid == rid for token in effect.tokens]

    def ended(self, rid: str = "a") -> int:
        return sum(isinstance(effect, RequestFinished | RequestFailed) and effect.rid == rid for effect in self.seen)

    def metric(self, name: str, *labels: str) -> float:
        stats: Stats = self.scheduler.statistics(self.now)
        return next((sample.value for sample in stats.samples if (sample.name, sample.labels) == (name, labels)), 0.0)

    def assert_empty(self) -> None:
        assert self.scheduler.idle
        assert self.metric("kv_pages", "leased") == 0
        assert self.metric("kv_pages", "free") + self.metric("kv_pages", "cached") == self.config.kv_pages
        assert self.metric("metadata_rows_in_use") == 0

    def _keep(self, effects: list[Effect]) -> list[Effect]:
        assert self.scheduler.check_integrity() == []
        self.seen += effects
        return effects


def only(effects: list[Effect], kind: type[E]) -> E:
    found = [effect for effect in effects if isinstance(effect, kind)]
    assert len(found) == 1, effects
    return found[0]


def none(effects: list[Effect], kind: type[E]) -> bool:
    return not any(isinstance(effect, kind) for effect in effects)


def ids(packed: bytes) -> list[int]:
    return list(unpack(packed))
