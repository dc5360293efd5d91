"""Lengths of the passes in which pieces of open prompts are computed, so that others wait for little."""

from headrace.core.config import SchedulerConfig

SHORT = 4  # a short pass has so much less tokens than others may have


def open_target(config: SchedulerConfig, tokens: int) -> int:
    """Tokens of a piece that are computed: whole pages, as others are not cached, without the last token, which a
    prompt that finds all of it cached has to compute anyway."""
    size = config.page_size
    keeps = config.prefix_cache and size <= config.chunk_tokens
    return max(0, tokens - 1) // size * size if keeps else 0


class PiecePasses:
    """How many tokens a pass with pieces of open prompts may have.

    Others wait for the end of one that cannot be cancelled, so those are short. What one has computed that is cancelled
    is lost, so the next one is short, too; each that is not cancelled lets the next one be twice as long, up to any.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        size = config.page_size
        self._short = max(size, config.chunk_tokens // SHORT // size * size)
        self._next = self._short
        self._long = max(size, config.chunk_tokens // size * size)

    def tokens(self, *, cancels: bool) -> int:
        """Of the next pass. cancels: it can be cancelled."""
        return self._next if cancels else self._short

    def ended(self, *, cancelled: bool) -> None:
        """A pass was computed, or cancelled."""
        self._next = self._short if cancelled else min(self._long, self._next * 2)
