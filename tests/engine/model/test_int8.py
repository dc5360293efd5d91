"""Models in 8 bits: near the model itself, from every kind of file, under another fingerprint, and only on the CPU."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize

import headrace.engine.runner
from headrace.core.config import EngineConfig
from headrace.core.types.errors import ConfigError
from headrace.engine.device import Computation, computes_in
from headrace.engine.kv.memory_plan import plan_memory
from headrace.engine.model.checkpoint import open_checkpoint
from headrace.engine.model.int8 import Int8Weight
from headrace.engine.model.sharding import part_of
from headrace.engine.model.source import load_spec, resolve_source
from headrace.engine.native.int8 import PackedInt8
from headrace.engine.runner import ModelRunner
from tests.cpus import KINDS, cpuinfo
from tests.engine.models import Prompt, Saved, make_runner, random_tokens, reported_logprobs, run_chunks

PAGES = list(range(10))


def logprobs_of(runner: ModelRunner, tokens: list[int]) -> torch.Tensor:
    return reported_logprobs(run_chunks(runner, Prompt(1, tokens, PAGES, 16).chunks(64)))


def divergence(one: torch.Tensor, other: torch.Tensor) -> float:
    """Kullback-Leibler divergence of two distributions, in nats."""
    return float((one.exp() * (one - other)).sum())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama-bias", "qwen3"])
def test_a_model_in_8_bits_is_near_itself(saved: Callable[[str], Saved], name: str, dtype: str, kind: str) -> None:
    """Random models of 48 hidden values have sharp distributions: a fiftieth of a nat is little there."""
    folder = saved(name).folder
    whole, in_8_bits = (
        make_runner(folder, dtype=dtype, quantize=quantize, cpuinfo=cpuinfo(kind)) for quantize in ("none", "int8")
    )
    found = [divergence(*(logprobs_of(runner, random_tokens(90, seed)) for runner in (whole, in_8_bits)))
             for seed in range(4)]  # fmt: skip
    assert 1e-6 < np.mean(found) < 0.2
    assert in_8_bits.fingerprint != whole.fingerprint
    assert in_8_bits.geometry == whole.geometry


def test_kernels_and_torch_compute_the_same_model(
    saved: Callable[[str], Saved], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, tokens = saved("llama").folder, random_tokens(90)
    native = make_runner(folder, quantize="int8")
    assert isinstance(native._decoder._layers[0].attention.qkv.weight, PackedInt8)
    monkeypatch.setattr(headrace.engine.runner, "load_kernels", lambda **_: None)
    plain = make_runner(folder, quantize="int8")
    assert type(plain._decoder._layers[0].attention.qkv.weight) is Int8Weight
    # Sums in another order round a few activations to a neighbouring number.
    assert divergence(logprobs_of(native, tokens), logprobs_of(plain, tokens)) < 1e-3


@pytest.fixture(scope="module")
def q8_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with its linear layers in GGUF's own 8 bits, Q8_0, and one of them in 32."""
    source = GGUFReader(resolve_source("smollm2").path)
    path = tmp_path_factory.mktemp("q8") / "model.gguf"
    writer = GGUFWriter(path, "llama")
    for field in source.fields.values():
        if not field.name.startswith(("GGUF.", "tokenizer.", "general.architecture", "general.quantization")):
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for tensor in source.tensors:
        floats = dequantize(tensor.data, tensor.tensor_type)
        if floats.ndim == 2 and tensor.name != "blk.3.attn_q.weight":
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(tensor.name, quantize(floats, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, floats)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_blocks_of_a_q8_file_are_used_as_they_are(q8_file: Path) -> None:
    source = resolve_source(str(q8_file))
    spec = load_spec(source)
    checkpoint = open_checkpoint(source, spec)
    for name, shape in (("q_proj", (576, 576)), ("k_proj", (192, 576)), ("v_proj", (192, 576))):
        full = f"model.layers.1.self_attn.{name}.weight"
        stored = checkpoint.read_int8(full, shape)
        assert stored is not None
        assert stored.scales.shape == (shape[0], 18)
        values = stored.values.view(shape[0], 18, 32).float() * stored.scales[:, :, None]
        assert torch.equal(values.view(shape), checkpoint.read(full, shape))
    assert checkpoint.read_int8("model.layers.3.self_attn.q_proj.weight", (576, 576)) is None


def test_parts_of_a_q8_file_are_used_as_they_are(q8_file: Path) -> None:
    """Rows of any number; columns in whole blocks, since others would need other scales."""
    source = resolve_source(str(q8_file))
    checkpoint = open_checkpoint(source, load_spec(source))
    name, shape = "model.layers.1.self_attn.q_proj.weight", (576, 576)
    whole = checkpoint.read_int8(name, shape)
    part = checkpoint.read_int8(name, shape, range(192, 576), range(64, 160))
    assert whole is not None
    assert part is not None
    assert part.inputs == 96
    assert torch.equal(part.values, whole.values[192:, 64:160])
    assert torch.equal(part.scales, whole.scales[192:, 2:5])
    assert checkpoint.read_int8(name, shape, None, range(60, 160)) is None
    cut = checkpoint.read(name, shape, range(192, 576), range(60, 160))
    assert torch.equal(cut, checkpoint.read(name, shape)[192:, 60:160])


def test_a_q8_file_computes_what_its_weights_say(q8_file: Path) -> None:
    """Beside the same weights in float32. Layer 3 mixes kinds, so it is quantised again."""
    tokens = [(7 * index) % 4000 + 20 for index in range(120)]

    def top(quantize: str) -> tuple[int, torch.Tensor]:
        runner = make_runner(str(q8_file), quantize=quantize)
        sampled = run_chunks(runner, Prompt(1, tokens, PAGES, 16).chunks(64))
        if quantize == "int8":
            weights = [layer.attention.qkv.weight for layer in runner._decoder._layers[2:5]]
            assert [isinstance(weight, PackedInt8) and weight.record.block for weight in weights] == [32, 64, 32]
        hidden = runner.forward([Prompt(2, tokens, PAGES, 16).row(0, len(tokens))])
        return sampled.token, torch.log_softmax(runner._decoder.logits(hidden[-1:])[0], 0)

    (token, exact), (other, in_8_bits) = top("none"), top("int8")
    assert token == other
    assert divergence(exact, in_8_bits) < 0.05


def test_memory_counts_linear_layers_as_bytes() -> None:
    spec = load_spec(resolve_source("smollm2"))
    plans = {
        int8: plan_memory(
            part_of(spec), Computation("cpu", "bfloat16", native=False), 16, 512, 8 << 30, max_model_len=512, int8=int8
        )
        for int8 in (False, True)
    }
    table = spec.vocab_size * spec.hidden_size
    assert plans[False].weight_dtype == "float32"
    assert plans[True].weight_dtype == "bfloat16"
    linear = plans[False].weight_bytes // 4 - table
    assert plans[True].weight_bytes == pytest.approx(2 * table + linear, rel=1e-3)
    assert "int8 and bfloat16" in plans[True].explanation


def test_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="--quantize int8 is for the CPU, not for cuda; write --device cpu"):
        computes_in("bfloat16", "cuda", "int8", EngineConfig().cpuinfo)
