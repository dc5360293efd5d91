"""Whether KV that a decode server offers back is worth taking. Pure.

    saving = seconds of computing what is offered and not cached here          × chance that another turn comes
    cost   = seconds of its transfer
           + seconds of computing as much as it pushes out of the prefix cache × chance that this is needed again

Both chances are shares of what this server has counted (scheduler/kv/turn_chances.py). Nothing that a request uses is
pushed out, and without pages that are free or cached nothing is taken. Servers and the simulator ask judge_return().
"""

from typing import Literal, get_args

import msgspec

from headrace.core.types.kv.kv_tiers import NONE_LOADED, TierTokens

ReturnReason = Literal["taken", "cached", "no_room", "not_worth_it", "busy", "no_session"]
"""Why an offer was taken or not: it is all cached here; no pages; the cost is above the saving; too many come in or the
scheduler does not answer in time; no session of that host is open."""

RETURN_REASONS: tuple[ReturnReason, ...] = get_args(ReturnReason)


MAX_OFFERS = 8
"""Offers that a decode server makes at a time; of further turns none."""

MAX_TAKEN = 8
"""Offers whose KV comes to a prefill server at a time."""

MOVE_S = 10.0
"""For the KV."""


class PoolForecast(msgspec.Struct, frozen=True):
    """What a server has of a conversation, and what room and chances there are."""

    cached: int
    """Leading tokens whose KV is in the pool."""

    free: int
    """Pages of the pool that nothing uses."""

    evictable: int
    """Pages of the pool that only the prefix cache uses."""

    turn_chance: float
    """Chance that another turn follows."""

    again_chance: float
    """Chance that a page is needed after it was evicted."""

    in_tiers: TierTokens = NONE_LOADED
    """Tokens that follow the cached ones and can be loaded from tiers."""

    retainable: int = 0
    """Leading tokens whose KV its tenant may retain."""

    @property
    def held(self) -> int:
        """Leading tokens that the pool and the tiers have."""
        return self.cached + self.in_tiers.total


def judge_return(
    pool: PoolForecast, offered: int, page_size: int, work_s: float | None, transfer_s: float
) -> ReturnReason:
    """Whether to take KV of the first `offered` tokens of a conversation, whole pages, of which all behind pool.cached
    are transferred. work_s: predicted seconds of computing those; None while nothing is predicted: they are taken if
    they push nothing out. transfer_s: of their transfer, 0 while none was measured."""
    needed = -(-(offered - pool.cached) // page_size)
    if needed <= 0:
        return "cached"
    if needed > pool.free + pool.evictable:
        return "no_room"
    pushed = max(0, needed - pool.free)
    if work_s is None:
        return "not_worth_it" if pushed else "taken"
    pushed_s = work_s * pushed / needed
    cost_s = transfer_s + pushed_s * pool.again_chance
    return "taken" if work_s * pool.turn_chance > cost_s else "not_worth_it"
