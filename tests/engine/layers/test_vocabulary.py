"""A vocabulary in blocks gives the logits and the greedy tokens of the whole one."""

import math
import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.core.types.requests.request import SamplingParams
from headrace.engine.collectives.operations import Collectives
from headrace.engine.layers.vocabulary import Vocabulary
from headrace.engine.model.arithmetic import TorchArithmetic
from headrace.engine.model.sharding import Shard
from headrace.engine.sampling.sampler import Sampler, SampleRow, greedy_tokens
from tests.engine.collectives.threads import run_ranks

PADDING = -1.0
LARGE = 1e9


class GivenLogits(TorchArithmetic):
    """Logits that do not come out of a product: rows [rows, vocabulary] are logits by id already, and the head names
    the ids of its block. Padding gets the largest of all."""

    def logits(self, x: Tensor, head: Tensor) -> Tensor:
        ids = head[:, 0]
        return torch.where(ids == PADDING, LARGE, x[:, ids.clamp(min=0).long()])


def blocks(vocabulary: int, tp: int) -> list[tuple[Shard, Tensor]]:
    """The shard and the head of each rank."""
    size = -(-vocabulary // tp)
    found = []
    for rank in range(tp):
        held = range(min(rank * size, vocabulary), min((rank + 1) * size, vocabulary))
        head = torch.tensor([*held, *[PADDING] * (size - len(held))])[:, None]
        found.append((Shard(rank, range(1), range(1), range(1), range(1), held, size), head))
    return found


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_logits_and_greedy_tokens_of_any_split(data: st.DataObject) -> None:
    """Blocks may be short or empty; logits may be equal, negative, infinite and NaN."""
    vocabulary, tp, rows = data.draw(st.integers(1, 9)), data.draw(st.integers(2, 4)), data.draw(st.integers(1, 4))
    value = st.sampled_from([-2.0, -1.0, 0.0, 1.0, -math.inf, math.inf, math.nan])
    drawn = data.draw(st.lists(st.lists(value, min_size=vocabulary, max_size=vocabulary), min_size=rows, max_size=rows))
    logits = torch.tensor(drawn)
    parts = blocks(vocabulary, tp)

    def work(tp: Collectives) -> tuple[Tensor, list[int]]:
        shard, head = parts[tp.rank]
        made = Vocabulary(vocabulary, head, head, GivenLogits(), shard, tp)
        return made.logits(logits), greedy_tokens(*made.best(logits)).tolist()

    (gathered, tokens), *others = run_ranks(tp, work)
    assert torch.equal(gathered.nan_to_num(7.0), logits.nan_to_num(7.0))
    greedy = [SampleRow(SamplingParams(temperature=0.0), 1, 0)] * rows
    assert tokens == Sampler(random.Random(0)).sample(logits, greedy).tolist()
    assert all(len(elsewhere) == 0 and found == [] for elsewhere, found in others)


@settings(max_examples=50, deadline=None)
@given(vocabulary=st.integers(1, 9), tp=st.integers(2, 4), seed=st.integers(0, 9))
def test_embeddings_of_any_split(vocabulary: int, tp: int, seed: int) -> None:
    torch.manual_seed(seed)
    table, ids = torch.randn(vocabulary, 3), torch.randint(0, vocabulary, (6,))
    parts = blocks(vocabulary, tp)

    def work(tp: Collectives) -> Tensor:
        shard, head = parts[tp.rank]
        block = torch.full((len(head), 3), torch.nan)
        block[: len(shard.vocabulary)] = table[list(shard.vocabulary)]
        return Vocabulary(vocabulary, block, block, TorchArithmetic(), shard, tp).embed(ids, torch.float32)

    for found in run_ranks(tp, work):
        assert torch.equal(found, table[ids])
