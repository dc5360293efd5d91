"""A whole model whose experts are divided among ranks: what one rank computes, whatever other replicas do."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch

from headrace.core.messages.orders import PlanRow
from headrace.core.types.ranks.coordinate import Agreement
from headrace.engine.layers.exchange import make_exchange
from headrace.engine.model.expert_plan import Way
from headrace.engine.model.source import load_spec, resolve_source
from headrace.engine.runner import ModelRunner
from tests.engine.layers.mixtures import Groups, run_stage
from tests.engine.models import (
    Prompt,
    Saved,
    make_runner,
    pool_tokens,
    random_tokens,
    reported_logprobs,
)

PAGES = [list(range(8)), list(range(8, 16))]
WAYS: list[Way] = ["allgather", "alltoall"]


class Computed(NamedTuple):
    """What a rank computed for the prompts of its replica."""

    logprobs: list[torch.Tensor]
    kv: list[torch.Tensor]


def prompts_of(replica: int) -> list[Prompt]:
    """Two for replica 0, one for replica 1, none for the others."""
    lengths: Sequence[int] = ((70, 33), (21,), (), ())[replica]
    seeds = [10 * replica + index for index in range(len(lengths))]
    return [
        Prompt(seed, random_tokens(length, seed), pages, 16)
        for seed, length, pages in zip(seeds, lengths, PAGES, strict=False)
    ]


def plans_of(replica: int) -> list[list[PlanRow]]:
    """Five passes; replicas are idle in some, replica 1 between others, replicas 2 and 3 always."""
    prompts = prompts_of(replica)
    if replica == 0:
        long, short = prompts
        return [[long.row(0, 25)], [], [long.row(25, 20), short.row(0, 30)], [long.row(45, 25)], [short.row(30, 3)]]
    if replica == 1:
        return [[], [prompts[0].row(0, 20)], [], [prompts[0].row(20, 1)], []]
    return [[]] * 5


def compute(runner: ModelRunner, replica: int, counts: Sequence[Sequence[int]]) -> Computed:
    """All passes of a replica. counts: tokens of every replica in each."""
    logprobs = []
    for rows, tokens in zip(plans_of(replica), counts, strict=True):
        hidden = runner.forward(rows, None, Agreement(tuple(tokens), max(tokens)) if tokens else None)
        if rows:
            logprobs += [reported_logprobs(sample) for sample in runner.sample(rows, hidden).result().samples]
        else:
            assert hidden.shape == (0, runner.hidden_spec.size)
    prompts = prompts_of(replica)
    return Computed(logprobs, [pool_tokens(runner, prompt.pages, len(prompt.tokens)) for prompt in prompts])


def expected_of(saved: Saved, replica: int) -> Computed:
    """By one rank alone, which skips the passes in which it has no rows."""
    runner = make_runner(saved.folder)
    logprobs = []
    for rows in filter(None, plans_of(replica)):
        logprobs += [reported_logprobs(sample) for sample in runner.execute(rows).samples]
    prompts = prompts_of(replica)
    return Computed(logprobs, [pool_tokens(runner, prompt.pages, len(prompt.tokens)) for prompt in prompts])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_replicas_that_share_experts_compute_what_one_rank_does(
    saved: Callable[[str], Saved], name: str, dp: int, tp: int, way: Way
) -> None:
    model = saved(name)
    moe = load_spec(resolve_source(str(model.folder))).moe
    assert moe is not None
    counts = [[sum(row.count for row in plans_of(replica)[turn]) for replica in range(dp)] for turn in range(5)]

    def work(replica: int, shard: int, groups: Groups) -> Computed:
        exchange = make_exchange(way, moe, *groups)
        runner = make_runner(model.folder, exchanges=[exchange])
        assert runner.expert_rows is not None
        assert runner.expert_rows.first == exchange.own.start
        return compute(runner, replica, counts)

    results = run_stage(dp, tp, work)
    for replica in range(dp):
        expected = expected_of(model, replica)
        for shard in range(tp):
            found = results[replica * tp + shard]
            for one, other in zip((*found.logprobs, *found.kv), (*expected.logprobs, *expected.kv), strict=True):
                torch.testing.assert_close(one, other, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("tp", [2, 3])
def test_shards_that_divide_experts_compute_what_one_rank_does(saved: Callable[[str], Saved], tp: int) -> None:
    model = saved("qwen3-moe")
    moe = load_spec(resolve_source(str(model.folder))).moe
    assert moe is not None
    expected = expected_of(model, 0)
    counts = [[sum(row.count for row in rows)] for rows in plans_of(0)]

    def work(replica: int, shard: int, groups: Groups) -> Computed:
        return compute(make_runner(model.folder, exchanges=[make_exchange("replicated", moe, *groups)]), 0, counts)

    for found in run_stage(1, tp, work):
        for one, other in zip((*found.logprobs, *found.kv), (*expected.logprobs, *expected.kv), strict=True):
            torch.testing.assert_close(one, other, atol=2e-4, rtol=2e-4)
