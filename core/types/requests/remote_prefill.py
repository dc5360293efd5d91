"""Conditional disaggregation: whether a prompt is computed by a prefill server or where it is decoded. Pure.

    cost here  = seconds to the first token here  + seconds of computing it here  × requests here that it delays
    cost there = seconds to the first token there + seconds of computing it there × requests there that it delays

Both are seconds that the prompt adds to the waiting of all clients: its own first token, and the next tokens of those
whose forward passes its chunks are in, or whose turn comes later. (Its own wait alone would have short prompts crowd a
prefill server whose policy lets them pass, at the cost of all others there.) The lower cost is chosen. Decode servers,
gateways and the simulator ask decide(); who asks says what the seconds are.

Many decode servers read the same report of a prefill server's queue, which is up to a second old. If all of them
compared by one threshold they would all send, and then none. So each request has a threshold of its own, within
SPREAD of 1: as a queue grows, a growing share of the prompts stays.

What a prefill server takes is known from prompts that it computes. One that was slow once would be avoided for ever:
now and then a prompt that loses little goes there, too.
"""

from hashlib import blake2b
from typing import Literal, get_args

import msgspec

PrefillReason = Literal["cheaper_there", "unknown_cost", "probe", "cheaper_here", "cached_here"]
"""Why a prompt was computed there or here."""

PREFILL_REASONS: tuple[PrefillReason, ...] = get_args(PrefillReason)
SPREAD = 0.2
"""Share by which thresholds differ: predictions of cost models that are not stale may be wrong by as much."""

CACHED_SHARE = 0.5
"""Share of a prompt in the prefix cache from which the cache is named as the reason to compute it here."""


PROBE_S = 30.0
"""Seconds without a prompt of ours after which a prefill server gets one though it is dearer there."""

PROBE_COST_S = 0.2
"""Seconds that such a prompt may lose."""


class RemoteForecast(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a prefill server is expected to take for a prompt. A report of it that is old or misses prompts of others is
    a lower bound, by which a prompt stays only where even that is dearer."""

    queued_s: float
    """Seconds of work that comes before it there."""

    work_s: float
    """Seconds of computing what the prefix cache there does not have."""

    handoff_s: float = 0.0
    """Seconds that the handoff adds: reservation, requests, and the part of the transfer behind the last forward
    pass."""

    delayed: float = 0.0
    """Requests there that it delays."""

    @property
    def cost_s(self) -> float:
        """Seconds that the prompt adds to all waiting."""
        return self.queued_s + self.work_s + self.handoff_s + self.delayed * self.work_s


class LocalForecast(msgspec.Struct, frozen=True):
    """What the same prompt is expected to take where it is decoded."""

    ttft_s: float
    """Seconds to its first token: queue, and computing what is not cached."""

    work_s: float
    """Seconds of computing what the prefix cache here does not have."""

    delayed: float
    """Requests here that it delays: those that decode, and those whose turn comes later."""

    cached_share: float
    """Share of the prompt that the prefix cache has."""

    @property
    def cost_s(self) -> float:
        """Seconds that the prompt adds to all waiting."""
        return self.ttft_s + self.delayed * self.work_s


class PrefillDecision(msgspec.Struct, frozen=True):
    """Where a prompt is computed."""

    remote: bool
    reason: PrefillReason


UNKNOWN = PrefillDecision(True, "unknown_cost")
"""Without two predictions there is nothing to compare: the prefill tier is there to compute prompts."""


def decide(
    here: LocalForecast | None, there: RemoteForecast | None, threshold: float = 1.0, unused_s: float = 0.0
) -> PrefillDecision:
    """Where a prompt is computed. None: no cost model has predicted it. threshold: the cost there, in costs here, from
    which it is computed here; see threshold_of(). unused_s: seconds since the prefill server has got a prompt."""
    if here is None or there is None:
        return UNKNOWN
    if there.cost_s <= threshold * here.cost_s:
        return PrefillDecision(True, "cheaper_there")
    if unused_s >= PROBE_S and there.cost_s <= here.cost_s + PROBE_COST_S:
        return PrefillDecision(True, "probe")
    return PrefillDecision(False, "cached_here" if here.cached_share >= CACHED_SHARE else "cheaper_here")


def threshold_of(rid: str) -> float:
    """The threshold of a request: 1, give or take SPREAD, spread evenly over request ids."""
    digest = blake2b(rid.encode("utf-8", "surrogatepass"), digest_size=4).digest()
    return 1 - SPREAD + 2 * SPREAD * int.from_bytes(digest, "big") / 0xFFFFFFFF
