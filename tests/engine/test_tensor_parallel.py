"""Shards of a model, as threads of this process: logits, KV and tokens of one rank and of transformers."""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from headrace.core.messages.orders import PlanRow
from headrace.core.messages.stage_events import PromptLogprobs, SampledToken
from headrace.core.types.requests.request import SamplingParams, TokenHistory
from headrace.engine.collectives.operations import Alone, Collectives
from headrace.engine.row_sampler import PlanResult
from headrace.engine.runner import ModelRunner
from tests.engine.collectives.threads import ThreadCollectives, run_ranks
from tests.engine.models import (
    CONFIGS,
    LATENTS,
    VOCABULARY,
    Prompt,
    Saved,
    fed_tokens,
    make_runner,
    pool_tokens,
    random_tokens,
    reference,
    reported_logprobs,
    shuffled_pages,
)

Models = Callable[[str, int, int], Saved]
PLAIN = SamplingParams(temperature=0.0)
SEEN = SamplingParams(temperature=0.0, logprobs=VOCABULARY)
SEEDED = SamplingParams(temperature=0.9, top_p=0.9, seed=7)
EVEN = tuple(range(0, VOCABULARY, 2))
LENGTH = 41
DECODED = 6
SHAPES = [  # query heads, KV heads, shards
    (6, 2, 2),
    (6, 3, 2),  # uneven: one KV head and two
    (6, 3, 3),
    (8, 4, 3),  # uneven: one, one and two
    (8, 4, 4),
    (4, 1, 2),  # both shards have the KV head
    (12, 2, 4),  # two shards have each
]


class Computed(NamedTuple):
    """What one rank knows of a prompt after it."""

    logprobs: list[Tensor]  # of the prompt's last position, [vocabulary]; empty on ranks that do not sample
    prompt: list[Tensor]  # logprobs of its positions, in chunks, without the last position
    tokens: list[int]  # greedy, by their largest logits only
    kv: Tensor  # [layers, 2, kv_heads, tokens, head_dim]
    heads: range  # of the KV
    hidden: Tensor  # of the last chunk


class Texts:
    """Executes plans on one rank, which takes the tokens that the first rank samples."""

    def __init__(self, runner: ModelRunner, tp: Collectives) -> None:
        self._runner = runner
        self._tp = tp

    def execute(self, rows: Sequence[PlanRow]) -> tuple[PlanResult, dict[int, int]]:
        """The rank's own result, and the tokens by request, on all ranks."""
        result = self._runner.execute(rows)
        assert self._tp.rank == 0 or result == PlanResult([], [], [])
        found = {sampled.request: sampled.token for sampled in result.samples}
        mine = torch.tensor([found.get(row.request, -1) for row in rows])
        tokens = dict(zip((row.request for row in rows), self._tp.broadcast(mine, 0).wait().tolist(), strict=True))
        self._runner.feed(fed_tokens({request: token for request, token in tokens.items() if token >= 0}))
        return result, tokens

    def decode(self, prompts: Sequence[Prompt], count: int, params: Sequence[SamplingParams]) -> list[list[int]]:
        """Tokens after prompts whose positions have been computed but the last."""
        texts: list[list[int]] = [[] for _ in prompts]
        for step in range(count):
            fields = {"tokens": b""} if step else {"history": TokenHistory()}
            rows = [
                prompt.row(len(prompt.tokens) - 1 + step, 1, sample=each, generated=step, **fields)
                for prompt, each in zip(prompts, params, strict=True)
            ]
            tokens = self.execute(rows)[1]
            for prompt, text in zip(prompts, texts, strict=True):
                text.append(tokens[prompt.request])
        return texts


def compute(tp: Collectives, folder: Path, chunk: int, **options: Any) -> Computed:
    runner = make_runner(folder, tp=tp, **options)
    prompt = Prompt(1, random_tokens(LENGTH, seed=LENGTH), shuffled_pages(4, 64), 16)
    texts = Texts(runner, tp)
    seen: list[SampledToken] = []
    entries: list[Tensor] = []
    hidden = torch.empty(0)
    for start in range(0, LENGTH, chunk):
        end = min(start + chunk, LENGTH)
        following = {"next_token": prompt.tokens[end]} if end < LENGTH else {}
        row = prompt.row(start, end - start, prompt_logprobs=VOCABULARY, **following)
        hidden = runner.forward([row])
        result = runner.sample([row], hidden).result()
        seen += result.samples
        entries += _entries(result.prompt_logprobs)
    kv = pool_tokens(runner, prompt.pages, LENGTH).clone()
    [tokens] = texts.decode([prompt], DECODED, [PLAIN])
    first = runner.geometry.head_start
    heads = range(first, first + runner.geometry.kv_heads)
    return Computed([reported_logprobs(each) for each in seen], entries, tokens, kv, heads, hidden)


