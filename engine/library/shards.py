"""Tensor-parallel shards of transformers' modules: which part of each parameter a shard has, by the model's own plan.

    colwise           rows of a weight: heads, or an MLP's inner columns; its results are this shard's
    rowwise           the columns that take those results; its products are summed over the shards
    moe_tp_experts    some of the experts each; their weighted sums are summed
    all other styles  whole, on every shard, so that nothing is exchanged

Source: base_model_tp_plan of the configurations of transformers 5.23.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from math import gcd
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from headrace.core.types.errors import ConfigError
from headrace.engine.model.expert_plan import own_experts

COLUMNS, ROWS, EXPERTS = "colwise", "rowwise", "moe_tp_experts"
KEPT_WHOLE = {
    "colwise_gather_output", "rowwise_split_input", "replicated_with_grad_allreduce", "mla_kv_a_proj",
    "embedding_rowwise", "local_params", "moe_identity_expert", "packed_colwise", "packed_rowwise",
}  # fmt: skip
_PROJECTIONS = {
    **{f"layers.*.self_attn.{name}_proj": COLUMNS for name in "qkv"},
    "layers.*.self_attn.o_proj": ROWS,
}
_MLP = {"layers.*.mlp.gate_proj": COLUMNS, "layers.*.mlp.up_proj": COLUMNS, "layers.*.mlp.down_proj": ROWS}
# Of model types whose configuration has no plan.
PLANS: Mapping[str, Mapping[str, str]] = {
    "gpt_oss": {**_PROJECTIONS, "layers.*.self_attn.sinks": COLUMNS, "layers.*.mlp.experts": EXPERTS},
    "qwen3_vl_text": {**_PROJECTIONS, **_MLP},
}
_PART = "_shard_part"  # attribute of modules
EXPERT = re.compile(r"\.experts\.(\d+)\.")
OTHER_INPUTS = ("vision", "visual", "audio", "image")  # modules whose names have these compute no text


class Cut(NamedTuple):
    """What a shard has of a parameter."""

    style: str
    axis: int
    own: range
    """Indices along the axis."""
    whole: int
    """Size of the axis without shards."""


def plan_of(text: PreTrainedConfig) -> Mapping[str, str]:
    """Styles of a text model's modules and parameters, by patterns of their names. Raises ConfigError where there is no
    plan, or one of another kind."""
    plan = getattr(text, "base_model_tp_plan", None) or PLANS.get(text.model_type, {})
    if not plan:
        raise ConfigError("transformers has no plan for shards of it")
    if unknown := set(plan.values()) - {COLUMNS, ROWS, EXPERTS} - KEPT_WHOLE:
        raise ConfigError(f"its plan for shards asks for {', '.join(sorted(unknown))}")
    return plan


def cuts_of(model: nn.Module, plan: Mapping[str, str], shard: int, shards: int) -> dict[str, Cut]:
    """What a shard has of each parameter that is divided, by its name in a model whose parameters are whole. Raises
    ConfigError for a size that cannot be divided."""
    cuts = {}
    for name, style, parameter in _divided(model, plan):
        axis = 1 if style == ROWS else 0
        size = parameter.shape[axis]
        if style != EXPERTS and size % shards:
            raise ConfigError(f"{name} has {size} of what {shards} shards would divide")
        cuts[name] = Cut(style, axis, own_experts(size, shards, shard), size)
    return cuts


def shrink(model: nn.Module, cuts: Mapping[str, Cut]) -> None:
    """Give a model on the meta device parameters of the sizes that its shard has; part_of() says which part they
    are."""
    for name, cut in cuts.items():
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        whole = getattr(module, own)
        setattr(module, own, nn.Parameter(whole.narrow(cut.axis, cut.own.start, len(cut.own)), requires_grad=False))
        if isinstance(module, nn.Linear) and own == "weight":
            module.out_features, module.in_features = module.weight.shape
        if own != "bias":
            setattr(module, _PART, cut)


def part_of(module: nn.Module) -> Cut | None:
    """What a shard has of a module's weights; None for all of them."""
    part: Cut | None = getattr(module, _PART, None)
    return part


def sizes_of(model: nn.Module, plan: Mapping[str, str]) -> set[int]:
    """Numbers that a number of shards has to divide."""
    return {each.shape[1 if style == ROWS else 0] for _, style, each in _divided(model, plan) if style != EXPERTS}


def least_shards(sizes: set[int]) -> int:
    """The smallest number of shards that divides all of them; 1 where there is none."""
    common = gcd(*sizes)
    return next((each for each in range(2, common + 1) if common % each == 0), 1)


def stored_cuts(model: PreTrainedModel, names: Iterable[str], shard: int, shards: int) -> dict[str, Cut]:
    """What a shard reads of the tensors of a checkpoint, which may have other names than a model's parameters, and
    experts in tensors of their own: an empty range for one that another shard has. model: on the meta device, whole.
    Raises ConfigError for a tensor that cannot be cut before it is loaded."""
    cuts = cuts_of(model, plan_of(model.config.get_text_config(decoder=True)), shard, shards)
    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    prefix, state = model.base_model_prefix, model.state_dict()
    found = {}
    for name in names:
        parameter, converted = rename_source_key(name, renamings, converters, prefix, state)
        if (cut := cuts.get(parameter)) is None:
            continue
        if cut.style == EXPERTS and (number := EXPERT.search(name)):
            if int(number[1]) not in cut.own:
                found[name] = cut._replace(own=range(0))
        elif converted is not None and cut.style != EXPERTS:
            raise ConfigError(f"shards cannot divide {name}, which becomes {parameter} when it is loaded: write --tp 1")
        else:
            found[name] = cut
    return found


def _divided(model: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Names and styles of the parameters that are divided. What a plan says of single parameters of experts is passed
    over: shards have whole experts."""
    patterns = {
        style: re.compile("|".join(_pattern(name) for name, each in plan.items() if each == style) or "(?!)")
        for style in (EXPERTS, COLUMNS, ROWS)
    }
    for name, parameter in model.named_parameters():
        module, _, own = name.rpartition(".")
        if any(word in name for word in OTHER_INPUTS):
            continue
        if patterns[EXPERTS].fullmatch(module):
            if hasattr(model.get_submodule(module), "is_transposed"):  # else the model computes them itself
                yield name, EXPERTS, parameter
        elif patterns[COLUMNS].fullmatch(module) or patterns[COLUMNS].fullmatch(name):
            yield name, COLUMNS, parameter
        elif patterns[ROWS].fullmatch(module) and own != "bias":  # which is added once
            yield name, ROWS, parameter


def _pattern(name: str) -> str:
    return r"(?:.*\.)?" + re.escape(name).replace(r"\*", r"\d+")
