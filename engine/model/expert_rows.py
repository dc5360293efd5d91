"""Rows of a mixture of experts in the order of the experts that compute them, by operations that never wait for a GPU:
how many rows an expert has is known to the device alone."""

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.engine.model.expert_choice import ExpertChoice


class SortedRows(NamedTuple):
    """Where the rows of one rank's experts are. A choice is one of k experts of a token: token * k + number.

    There is room for every choice. Rows behind the last expert's have no meaning: those of other ranks' experts.
    """

    sources: Tensor
    """Integers [tokens * k]: the choice that each row is of."""
    places: Tensor
    """Integers [tokens * k]: the row of each choice; of other ranks' experts none that has a meaning."""
    ends: Tensor
    """int32 [experts]: where the rows of each expert end; last, if at all, of the shared experts, which are one."""

    @property
    def total(self) -> Tensor:
        """How many rows have a meaning: int32 [1]."""
        return self.ends[-1:]


def sort_rows(experts: Tensor, own: range, counts: Tensor, shared: int | None = None) -> SortedRows:
    """Rows of the experts `own` among the choices int64 [tokens, k], of an expert in the order of tokens. shared: the
    number of one more, behind them. counts: int64 [own experts], to which each expert's rows are added."""
    held = len(own) + (shared is not None)
    numbers = experts.flatten() - own.start
    others = (numbers < 0) | (numbers >= len(own))
    numbers = numbers.masked_fill_(others, held)
    if shared is not None:
        numbers = numbers.masked_fill_(experts.flatten() == shared, len(own))
    ordered, sources = numbers.sort(stable=True)
    places = torch.empty_like(sources).scatter_(0, sources, torch.arange(len(sources), device=sources.device))
    each = torch.arange(held + 1, device=ordered.device)
    edges = torch.searchsorted(ordered, each, out_int32=True)
    counts += edges.diff()[: len(own)]
    return SortedRows(sources, places, edges[1:])


def take_rows(x: Tensor, rows: SortedRows, k: int) -> Tensor:
    """Rows of x [tokens, width] in the order of experts: [tokens * k, width]."""
    return x.index_select(0, rows.sources // k)


def combine_rows(results: Tensor, rows: SortedRows, choice: ExpertChoice) -> Tensor:
    """Weighted sums of experts' results [tokens * k, width]: [tokens, width], each rounded once."""
    tokens, k = choice.experts.shape
    known = rows.places < rows.total
    # What no expert has computed may be anything.
    apart = results.index_select(0, rows.places).masked_fill_(~known[:, None], 0).view(tokens, k, -1)
    return torch.bmm(choice.weights[:, None], apart.float())[:, 0].to(results.dtype)
