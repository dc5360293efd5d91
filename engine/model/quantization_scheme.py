"""What a model's configuration says of the quantisation of its weights: config.json and files beside it. No torch."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headrace.core.types.errors import ConfigError
from headrace.engine.model.config_fields import COUNT, FLAG, NAME, OBJECT, SIZES, Fields

METHODS = ("fp8", "compressed-tensors", "awq", "gptq", "mxfp4", "bitsandbytes", "modelopt")
FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")  # of modelopt, AutoGPTQ, AutoAWQ
BLOCK = 128  # of float8 weights, where a configuration does not say otherwise


class Scheme(NamedTuple):
    """What a model says of its quantisation, as far as tensors do not show it."""

    method: str = ""
    """One of METHODS; "" where nothing is said."""
    bits: int = 4
    block: tuple[int, int] = (BLOCK, BLOCK)
    """Rows and columns that share a scale in float8."""
    symmetric: bool = True
    """compressed-tensors: whole numbers around zero, without zero points."""
    zero_offset: int = 0
    """GPTQ: what its files have subtracted from zero points."""
    float8: bool = False
    """Weights of linear layers are in FP8."""


def read_scheme(folder: Path, config: Mapping[str, Any], read_json: Callable[[Path], dict[str, Any]]) -> Scheme:
    """What config.json and files beside it say. Raises ConfigError for a method that is not here."""
    fields = Fields("config.json", config)
    for part in (fields, fields.within("text_config")):
        for key in ("quantization_config", "compression_config"):
            if part.get(key, OBJECT, {}):
                return _scheme(part.within(key), "compressed-tensors" if key == "compression_config" else "")
    for name in FILES:
        if (folder / name).is_file():
            said = Fields(name, read_json(folder / name))
            if name == FILES[0]:
                algorithm = said.within("quantization").get("quant_algo", NAME, "")
                return Scheme("modelopt", float8=algorithm.startswith("FP8"))
            return _scheme(said, "gptq" if name == FILES[1] else "awq")
    return Scheme()


def _scheme(said: Fields, default: str) -> Scheme:
    method = said.get("quant_method", NAME, default or None)
    if method not in METHODS:
        raise ConfigError(f"quant_method {method!r} is not supported; supported are {', '.join(METHODS)}")
    bits = said.get("bits", COUNT, said.get("w_bit", COUNT, 4))
    if method in ("awq", "gptq") and bits not in ((4,) if method == "awq" else (2, 4, 8)):
        few = "4" if method == "awq" else "2, 4 and 8"
        raise ConfigError(f"{method} in {bits} bits is not supported; supported are {few}")
    if method == "awq" and (version := said.get("version", NAME, "gemm")).lower() != "gemm":
        raise ConfigError(f"AWQ's version {version!r} is not supported; supported is 'gemm'")
    symmetric, float8 = True, method == "fp8" or said.get("quant_algo", NAME, "").startswith("FP8")
    if method == "compressed-tensors":
        if said.get("transform_config", OBJECT, {}):
            raise ConfigError("transform_config of compressed-tensors is not supported")
        if (layout := said.within("sparsity_config").get("format", NAME, "dense")) != "dense":
            raise ConfigError(f"sparsity_config of compressed-tensors in format {layout!r} is not supported")
        groups = said.within("config_groups")
        weights = [groups.within(name).within("weights") for name in said.get("config_groups", OBJECT, {})]
        found = {(each.get("num_bits", COUNT, 8), each.get("symmetric", FLAG, True)) for each in weights}
        if len(found) > 1:
            raise ConfigError("config_groups of compressed-tensors with different weights are not supported")
        bits, symmetric = found.pop() if found else (8, True)
        float8 = bool(weights) and bits == 8 and weights[0].get("type", NAME, "int") == "float"
    block = said.get("weight_block_size", SIZES, [BLOCK, BLOCK])
    v2 = said.get("checkpoint_format", NAME, "gptq") == "gptq_v2"
    return Scheme(method, bits, (block[0], block[1]), symmetric, int(method == "gptq" and not v2), float8)
