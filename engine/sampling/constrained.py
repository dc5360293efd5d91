"""Constrained sampling: logits without the tokens that the grammars of their rows do not allow."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.messages.orders import PlanRow
from headrace.core.messages.stage_events import SampledToken
from headrace.core.types.requests.constraint import GrammarRejection
from headrace.engine.grammar.compiler import GrammarError
from headrace.engine.grammar.states import GrammarStates
from headrace.engine.kv.device_copies import place
from headrace.engine.sampling.sampler import SampleRow

log = logging.getLogger(__name__)


class MaskedRows(NamedTuple):
    """Rows to sample from, in order."""

    rows: list[SampleRow]
    rejected: dict[int, str]
    """Requests whose grammar gives no mask, and why."""


def mask_logits(logits: Tensor, rows: Sequence[PlanRow], grammars: GrammarStates) -> MaskedRows:
    """Set the logits of tokens that a row's grammar does not allow to negative infinity, in place. Logprobs are of what
    is left, as vLLM's are.

    logits: [rows, vocabulary], of rows that sample. min_tokens gives way to a grammar that has come to its end.
    """
    sampled, rejected = [], {}
    for index, row in enumerate(rows):
        assert row.sample is not None, "only rows that sample have logits"
        generated = row.generated
        try:
            allowed = grammars.mask(row)
        except GrammarError as error:
            rejected[row.request] = str(error)
            allowed = None
        if allowed is not None:
            later = _without(allowed, row.sample.stop_token_ids) if generated < row.sample.min_tokens else allowed
            if later.any():
                allowed = later
            else:
                generated = row.sample.min_tokens
            forbidden = place(~allowed[: logits.shape[-1]], logits.device)
            logits[index].masked_fill_(forbidden, -torch.inf)
        sampled.append(SampleRow(row.sample, row.start + row.count, generated))
    return MaskedRows(sampled, rejected)


def accept_tokens(
    samples: Sequence[SampledToken], rejected: dict[int, str], grammars: GrammarStates
) -> tuple[list[SampledToken], list[GrammarRejection]]:
    """Advance the grammars by what was sampled. Returns the samples of the others, and the requests that have to fail.
    rejected: as in MaskedRows."""
    for sampled in samples:
        if sampled.request not in rejected:
            try:
                grammars.accept(sampled.request, sampled.token)
            except GrammarError as error:
                rejected[sampled.request] = str(error)
    grammars.look_ahead()
    if not rejected:
        return list(samples), []
    for request, why in rejected.items():
        log.warning("request %d: its constraint cannot go on: %s", request, why)
    failed = [GrammarRejection(request, f"the constraint of this request: {why}") for request, why in rejected.items()]
    return [sampled for sampled in samples if sampled.request not in rejected], failed


def _without(allowed: NDArray[np.bool_], tokens: Sequence[int]) -> NDArray[np.bool_]:
    left = allowed.copy()
    left[[token for token in tokens if 0 <= token < len(left)]] = False
    return left
