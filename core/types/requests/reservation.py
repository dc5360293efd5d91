"""What a decode server reserves for the KV of a prompt, and asks its prefill server for."""

import msgspec

from headrace.core.types.requests.draft import NO_DRAFT, DraftTerms


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """Destination pages for one use of a ticket.

    The decode side writes it down once, the control server makes the same of the message that comes, checked against
    the session; inside a process it is carried as it is.
    """

    ticket: str
    generation: int
    """Which use of the ticket this is, counted by the decode side."""

    prompt_tokens: int
    cached_tokens: int
    """Leading tokens of the prompt whose KV the decode side has."""

    pages: bytes
    """Packed page ids in its pool for positions [cached_tokens, prompt_tokens); the first page holds position
    cached_tokens."""

    row: int
    """Its metadata row."""

    slot: int = -1
    """Where the request's states go in its pools; -1 where the model keeps none."""

    wait: bool = True
    """Keep the reservation if the prompt has not come yet; otherwise fail it."""

    prompt_hash: str = ""
    """Of the prompt that it has (headrace.core.types.packed.prompt_hash); "" if it does not say."""

    adapter: str = ""
    """Fingerprint of the LoRA adapter that its prompt goes through; "" for none."""

    draft: DraftTerms = NO_DRAFT
    """Draft data that it asks for."""
