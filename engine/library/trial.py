"""A trial of a decoder when it is loaded: the same tokens whole, cut into chunks, and beside another request.

It finds what is wrong in silence: rotations by the longest position of a batch, modules that cannot begin with a state.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.core.types.errors import ConfigError
from headrace.engine.attention.paged import AttentionSpan
from headrace.engine.kv.pool import KVPool
from headrace.engine.library.decoder import LibraryDecoder

TOKENS = 60  # of a request, at most; an odd number of them in the first chunk
ROUNDING = {torch.float32: 2e-3, torch.bfloat16: 6e-2, torch.float16: 1e-2}  # of the largest number, that may differ
STEPS = 10  # so much further apart may be the state of a token alone: some scans clamp time steps in chunks only


class Trial(NamedTuple):
    """How far the states of the same tokens were apart."""

    gap: float
    """The largest difference, as a share of the largest number."""

    @property
    def same_bits(self) -> bool:
        """Neither chunks nor neighbours change a bit."""
        return self.gap == 0


def try_decoder(decoder: LibraryDecoder, pool: KVPool, tokens: int, incoming: Callable[[int, int], Tensor]) -> Trial:
    """Compute random tokens in several ways; pages and states of the pool are overwritten. Modules that turn out not to
    begin with a state get their tokens one by one from then on.

    tokens: of the longest request. incoming: what forward() takes for so many tokens, by a seed. Raises ConfigError for
    states that are further apart than by rounding.
    """
    count = min(TOKENS, tokens, pool.pages * pool.page_size // 2 - pool.page_size)
    if count < 3:
        return Trial(0.0)
    first, other = incoming(count, 1), incoming(count, 2)
    most = ROUNDING[first.dtype if first.is_floating_point() else decoder.compute]
    gap = _gap(decoder, pool, first, other)
    if not gap <= most and decoder.has_states:
        decoder.one_by_one = True
        gap = _gap(decoder, pool, first, other)
    if not gap <= most:
        raise ConfigError(
            f"a trial of the model gave other states in chunks or beside another request (by {gap:.2g} of the "
            "largest): it would be computed wrong"
        )
    return Trial(gap)


def _gap(decoder: LibraryDecoder, pool: KVPool, first: Tensor, other: Tensor) -> float:
    """The largest difference of the states of one request, whole, in chunks and beside another one, as a share of the
    largest number."""
    count = len(first)
    each = pool.geometry.pages_for(count)
    own, others = np.arange(each, dtype=np.int64), np.arange(each, 2 * each, dtype=np.int64)
    cut = count // 3 * 2 - 1

    def run(rows: Sequence[tuple[int, Tensor, "np.ndarray"]]) -> Tensor:
        spans = [AttentionSpan(start, len(given), pages, int(pages is others)) for start, given, pages in rows]
        positions = torch.cat([torch.arange(span.start, span.start + span.count) for span in spans])
        decoder.begin([len(positions)], len(positions))
        given = torch.cat([given for _, given, _ in rows])
        return decoder.forward(given, positions.to(given.device), spans).float()

    with torch.inference_mode():
        whole = run([(0, first, own)])
        chunks = torch.cat([run([(0, first[:cut], own)]), run([(cut, first[cut:], own)])])
        beside = run([(0, other, others), (0, first, own)])[count:]
        run([(0, first[:-1], own)])
        last = run([(0, other, others), (count - 1, first[-1:], own)])[-1:]
        pairs = (chunks, whole, 1), (beside, whole, 1), (last, whole[-1:], STEPS if decoder.has_states else 1)
        most = whole.abs().max()
        return max(float((found - expected).abs().max() / most) / weight for found, expected, weight in pairs)
