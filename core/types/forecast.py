"""Forecasts of a server's queue: what a copy of its scheduler has found by running ahead in virtual time."""

import msgspec

HORIZON_S = 60.0
"""How far a forecast looks ahead."""


class LengthSamples(msgspec.Struct, frozen=True):
    """Times to first token that prompts of one length would have."""

    tokens: int
    """Of the prompt, none of them cached."""

    work_s: float
    """Predicted seconds of computing it."""

    ratios: tuple[float, ...]
    """Each time, divided by the one that sums predict for it (TtftPredictor)."""


class QueueOutlook(msgspec.Struct, frozen=True):
    """Predicted seconds of computing what is admitted and not planned, over the time that is looked ahead."""

    p50_s: float
    p99_s: float


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """What the copies have found."""

    samples: tuple[LengthSamples, ...]
    queue: QueueOutlook | None
    """None: no copy has come to its end."""

    one_more: QueueOutlook | None
    """The same if one more server like this one took half of what arrives from now on."""

    horizon_s: float
    """Seconds that the shortest of the runs has looked ahead: HORIZON_S, unless that took too many steps."""

    steps: int
    """Of all copies."""

    took_s: float = 0.0
    """CPU seconds."""


class LengthBound(msgspec.Struct, frozen=True):
    """The time to first token that a prompt would be promised now."""

    tokens: int
    """Of the prompt, none of them cached."""

    ttft_s: float


class ForecastReport(msgspec.Struct, frozen=True, kw_only=True):
    """A forecast as the scheduler reports it. Fields are None before the first one."""

    promise: float
    """Share of bounds that are to be kept; 0: none are promised, and nothing is forecast."""

    queue_s: float = 0.0
    """Predicted seconds of computing what is admitted and not planned now."""

    queue: QueueOutlook | None = None
    one_more: QueueOutlook | None = None
    horizon_s: float | None = None
    bounds: tuple[LengthBound, ...] = ()
    """Ascending."""

    age_s: float | None = None
    """Seconds since the state was copied that the forecast is from."""
