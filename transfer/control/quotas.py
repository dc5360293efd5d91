"""What one peer may take of a server, beyond the numbers of peers and tickets that are configured. Pure.

The limits are far above what an honest peer needs: they bound what a broken or hostile one costs the others.
"""

from headrace.core.runtime.rate_limit import TokenBucket
from headrace.transfer.protocol.messages import MAX_RENEWALS, Hello

MESSAGES_PER_S = 5000.0
BURST = 10_000.0
RENEWALS = 4  # pings with as many tickets as one may name, in the time between two heartbeats
RESERVED_PAGES = 1 << 22  # 16 MiB of page ids


def renewal_limit(now: float, heartbeat_s: float) -> TokenBucket:
    """Limits the tickets that a peer renews: each costs the scheduler a look-up."""
    tickets = RENEWALS * MAX_RENEWALS
    return TokenBucket(now, tickets / heartbeat_s, 2 * tickets)


def page_limit(hello: Hello) -> int:
    """Pages in all open tickets of a peer together. Twice its pool: it learns of a ticket's end before the control
    endpoint does, and may have given the pages to another one already."""
    return min(2 * hello.kv_pages, RESERVED_PAGES)
