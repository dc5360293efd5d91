"""A forecast: several courses of the next minute, each in a copy of the scheduler as it is now.

scheduler ──┬── copy: a prompt of 64 tokens comes now ──► its time to first token
            ├── copy: one of 256 tokens …                  each length that fits
            ├── copy: nothing but what comes ────────────► what waits, second by second
            └── copy: half of what comes ────────────────► the same with one more server
"""

from collections.abc import Callable
from functools import partial

import msgspec

from headrace.core.types.forecast import HORIZON_S, Forecast, LengthSamples, QueueOutlook
from headrace.scheduler.promises.promises import LENGTHS
from headrace.scheduler.scheduler import Scheduler
from headrace.scheduler.twin.twin import Twin

QUEUE_COPIES = 2
"""Of those that look at the queue, with as many servers and with one more."""

Copied = Callable[[Callable[[], bytes]], bytes]
"""Calls a function in a copy of this process, and returns what it has returned. Raises RuntimeError."""


class _Course(msgspec.Struct, frozen=True):
    """What one copy has found."""

    steps: int
    elapsed_s: float
    tokens: int = 0
    work_s: float = 0.0
    ratio: float | None = None
    queue_s: tuple[float, ...] = ()


def make_forecast(scheduler: Scheduler, now: float, seed: int, steps: int, copied: Copied) -> Forecast:
    """Look ahead from the state of a scheduler, which is not changed. steps: of all copies, about. Raises RuntimeError
    if no copy could be had."""
    lengths = _lengths(scheduler)
    courses: list[Callable[[int], bytes]] = [
        partial(_candidate, scheduler, now, seed * len(LENGTHS) + number, tokens)
        for number, tokens in enumerate(lengths)
    ]
    for number in range(QUEUE_COPIES):
        courses += [partial(_queue, scheduler, now, seed * QUEUE_COPIES + number, share) for share in (1.0, 0.5)]
    found: list[_Course] = []
    for number, course in enumerate(courses):  # steps that one does not need are for the others
        left = max(1, (steps - sum(one.steps for one in found)) // (len(courses) - number))
        found.append(msgspec.msgpack.decode(copied(partial(course, left)), type=_Course))
    candidates, queues = found[: len(lengths)], found[len(lengths) :]
    samples = tuple(LengthSamples(one.tokens, one.work_s, (one.ratio,)) for one in candidates if one.ratio is not None)
    return Forecast(
        samples=samples,
        queue=_outlook(queues[0::2]),
        one_more=_outlook(queues[1::2]),
        horizon_s=min(one.elapsed_s for one in queues),
        steps=sum(one.steps for one in found),
    )


def _lengths(scheduler: Scheduler) -> list[int]:
    """Those of LENGTHS that the model and the pool take."""
    state = scheduler.state
    longest = state.config.max_model_len - 1 if state.config.max_model_len else LENGTHS[-1]
    longest = min(longest, min(replica.cache.total for replica in state.replicas) * state.config.page_size)
    return [tokens for tokens in LENGTHS if tokens <= longest]


def _candidate(scheduler: Scheduler, now: float, seed: int, tokens: int, steps: int) -> bytes:
    """The time to first token of a prompt of so many tokens, beside what sums predict."""
    twin = Twin(scheduler, now, seed)
    twin.start()
    admitted = twin.admit(tokens)
    found = twin.first_token_s(HORIZON_S, steps) if admitted is not None else None
    if admitted is None or found is None:
        return msgspec.msgpack.encode(_Course(twin.steps, twin.elapsed_s))
    work_s, predicted_s = admitted
    ratio = found / predicted_s if predicted_s > 0 else None
    return msgspec.msgpack.encode(_Course(twin.steps, twin.elapsed_s, tokens, work_s, ratio))


def _queue(scheduler: Scheduler, now: float, seed: int, arriving: float, steps: int) -> bytes:
    """What waits over the next minute."""
    twin = Twin(scheduler, now, seed, arriving)
    twin.start()
    found = tuple(twin.queue_seconds(HORIZON_S, steps))
    return msgspec.msgpack.encode(_Course(twin.steps, float(len(found)), queue_s=found))


def _outlook(courses: list[_Course]) -> QueueOutlook | None:
    found = sorted(seconds for course in courses for seconds in course.queue_s)
    if not found:
        return None
    return QueueOutlook(round(found[len(found) // 2], 6), round(found[min(len(found) - 1, len(found) * 99 // 100)], 6))
