"""The phases of a request.

             BOOTSTRAP ─► WAITING ─► RUNNING ──► INFLIGHT ───► DONE     route SendTo
                          WAITING ─────────────► INFLIGHT ───► DONE     route SendTo, from the prefix cache
                          WAITING ─► RUNNING ──► INFLIGHT ───► DONE     route SendTo, computed before its peer reserves
                          WAITING ─► RUNNING ──► DONE                   route Discard
                          WAITING ─► RUNNING ──► GENERATING ─► DONE     route DecodeHere
                          WAITING ─► FETCHING ─► GENERATING ─► DONE     route FetchFrom
                             ▲────── preempted ──────┘
                          WAITING ─► FETCHING ───────────────► DONE     route FetchFrom, a prefix
any of them ─► FAILED, which is absorbing and keeps the first reason
"""

from collections.abc import Mapping
from enum import Enum

from headrace.core.types.requests.request import Timing


class Phase(Enum):
    """Where a request is on its way."""

    BOOTSTRAP = "bootstrap"  # a peer has to reserve pages before it is computed
    WAITING = "waiting"  # may be started
    RUNNING = "running"  # has pages; the first token is not known
    INFLIGHT = "inflight"  # computed, or cached; held for a peer, or not every stage's bytes are acknowledged
    FETCHING = "fetching"  # KV is coming from a prefill server
    GENERATING = "generating"  # decoding here
    DONE = "done"
    FAILED = "failed"

    __hash__ = object.__hash__  # Enum hashes the name, in Python: slow in the counts by phase


ENDED = (Phase.DONE, Phase.FAILED)


def timing(spent: Mapping[Phase, float]) -> Timing:
    """Seconds by phase for the front end. spent: of the phases that were left."""
    return Timing(
        bootstrap_s=spent.get(Phase.BOOTSTRAP, 0.0),
        queue_s=spent.get(Phase.WAITING, 0.0),
        forward_s=spent.get(Phase.RUNNING, 0.0),
        transfer_s=spent.get(Phase.INFLIGHT, 0.0) + spent.get(Phase.FETCHING, 0.0),
        decode_s=spent.get(Phase.GENERATING, 0.0),
    )
