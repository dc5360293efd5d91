"""Embedding and output head, split over shards by the vocabulary (as in Megatron-LM, arXiv 1909.08053)."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.engine.collectives.operations import Collectives
from headrace.engine.model.arithmetic import Arithmetic
from headrace.engine.model.sharding import Shard
from headrace.engine.sampling.logprobs import SLICE


class Best(NamedTuple):
    """The largest logit of each row; no rows on shards other than the first."""

    logits: Tensor  # [rows]; NaN where a row has one
    tokens: Tensor  # int64 [rows]: the lowest id among equal logits


class Vocabulary:
    """Token ids to hidden states, and hidden states to logits. A shard has one block of the vocabulary.

    All methods raise LinkBroken when another shard is gone.
    """

    def __init__(
        self, size: int, embedding: Tensor, head: Tensor, arithmetic: Arithmetic, shard: Shard, tp: Collectives
    ) -> None:
        """size: of the whole vocabulary. embedding, head: this shard's rows [vocabulary block, hidden], see
        HeadWeights; empty on stages that do not use them. tp: the shards of this stage."""
        self._size = size
        self._embedding = embedding
        self._head = head
        self._arithmetic = arithmetic
        self._shard = shard
        self._tp = tp

    def embed(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Token ids int64 [tokens] → hidden states [tokens, hidden size] of this dtype, equal on all shards."""
        if self._tp.size == 1:
            return F.embedding(ids, self._embedding).to(dtype)
        local = ids - self._shard.vocabulary.start
        elsewhere = (local < 0) | (local >= len(self._shard.vocabulary))
        hidden = F.embedding(local.masked_fill_(elsewhere, 0), self._embedding).to(dtype)
        return self._tp.all_reduce(hidden.masked_fill_(elsewhere[:, None], 0)).wait()

    def logits(self, normed: Tensor) -> Tensor:
        """Hidden states after the final norm [rows, hidden size] → float32 logits [rows, vocabulary] on the first
        shard; no rows on the others. Gathered in tiles of SLICE rows, so that the others need no more memory."""
        if self._tp.size == 1:
            return self._arithmetic.logits(normed, self._head)
        gathered = [self._gather(tile) for tile in torch.split(normed, SLICE)]
        return gathered[0] if len(gathered) == 1 else torch.cat(gathered)

    def best(self, normed: Tensor) -> Best:
        """The largest logits of hidden states as of logits(), without a gather of all logits."""
        if self._tp.size == 1:
            return best_of(self._arithmetic.logits(normed, self._head))
        own = [self._own_best(tile) for tile in torch.split(normed, SLICE)]
        # float64 holds both exactly, so that one message carries them.
        pairs = torch.cat([torch.stack((logits.double(), tokens.double()), dim=1) for logits, tokens in own])
        gathered = self._tp.gather(pairs, 0).wait().view(-1, len(pairs), 2)
        if not self._shard.first:
            return Best(gathered.new_empty(0), gathered.new_empty(0, dtype=torch.int64))
        # The first shard among equals has the lowest ids.
        logits, tokens = gathered.unbind(2)
        shard = logits.argmax(dim=0, keepdim=True)
        return Best(logits.gather(0, shard)[0], tokens.gather(0, shard)[0].long())

    def _gather(self, normed: Tensor) -> Tensor:
        block = self._arithmetic.logits(normed, self._head)  # [rows, vocabulary block]
        gathered = self._tp.gather(block, 0).wait()
        if not self._shard.first:
            return gathered.new_empty(0, block.shape[1])
        blocks = gathered.view(self._tp.size, len(normed), -1).transpose(0, 1).reshape(len(normed), -1)
        return blocks[:, : self._size]

    def _own_best(self, normed: Tensor) -> Best:
        own = len(self._shard.vocabulary)
        if not own:
            logits = torch.full((len(normed),), -torch.inf, device=normed.device)
            return Best(logits, torch.zeros(len(normed), dtype=torch.int64, device=normed.device))
        logits, tokens = best_of(self._arithmetic.logits(normed, self._head)[:, :own])
        return Best(logits, tokens + self._shard.vocabulary.start)


def best_of(logits: Tensor) -> Best:
    """The largest of logits [rows, vocabulary]. NaN counts as the largest."""
    tokens = logits.argmax(dim=-1)
    return Best(logits.gather(-1, tokens[:, None])[:, 0], tokens)
