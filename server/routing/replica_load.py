"""The work that waits at one replica: what it last reported, and what this router has sent to it since.

A prompt of another router is seen with the next report; one of this router at once:

    report asked for ─► report:  work that waits there, with all prompts that were posted before it was asked for
    chosen ─► posted ─► done     counted here until a report has it, or it is done

Work is counted in tokens and squared tokens, which are priced with the costs that are known when they are asked for.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from headrace.core.types.requests.remote_prefill import RemoteForecast
from headrace.server.routing.handoff_cost import HandoffCost

REPORT_S = 10.0  # older reports do not count


class LoadReport(msgspec.Struct, frozen=True):
    """What a replica says of its load."""

    queued_seconds: float
    """Predicted seconds of computing what is admitted and not yet planned."""

    cost: tuple[float, float]
    """Seconds per squared token and per token of a prompt."""

    trusted: bool = False
    """Both are seconds, and were right of late. Until a plan was computed there, they compare with each other alone."""

    waits: Sequence[tuple[int, float, float]] = ()
    """Prompt tokens, ascending; predicted seconds that a prompt of as many, none cached, would wait there; and how many
    requests it would delay. A policy may have short prompts go before long ones."""

    def wait(self, tokens: int) -> tuple[float, float]:
        """Predicted seconds that a prompt of so many uncached tokens would wait, and how many requests it would delay:
        between those of the two nearest lengths."""
        if not self.waits:
            return self.queued_seconds, 0.0
        for (short, *less), (long, *more) in pairwise(self.waits):
            if tokens <= long:
                part = max(0, tokens - short) / (long - short)
                return less[0] + (more[0] - less[0]) * part, less[1] + (more[1] - less[1]) * part
        return self.waits[-1][1:]


class Work(NamedTuple):
    """Computing positions [start, end) of a prompt."""

    squares: int
    """end² - start²."""

    tokens: int

    def seconds(self, cost: tuple[float, float]) -> float:
        """Seconds at so many per squared token and per token."""
        return cost[0] * self.squares + cost[1] * self.tokens


def work(start: int, end: int) -> Work:
    """The work of positions [start, end)."""
    return Work(end * end - start * start, end - start)


class Sent(msgspec.Struct, eq=False):
    """A prompt that this router has sent."""

    replica: int
    work: Work
    prompt_tokens: int
    pages: Sequence[int] = ()
    """Names of its pages that the replica was not known to hold."""

    posted_at: float | None = None
    """None until it was sent: pages are reserved for it before."""


class ReplicaLoad:
    """What is known of the load of one replica."""

    def __init__(self) -> None:
        self.report: LoadReport | None = None
        self._reported_at = 0.0
        self._open: dict[int, Sent] = {}  # by identity; those that are not done
        self._unreported: dict[int, Sent] = {}  # those of them that the report cannot have
        self.handoffs = HandoffCost()
        self.prompt_tokens = 0
        """Of the prompts that are not done."""

    def reported(self, report: LoadReport, asked_at: float, now: float) -> None:
        """A report has come that was asked for at this time."""
        self.report, self._reported_at = report, now
        self._unreported = {
            key: sent for key, sent in self._open.items() if sent.posted_at is None or sent.posted_at >= asked_at
        }

    def forget(self) -> None:
        """The replica is another one: nothing is reported of it."""
        self.report = None

    def sent(self, sent: Sent) -> None:
        """A prompt was chosen to be computed there."""
        self._open[id(sent)] = self._unreported[id(sent)] = sent
        self.prompt_tokens += sent.prompt_tokens

    def done(self, sent: Sent) -> None:
        """A prompt is answered, or not waited for any more. No effect the second time."""
        if self._open.pop(id(sent), None) is not None:
            self._unreported.pop(id(sent), None)
            self.prompt_tokens -= sent.prompt_tokens

    def forecast(self, sent: Sent, now: float) -> RemoteForecast | None:
        """What the replica is expected to take for a prompt that was chosen to be computed there; None where it has
        not said what computing costs it. An old report does not count: the queue is then what is known of it here."""
        if self.report is None or not self.report.trusted:
            return None
        cost, work_s = self.report.cost, sent.work.seconds(self.report.cost)
        queued_s = self.queued_s(cost, now) - work_s
        if self._is_old(now):
            delayed = len(self._open) - 1.0
        else:
            wait_s, delayed = self.report.wait(sent.work.tokens)
            left_s = max(0.0, wait_s - (now - self._reported_at))  # it has gone on computing since
            queued_s += left_s - self.report.queued_seconds
            delayed += sum(each.work.tokens > sent.work.tokens for each in self._unreported.values())
        handoff_s = self.handoffs.seconds(sent.work.tokens)
        return RemoteForecast(max(0.0, queued_s), work_s, handoff_s, max(0.0, delayed))

    def queued_s(self, cost: tuple[float, float], now: float) -> float:
        """Predicted seconds of the work that waits there, at this cost."""
        if self.report is None or self._is_old(now):
            return sum(sent.work.seconds(cost) for sent in self._open.values())
        return self.report.queued_seconds + sum(sent.work.seconds(cost) for sent in self._unreported.values())

    def _is_old(self, now: float) -> bool:
        return now - self._reported_at > REPORT_S
