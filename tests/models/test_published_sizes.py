"""`headrace check` of models in their published sizes and forms: what they take on a machine that has the memory.

The files have headers, and holes in the place of weights, which nothing reads.
"""

import json
import struct
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import AutoConfig

from headrace.cli import commands
from headrace.engine.library.model import model_class, on_meta
from headrace.engine.model.stub import stub_tokenizer

Stored = tuple[str, str, tuple[int, ...]]
"""Name, dtype and shape of a tensor in a file."""
BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1}


def plain(name: str, shape: tuple[int, ...]) -> Iterator[Stored]:
    yield name, "BF16", shape


def in_blocks(name: str, shape: tuple[int, ...]) -> Iterator[Stored]:
    """DeepSeek-V3: an expert's matrices apart, and all of a layer's in float8 with a scale for 128 x 128."""
    if ".experts." in name and len(shape) == 3:
        experts, rows, columns = shape
        parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
        for expert in range(experts):
            for part in parts:
                own = f"{name.rpartition('.')[0]}.{expert}.{part}.weight"
                yield from in_blocks(own, (rows // len(parts), columns))
    elif name.endswith("proj.weight") or "_a_proj" in name or "_b_proj" in name:
        yield name, "F8_E4M3", shape
        yield f"{name}_scale_inv", "F32", tuple(-(-size // 128) for size in shape)
    else:
        yield from plain(name, shape)


def in_mxfp4(name: str, shape: tuple[int, ...]) -> Iterator[Stored]:
    """gpt-oss: matrices of experts in 4 bits, with a scale for 32."""
    if len(shape) == 3:
        experts, inputs, outputs = shape
        yield f"{name}_blocks", "U8", (experts, outputs, inputs // 32, 16)
        yield f"{name}_scales", "U8", (experts, outputs, inputs // 32)
    else:
        yield from plain(name, shape)


class Model(NamedTuple):
    kind: str
    fields: dict[str, Any]
    form: Callable[[str, tuple[int, ...]], Iterator[Stored]]
    config: dict[str, Any]
    kv_bytes: int
    """Of a token, in bfloat16."""


MODELS = {
    "DeepSeek-V3": Model(
        "deepseek_v3",
        {"max_position_embeddings": 163840},
        in_blocks,
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
        61 * (512 + 64) * 2,
    ),
    "gpt-oss-120b": Model(
        "gpt_oss",
        {
            "hidden_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8,
            "head_dim": 64, "sliding_window": 128, "num_local_experts": 128, "num_experts_per_tok": 4,
            "intermediate_size": 2880, "max_position_embeddings": 131072,
        },
        in_mxfp4,
        {"quantization_config": {"quant_method": "mxfp4"}},
        36 * 2 * 8 * 64 * 2,
    ),
    "Qwen3.5 9B": Model("qwen3_5_text", {}, plain, {}, 8 * 2 * 4 * 256 * 2),
    "Gemma 3 27B": Model(
        "gemma3_text",
        {
            "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62, "num_attention_heads": 32,
            "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024, "vocab_size": 262208,
            "max_position_embeddings": 131072,
        },
        plain,
        {},
        62 * 2 * 16 * 128 * 2,
    ),
}  # fmt: skip


def publish(folder: Path, model: Model) -> int:
    """Write a model's files. Returns the number of its parameters."""
    config = AutoConfig.for_model(model.kind, **model.fields)
    cls = model_class(config)
    shapes = {name: tuple(weight.shape) for name, weight in on_meta(cls, config).state_dict().items()}
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight")
    fields = {**config.to_dict(), **model.config, "architectures": [cls.__name__], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(fields, default=str))
    stub_tokenizer("stub:vocab=1000").save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    stored = [each for name, shape in shapes.items() for each in model.form(name, shape)]
    for number, tensors in enumerate(files(stored)):
        header, end = {}, 0
        for name, dtype, shape in tensors:
            start, end = end, end + prod(shape) * BYTES[dtype]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        with (folder / f"model-{number + 1:05d}.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
    return sum(map(prod, shapes.values()))


def files(tensors: list[Stored], most: int = 5 << 30) -> Iterator[list[Stored]]:
    """Tensors of files of 5 GiB."""
    own, size = [], 0
    for each in tensors:
        more = prod(each[2]) * BYTES[each[1]]
        if own and size + more > most:
            yield own
            own, size = [], 0
        own.append(each)
        size += more
    yield own


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_check_says_what_a_model_takes(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = MODELS[name]
    parameters = publish(tmp_path, model)
    flags = ["--model", str(tmp_path), "--max-model-len", "8192", "--kv-pages", "512", "--page-size", "16"]
    assert commands.main(["check", *flags, "--dtype", "float16", "--memory-gib", "4096"]) == 0
    memory = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("# memory"))
    weights, dtype = memory.partition("weights ")[2].split(" MiB (")[0], memory.partition("(")[2].partition(")")[0]
    held = {"float32": 4, "float16": 2}[dtype]
    assert float(weights) == pytest.approx(parameters * held / (1 << 20), rel=0.01)
    assert f"{model.kv_bytes} bytes per token" in memory
    assert commands.main(["check", *flags, "--dtype", "float16", "--memory-gib", "16"]) == 2
    assert "the weights take" in capsys.readouterr().err


@pytest.mark.full
def test_deepseek_v3_in_float8_on_eight_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """141 GB each, of H200, are 131 GiB."""
    publish(tmp_path, MODELS["DeepSeek-V3"])
    flags = f"--model {tmp_path} --device cuda --dtype bfloat16 --tp 8 --max-model-len 32768".split()
    assert commands.main(["check", *flags, "--memory-gib", "128"]) == 0
    memory = [line for line in capsys.readouterr().out.splitlines() if line.startswith("# memory")]
    assert len(memory) == 8
    for line in memory:
        weights = float(line.partition("weights ")[2].split(" MiB (float8 and bfloat16)")[0]) / 1024
        assert 80 < weights < 88
    assert commands.main(["check", *flags, "--memory-gib", "80"]) == 2
    assert "the weights take" in capsys.readouterr().err
    assert commands.main(["check", *flags, "--memory-gib", "128", "--compile", "off"]) == 2
