"""KV hints: what clients say of the use that the KV of a prompt will have, and what of it was granted."""

import msgspec

MAX_RETAIN_S = 86_400.0
"""The longest time for which pages are retained."""


class Retain(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Keep the KV of a prompt in the pool after the request has ended well."""

    seconds: float
    """Beyond the end of the request."""

    priority: int = 0
    """Of what its tenant retains, a higher one displaces lower ones at the tenant's bound."""
