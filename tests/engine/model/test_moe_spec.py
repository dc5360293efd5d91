"""Models with experts: what config.json may say, and their sizes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headrace.core.types.errors import ConfigError
from headrace.engine.kv.memory_plan import linear_count, weight_count
from headrace.engine.model.config import spec_from_config
from headrace.engine.model.config_fields import Fields
from headrace.engine.model.fingerprint import fingerprint
from headrace.engine.model.moe_spec import MoeSpec, read_deepseek_v2_moe, read_deepseek_v3_moe
from headrace.engine.model.sharding import part_of
from headrace.engine.model.source import load_spec, resolve_source
from headrace.engine.parallel.layer_split import head_flops, layer_flops, stage_layers
from tests.engine.layers.mixtures import RandomWeights
from tests.engine.models import Saved

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 6, "num_attention_heads": 4, "max_position_embeddings": 2048, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True,
}  # fmt: skip
MIXTRAL: dict[str, Any] = {
    **{key: value for key, value in QWEN3.items() if key not in ("num_experts", "moe_intermediate_size")},
    "architectures": ["MixtralForCausalLM"], "num_local_experts": 4,
}  # fmt: skip
V2: dict[str, Any] = {
    "num_hidden_layers": 6, "n_routed_experts": 12, "n_shared_experts": 2, "moe_intermediate_size": 16,
    "num_experts_per_tok": 3, "first_k_dense_replace": 1,
}  # fmt: skip
V3: dict[str, Any] = {**V2, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}


def moe_of(config: dict[str, Any]) -> MoeSpec:
    moe = spec_from_config(config).moe
    assert moe is not None
    return moe


def deepseek(family: str, **change: Any) -> MoeSpec:
    read, config = (read_deepseek_v2_moe, V2) if family == "deepseek_v2" else (read_deepseek_v3_moe, V3)
    moe = read(Fields("config.json", {**config, **change}))
    assert moe is not None
    return moe


def kinds(moe: MoeSpec) -> str:
    """One letter for each layer."""
    return "".join(kind[0] for kind in moe.layer_kinds)


def test_transformers_4_and_5_name_the_experts_differently() -> None:
    newer = {key: value for key, value in QWEN3.items() if key != "num_experts"} | {"num_local_experts": 8}
    assert spec_from_config(QWEN3) == spec_from_config(newer)
    assert moe_of(QWEN3).experts == 8


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "mmmmmm"),
        ({"mlp_only_layers": None}, "mmmmmm"),
        ({"mlp_only_layers": [0, 3]}, "dmmdmm"),
        ({"decoder_sparse_step": 2}, "dmdmdm"),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, "dddmdm"),
    ],
)
def test_which_layers_have_experts(change: dict[str, Any], expected: str) -> None:
    assert kinds(moe_of({**QWEN3, **change})) == expected


def test_which_layers_of_deepseek_have_experts() -> None:
    assert kinds(deepseek("deepseek_v2")) == "dmmmmm"
    assert kinds(deepseek("deepseek_v2", moe_layer_freq=2)) == "ddmdmd"
    assert kinds(deepseek("deepseek_v3", first_k_dense_replace=3, num_nextn_predict_layers=1)) == "dddmmm"
    assert read_deepseek_v2_moe(Fields("config.json", {**V2, "n_routed_experts": None})) is None


def test_families_differ_in_their_routers() -> None:
    assert moe_of(MIXTRAL).normalized
    assert moe_of(MIXTRAL).intermediate_size == 96
    assert moe_of(MIXTRAL).projections == ("w1", "w3", "w2")
    assert not moe_of({**QWEN3, "norm_topk_prob": False}).normalized
    greedy = deepseek("deepseek_v2", n_group=4, topk_group=2, topk_method="greedy")
    assert (greedy.groups, greedy.shared_size, greedy.choice_bias) == (1, 32, False)
    limited = deepseek("deepseek_v2", n_group=4, topk_group=2, topk_method="group_limited_greedy")
    assert (limited.groups, limited.top_groups, limited.group_score) == (4, 2, "maximum")
    newer = deepseek("deepseek_v3", topk_method="noaux_tc", scoring_func="sigmoid")
    assert (newer.scores, newer.group_score, newer.normalized, newer.scaling) == ("sigmoid", "two best", True, 2.5)


def test_attention_is_that_of_the_dense_family() -> None:
    qwen3 = spec_from_config({**QWEN3, "attention_bias": True})
    assert (qwen3.qk_norm, qwen3.qkv_bias, qwen3.output_bias, qwen3.head_dim) == (True, True, True, 16)
    mixtral = spec_from_config({**MIXTRAL, "sliding_window": 128})
    assert (mixtral.qk_norm, mixtral.qkv_bias, mixtral.sliding_window, mixtral.norm_eps) == (False, False, 128, 1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": None}, "'num_local_experts' has to be a whole number from 1 to 2147483647, but is missing"),
        ({"num_experts_per_tok": 9}, "9 experts per token cannot be chosen of 8"),
        ({"moe_intermediate_size": 0}, "'moe_intermediate_size' has to be a whole number from 1"),
        ({"decoder_sparse_step": 0}, "'decoder_sparse_step' has to be a whole number from 1"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec_from_config({**QWEN3, **change})


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob true is not supported for deepseek_v2"),
        (
            "deepseek_v2",
            {"topk_method": "noaux_tc"},
            "'noaux_tc' is not supported; supported for deepseek_v2 is greedy",
        ),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ("deepseek_v3", {"topk_group": 5}, "5 of 4 groups cannot be chosen of 12 experts"),
        ("deepseek_v3", {"n_group": 5}, "2 of 5 groups cannot be chosen of 12 experts"),
        ("deepseek_v3", {"n_group": 12}, "12 groups of 12 experts have no two best each"),
        ("deepseek_v3", {"num_experts_per_tok": 7}, "7 experts per token cannot be chosen of 6"),
    ],
)
def test_mistakes_of_deepseek_are_named(family: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        deepseek(family, **change)


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3-moe", "qwen3"])
def test_weights_are_counted_as_a_model_has_them(saved: Callable[[str], Saved], name: str) -> None:
    model = saved(name)
    spec = load_spec(resolve_source(str(model.folder)))
    assert weight_count(part_of(spec)) == sum(parameter.numel() for parameter in model.model.parameters())


def test_layers_count_by_their_kind() -> None:
    spec = spec_from_config({**QWEN3, "mlp_only_layers": [0, 1, 2]})
    moe = spec.moe
    assert moe is not None
    attention = 64 * 2 * (4 + 4) * 16
    assert linear_count(part_of(spec, range(3))) == 3 * (attention + 3 * 64 * 96)
    assert linear_count(part_of(spec, range(3, 6))) == 3 * (attention + 8 * 3 * 64 * 16)
    assert linear_count(part_of(spec, range(3, 6), experts=2)) == 3 * (attention + 2 * 3 * 64 * 16)
    assert weight_count(part_of(spec)) - weight_count(part_of(spec, experts=7)) == 3 * 3 * 64 * 16
    assert layer_flops(spec, 0) == 2 * (attention + 3 * 64 * 96)
    assert layer_flops(spec, 5) == 2 * (attention + 2 * 3 * 64 * 16 + 8 * 64)
    shared = deepseek("deepseek_v2")
    assert shared.active_weights(64) == 64 * (3 * (3 * 16 + 32) + 12)
    assert shared.stored_weights(64) == 64 * 3 * (12 * 16 + 32)


def test_stages_share_active_weights() -> None:
    """Three wide dense layers take as long as six or more with two active experts of sixteen columns each."""
    spec = spec_from_config(
        {**QWEN3, "num_hidden_layers": 9, "mlp_only_layers": [0, 1, 2], "intermediate_size": 640, "vocab_size": 1}
    )
    costs = [layer_flops(spec, layer) for layer in range(9)]
    assert sum(costs[:3]) > sum(costs[3:])
    assert stage_layers(spec, 2, 0.0) == (2, 7)
    assert head_flops(spec) == 128


def test_fingerprints_tell_routers_apart_and_leave_dense_models_alone() -> None:
    class Ones(RandomWeights):
        """A checkpoint full of ones, so that a fingerprint follows from the sizes alone."""

        def read(self, name: str, shape: tuple[int, ...], rows: Any = None, columns: Any = None) -> torch.Tensor:
            """See Checkpoint."""
            return torch.ones(shape)[: len(rows or range(shape[0]))]

    def of(config: dict[str, Any]) -> str:
        return fingerprint(spec_from_config(config), Ones())

    dense = {**QWEN3, "architectures": ["Qwen3ForCausalLM"], "head_dim": 16}
    changes: list[dict[str, Any]] = [
        {},
        {"num_experts_per_tok": 3},
        {"norm_topk_prob": False},
        {"mlp_only_layers": [2]},
    ]
    found = [of({**QWEN3, **change}) for change in changes]
    assert len({*found, of(dense)}) == len(changes) + 1
    assert of(dense) == "303a8d0ffcfc72e5336bd53517d296c6"
