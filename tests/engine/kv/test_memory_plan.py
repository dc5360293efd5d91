"""Sizing the pool, and choosing device and dtype."""

from pathlib import Path

import pytest
from msgspec import structs

from headrace.core.config import AttentionChoice, EngineConfig, ModelConfig
from headrace.core.types.errors import ConfigError
from headrace.engine import load_plan
from headrace.engine.device import (
    Computation,
    available_memory,
    has_matrix_units,
    has_wide_vectors,
    resolve_device,
    resolve_dtype,
)
from headrace.engine.kv.memory_plan import (
    COPY_BYTES,
    FLASHINFER_BYTES,
    PRODUCT_BYTES,
    activation_bytes,
    add_host_tier,
    encoding_bytes,
    graph_bytes,
    plan_memory,
    stage_geometry,
    weight_count,
)
from headrace.engine.load_plan import ModelTerms
from headrace.engine.model.config import spec_from_config
from headrace.engine.model.graph_sizes import graph_sizes
from headrace.engine.model.library_spec import Encoding, LibrarySpec
from headrace.engine.model.sharding import part_of, split_model
from headrace.engine.model.source import ModelSource
from tests.cpus import cpuinfo
from tests.engine.models import CONFIGS, Saved, save_model

FLOAT32 = Computation("cpu", "float32", native=True)
MIB = 1 << 20


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_counted_exactly(name: str, tmp_path: Path) -> None:
    saved: Saved = save_model(CONFIGS[name], tmp_path)
    spec = spec_from_config(saved.model.config.to_dict())
    biases = [values for name, values in saved.model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert weight_count(part_of(spec)) == saved.model.num_parameters() + sum(values.numel() for values in biases)
    parts = weight_count(part_of(spec, range(1))) + weight_count(part_of(spec, range(1, 3)))
    repeated = spec.vocab_size * spec.hidden_size if spec.tied else 0  # a tied head is held at both ends
    assert parts == weight_count(part_of(spec)) + repeated


def test_pages_of_our_own_choice() -> None:
    spec = spec_from_config(CONFIGS["llama"].to_dict() | {"architectures": ["LlamaForCausalLM"]})
    page = stage_geometry(part_of(spec), "float32", 16).page_bytes
    roomy = plan_memory(part_of(spec), FLOAT32, 16, 0, 10_000 * MIB)
    assert roomy.kv_pages == 65536 // 16
    assert roomy.page_bytes == page
    assert "65536 tokens" in roomy.explanation
    tight = plan_memory(part_of(spec), FLOAT32, 16, 0, 100 * page, max_model_len=64)
    assert tight.kv_pages == 40
    assert "40% of the available memory" in tight.explanation
    assert tight.kv_bytes + tight.weight_bytes <= 100 * page
    assert plan_memory(part_of(spec), FLOAT32, 16, 32, 10_000 * MIB).kv_pages == 32


def test_weights_are_held_wide_where_there_is_room() -> None:
    spec = spec_from_config(CONFIGS["llama"].to_dict() | {"architectures": ["LlamaForCausalLM"]})
    count = weight_count(part_of(spec))
    for available, native, dtype in (
        (16 * count, False, "float32"),
        (16 * count - 1, False, "bfloat16"),
        (16 * count, True, "bfloat16"),
    ):
        plan = plan_memory(
            part_of(spec), Computation("cpu", "bfloat16", native=native), 16, 1, available, max_model_len=16
        )
        assert plan.weight_dtype == dtype
        assert plan.weight_bytes == count * (4 if dtype == "float32" else 2)
        assert dtype in plan.explanation


def test_a_host_tier_takes_the_room_that_is_left() -> None:
    spec = spec_from_config(CONFIGS["llama"].to_dict() | {"architectures": ["LlamaForCausalLM"]})
    plan = plan_memory(part_of(spec), FLOAT32, 16, 32, 10_000 * MIB)
    assert add_host_tier(plan, 0, 0) is plan
    room = 100 * plan.page_bytes
    tiered = add_host_tier(plan, 100, room)
    assert (tiered.host_bytes, tiered.kv_pages) == (room, 32)
    assert tiered.explanation.startswith(plan.explanation)
    assert f"host tier {room / MIB:.1f} MiB = 100 pages" in tiered.explanation
    with pytest.raises(
        ConfigError, match=r"101 pages of the host tier take .* left .*; write --host-pages 100 or less"
    ):
        add_host_tier(plan, 101, room)
    with pytest.raises(ConfigError, match=r"0.0 MiB of memory are left for them; write --host-pages 0 or less"):
        add_host_tier(plan, 1, -room)


def test_what_does_not_fit_is_refused() -> None:
    spec = spec_from_config(CONFIGS["llama"].to_dict() | {"architectures": ["LlamaForCausalLM"]})
    page = stage_geometry(part_of(spec), "float32", 16).page_bytes
    weights = weight_count(part_of(spec)) * 4
    with pytest.raises(ConfigError, match=r"the weights take .* are available"):
        plan_memory(part_of(spec), FLOAT32, 16, 0, weights)
    with pytest.raises(ConfigError, match="31 KV pages of 16 tokens hold less than one request of max_model_len 512"):
        plan_memory(part_of(spec), FLOAT32, 16, 31, 10_000 * MIB)
    with pytest.raises(ConfigError, match="write --max-model-len 160 or less"):
        plan_memory(part_of(spec), FLOAT32, 16, 0, weights + 10 * page)
    with pytest.raises(ConfigError, match=r"of KV pages do not fit.* write --kv-pages 50 or less, or leave it out"):
        plan_memory(part_of(spec), FLOAT32, 16, 100, weights + 50 * page)
    with pytest.raises(ConfigError, match=r"of KV pages do not fit.* write --max-model-len 320 or less"):
        plan_memory(part_of(spec), FLOAT32, 16, 100, weights + 20 * page)
    with pytest.raises(ConfigError, match="max_model_len 513 is above 512"):
        plan_memory(part_of(spec), FLOAT32, 16, 0, 10_000 * MIB, max_model_len=513)


def test_torch_is_asked_about_gpus_only_where_there_is_a_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.engine.device._gpus", lambda: 2)
    monkeypatch.setattr("headrace.engine.device._GPU_DRIVERS", (tmp_path / "none", tmp_path))
    assert resolve_device("auto") == "cuda"
    monkeypatch.setattr("headrace.engine.device._GPU_DRIVERS", (tmp_path / "none",))
    assert resolve_device("auto") == "cpu"
    assert resolve_device("cuda:1") == "cuda:1", "who names a GPU is not second-guessed"
    with pytest.raises(ConfigError, match=r"^device cuda:2 is not available here; the last one is cuda:1$"):
        resolve_device("cuda:2")
    assert resolve_device("cuda:2", elsewhere=True) == "cuda:2"


def test_dtype_and_kernels_follow_the_flags_of_the_cpu(tmp_path: Path) -> None:
    plain, units, arm, none = cpuinfo("avx2"), cpuinfo("bf16"), str(tmp_path / "arm"), str(tmp_path / "none")
    Path(arm).write_text("processor\t: 0\nFeatures\t: fp asimd i8mm bf16\n")
    assert [resolve_dtype("auto", "cpu", each) for each in (plain, units, arm, none)] == [
        "float32", "bfloat16", "bfloat16", "float32",
    ]  # fmt: skip
    assert [has_wide_vectors(each) for each in (plain, units, arm, none)] == [False, True, False, False]
    amd = Path(units).read_text()
    for vendor, flag, expected in (
        ("AuthenticAMD", "", "bfloat16"), ("GenuineIntel", "", "float32"), ("GenuineIntel", " amx_bf16", "bfloat16"),
    ):  # fmt: skip
        of_vendor = tmp_path / f"{vendor}{flag}"
        of_vendor.write_text(f"vendor_id : {vendor}\n" + amd.replace("avx512_bf16", f"avx512_bf16{flag}"))
        assert resolve_dtype("auto", "cpu", str(of_vendor)) == expected
    for each in (plain, units):
        assert has_matrix_units("float32", "cpu", each)
        assert not has_matrix_units("float16", "cpu", each)
        assert resolve_dtype("auto", "cuda", each) == "bfloat16"
        assert resolve_dtype("float16", "cpu", each) == "float16"


def test_devices() -> None:
    assert resolve_device("cpu") == "cpu"
    for unknown in ("tpu", "cuda:", "cuda:x", "cuda:-1"):
        with pytest.raises(ConfigError, match=f"'{unknown}' is not supported; supported are auto, cpu"):
            resolve_device(unknown)
    assert 0 < available_memory("cpu") < 1 << 50


def test_a_gpus_pool_takes_a_share_of_what_weights_and_activations_leave() -> None:
    spec = spec_from_config(CONFIGS["llama"].to_dict() | {"architectures": ["LlamaForCausalLM"]})
    part, gpu = part_of(spec), Computation("cuda:0", "bfloat16", native=True)
    available, tokens = 300 * MIB, 8192
    activations = activation_bytes(part, "bfloat16", tokens, 64)
    for share, expected in ((0.0, 0.9), (0.5, 0.5)):
        plan = plan_memory(part, gpu, 16, 0, available, max_model_len=64, pass_tokens=tokens, kv_share=share)
        left = available - plan.weight_bytes - activations - PRODUCT_BYTES - COPY_BYTES
        assert expected * left - plan.page_bytes < plan.kv_bytes <= expected * left
        assert f"({expected:.0%} of what is left)" in plan.explanation
        assert f"activations of 8192 tokens {activations / MIB:.1f} MiB" in plan.explanation
    on_cpu = plan_memory(part, FLOAT32, 16, 0, available, max_model_len=64, pass_tokens=tokens, kv_share=0.5)
    assert on_cpu.kv_bytes == pytest.approx(0.5 * (available - on_cpu.weight_bytes), rel=0.01)
    with pytest.raises(ConfigError, match=r"activations of 8192 tokens .* MiB and 1.0 MiB are available"):
        plan_memory(part, gpu, 16, 0, MIB, max_model_len=64, pass_tokens=tokens)


def test_a_gpus_pool_leaves_room_for_graphs() -> None:
    spec = spec_from_config(CONFIGS["llama"].to_dict() | {"architectures": ["LlamaForCausalLM"]})
    part, gpu, sizes = part_of(spec), Computation("cuda:0", "bfloat16", native=True), graph_sizes(100)
    plans = [plan_memory(part, gpu, 16, 0, 400 * MIB, max_model_len=64, graphs=each) for each in ((), sizes)]
    captured = graph_bytes(part, "bfloat16", sizes)
    taken = captured + PRODUCT_BYTES  # products are on a second stream, too
    assert len(sizes) == 8, "1, 2, 4 … 128"
    assert taken > 8 * 4 * 200_000
    assert plans[0].kv_bytes - plans[1].kv_bytes == pytest.approx(0.9 * taken, abs=plans[0].page_bytes)
    assert f"CUDA graphs {captured / MIB:.1f} MiB" in plans[1].explanation
    with pytest.raises(ConfigError, match=r"CUDA graphs \(--cuda-graphs off\) .* MiB and 1.0 MiB are available"):
        plan_memory(part, gpu, 16, 0, MIB, max_model_len=64, graphs=sizes)


def test_a_gpus_pool_leaves_room_for_workspaces() -> None:
    """Of products and copies always, of FlashInfer where it may be used; on a CPU of none."""
    spec = spec_from_config(CONFIGS["llama"].to_dict() | {"architectures": ["LlamaForCausalLM"]})
    part, gpu = part_of(spec), Computation("cuda:0", "bfloat16", native=True)
    plans = [
        plan_memory(part, computation, 16, 0, 400 * MIB, max_model_len=64, kv_share=0.9, flashinfer=flashinfer)
        for computation in (FLOAT32, gpu)
        for flashinfer in (False, True)
    ]
    assert plans[0] == plans[1]
    assert "workspaces" not in plans[0].explanation
    assert "workspaces of products 64.0 MiB; copies of KV 64.0 MiB; KV " in plans[2].explanation
    assert "FlashInfer" not in plans[2].explanation
    assert "FlashInfer 192.0 MiB" in plans[3].explanation
    assert plans[2].kv_bytes - plans[3].kv_bytes == pytest.approx(0.9 * FLASHINFER_BYTES, abs=plans[2].page_bytes)
    with pytest.raises(ConfigError, match=r"FlashInfer \(--attention torch\) 192.0 MiB and 200.0 MiB are available"):
        plan_memory(part, gpu, 16, 0, 200 * MIB, max_model_len=64, flashinfer=True)


@pytest.mark.parametrize(
    ("attention", "installed", "name", "planned"),
    [
        ("auto", True, "llama", True),
        ("auto", False, "llama", False),
        ("flashinfer", False, "llama", True),
        ("torch", True, "llama", False),
        ("triton", True, "llama", False),
        ("auto", True, "deepseek-v3", True),
    ],
)
def test_flashinfer_is_planned_where_it_is_tried(
    attention: AttentionChoice, installed: bool, name: str, planned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_plan, "find_spec", lambda _: object() if installed else None)
    config = CONFIGS[name].to_dict()
    spec = spec_from_config(config | {"architectures": [type(CONFIGS[name]).__name__.replace("Config", "ForCausalLM")]})
    terms = ModelTerms(
        ModelConfig(), EngineConfig(attention=attention), ModelSource("folder", Path()), spec,  # type: ignore[arg-type]
        Computation("cuda:0", "bfloat16", native=True), 64,
    )  # fmt: skip
    assert ("FlashInfer" in terms.plan(part_of(spec), 8, 1 << 30).memory.explanation) == planned


@pytest.mark.parametrize(
    ("name", "engine", "device", "tp", "experts", "planned"),
    [
        ("llama", {}, "cuda:0", 1, None, True),
        ("llama", {"cuda_graphs": "off"}, "cuda:0", 1, None, False),
        ("llama", {}, "cpu", 1, None, False),
        ("llama", {}, "cuda:0", 2, None, True),
        ("qwen3-moe", {}, "cuda:0", 1, None, True),
        ("qwen3-moe", {}, "cuda:0", 1, 8, True),
        ("qwen3-moe", {}, "cuda:0", 1, 4, False),
        ("deepseek-v3", {}, "cuda:0", 1, None, True),
    ],
)
def test_graphs_are_planned_where_they_are_captured(
    name: str, engine: dict[str, str], device: str, tp: int, experts: int | None, planned: bool
) -> None:
    spec = spec_from_config(
        CONFIGS[name].to_dict() | {"architectures": [type(CONFIGS[name]).__name__.replace("Config", "ForCausalLM")]}
    )
    terms = ModelTerms(
        ModelConfig(), EngineConfig(**engine), ModelSource("folder", Path()), spec,  # type: ignore[arg-type]
        Computation(device, "bfloat16", native=True), 64,
    )  # fmt: skip
    part = part_of(spec, shard=split_model(spec, tp)[0], experts=experts)
    assert ("CUDA graphs" in terms.plan(part, 8, 4 << 30).memory.explanation) == planned


@pytest.mark.parametrize(
    ("layers", "shards", "exchange", "mib"),
    [
        (range(4), 1, 0, 0),
        (range(4), 2, 0, 1024 + 320),  # sums, and tokens
        (range(2), 1, 0, 2 * 320),  # hidden states, and tokens
        (range(1, 3), 2, 0, 1024 + 3 * 320),
        (range(4), 2, 8, 3 * 1024 + 320),  # replicas that share experts
    ],
)
def test_a_gpus_pool_leaves_room_for_links(layers: range, shards: int, exchange: int, mib: int) -> None:
    config = CONFIGS["llama"].to_dict() | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4}
    spec = spec_from_config(config)
    part = part_of(spec, layers, split_model(spec, shards)[0], exchange_bytes=exchange)
    gpu, available = Computation("cuda:0", "bfloat16", native=True), 8000 * MIB
    plan = plan_memory(part, gpu, 16, 8, available, max_model_len=64)
    assert (f"links between GPUs {mib}.0 MiB" in plan.explanation) == bool(mib)
    assert ("links" in plan.explanation) == bool(mib)
    assert "links" not in plan_memory(part, FLOAT32, 16, 8, available, max_model_len=64).explanation


def test_a_gpus_pool_leaves_room_for_images() -> None:
    """On the stage that encodes them: for the largest one that fits into a sequence."""
    spec = spec_from_config(CONFIGS["llama"].to_dict() | {"architectures": ["LlamaForCausalLM"]})
    layers = spec.layers
    library = LibrarySpec(
        "", (None,) * layers, (1,) * layers, (1,) * layers, (1,) * layers, 1, 1, 1, 1, "",
        encoding=Encoding(100, 3 * MIB),
    )  # fmt: skip
    part = part_of(structs.replace(spec, library=library), range(1))
    assert encoding_bytes(part, 64) == 192 * MIB
    assert encoding_bytes(part, 1000) == 300 * MIB
    assert encoding_bytes(part._replace(layers=range(1, layers)), 64) == 0
