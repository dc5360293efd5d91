"""What one peer may take of a server, beyond the numbers of peers and tickets that are configured. Pure.

The limits are far above what an honest peer needs: they bound what a broken or hostile one costs the others.
"""

from headrace.transfer.protocol.messages import Hello

MESSAGES_PER_S = 5000.0
BURST = 10_000.0
RESERVED_PAGES = 1 << 22  # 16 MiB of page ids


def page_limit(hello: Hello) -> int:
    """Pages in all open tickets of a peer together. Twice its pool: it learns of a ticket's end before the control
    endpoint does, and may have given the pages to another one already."""
    return min(2 * hello.kv_pages, RESERVED_PAGES)