def _entries(reports: Sequence[PromptLogprobs]) -> list[Tensor]:
    runs = [run for report in reports for run in report.runs]
    return [_by_id(entry.top_ids, entry.top_logprobs) for run in runs for entry in run.entries()]


def _by_id(ids: Sequence[int], values: Sequence[float]) -> Tensor:
    logprobs = torch.empty(len(ids))
    logprobs[list(ids)] = torch.tensor(values)
    return logprobs


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Equal but for the order of additions in float32."""
    torch.testing.assert_close(found, expected, atol=3e-4, rtol=3e-4)


def greedy_text(saved: Saved, tokens: list[int], count: int) -> list[int]:
    """What transformers generates."""
    text = list(tokens)
    for _ in range(count):
        text.append(int(reference(saved.model, text)[0][-1].argmax()))
    return text[len(tokens) :]


def check(saved: Saved, tp: int, chunk: int) -> None:
    tokens = random_tokens(LENGTH, seed=LENGTH)
    logprobs, keys_values = reference(saved.model, tokens)
    ranks = run_ranks(tp, partial(compute, folder=saved.folder, chunk=chunk))
    whole = compute(Alone(), saved.folder, chunk)
    assert_close(ranks[0].logprobs[0], logprobs[-1])
    assert_close(torch.stack(ranks[0].prompt), logprobs[:-1])
    assert_close(torch.stack(ranks[0].prompt), torch.stack(whole.prompt))
    expected = greedy_text(saved, tokens, DECODED)
    for rank in ranks:
        assert_close(rank.kv, keys_values[:, :, rank.heads.start : rank.heads.stop])
        assert torch.equal(rank.hidden, ranks[0].hidden), "equal bits on all ranks"
        assert rank.tokens == expected == whole.tokens
    assert_close(ranks[0].hidden, whole.hidden)
    assert not any(rank.logprobs or rank.prompt for rank in ranks[1:])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in LATENTS])
def test_every_family_on_any_number_of_shards(reshaped: Models, name: str, shape: tuple[int, int, int]) -> None:
    heads, kv_heads, tp = shape
    check(reshaped(name, heads, kv_heads), tp, chunk=25)


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("name", LATENTS)
def test_every_shard_has_the_whole_latents(saved: Callable[[str], Saved], name: str, tp: int) -> None:
    """Heads are divided; latents are one for all heads."""
    model = saved(name)
    tokens = random_tokens(LENGTH, seed=LENGTH)
    ranks = run_ranks(tp, partial(compute, folder=model.folder, chunk=25))
    whole = compute(Alone(), model.folder, chunk=25)
    assert_close(ranks[0].logprobs[0], reference(model.model, tokens)[0][-1])
    for rank in ranks:
        assert_close(rank.kv, whole.kv)
        assert torch.equal(rank.hidden, ranks[0].hidden), "equal bits on all ranks"
        assert rank.tokens == whole.tokens


@pytest.mark.parametrize("chunk", [1, 16, 41])
def test_chunks_of_any_size(reshaped: Models, chunk: int) -> None:
    check(reshaped("llama-bias", 6, 3), 2, chunk)


def test_prompt_logprobs_of_more_positions_than_a_tile(reshaped: Models) -> None:
    """Which are gathered 64 at a time; a row of one position, the prompt's last, asks for none."""
    saved = reshaped("qwen2", 6, 3)
    prompt = Prompt(1, random_tokens(130), shuffled_pages(9, 64), 16)

    def work(tp: Collectives) -> list[Tensor]:
        runner = make_runner(saved.folder, tp=tp)
        whole = runner.execute([prompt.row(0, 129, prompt_logprobs=VOCABULARY, next_token=prompt.tokens[129])])
        last = runner.execute([prompt.row(129, 1, prompt_logprobs=VOCABULARY)])
        reports = [*whole.prompt_logprobs, *last.prompt_logprobs]
        return _entries(reports)

    found, others, _ = run_ranks(3, work)
    assert_close(torch.stack(found), reference(saved.model, prompt.tokens)[0][:-1])
    assert not others


