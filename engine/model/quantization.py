"""Quantised weights as they are published, expanded while they are read: by what lies beside a tensor in its file.

    float8            weight + weight_scale_inv (blocks of DeepSeek-V3, Kimi K2, Qwen3) or weight_scale (per tensor or
                      channel: compressed-tensors, modelopt)
    int8              weight + weight_scale (compressed-tensors) or SCB (bitsandbytes)
    int4, int8        weight_packed + weight_scale (compressed-tensors); qweight + qzeros + scales (AWQ, GPTQ)
    4-bit floats      NAME_blocks + NAME_scales (MXFP4 of gpt-oss); weight_packed or weight + weight_scale in blocks of
                      16 with a scale of scales (NVFP4 of compressed-tensors and modelopt)
    nf4, fp4          weight + weight.absmax + weight.quant_map (bitsandbytes)

Products are those of the expanded weights with activations as they are; scales of activations and of KV are not used.
What is in no such form is refused by its name: no weight is ever multiplied without its scale.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from headrace.core.types.errors import ConfigError
from headrace.engine.model.float8 import Float8Weight, stored_float8
from headrace.engine.model.quantization_scheme import Scheme
from headrace.engine.model.tensor_names import FLOATS

# What safetensors files call dtypes whose values are the weights.
FLOAT8 = ("F8_E4M3", "F8_E5M2")
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # values of E2M1; the fourth bit is the sign
FP4_BLOCK = 16  # values that share a scale in NVFP4
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # place of each of eight columns in its int32
# Beside weights, and without meaning for them: scales of activations and of KV, and the layout of 8-bit weights.
UNUSED = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale", ".q_scale", ".prob_scale", ".weight_format")
Read = Callable[[str], Tensor]
"""A whole tensor as it is stored, by the name that it has there."""


class Form(NamedTuple):
    """How a weight is stored."""

    shape: tuple[int, ...]
    """Of the weight."""
    parts: tuple[str, ...]
    """Names of the tensors that it is made of."""
    expand: Callable[[Read], Tensor]
    """Makes the weight: float32."""
    float8: Callable[[Read], Float8Weight | None] | None = None
    """Makes it in FP8, as it is stored; None, or gives None, where it cannot be had so."""


class Stored(NamedTuple):
    """A tensor in a file."""

    dtype: str
    """As safetensors calls it."""
    shape: tuple[int, ...]


def find_forms(tensors: Mapping[str, Stored], scheme: Scheme, read: Read) -> tuple[dict[str, Form], set[str]]:
    """The quantised weights among the tensors of files, by the names that they would have otherwise; and the names of
    all that belongs to them.

    read: for what says the shape of a weight. Raises ConfigError for a tensor that is no weight by itself and in no
    form.
    """
    forms: dict[str, Form] = {}
    for name, stored in tensors.items():
        found = _form(name, stored, tensors, scheme, read)
        if found is not None:
            forms[found[0]] = found[1]
    used = {part for form in forms.values() for part in form.parts}
    used |= {name for name in tensors if name.endswith(UNUSED)}
    for name, stored in tensors.items():
        if stored.dtype not in (*FLOATS, "I64", "BOOL") and name not in used:
            raise ConfigError(
                f"tensor {name} is stored as {stored.dtype}, which is a weight only together with its scales, and "
                "these were not found"
            )
    return forms, used


def _form(
    name: str, stored: Stored, tensors: Mapping[str, Stored], scheme: Scheme, read: Read
) -> tuple[str, Form] | None:
    """The weight that a tensor is the main part of, by its name, or None."""
    base, _, last = name.rpartition(".")
    if last == "weight_packed":
        scale = f"{base}.weight_scale"
        if scale not in tensors:
            raise ConfigError(f"tensor {name} has no {scale} beside it")
        return f"{base}.weight", _packed(base, stored, tensors, scheme)
    if last == "qweight":
        return f"{base}.weight", _grouped(base, stored, tensors, scheme)
    if name.endswith("_blocks") and (scales := f"{name.removesuffix('_blocks')}_scales") in tensors:
        return name.removesuffix("_blocks"), _mxfp4(name, scales, stored)
    if stored.dtype in FLOAT8 and not last.endswith(("scale", "scale_inv")):  # experts may be joined, in tensors
        return name, _scaled(name, stored, (f"{name}_scale_inv", f"{name}_scale"), tensors, scheme)
    if stored.dtype == "I8" and last == "weight":
        if f"{base}.SCB" in tensors:
            largest = f"{base}.SCB"
            if tensors[largest].shape != stored.shape[:1]:
                raise ConfigError(
                    f"tensor {largest} has shape {list(tensors[largest].shape)}, one is needed for each row"
                )
            return name, Form(stored.shape, (name, largest), lambda read: _int8(read(name), read(largest)))
        return name, _scaled(name, stored, (f"{name}_scale",), tensors, scheme)
    if stored.dtype == "U8" and last == "weight" and f"{name}.absmax" in tensors:
        return name, _bitsandbytes(name, tensors, read)
    if stored.dtype == "U8" and last == "weight" and f"{name}_scale_2" in tensors:
        shape = (stored.shape[0], 2 * stored.shape[1])
        more = (f"{name}_scale", f"{name}_scale_2")
        return name, Form(shape, (name, *more), lambda read: _nvfp4(read(name), *map(read, more)))
    return None


def _scaled(name: str, stored: Stored, scales: Iterable[str], tensors: Mapping[str, Stored], scheme: Scheme) -> Form:
    """A weight times a scale for all of it, for each row, or for each block of rows and columns."""
    scale = next((each for each in scales if each in tensors), None)
    if scale is None:
        raise ConfigError(
            f"tensor {name} is stored as {stored.dtype}, which is a weight only together with its scale, and there is "
            f"none beside it ({' or '.join(scales)})"
        )
    if f"{name}_zero_point" in tensors:
        raise ConfigError(f"tensor {name} has zero points, which are not supported for this form")
    sizes = tensors[scale].shape
    rows, columns = stored.shape[-2:] if len(stored.shape) > 1 else (1, stored.shape[0])
    blocks = (math.ceil(rows / scheme.block[0]), math.ceil(columns / scheme.block[1]))
    plain = math.prod(sizes) == 1 or sizes in ((rows,), (rows, 1), stored.shape[:-1], (*stored.shape[:-1], 1))
    if not plain and sizes != (*stored.shape[:-2], *blocks):
        raise ConfigError(
            f"tensor {scale} has shape {list(sizes)}, which are no scales of {name} of shape {list(stored.shape)}"
        )

    def expand(read: Read) -> Tensor:
        weight, factors = read(name).float(), read(scale).float()
        if factors.numel() == 1:
            return weight * factors.view(())
        if plain:
            return weight * factors.view(*stored.shape[:-1], 1)
        wide = factors.repeat_interleave(scheme.block[0], -2).repeat_interleave(scheme.block[1], -1)
        return weight.mul_(wide[..., :rows, :columns])

    if stored.dtype != FLOAT8[0] or len(stored.shape) != 2:
        return Form(stored.shape, (name, scale), expand)
    return Form(stored.shape, (name, scale), expand, lambda read: stored_float8(read(name), read(scale), scheme.block))


def _packed(base: str, stored: Stored, tensors: Mapping[str, Stored], scheme: Scheme) -> Form:
    """compressed-tensors: whole numbers side by side in int32, or 4-bit floats in bytes."""
    packed, scale = f"{base}.weight_packed", f"{base}.weight_scale"
    if stored.dtype == "U8":
        whole = f"{base}.weight_global_scale"
        if whole not in tensors:
            raise ConfigError(f"tensor {packed} has no {whole} beside it")
        shape = (*stored.shape[:-1], 2 * stored.shape[-1])
        return Form(
            shape, (packed, scale, whole), lambda read: _nvfp4(read(packed), read(scale), 1 / read(whole).float())
        )
    if scheme.bits not in (4, 8):
        raise ConfigError(f"compressed-tensors packed in {scheme.bits} bits are not supported; supported are 4 and 8")
    sizes, groups = f"{base}.weight_shape", tensors[scale].shape[-1]
    zero, order = f"{base}.weight_zero_point", f"{base}.weight_g_idx"
    shape = (stored.shape[0], stored.shape[1] * (32 // scheme.bits))
    if not scheme.symmetric and zero not in tensors:
        raise ConfigError(f"tensor {packed} has no {zero} beside it")
    parts = tuple(each for each in (packed, scale, sizes, zero, order) if each in tensors)

    def expand(read: Read) -> Tensor:
        half = 1 << (scheme.bits - 1)
        values = (unpacked(read(packed), scheme.bits) - half).float()
        factors = read(scale).float()
        by = read(order).long() if order in parts else torch.arange(shape[1]) // (shape[1] // groups)
        if zero in parts:
            zeros = read(zero)
            if zeros.dtype == torch.int32:  # packed along the rows
                zeros = unpacked(zeros.T.contiguous(), scheme.bits).T[: shape[0]] - half
            values -= zeros.float()[:, by]
        return values.mul_(factors[:, by])

    return Form(shape, parts, expand)


def _grouped(base: str, stored: Stored, tensors: Mapping[str, Stored], scheme: Scheme) -> Form:
    """AWQ and GPTQ: inputs in groups with a scale and a zero point for each output."""
    names = {kind: f"{base}.{kind}" for kind in ("qweight", "qzeros", "scales", "g_idx")}
    for kind in ("qzeros", "scales"):
        if names[kind] not in tensors:
            raise ConfigError(f"tensor {names['qweight']} has no {names[kind]} beside it")
    if scheme.method not in ("awq", "gptq"):
        raise ConfigError(f"tensor {names['qweight']} is of AWQ or GPTQ, and no configuration says of which")
    parts = tuple(name for name in names.values() if name in tensors)
    awq, many = scheme.method == "awq", 32 // scheme.bits
    outputs = stored.shape[1] * many if awq else stored.shape[1]
    inputs = stored.shape[0] if awq else stored.shape[0] * many
    groups = tensors[names["scales"]].shape[0]

    def expand(read: Read) -> Tensor:
        zeros = unpacked(read(names["qzeros"]), scheme.bits)  # [groups, outputs]
        if awq:
            values = _in_order(unpacked(read(names["qweight"]), scheme.bits))
            zeros = _in_order(zeros)
        else:
            values = unpacked(read(names["qweight"]).T.contiguous(), scheme.bits).T
        by = (
            read(names["g_idx"]).long()
            if names["g_idx"] in parts
            else torch.arange(inputs) // math.ceil(inputs / groups)
        )
        offsets = (zeros + scheme.zero_offset).float()[by]
        return ((values.float() - offsets) * read(names["scales"]).float()[by]).T.contiguous()

    return Form((outputs, inputs), parts, expand)


def _in_order(values: Tensor) -> Tensor:
    """AWQ's columns, which lie interleaved in their int32."""
    return values.view(*values.shape[:-1], -1, len(AWQ_ORDER))[..., AWQ_ORDER].flatten(-2)


