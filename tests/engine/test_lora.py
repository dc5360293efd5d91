"""LoRA adapters beside models that peft has merged them into: both decoders, ragged batches, shards, stages, 8 bits."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from headrace.core.types.errors import ConfigError
from headrace.engine.collectives.operations import Collectives
from headrace.engine.runner import ModelRunner
from tests.engine.collectives.threads import run_ranks
from tests.engine.library_shards import load_one_at_a_time
from tests.engine.lora import Adapter, save_adapter
from tests.engine.models import (
    Prompt,
    Saved,
    make_runner,
    random_tokens,
    reference,
    reported_logprobs,
)

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "all": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "some": {"r": 5, "lora_alpha": 3, "target_modules": ["v_proj", "down_proj", "up_proj"], "use_rslora": True},
    "patterns": {
        "r": 2,
        "lora_alpha": 2,
        "target_modules": r".*\.(1|2)\..*(q_proj|o_proj|gate_proj)",
        "rank_pattern": {r"model.layers.1.self_attn.q_proj": 7},
        "alpha_pattern": {"o_proj": 9},
    },
    "attention": {"r": 3, "lora_alpha": 6, "target_modules": ATTENTION},
    "latent": {"r": 3, "lora_alpha": 6, "target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]},
    "expanded": {"r": 3, "target_modules": ["kv_b_proj"]},
}
TOLERANCE = 3e-4
LENGTHS = (33, 20, 41, 17)


class Site(NamedTuple):
    base: Saved
    adapters: dict[str, Adapter]

    @property
    def flags(self) -> list[str]:
        return [adapter.flag(name) for name, adapter in self.adapters.items()]

    def model(self, adapter: str) -> Any:
        return self.adapters[adapter].model if adapter else self.base.model


Sites = Callable[..., Site]


@pytest.fixture(scope="session")
def sites(saved: Callable[[str], Saved], tmp_path_factory: pytest.TempPathFactory) -> Sites:
    """A model of CONFIGS with adapters of KINDS."""
    made: dict[tuple[str, ...], Site] = {}

    def get(name: str, *kinds: str) -> Site:
        if (name, *kinds) not in made:
            base = saved(name)
            adapters = {
                kind: save_adapter(base.model, tmp_path_factory.mktemp(kind), seed, **KINDS[kind])
                for seed, kind in enumerate(kinds)
            }
            made[name, *kinds] = Site(base, adapters)
        return made[name, *kinds]

    return get


def mixed(runner: ModelRunner, adapters: Sequence[str], chunk: int = 256) -> list[Tensor]:
    """Logprobs after prompts that go through these adapters ("": none), all of them in every pass; the last token of
    each comes alone, as in decoding."""
    prompts = prompts_of(runner, adapters)
    longest = max(len(prompt.tokens) for prompt, _ in prompts)
    for start in range(0, longest, chunk):
        rows = [
            prompt.row(start, min(chunk, len(prompt.tokens) - 1 - start), adapter=fingerprint)
            for prompt, fingerprint in prompts
            if start < len(prompt.tokens) - 1
        ]
        if rows:
            runner.execute(rows)
    last = [prompt.row(len(prompt.tokens) - 1, 1, adapter=fingerprint) for prompt, fingerprint in prompts]
    found = {sampled.request: reported_logprobs(sampled) for sampled in runner.execute(last).samples}
    return [found[number] for number in range(len(adapters))]


def prompts_of(runner: ModelRunner, adapters: Sequence[str]) -> list[tuple[Prompt, str]]:
    return [
        (
            Prompt(number, random_tokens(length, number), [number * 4 + page for page in range(4)], 16),
            runner.adapters[adapter] if adapter else "",
        )
        for number, (adapter, length) in enumerate(zip(adapters, LENGTHS, strict=False))
    ]


def expected(site: Site, adapters: Sequence[str]) -> list[Tensor]:
    return [
        reference(site.model(adapter), random_tokens(length, number))[0][-1]
        for number, (adapter, length) in enumerate(zip(adapters, LENGTHS, strict=False))
    ]


def close(found: Sequence[Tensor], wanted: Sequence[Tensor], tolerance: float = TOLERANCE) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


def test_adapters_of_these_tests_change_what_is_computed(sites: Sites) -> None:
    site = sites("llama-bias", "all", "some", "patterns")
    logprobs = [expected(site, [name])[0] for name in ("", *site.adapters)]
    for number, one in enumerate(logprobs):
        assert all((one - other).abs().max() > 0.1 for other in logprobs[:number])


@pytest.mark.parametrize("chunk", [256, 7])
@pytest.mark.parametrize("decoder", ["native", "library"])
@pytest.mark.parametrize("name", ["llama-bias", "qwen2", "qwen3"])
def test_two_adapters_and_none_in_one_batch(sites: Sites, name: str, decoder: str, chunk: int) -> None:
    site = sites(name, "all", "some", "patterns")
    runner = make_runner(site.base.folder, decoder=decoder, lora=site.flags)
    rows = ["all", "", "patterns", "some"]
    close(mixed(runner, rows, chunk), expected(site, rows))
    assert runner.same_bits in (None, True)


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_attention_of_models_with_experts(sites: Sites, name: str) -> None:
    site = sites(name, "attention")
    rows = ["attention", "", "attention"]
    close(mixed(make_runner(site.base.folder, lora=site.flags), rows), expected(site, rows))


def test_latents_by_the_library(sites: Sites) -> None:
    site = sites("deepseek-v3", "latent")
    rows = ["latent", "", "latent"]
    close(mixed(make_runner(site.base.folder, decoder="library", lora=site.flags), rows), expected(site, rows))
    with pytest.raises(
        ConfigError, match=r"--lora latent: model.layers.0.self_attn.* is not adapted by our own layers"
    ):
        make_runner(site.base.folder, lora=site.flags)


def test_a_module_that_is_computed_for_all_positions_is_refused(sites: Sites) -> None:
    site = sites("deepseek-v3", "expanded")
    with pytest.raises(ConfigError, match="--lora expanded: an adapted module computes other rows than the pass has"):
        make_runner(site.base.folder, decoder="library", lora=site.flags)


@pytest.mark.parametrize("decoder", ["native", "library"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_neighbours_and_chunks_change_no_bit(sites: Sites, decoder: str, dtype: str, quantize: str) -> None:
    """And rows without an adapter have the bits that they have where there are none."""
    site = sites("qwen3", "all", "some")
    options = {"decoder": decoder, "dtype": dtype, "quantize": quantize}
    runner = make_runner(site.base.folder, lora=site.flags, **options)
    plain = make_runner(site.base.folder, **options)
    rows = ["all", "", "some", "all"]
    together = mixed(runner, rows)
    for number, adapter in enumerate(rows):
        others = ["", "some", "", ""]
        others[number] = adapter
        assert torch.equal(mixed(runner, others)[number], together[number])
        assert torch.equal(mixed(runner, rows, 7)[number], together[number])
    assert torch.equal(mixed(plain, ["", "", "", ""])[1], together[1])


@pytest.mark.parametrize("decoder", ["native", "library"])
def test_weights_in_8_bits(sites: Sites, decoder: str) -> None:
    """As far from full precision as the model itself is in 8 bits, or little more."""
    site = sites("qwen2", "all", "some")
    runner = make_runner(site.base.folder, decoder=decoder, quantize="int8", lora=site.flags)
    rows = ["", "all", "some", "all"]
    base, *others = (
        float((found - wanted).abs().max())
        for found, wanted in zip(mixed(runner, rows), expected(site, rows), strict=True)
    )
    assert 1e-3 < base < 1.0
    assert all(gap < 3 * base for gap in others)


@pytest.mark.parametrize(
    ("shape", "decoder"),
    [((6, 2, 2), "native"), ((6, 3, 2), "native"), ((4, 1, 2), "native"), ((6, 2, 2), "library")],
)
@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_shards(
    reshaped: Callable[[str, int, int], Saved],
    tmp_path: Path,
    shape: tuple[int, int, int],
    decoder: str,
    quantize: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load_one_at_a_time(monkeypatch)
    heads, kv_heads, tp = shape
    base = reshaped("llama-bias", heads, kv_heads)
    kinds = ("all", "some")
    site = Site(base, {kind: save_adapter(base.model, tmp_path / kind, 5, **KINDS[kind]) for kind in kinds})
    rows = ["all", "some", "", "all"]

    def rank(collectives: Collectives) -> list[Tensor]:
        runner = make_runner(base.folder, tp=collectives, lora=site.flags, quantize=quantize, decoder=decoder)
        prompts = prompts_of(runner, rows)
        results = runner.execute([prompt.row(0, len(prompt.tokens), adapter=of) for prompt, of in prompts])
        return [reported_logprobs(sampled) for sampled in results.samples]

    found = run_ranks(tp, rank)[0]
    close(found, expected(site, rows), TOLERANCE if quantize == "none" else 1.0)


@pytest.mark.parametrize("decoder", ["native", "library"])
def test_stages_have_the_adapters_of_their_layers(sites: Sites, decoder: str) -> None:
    site = sites("qwen3", "all", "some")
    options: dict[str, Any] = {"lora": site.flags, "decoder": decoder}
    first = make_runner(site.base.folder, layers=range(2), **options)
    last = make_runner(site.base.folder, layers=range(2, 3), **options)
    assert first.adapters == last.adapters
    rows = ["some", "", "all"]
    plan = [prompt.row(0, len(prompt.tokens), adapter=of) for prompt, of in prompts_of(first, rows)]
    found = last.sample(plan, last.forward(plan, first.forward(plan))).result().samples
    close([reported_logprobs(sampled) for sampled in found], expected(site, rows))


def test_a_row_of_an_adapter_that_is_not_here(sites: Sites) -> None:
    site = sites("llama-bias", "all", "some", "patterns")
    runner = make_runner(site.base.folder, lora=site.flags[:1])
    prompt = Prompt(1, random_tokens(5), [0], 16)
    with pytest.raises(ValueError, match="adapter deadbeef, which is not here"):
        runner.execute([prompt.row(0, 5, adapter="deadbeef")])


def test_one_adapter_under_two_names_is_held_once(sites: Sites) -> None:
    site = sites("llama-bias", "all", "some", "patterns")
    adapter = site.adapters["all"]
    runner = make_runner(site.base.folder, lora=[adapter.flag("one"), adapter.flag("two")])
    assert runner.adapters["one"] == runner.adapters["two"]
    close(mixed(runner, ["one", "two"]), expected(site, ["all", "all"]))
