"""The matrices between latents and heads (kv_b_proj), used from either side: to make keys and values of latents, to
bring queries into the space of latents, and results out of it."""

from typing import Protocol

import torch
from torch import Tensor

from headrace.core.config import MlaForm
from headrace.engine.model.arithmetic import Arithmetic, Weight
from headrace.engine.model.weights import LayerReader


class LatentProjections(Protocol):
    """Per head K [nope_dim, kv_rank] and V [value_dim, kv_rank], in the model's dtype (never in 8 bits)."""

    def absorb(self, query: Tensor) -> Tensor:
        """query [tokens, heads, nope_dim] → [tokens, heads, kv_rank]: its product with a latent is that with the
        latent's key."""
        ...

    def values(self, attended: Tensor) -> Tensor:
        """Weighted sums of latents [tokens, heads, kv_rank] → those of their values [tokens, heads, value_dim]."""
        ...

    def expand(self, latents: Tensor, heads: range) -> Tensor:
        """latents [positions, kv_rank] → [positions, heads, nope_dim + value_dim] of these heads, keys before
        values."""
        ...


class HeadsApart:
    """LatentProjections as a product per head, on the CPU: a row has the same bits whatever the number of rows."""

    def __init__(self, weight: Tensor, nope_dim: int, read: LayerReader, arithmetic: Arithmetic, form: MlaForm) -> None:
        """weight: [heads, nope_dim + value_dim, kv_rank]. form: what is not used in it is not held."""
        self._arithmetic = arithmetic
        keys = weight[:, :nope_dim]
        self._values = [read.packed(head.contiguous(), int8=False) for head in weight[:, nope_dim:]]
        self._absorb: list[Weight] = []  # per head [kv_rank, nope_dim]
        self._keys: list[Weight] = []  # per head [nope_dim, kv_rank]
        if form != "expanded":
            self._absorb = [read.packed(head.T.contiguous(), int8=False) for head in keys]
        if form != "absorbed":
            self._keys = [read.packed(head.contiguous(), int8=False) for head in keys]

    def absorb(self, query: Tensor) -> Tensor:
        """See LatentProjections."""
        return self._per_head(query, self._absorb)

    def values(self, attended: Tensor) -> Tensor:
        """See LatentProjections."""
        return self._per_head(attended, self._values)

    def expand(self, latents: Tensor, heads: range) -> Tensor:
        """See LatentProjections."""
        rows, linear = latents.contiguous(), self._arithmetic.linear
        made = [torch.cat((linear(rows, self._keys[head]), linear(rows, self._values[head])), -1) for head in heads]
        return torch.stack(made, dim=1)

    def _per_head(self, rows: Tensor, weights: list[Weight]) -> Tensor:
        apart = rows.transpose(0, 1).contiguous()  # [heads, tokens, width]
        products = [self._arithmetic.linear(head, weight) for head, weight in zip(apart, weights, strict=True)]
        return torch.stack(products, dim=1)


class HeadsTogether:
    """LatentProjections as one batched product over heads, on a GPU."""

    def __init__(self, weight: Tensor, nope_dim: int) -> None:
        """weight: [heads, nope_dim + value_dim, kv_rank], on the device."""
        self._weight = weight
        self._nope_dim = nope_dim

    def absorb(self, query: Tensor) -> Tensor:
        """See LatentProjections."""
        keys = self._weight[:, : self._nope_dim].to(query.dtype)
        return torch.bmm(query.transpose(0, 1), keys).transpose(0, 1)

    def values(self, attended: Tensor) -> Tensor:
        """See LatentProjections."""
        values = self._weight[:, self._nope_dim :].to(attended.dtype)
        return torch.bmm(attended.transpose(0, 1), values.transpose(1, 2)).transpose(0, 1)

    def expand(self, latents: Tensor, heads: range) -> Tensor:
        """See LatentProjections."""
        some = self._weight[heads.start : heads.stop].to(latents.dtype)
        return torch.matmul(latents, some.flatten(0, 1).T).view(-1, *some.shape[:2])