@pytest.mark.parametrize(
    "params",
    [
        SEEDED,
        SamplingParams(temperature=0.0, stop_token_ids=EVEN, min_tokens=9),
        SamplingParams(temperature=0.0, frequency_penalty=2.0),
        SamplingParams(temperature=0.0, logit_bias=((7, 100.0),)),
    ],
)
def test_sampled_tokens_are_those_of_one_rank(reshaped: Models, params: SamplingParams) -> None:
    """With a seed, with stop tokens that may not come yet, penalties and biases, which need all logits; other than the
    greedy ones."""
    folder = reshaped("qwen3", 8, 4).folder

    def work(tp: Collectives, params: SamplingParams = params) -> list[list[int]]:
        prompt = Prompt(1, random_tokens(30, 3), shuffled_pages(4, 64), 16)
        runner = make_runner(folder, tp=tp)
        runner.execute([prompt.row(0, 29)])
        return Texts(runner, tp).decode([prompt], 12, [params])

    expected = work(Alone())
    assert run_ranks(3, work) == [expected] * 3
    assert expected != work(Alone(), PLAIN)


def test_one_batch_of_many_kinds_of_rows(reshaped: Models) -> None:
    """More rows than a tile; a greedy row beside a drawn one gets its token by all logits."""
    folder = reshaped("llama", 6, 3).folder
    params = [PLAIN, SEEDED, SEEN]

    def rows(kinds: Sequence[SamplingParams | None]) -> Iterator[PlanRow]:
        for request in range(70):
            prompt = Prompt(request, random_tokens(3, request), [request], 16)
            yield prompt.row(0, 3, sample=kinds[request % len(kinds)])

    def work(tp: Collectives) -> list[list[int]]:
        runner = make_runner(folder, tp=tp, kv_pages=80)
        batches = ([PLAIN], params, [None, *params])
        return [[each.token for each in runner.execute(list(rows(kinds))).samples] for kinds in batches]

    expected = work(Alone())
    found, others = run_ranks(2, work)
    assert found == expected
    assert others == [[], [], []]


def test_what_is_exchanged(reshaped: Models) -> None:
    """One sum for each block and one for the embeddings; of logits the largest ones only, if they suffice."""
    saved = reshaped("llama", 6, 2)

    def work(tp: Collectives) -> list[str]:
        assert isinstance(tp, ThreadCollectives)
        runner = make_runner(saved.folder, tp=tp)
        before = len(tp.operations)
        row = Prompt(1, random_tokens(20), [1, 2], 16).row(0, 20, sample=PLAIN)
        runner.execute([row])
        return tp.operations[before:]

    sums = ["all_reduce (20, 48) torch.float32"] * (1 + 2 * 3)
    for found in run_ranks(2, work):
        assert found == [*sums, "gather (1, 2) torch.float64 to 0"]


def test_stages_of_shards_equal_one_rank(reshaped: Models) -> None:
    saved = reshaped("qwen3", 6, 3)
    prompt = Prompt(1, random_tokens(30), [9, 3], 16)

    def work(tp: Collectives) -> tuple[list[SampledToken], list[tuple[int, int, int, int]]]:
        runners = [make_runner(saved.folder, layers=layers, tp=tp) for layers in (range(1), range(1, 3))]
        rows = [prompt.row(0, 30)]
        hidden = runners[1].forward(rows, runners[0].forward(rows))
        geometries = [runner.geometry for runner in runners]
        shapes = [(each.layer_start, each.layers, each.head_start, each.kv_heads) for each in geometries]
        return runners[1].sample(rows, hidden).result().samples, shapes

    (samples, first), (_, second) = run_ranks(2, work)
    assert_close(reported_logprobs(samples[0]), reference(saved.model, prompt.tokens)[0][-1])
    assert first == [(0, 1, 0, 1), (1, 2, 0, 1)]
    assert second == [(0, 1, 1, 2), (1, 2, 1, 2)]


