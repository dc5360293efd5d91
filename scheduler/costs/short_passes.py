"""Lengths of the passes in which pieces of open prompts are computed: short, so that others wait for little."""

from headrace.core.config import SchedulerConfig

SHORT = 4  # a pass of pieces has so much less tokens than others may have


def open_target(config: SchedulerConfig, tokens: int) -> int:
    """Tokens of a piece that are computed: whole pages, as others are not cached, without the last token, which a
    prompt that finds all of it cached has to compute anyway."""
    size = config.page_size
    keeps = config.prefix_cache and size <= config.chunk_tokens
    return max(0, tokens - 1) // size * size if keeps else 0


def short_pass(config: SchedulerConfig) -> int:
    """Tokens of a pass that holds pieces of open prompts."""
    return max(config.page_size, config.chunk_tokens // SHORT // config.page_size * config.page_size)
