"""KV on its way between simulated servers, and what a stage has of it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.core.messages.orders import PrepareReceive, SendChunk
from headrace.core.types.requests.request import FirstToken


@dataclass(slots=True)
class SimulatedChunk:
    """The KV of one SendChunk of one stage, on its way."""

    stage: int
    """The stage that sends it, in its replica."""

    stages: int
    """Stages of that replica of the prefill server."""

    rank: int
    """The rank that sends it."""

    order: SendChunk
    values: list[int]
    """KV of positions [order.start, order.start + len(values))."""

    acked: Callable[[], None]
    """To be called when every receiver has it."""

    receivers: int = 0
    """Stages of the decode server that have not received it."""

    written: bool = False
    """It was written into the peer's pages directly."""


@dataclass(slots=True)
class PendingReceive:
    """KV that a stage was ordered to receive, as far as it has come."""

    order: PrepareReceive
    seen: set[tuple[int, int]] = field(default_factory=set)
    """Chunks that have come, by sending stage and number."""

    totals: dict[int, int] = field(default_factory=dict)
    """Chunks to come from each sending stage whose last chunk has come."""

    first: FirstToken | None = None
