"""The stub model: its tokens follow from the prompt alone, and show every wrong page."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from random import Random

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.core.config import EngineConfig, ModelConfig
from headrace.core.messages.orders import PlanRow
from headrace.core.types.errors import ConfigError
from headrace.core.types.packed import pack
from headrace.core.types.requests.request import SamplingParams
from headrace.engine.collectives.operations import Alone, Collectives
from headrace.engine.load_plan import plan_rank
from headrace.engine.model.source import load_spec, resolve_source
from headrace.engine.model.stub import parse_stub
from headrace.engine.runner import Runner
from headrace.engine.stub.runner import StubRunner, fault_in
from tests.engine.collectives.threads import run_ranks
from tests.engine.models import fed_tokens

PAGES = 110
GREEDY = SamplingParams(temperature=0.0)
NAME = "stub:layers=4,hidden=16,us_per_token=0,max_len=100,vocab=300"


def runner(layers: range | None = None, page_size: int = 4, model: str = NAME, dtype: str = "float32") -> StubRunner:
    settings = ModelConfig(model=model, dtype=dtype, device="cpu")  # type: ignore[arg-type]
    made = StubRunner(plan_rank(settings, EngineConfig(page_size=page_size, kv_pages=PAGES), layers=layers))
    made.pool.tensor.view(torch.uint8).random_(0, 256)
    made.warm_up()
    return made


def row(request: int, start: int, tokens: Sequence[int], pages: Sequence[int], *, sample: bool = False) -> PlanRow:
    return PlanRow(request, start, len(tokens), pack(pages), pack(tokens), sample=GREEDY if sample else None)


def through(stages: Sequence[Runner], rows: Sequence[PlanRow]) -> dict[int, int]:
    """Tokens sampled by a pipeline, which every stage learns."""
    hidden = None
    for stage in stages:
        hidden = stage.forward(rows, hidden)
    assert hidden is not None
    samples = stages[-1].sample(rows, hidden).result()[0]
    for stage in stages:
        stage.feed(fed_tokens({sample.request: sample.token for sample in samples}))
    return {sample.request: sample.token for sample in samples}


def generate(stages: Sequence[Runner], prompt: Sequence[int], count: int, pages: Sequence[int]) -> list[int]:
    """The plain way: one chunk, and a decoding row for every token."""
    tokens = [through(stages, [row(1, 0, prompt, pages, sample=True)])[1]]
    for position in range(len(prompt), len(prompt) + count - 1):
        tokens.append(through(stages, [PlanRow(1, position, 1, pack(pages), sample=GREEDY)])[1])
    return tokens


PROMPTS = st.lists(st.integers(0, 299), min_size=1, max_size=30)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(PROMPTS, min_size=1, max_size=3), st.integers(1, 5), st.sampled_from(["float32", "bfloat16", "float16"]),
    st.lists(st.integers(1, 3), max_size=3), st.randoms(use_true_random=False),
)  # fmt: skip
def test_chunks_batches_pages_stages_and_dtypes_do_not_show(
    prompts: list[list[int]], page_size: int, dtype: str, cuts: list[int], random: Random
) -> None:
    plain = [generate([runner(page_size=100)], prompt, 3, [0]) for prompt in prompts]
    borders = sorted({0, 4, *cuts})
    stages = [runner(range(*pair), page_size, dtype=dtype) for pair in pairwise(borders)]
    free = random.sample(range(PAGES), PAGES)
    pages = [[free.pop() for _ in range(-(-33 // page_size))] for _ in prompts]
    pending = dict.fromkeys(range(len(prompts)), 0)
    found: dict[int, list[int]] = {request: [] for request in pending}
    while pending:
        rows = []
        for request in random.sample(sorted(pending), random.randint(1, len(pending))):
            prompt, start = prompts[request], pending[request]
            if start < len(prompt):
                end = random.randint(start + 1, len(prompt))
                rows.append(row(request, start, prompt[start:end], pages[request], sample=end == len(prompt)))
            else:
                end = start + 1
                rows.append(PlanRow(request, start, 1, pack(pages[request]), sample=GREEDY))
            pending[request] = end
        for request, token in through(stages, rows).items():
            found[request].append(token)
            if len(found[request]) == 3:
                del pending[request]
                stages[0].release(request)
    assert [found[request] for request in range(len(prompts))] == plain


def test_a_wrong_page_anywhere_shows_as_another_token() -> None:
    prompt = list(range(40))
    made = runner()
    made.pool.tensor.zero_()  # else the wrong page holds whatever was there, and one in some hundred tokens is the same
    good = generate([made], prompt, 1, range(11))
    pages = list(range(11))
    for page in range(10):
        through([made], [row(1, 0, prompt, pages)])
        swapped = [*pages[:page], 20, *pages[page + 1 :]]
        last = [row(1, 39, prompt[39:], pages, sample=True)]
        wrong = [row(1, 39, prompt[39:], swapped, sample=True)]
        assert through([made], last)[1] == good[0]
        if page < 9:
            assert through([made], wrong)[1] != good[0], page


def test_a_wrong_byte_in_any_layer_of_any_stage_shows() -> None:
    prompt = list(range(16))
    stages = [runner(range(1), page_size=8), runner(range(1, 4), page_size=8)]
    last = [row(1, 15, prompt[15:], range(4), sample=True)]
    through(stages, [row(1, 0, prompt, range(4))])
    good = through(stages, last)[1]
    for stage, layer, kind in ((0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 1, 1), (1, 2, 0)):
        page = stages[stage].pool.tensor[1, layer, kind]
        kept = page.clone()
        page.zero_()
        assert through(stages, last)[1] != good, (stage, layer, kind)
        page.copy_(kept)
    assert through(stages, last)[1] == good


def test_a_state_that_is_not_the_requests_shows() -> None:
    """In any stage, of any chunk; from a checkpoint a prompt goes on as the request did."""
    prompt = list(range(40))
    stages = [runner(part, model=f"{NAME},states=1") for part in (range(2), range(2, 4))]

    def computed(*rows: PlanRow, between: Callable[[], object] = lambda: None) -> int:
        through(stages, rows[:1])
        between()
        return [through(stages, [each]) for each in rows[1:]][-1][1]

    first = replace(row(1, 0, prompt[:20], range(11)), slot=2, checkpoint=5)
    chunk = replace(row(1, 20, prompt[20:30], range(11)), slot=2)
    last = replace(row(1, 30, prompt[30:], range(11), sample=True), slot=2)
    good = computed(first, chunk, last)
    assert computed(replace(first, slot=3), replace(chunk, resume=5), last) == good
    assert computed(first, chunk, replace(last, slot=3)) != good
    assert computed(first, replace(chunk, resume=6), last) != good
    for stage in stages:
        assert computed(first, chunk, last, between=stage.pool.tensors["state"][2, 1].zero_) != good
    assert computed(first, chunk, last) == good


def test_kv_follows_from_the_prompt_and_takes_the_whole_slot() -> None:
    one, other = runner(page_size=4), runner(page_size=4)
    prompt = [5, 6, 7, 8]
    through([one], [row(1, 0, prompt, [3])])
    through([other], [row(9, 0, prompt[:1], [7])])
    through([other], [row(9, 1, prompt[1:], [7])])
    assert (one.pool.read(3, 0, 4) == other.pool.read(7, 0, 4)).all()
    through([other], [row(9, 0, [5, 7, 6, 8], [7])])
    differs = (one.pool.read(3, 0, 4) != other.pool.read(7, 0, 4)).any(axis=-1)
    assert not differs[:, :, :, 0].any()
    assert differs[:, :, :, 1:3].all()


def test_logprobs_are_those_of_a_certain_model() -> None:
    made = runner()
    params = SamplingParams(temperature=1.0, logprobs=2)
    prompt = [1, 2, 3]
    whole = PlanRow(1, 0, 3, pack([0]), pack(prompt), sample=params, prompt_logprobs=0)
    [sampled], [prompt_logprobs], *_ = made.execute([whole])
    assert sampled.logprob is not None
    assert sampled.token == sampled.logprob.top_ids[0]
    assert sampled.logprob.logprob == pytest.approx(0, abs=1e-6)
    assert [entry.token for entry in prompt_logprobs.runs[0].entries()] == [2, 3]
    follow = through([made], [row(2, 0, prompt[:1], [1], sample=True)])[2]
    [entry] = made.execute([PlanRow(3, 0, 2, pack([2]), pack([1, follow]), prompt_logprobs=0)])[1][0].runs[0].entries()
    assert entry.logprob == pytest.approx(0, abs=1e-6)


def test_a_plan_takes_its_time_and_a_stage_its_share() -> None:
    made = runner(range(2), model="stub:layers=4,hidden=16,us_per_token=200,us_per_plan=2000,max_len=100")
    prompt = [row(1, 0, list(range(20)), range(5))]
    begun, used = time.perf_counter(), time.process_time()
    for _ in range(20):
        made.forward(prompt)
    assert 20 * 0.003 * 0.98 <= time.perf_counter() - begun < 20 * 0.003 * 20  # a busy machine
    assert time.process_time() - used < 0.03


def test_squared_tokens_take_the_time_of_the_prefix_too() -> None:
    """A row of 10 tokens after 80: 90² - 80² of them, 1 µs each, of which half the layers take half."""
    made = runner(range(2), model="stub:layers=4,hidden=16,us_per_token=0,ps_per_token_squared=1000000,max_len=100")
    prompt = [row(1, 80, list(range(10)), range(23))]
    begun = time.perf_counter()
    for _ in range(20):
        made.forward(prompt)
    assert 20 * 0.00085 * 0.98 <= time.perf_counter() - begun < 20 * 0.00085 * 3


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("stub:size=3", "there is no 'size'; a stub has layers, hidden"),
        ("stub:layers", "layers must be a whole number, found ''"),
        ("stub:layers=-1", "layers must be a whole number, found '-1'"),
        ("stub:layers=0", "layers must be 1 or more"),
        ("stub:hidden=20", "hidden must be a multiple of 8, such as 16"),
        ("stub:vocab=100", "vocab must be 258 or more"),
        ("stub:layers=2,layers=3", "layers is given twice"),
        ("stub:states=2", "states must be 0 or 1"),
        ("stub:jitter_percent=101", "jitter_percent must be 100 or less"),
    ],
)
def test_a_wrong_name_is_refused_saying_why(model: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_spec(resolve_source(model))


def test_rows_that_contradict_themselves_are_refused() -> None:
    made = runner()
    with pytest.raises(ValueError, match="no tokens for 1 positions"):
        made.forward([PlanRow(1, 3, 1, pack([0]))])
    with pytest.raises(ValueError, match="1 pages for 5 positions"):
        made.forward([row(1, 0, range(5), [0])])
    with pytest.raises(ValueError, match="101 positions, and the model 100"):
        made.forward([row(1, 0, range(101), range(26))])
    with pytest.raises(IndexError, match="outside the pool"):
        made.forward([row(1, 0, range(4), [PAGES])])


def test_time_stays_out_of_the_fingerprint_and_sizes_do_not() -> None:
    assert parse_stub("stub:us_per_token=1").fingerprint() == parse_stub("stub").fingerprint()
    assert parse_stub("stub:layers=9").fingerprint() != parse_stub("stub").fingerprint()


SHARDED = "stub:layers=4,hidden=96,heads=6,kv_heads=3,us_per_token=0,max_len=100,vocab=300"


def one_shard(tp: Collectives, model: str, work: Callable[[StubRunner], None] | None = None) -> list[int]:
    """The tokens after a prompt in two chunks, sampled by the first shard and fed to all. work: done in between."""
    config = ModelConfig(model=model, dtype="float32", device="cpu")
    made = StubRunner(plan_rank(config, EngineConfig(page_size=4, kv_pages=PAGES), tp=tp.size, shard=tp.rank), tp=tp)
    made.pool.tensor.view(torch.uint8).random_(0, 256)
    made.warm_up()
    found: list[int] = []
    pages = list(range(20))
    rows = [row(1, 0, PROMPT[:11], pages), row(1, 11, PROMPT[11:], pages, sample=True)]
    rows += [PlanRow(1, len(PROMPT) + step, 1, pack(pages), sample=GREEDY) for step in range(3)]
    for each in rows:
        samples = made.sample([each], made.forward([each])).result()[0]
        assert tp.rank == 0 or not samples
        if each.sample is not None:
            mine = samples[0].token if samples else 0
            found.append(int(tp.broadcast(torch.tensor([mine]), 0).wait()))
            made.feed(fed_tokens({1: found[-1]}))
        elif work is not None:
            work(made)
    return found


PROMPT = [7, 201, 0, 299, 5, 5, 8, 13, 21, 34, 55, 89, 144, 233, 77, 4, 181]


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
def test_shards_say_what_one_rank_says(kv_heads: int) -> None:
    """Uneven splits and copies of KV heads included."""
    model = SHARDED.replace("kv_heads=3", f"kv_heads={kv_heads}")
    alone = one_shard(Alone(), model)
    tried = 0
    for tp in range(2, 7):
        with suppress(ConfigError):
            assert run_ranks(tp, lambda group: one_shard(group, model)) == [alone] * tp
            tried += 1
    assert tried >= 2


@pytest.mark.parametrize(("shard", "head"), [(0, 0), (1, 0), (1, 1)])
def test_a_wrong_head_on_any_shard_shows_as_another_token(shard: int, head: int) -> None:
    """Heads that are stale, and heads that are at the wrong place."""
    alone = one_shard(Alone(), SHARDED)

    def lose(made: StubRunner) -> None:
        made.pool.tensor[:10, :, :, head] = 0

    def work(group: Collectives) -> list[int]:
        return one_shard(group, SHARDED, lose if group.rank == shard else None)

    assert run_ranks(2, work)[0] != alone
    swap = SHARDED.replace("kv_heads=3", "kv_heads=6")

    def exchange(made: StubRunner) -> None:
        made.pool.tensor[:10, :, :, [0, 1]] = made.pool.tensor[:10, :, :, [1, 0]]

    found = run_ranks(2, lambda group: one_shard(group, swap, exchange if group.rank == shard else None))
    assert found[0] != one_shard(Alone(), swap)


def test_tokens_and_pool_of_the_model_with_one_head_are_what_they_were() -> None:
    """Peers of another version have to agree about them."""
    made = runner(model=NAME)
    assert generate([made], PROMPT, 4, range(20)) == [238, 192, 141, 78]
    assert xxhash.xxh3_64_hexdigest(made.pool.read(0, 0, 4).tobytes()) == "497a4ff974b8e7aa"
    assert made.fingerprint == "f84a68971aa84776b0eddf280a5a9ef4"


@pytest.mark.parametrize(
    ("above", "stage", "fault"), [(0, 0, "memory"), (1, 1, "memory"), (2, 0, "hang"), (3, 1, "hang")]
)
def test_prompts_that_break_a_stage(above: int, stage: int, fault: str) -> None:
    """The first two tokens say how, and which of the first and the last stage."""
    rows = [row(1, 0, [5, 6, 7], [0]), row(2, 0, [290, 290 + above, 3], [1])]
    assert [fault_in(rows, 290, number == 0, number == 1) for number in (0, 1)] == [
        fault if number == stage else None for number in (0, 1)
    ]
    assert fault_in(rows, 0, True, True) is None
    assert fault_in([row(1, 4, [290, 290], [0, 1]), row(2, 0, [290], [2])], 290, True, True) is None


def test_a_stage_that_runs_out_of_device_memory() -> None:
    made = runner(model=f"{NAME},fault_token=290")
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        made.forward([row(1, 0, [290, 290, 1], [0])])
    made.forward([row(2, 0, [289, 290, 1], [0])])


def test_hidden_states_depend_on_the_prompt_alone() -> None:
    """Not on chunks, pages or stages; another token changes all that follow."""

    def states(prompt: Sequence[int], size: int, stages: Sequence[StubRunner], pages: Sequence[int]) -> list[bytes]:
        found = []
        for start in range(0, len(prompt), size):
            part = prompt[start : start + size]
            rows = [PlanRow(1, start, len(part), pack(pages), pack(part), hidden=len(part))]
            hidden = None
            for stage in stages:
                hidden = stage.forward(rows, hidden)
            assert hidden is not None
            [report] = stages[-1].sample(rows, hidden).result().hidden
            assert (report.states.start, report.states.size) == (start, 16)
            found += [report.states.at(start + index).data for index in range(len(part))]  # type: ignore[union-attr]
        return found

    prompt = list(range(20))
    expected = states(prompt, 20, [runner(page_size=100)], [0])
    assert len(set(expected)) == 20
    assert states(prompt, 7, [runner(range(1)), runner(range(1, 4))], [5, 3, 1, 7, 9]) == expected
    other = states([*prompt[:10], 99, *prompt[11:]], 7, [runner()], range(5))
    assert [mine == theirs for mine, theirs in zip(expected, other, strict=True)] == [True] * 10 + [False] * 10


def test_draft_tokens_of_the_stub_are_certain() -> None:
    sampled = runner().execute([PlanRow(1, 0, 3, pack([0]), pack([1, 2, 3]), sample=GREEDY, draft_top_k=4)]).samples[0]
    assert sampled.draft is not None
    assert sampled.draft.ids[0] == sampled.token
    assert sampled.draft.probs[0] == pytest.approx(1)
    assert len(sampled.draft.ids) == 4
