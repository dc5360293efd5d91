"""Rows that travel between ranks: hidden states, chosen experts and their weights side by side, for one collective."""

import torch
from torch import Tensor

from headrace.engine.layers.choice import NO_EXPERT, ExpertChoice
from headrace.engine.layers.exchange.ways import WORD


def pack(x: Tensor, choice: ExpertChoice, rows: int = 0) -> Tensor:
    """Parcels int32 [rows, words] of x [tokens, hidden size], whose size in bytes is a multiple of 4.

    rows: filled up to this many with rows without experts; 0 adds none.
    """
    hidden, k = x.shape[1] * x.element_size() // WORD, choice.experts.shape[1]
    parcels = torch.empty(max(rows, len(x)), hidden + 2 * k, dtype=torch.int32, device=x.device)
    there, padding = parcels[: len(x)], parcels[len(x) :]
    there[:, :hidden] = x.contiguous().view(torch.int32)
    there[:, hidden : hidden + k] = choice.experts
    there[:, hidden + k :] = choice.weights.view(torch.int32)
    padding.zero_()
    padding[:, hidden : hidden + k] = NO_EXPERT
    return parcels


def unpack(parcels: Tensor, k: int, dtype: torch.dtype) -> tuple[Tensor, ExpertChoice]:
    """Hidden states of this dtype, experts and weights of parcels."""
    hidden = parcels.shape[1] - 2 * k
    weights = parcels[:, hidden + k :].contiguous().view(torch.float32)
    return parcels[:, :hidden].view(dtype), ExpertChoice(parcels[:, hidden : hidden + k].long(), weights)
