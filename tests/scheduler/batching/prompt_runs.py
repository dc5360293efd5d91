"""Prompts through a scheduler under any policy, one plan at a time."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace.core.messages.frontend import Submit
from headrace.core.messages.orders import Forward
from headrace.core.messages.replies import RequestFinished
from headrace.core.messages.stage_events import PlanDone, SampledToken, StageReady
from headrace.core.types.packed import pack
from headrace.core.types.requests.request import DecodeHere, Discard, SamplingParams
from headrace.core.types.requests.terms import RequestTerms
from headrace.scheduler.costs.chunking import Cost
from headrace.scheduler.scheduler import Effect, Scheduler
from tests.scheduler.bench import config, geometry

CHUNK = 64
OVERHEAD: Cost = (0.0, 1e-9, 0.01)  # plans that take 10 ms each


@dataclass(frozen=True)
class Prompt:
    """A prompt that arrives when so many plans are done."""

    at: int
    length: int
    priority: int = 0
    tenant: str = ""
    slo_ttft_s: float | None = None


@dataclass
class Run:
    """Prompts through a scheduler, one plan at a time; a plan takes 10 ms."""

    plans: list[list[tuple[str, int]]] = field(default_factory=list)
    """Tokens of each prompt, by plan."""

    finished: dict[str, int] = field(default_factory=dict)
    """The plan that ended each prompt."""

    able: dict[str, int] = field(default_factory=dict)
    """The plan before which each prompt came."""

    ended: list[set[str]] = field(default_factory=list)
    """Prompts that end in each plan."""


def seconds(cost: Cost, rows: Iterable[tuple[int, int]]) -> float:
    """What a plan with these rows takes, (start, count) each."""
    a, b, c = cost
    return c + sum(a * ((start + count) ** 2 - start**2) + b * count for start, count in rows)


def run(prompts: list[Prompt], limit: int = 3000, generate: int = 0, cost: Cost = OVERHEAD, **settings: object) -> Run:
    """Run all prompts to their end, in at most so many plans. generate: tokens decoded here, 0 for none. cost: of the
    plans, which the scheduler knows."""
    defaults: dict[str, object] = {
        "chunk_tokens": CHUNK,
        "pipeline_depth": 0,
        "kv_pages": 20_000,
        "page_size": 4,
        "max_model_len": 0,
        "prefix_cache": False,
        "max_queued_tokens": 1 << 30,
        "max_running": 1000,
        "refuse_unreachable": False,
    }
    bench = Scheduler(config(**(defaults | settings)))
    pages = int(str((defaults | settings)["kv_pages"]))
    up = StageReady(
        stage=0, geometry=geometry(4), fingerprint="f", data_port=1, kv_pages=pages, vocab_size=1000, cost=cost
    )
    bench.handle(up, 0.0)
    result, serials = Run(), {}
    waiting = sorted(enumerate(prompts), key=lambda item: item[1].at)
    now = 0.0

    def take(effects: list[Effect]) -> Forward | None:
        forward = None
        for effect in effects:
            if isinstance(effect, Forward):
                forward = effect
            elif isinstance(effect, RequestFinished):
                result.finished[effect.rid] = len(result.plans)
        return forward

    for number in range(limit):
        while waiting and waiting[0][1].at <= number:
            index, prompt = waiting.pop(0)
            serials[len(serials) + 1] = rid = f"r{index}"
            result.able[rid] = number
            sampling = SamplingParams(max_tokens=max(1, generate))
            route = DecodeHere() if generate else Discard()
            submit = Submit(
                rid=rid,
                prompt=pack([index % 1000] * prompt.length),
                sampling=sampling,
                route=route,
                terms=RequestTerms(priority=prompt.priority, tenant=prompt.tenant, slo_ttft_s=prompt.slo_ttft_s),
            )
            take(bench.handle(submit, now))
        forward = take(bench.plan(now))
        assert number % 8 or not bench.check_integrity()
        if forward is None:
            if bench.idle and not waiting:
                return result
            assert bench.idle, f"plan {number} is empty, and requests are left"
            result.plans.append([])
            result.ended.append(set())
            continue
        result.plans.append([(serials.get(row.request, str(row.request)), row.count) for row in forward.rows])
        result.ended.append(
            {serials.get(row.request, str(row.request)) for row in forward.rows if row.sample is not None}
        )
        duration = seconds(cost, [(row.start, row.count) for row in forward.rows])
        now += duration
        samples = tuple(SampledToken(row.request, 1) for row in forward.rows if row.sample is not None)
        take(bench.handle(PlanDone(stage=0, seq=forward.seq, duration_s=duration, samples=samples), now))
    raise AssertionError(f"not done within {limit} plans: {len(result.finished)} of {len(prompts)}")
