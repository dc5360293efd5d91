"""Weights in the forms in which quantised models are published: made here as their tools make them, each with what it
stands for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

BLOCK, GROUP = 32, 16
LARGEST8 = 448.0  # of E4M3
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
Parts = dict[str, Tensor]


class Published(NamedTuple):
    """A form of publication."""

    make: Callable[[Tensor], tuple[Parts, Tensor]]
    """A weight [outputs, inputs] → tensors by what follows the module's name, and the weight that they stand for."""
    config: dict[str, Any] | None
    """quantization_config of config.json."""
    key: str = "quantization_config"
    file: tuple[str, dict[str, Any]] | None = None
    """A file beside config.json that says it instead."""


def float8(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """A weight divided by scales that were expanded to it, and what it stands for."""
    rounded = (weight / scale).clamp(-LARGEST8, LARGEST8).to(torch.float8_e4m3fn)
    return rounded, rounded.float() * scale


def blocks(weight: Tensor) -> tuple[Parts, Tensor]:
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    padded = torch.zeros(rows * BLOCK, columns * BLOCK)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    scales = padded.view(rows, BLOCK, columns, BLOCK).abs().amax((1, 3)) / LARGEST8 + 1e-9
    wide = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: weight.shape[0], : weight.shape[1]]
    rounded, expected = float8(weight, wide)
    return {"weight": rounded, "weight_scale_inv": scales}, expected


def per_tensor(weight: Tensor) -> tuple[Parts, Tensor]:
    scale = weight.abs().max() / LARGEST8
    rounded, expected = float8(weight, scale)
    return {"weight": rounded, "weight_scale": scale, "input_scale": torch.tensor(0.5)}, expected


def per_channel(weight: Tensor) -> tuple[Parts, Tensor]:
    scale = (weight.abs().amax(1, keepdim=True) / LARGEST8).bfloat16()
    rounded, expected = float8(weight, scale.float())
    return {"weight": rounded, "weight_scale": scale}, expected