def _mxfp4(blocks: str, scales: str, stored: Stored) -> Form:
    """Experts of gpt-oss: blocks [experts, outputs, groups, 16] of 4-bit floats, a power of two for each group. The
    weight is [experts, inputs, outputs]."""
    experts, outputs, groups, width = stored.shape

    def expand(read: Read) -> Tensor:
        values = fp4(read(blocks)) * torch.exp2(read(scales).float() - 127)[..., None]
        return values.view(experts, outputs, -1).transpose(1, 2).contiguous()

    return Form((experts, groups * 2 * width, outputs), (blocks, scales), expand)


def _nvfp4(packed: Tensor, scales: Tensor, of_scales: Tensor) -> Tensor:
    values = fp4(packed).view(*packed.shape[:-1], -1, FP4_BLOCK)
    return values.mul_((scales.float() * of_scales.float())[..., None]).flatten(-2)


def _int8(weight: Tensor, largest: Tensor) -> Tensor:
    return weight.float() * (largest.float() / 127)[:, None]


def _bitsandbytes(name: str, tensors: Mapping[str, Stored], read: Read) -> Form:
    """4 bits by a table, in blocks with a scale each; scales may be in 8 bits themselves."""
    states = [each for each in tensors if each.startswith(f"{name}.quant_state.bitsandbytes__")]
    if len(states) != 1 or f"{name}.quant_map" not in tensors:
        raise ConfigError(f"tensor {name} has no quant_state and quant_map beside it")
    nested = f"{name}.nested_absmax" in tensors
    more = (f"{name}.nested_absmax", f"{name}.nested_quant_map") if nested else ()
    parts = (name, f"{name}.absmax", f"{name}.quant_map", *states, *more)

    try:
        state = msgspec.json.decode(bytes(read(states[0]).tolist()), type=_State)
    except msgspec.ValidationError as error:
        raise ConfigError(f"tensor {states[0]} cannot be read: {error}") from error

    def expand(read: Read) -> Tensor:
        scales = read(f"{name}.absmax")
        if nested:
            by = torch.arange(len(scales)) // state.nested_blocksize
            table = read(f"{name}.nested_quant_map").float()
            scales = table[scales.long()] * read(f"{name}.nested_absmax").float()[by] + state.nested_offset
        halves = read(name).flatten()
        indices = torch.stack((halves >> 4, halves & 15), -1).flatten().long()
        values = read(f"{name}.quant_map").float()[indices]
        by = torch.arange(len(values)) // state.blocksize
        return (values * scales.float()[by])[: math.prod(state.shape)].view(state.shape)

    return Form(state.shape, parts, expand)


class _State(msgspec.Struct):
    """Of a weight of bitsandbytes in 4 bits, beside its tensors."""

    shape: tuple[int, ...]
    blocksize: int
    nested_blocksize: int = 1
    nested_offset: float = 0.0


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """Whole numbers from int32 [rows, words], the first in the lowest bits: int32 [rows, words * 32 / bits]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((packed[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def fp4(packed: Tensor) -> Tensor:
    """E2M1 floats from bytes [..., width], the first in the lower half: float32 [..., 2 * width]."""
    table = torch.tensor([*FP4, *(-value for value in FP4)])
    return table[torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()]
