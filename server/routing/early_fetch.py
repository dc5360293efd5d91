"""When a decode server fetches KV of an open prompt that is still being computed by its prefill server. Pure.

It looks after pauses that grow while nothing changes. Enough at once is fetched, or the rest, when no more is computed.
"""

from typing import NamedTuple

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 1.0
FETCH_S = 10.0  # for the KV
FEW_PAGES = 8  # less than that is fetched only where no more is computed for now


class EarlyFetch(NamedTuple):
    """What to do now."""

    tokens: int
    """Leading ones of the prompt whose KV is to be fetched; 0: none now."""

    ended: bool
    """All has been computed that will be before the prompt changes."""


def early_fetch(sent: int, computed: int, seen: int, here: int, page_size: int) -> EarlyFetch:
    """What to do about an open prompt. sent: tokens of it that the prefill server has been told of. computed: those of
    them whose KV it has. seen: as many as it had when it was looked at last. here: tokens whose KV has come."""
    tokens = computed // page_size * page_size
    new = tokens - here // page_size * page_size
    ended = sent - computed <= page_size
    worth = new >= FEW_PAGES * page_size or (new > 0 and (ended or computed == seen))
    return EarlyFetch(tokens if worth else 0, ended)