def int8(weight: Tensor) -> tuple[Parts, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    values = torch.round(weight / scale)
    return {"weight": values.to(torch.int8), "weight_scale": scale}, values * scale


def bitsandbytes8(weight: Tensor) -> tuple[Parts, Tensor]:
    largest = weight.abs().amax(1)
    values = torch.round(weight * 127 / largest[:, None])
    parts = {"weight": values.to(torch.int8), "SCB": largest, "weight_format": torch.zeros((), dtype=torch.uint8)}
    return parts, values * largest[:, None] / 127


def words(values: Tensor, bits: int) -> Tensor:
    """Whole numbers [rows, columns] in int32 [rows, words], the first in the lowest bits."""
    apart = values.long().view(len(values), -1, 32 // bits)
    packed = sum(apart[..., at] << (bits * at) for at in range(32 // bits))
    assert isinstance(packed, Tensor)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def grouped(weight: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Whole numbers from 0, zero points and scales [outputs, groups], and what they stand for."""
    apart = weight.view(len(weight), -1, GROUP)
    low, high = apart.amin(-1).clamp(max=0), apart.amax(-1).clamp(min=0)
    scales = ((high - low) / ((1 << bits) - 1)).half().float()
    zeros = torch.round(-low / scales).clamp(1, (1 << bits) - 1)
    values = torch.round(apart / scales[..., None] + zeros[..., None]).clamp(0, (1 << bits) - 1)
    return values.flatten(1), zeros, scales, ((values - zeros[..., None]) * scales[..., None]).flatten(1)


def packed(bits: int, *, symmetric: bool) -> Callable[[Tensor], tuple[Parts, Tensor]]:
    def make(weight: Tensor) -> tuple[Parts, Tensor]:
        values, zeros, scales, expected = grouped(weight, bits)
        if symmetric:
            half = 1 << (bits - 1)
            scales = weight.view(len(weight), -1, GROUP).abs().amax(-1) / (half - 1)
            whole = torch.round(weight.view(len(weight), -1, GROUP) / scales[..., None]).clamp(-half, half - 1)
            values, expected = (whole + half).flatten(1), (whole * scales[..., None]).flatten(1)
        parts = {
            "weight_packed": words(values, bits), "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }  # fmt: skip
        if not symmetric:
            parts["weight_zero_point"] = words(zeros.T.contiguous(), bits).T.contiguous()
        return parts, expected

    return make


def awq(weight: Tensor) -> tuple[Parts, Tensor]:
    values, zeros, scales, expected = grouped(weight, 4)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def interleaved(rows: Tensor) -> Tensor:
        return words(rows.view(len(rows), -1, 8)[..., order].flatten(1), 4)

    return {
        "qweight": interleaved(values.T.contiguous()), "qzeros": interleaved(zeros.T.contiguous()),
        "scales": scales.T.contiguous().half(),
    }, expected  # fmt: skip


def gptq(bits: int, *, offset: int, shuffled: bool = False) -> Callable[[Tensor], tuple[Parts, Tensor]]:
    """offset: what is subtracted from zero points. shuffled: groups are of inputs in any order."""

    def make(weight: Tensor) -> tuple[Parts, Tensor]:
        inputs = weight.shape[1]
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(1)) if shuffled else torch.arange(inputs)
        values, zeros, scales, expected = grouped(weight[:, order], bits)
        back = order.argsort()
        parts = {
            "qweight": words(values[:, back], bits).T.contiguous(),
            "qzeros": words((zeros - offset).T.contiguous(), bits), "scales": scales.T.contiguous().half(),
            "g_idx": (torch.arange(inputs) // GROUP)[back].to(torch.int32),
        }  # fmt: skip
        return parts, expected[:, back]

    return make


def nibbles(values: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest 4-bit floats: bytes [rows, width / 2], and their values."""
    index = (values.abs()[..., None] - E2M1).abs().argmin(-1)
    coded = index + 8 * (values < 0)
    found = E2M1[index] * values.sign()
    return (coded[:, ::2] | coded[:, 1::2] << 4).to(torch.uint8), found


def nvfp4(*, modelopt: bool) -> Callable[[Tensor], tuple[Parts, Tensor]]:
    def make(weight: Tensor) -> tuple[Parts, Tensor]:
        apart = weight.view(len(weight), -1, 16)
        whole = weight.abs().max() / (6 * LARGEST8)
        scales = (apart.abs().amax(-1) / 6 / whole).clamp(min=2.0**-6).to(torch.float8_e4m3fn)
        by = (scales.float() * whole)[..., None]
        coded, values = nibbles((apart / by).flatten(1))
        expected = (values.view(apart.shape) * by).flatten(1)
        if modelopt:
            return {"weight": coded, "weight_scale": scales, "weight_scale_2": whole}, expected
        parts = {"weight_packed": coded, "weight_scale": scales, "weight_global_scale": (1 / whole)[None]}
        return {**parts, "input_global_scale": torch.ones(1)}, expected

    return make


def bitsandbytes4(weight: Tensor) -> tuple[Parts, Tensor]:
    table = torch.linspace(-1, 1, 16) ** 3
    size = 64
    flat = weight.flatten().view(-1, size)
    largest = flat.abs().amax(1)
    index = (flat[..., None] / largest[:, None, None] - table).abs().argmin(-1)
    coded = index.flatten().view(-1, 2)
    state = {"quant_type": "nf4", "blocksize": size, "dtype": "float32", "shape": list(weight.shape)}
    parts = {
        "weight": (coded[:, :1] << 4 | coded[:, 1:]).to(torch.uint8), "weight.absmax": largest,
        "weight.quant_map": table,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(msgspec.json.encode(state)), dtype=torch.uint8),
    }  # fmt: skip
    return parts, (table[index] * largest[:, None]).view(weight.shape)


def compressed(bits: int, *, symmetric: bool = True) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": bits, "symmetric": symmetric}}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


FP8 = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
BNB = {"quant_method": "bitsandbytes"}
PUBLISHED: dict[str, Published] = {
    "fp8-blocks": Published(blocks, FP8),
    "fp8-tensor": Published(per_tensor, {"quant_method": "fp8"}),
    "fp8-channel": Published(per_channel, compressed(8)),
    "fp8-modelopt": Published(per_tensor, None, file=("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}})),
    "fp8-silent": Published(per_tensor, None),
    "int8": Published(int8, compressed(8)),
    "int8-old-key": Published(int8, compressed(8), key="compression_config"),
    "w4a16": Published(packed(4, symmetric=True), compressed(4)),
    "w4a16-asymmetric": Published(packed(4, symmetric=False), compressed(4, symmetric=False)),
    "w8a16": Published(packed(8, symmetric=True), compressed(8)),
    "awq": Published(awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "awq-file": Published(awq, None, file=("quant_config.json", {"w_bit": 4, "version": "GEMM"})),
    "gptq": Published(gptq(4, offset=1), {"quant_method": "gptq", "bits": 4}),
    "gptq-act-order": Published(
        gptq(4, offset=1, shuffled=True), {"quant_method": "gptq", "bits": 4, "desc_act": True}
    ),
    "gptq-2": Published(gptq(2, offset=1), {"quant_method": "gptq", "bits": 2}),
    "gptq-v2-8": Published(gptq(8, offset=0), {"quant_method": "gptq", "bits": 8, "checkpoint_format": "gptq_v2"}),
    "gptq-file": Published(gptq(4, offset=1), None, file=("quantize_config.json", {"bits": 4})),
    "nvfp4": Published(nvfp4(modelopt=False), compressed(4)),
    "nvfp4-modelopt": Published(
        nvfp4(modelopt=True), None, file=("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}})
    ),
    "bitsandbytes-8": Published(bitsandbytes8, BNB),
    "bitsandbytes-4": Published(bitsandbytes4, BNB),
}


def publish(folder: Path, model: Any, form: Published) -> None:
    """Save a model in this form, and give it the weights that the form stands for."""
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors, stored = load_file(path), {}
    own = model.state_dict()
    for name, weight in tensors.items():
        if not name.endswith(("_proj.weight", "_proj_with_mqa.weight")):
            stored[name] = weight
            continue
        parts, expected = form.make(weight)
        stored.update({name.removesuffix("weight") + part: tensor.contiguous() for part, tensor in parts.items()})
        if name in own:  # experts are joined in the model
            own[name].copy_(expected)
    save_file(stored, path)
    edit(folder, {form.key: form.config} if form.config else {})
    if form.file is not None:
        (folder / form.file[0]).write_text(json.dumps(form.file[1]))


def edit(folder: Path, fields: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def publish_in_blocks(folder: Path, model: Any) -> None:
    """As DeepSeek-V3 and Kimi K2 are published, an expert's matrices apart."""
    publish(folder, model, PUBLISHED["fp8-blocks"])
    for module in model.modules():  # experts are joined in the model: those are the weights that the parts stand for
        if hasattr(module, "gate_up_proj") and module.gate_up_proj.dim() == 3:
            for weight in (module.gate_up_proj, module.down_proj):
                weight.data = torch.stack([joined(each) for each in weight.data])


def joined(weight: Tensor) -> Tensor:
    """What an expert's matrix stands for; gate and up projection were published apart."""
    halves = weight.chunk(2) if len(weight) == 64 and weight.shape[1] == 64 else (weight,)
    return torch.cat([PUBLISHED["fp8-blocks"].make(half)[1] for half in halves])


def publish_in_mxfp4(folder: Path, model: Any) -> None:
    """As gpt-oss is published: the matrices of its experts."""
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    stored, own = load_file(path), model.state_dict()
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        weight = stored.pop(name).transpose(1, 2)  # [experts, outputs, inputs]
        apart = weight.reshape(-1, 32)
        exponents = torch.floor(torch.log2(apart.abs().amax(1) / 6)) + 1
        coded, values = nibbles(apart / torch.exp2(exponents)[:, None])
        shape = (*weight.shape[:2], -1)
        stored[f"{name}_blocks"] = coded.view(*shape, 16)
        stored[f"{name}_scales"] = (exponents + 127).to(torch.uint8).view(shape)
        own[name].copy_((values * torch.exp2(exponents)[:, None]).view(weight.shape).transpose(1, 2))
    save_file(stored, path)
    edit(folder, {"quantization_config": {"quant_method": "mxfp4"}})
