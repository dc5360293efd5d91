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
ROUNDING = {torch.float32: 2e-3, torch.bfloat16: 0.12, torch.float16: 1e-2}  # of the largest number, that may differ
SINGLE = 5  # last tokens that are computed one by one
LEAST = 3 * SINGLE  # tokens that a trial needs
STEPS = 10  # so much further apart may single tokens be: some scans clamp time steps in chunks only


class Trial(NamedTuple):
    """How far the hidden states of the same tokens were apart, as shares of the largest number."""

    gap: float
    """Of the tokens that differ most."""
    typical: float
    """Of half of the tokens, in the way of computing that differs most. Where rounding has a router choose another
    expert, single tokens differ by more; what is computed wrong makes all tokens differ."""

    @property
    def same_bits(self) -> bool:
        """Neither chunks nor neighbours change a bit."""
        return self.gap == 0


def try_decoder(
    decoder: LibraryDecoder, pool: KVPool, tokens: int, incoming: Callable[[int, int], Tensor], adapter: str = ""
) -> Trial:
    """Compute random tokens in several ways; pages and states of the pool are overwritten. Modules that turn out not to
    begin with a state get their tokens one by one from then on.

    tokens: of the longest request. incoming: what forward() takes for so many tokens, by a seed. adapter: that they go
    through, by its fingerprint; the request beside them goes through none. Raises ConfigError for hidden states that
    are further apart than by rounding, and ValueError for an adapter of modules that cannot be adapted.
    """
    count = min(TOKENS, tokens, pool.pages * pool.page_size // 2 - pool.page_size)
    if count < LEAST:
        return Trial(0.0, 0.0)
    first, other = incoming(count, 1), incoming(count, 2)
    most = max(ROUNDING[decoder.compute], ROUNDING[pool.tensor.dtype])
    found = _compared(decoder, pool, first, other, adapter)
    if not found.typical <= most and decoder.has_states:
        decoder.one_by_one = True
        found = _compared(decoder, pool, first, other, adapter)
    if not found.typical <= most:
        raise ConfigError(
            f"a trial of the model gave other states in chunks or beside another request (by {found.typical:.2g} of "
            "the largest): it would be computed wrong"
        )
    return found


def _compared(decoder: LibraryDecoder, pool: KVPool, first: Tensor, other: Tensor, adapter: str) -> Trial:
    """One request whole beside the same in two chunks, beside another one, and its last tokens one by one."""
    count = len(first)
    each = pool.geometry.pages_for(count)
    own, others = np.arange(each, dtype=np.int64), np.arange(each, 2 * each, dtype=np.int64)
    cut = count // 3 * 2 - 1

    def run(rows: Sequence[tuple[int, Tensor, "np.ndarray"]]) -> Tensor:
        spans = [
            AttentionSpan(start, len(given), pages, slot=int(pages is others), adapter=adapter if pages is own else "")
            for start, given, pages in rows
        ]
        positions = torch.cat([torch.arange(span.start, span.start + span.count) for span in spans])
        decoder.begin([len(positions)], len(positions))
        given = torch.cat([given for _, given, _ in rows])
        return decoder.forward(given, positions.to(given.device), spans).float()

    with torch.inference_mode():
        whole = run([(0, first, own)])
        before = run([(0, first[:cut], own)])
        behind = run([(cut, first[cut:], own)])
        beside = run([(0, other, others), (0, first, own)])[count:]
        run([(0, first[:-SINGLE], own)])
        places = range(count - SINGLE, count)
        singly = torch.cat([run([(0, other, others), (at, first[at : at + 1], own)])[-1:] for at in places])
        gaps = [
            _gaps(before, whole[:cut], whole),
            _gaps(behind, whole[cut:], whole),
            _gaps(beside, whole, whole),
            _gaps(singly, whole[-SINGLE:], whole) / (STEPS if decoder.has_states else 1),
        ]
    return Trial(max(float(gap.max()) for gap in gaps), max(float(gap.median()) for gap in gaps))


def _gaps(found: Tensor, expected: Tensor, whole: Tensor) -> Tensor:
    """By token: the largest difference as a share of the largest number."""
    return (found - expected).flatten(1).abs().amax(1) / whole.abs().max()
