"""A replay as most tests have it: pages of 16 tokens, a pass when the one before is done, queues without bounds."""

from collections.abc import Sequence
from typing import Any

from headrace.core.config import SchedulerConfig
from headrace.scheduler.costs.chunking import Cost
from headrace.tools.simulate.replay.replay import Replay, ReplayResult, ReplaySettings
from headrace.tools.simulate.replay.routing import ROUTERS
from headrace.tools.simulate.replay.workload import PromptSegment, TraceRequest

PAGE = 16
COST: Cost = (0.0, 0.001, 0.01)  # a millisecond a token, ten a pass


def request(at: float, tokens: int, text: int, generated: int = 0) -> TraceRequest:
    """The first tokens of a text."""
    return TraceRequest(at, (PromptSegment(text, tokens),), tokens, generated)


def config(**changes: Any) -> SchedulerConfig:
    """The scheduler of every server."""
    fields = {"page_size": PAGE, "kv_pages": 4096, "max_model_len": 16384, "chunk_tokens": 512, "pipeline_depth": 0}
    return SchedulerConfig(**(fields | {"max_queued_tokens": 1 << 40} | changes))


def replay(requests: Sequence[TraceRequest], scheduler: SchedulerConfig, **settings: Any) -> ReplayResult:
    """One replay."""
    fields = {"scheduler": scheduler, "costs": (COST,), "router": ROUTERS["score"]}
    return Replay(ReplaySettings(**(fields | settings)), requests).run()