@pytest.mark.cpu_kind
def test_bfloat16_is_as_close_as_transformers(reshaped: Models) -> None:
    """To float32. How close that is, above all at a few positions, depends on the code that multiplies."""
    saved, tokens = reshaped("llama", 6, 3), random_tokens(LENGTH, seed=LENGTH)
    first, second = run_ranks(2, partial(compute, folder=saved.folder, chunk=25, dtype="bfloat16"))
    assert first.kv.dtype == torch.bfloat16
    logprobs, kv = reference(saved.model, tokens)
    their_logprobs, their_kv = reference(deepcopy(saved.model).bfloat16(), tokens)

    def error(found: Tensor, exact: Tensor) -> float:
        return float((found.float() - exact).square().mean())

    assert error(first.logprobs[0], logprobs[-1]) < error(their_logprobs[-1], logprobs[-1])
    assert error(torch.cat((first.kv, second.kv), dim=2), kv) < error(their_kv, kv)


@pytest.mark.parametrize("name", ["llama-bias", "qwen3"])
def test_8_bits_stay_close_to_one_rank(reshaped: Models, name: str) -> None:
    """Parts of rows have other blocks, and so other scales, than the whole rows."""
    saved = reshaped(name, 6, 3)
    work = partial(compute, folder=saved.folder, chunk=25, quantize="int8")
    found, _ = run_ranks(2, work)
    expected = work(Alone()).logprobs[0]
    assert float((expected.exp() * (expected - found.logprobs[0])).sum()) < 0.1


@pytest.mark.full
def test_the_bundled_model_writes_the_same_on_two_shards() -> None:
    """Nine query heads and three KV heads: three with one, six with two."""
    prompts = [Prompt(index, [(31 * index + 7 * token) % 4000 + 20 for token in range(60 + 9 * index)],
                      [8 * index + page for page in range(8)], 16) for index in range(3)]  # fmt: skip

    def work(tp: Collectives) -> list[list[int]]:
        runner = make_runner("smollm2", tp=tp)
        runner.execute([prompt.row(0, len(prompt.tokens) - 1) for prompt in prompts])
        return Texts(runner, tp).decode(prompts, 12, [PLAIN, SEEDED, PLAIN])

    expected = work(Alone())
    assert run_ranks(2, work) == [expected] * 2


def _bad_embedding(saved: Saved, folder: Path, token: int) -> None:
    with torch.no_grad():
        kept = saved.model.get_input_embeddings().weight[token].clone()
        saved.model.get_input_embeddings().weight[token] = torch.nan
        saved.model.save_pretrained(folder)
        saved.model.get_input_embeddings().weight[token] = kept


@pytest.mark.parametrize("token", [5, 190])
@pytest.mark.parametrize("params", [PLAIN, SEEDED, None])
def test_nonfinite_rows_are_found_wherever_they_come_from(
    reshaped: Models, tmp_path: Path, params: SamplingParams | None, token: int
) -> None:
    """An embedding of either shard; others in the batch are not affected."""
    _bad_embedding(reshaped("mistral", 6, 3), tmp_path, token)
    good = Prompt(1, [each if each not in (5, 190) else 6 for each in random_tokens(20)], [1, 2], 16)
    bad = Prompt(2, [7, 8, token], [3], 16)

    def work(tp: Collectives) -> PlanResult:
        return make_runner(tmp_path, tp=tp).execute([good.row(0, 20, sample=PLAIN), bad.row(0, 3, sample=params)])

    first, second = run_ranks(2, work)
    assert first.nonfinite == [2]
    assert [sampled.request for sampled in first.samples] == [1]
    assert first.samples == work(Alone()).samples
    assert second == PlanResult([], [], [])


def test_nonfinite_kv_of_another_shard_is_found(reshaped: Models) -> None:
    folder = reshaped("llama", 6, 3).folder

    def work(tp: Collectives) -> list[int]:
        runner = make_runner(folder, tp=tp)
        prompt = Prompt(1, random_tokens(20), [1, 2], 16)
        runner.execute([prompt.row(0, 16)])
        if tp.rank == 1:
            runner.pool.tensor[1, 2, 0, 1, 3] = torch.nan
        return runner.execute([prompt.row(16, 4)]).nonfinite

    assert run_ranks(2, work) == [[1], []]
