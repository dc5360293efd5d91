"""Rotary position embedding (RoPE, arXiv 2104.09864) in the half-rotation convention of GPT-NeoX and transformers.

Context extension: linear interpolation (arXiv 2306.15595), Llama 3.1 scaling, YaRN (arXiv 2309.00071).
"""

import math

import torch
from torch import Tensor

from headrace.engine.model.config import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> tuple[Tensor, float]:
    """Rotation per position in radians, float32 [head_dim / 2], and the factor that scales cos and sin."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, plain, head_dim), _yarn_attention_factor(rope)
    if rope.kind == "divisors":
        return plain / torch.tensor(rope.divisors, dtype=torch.float32), 1.0
    return plain, 1.0


def rotary_tables(rope: RopeSpec, head_dim: int, positions: int) -> tuple[Tensor, Tensor]:
    """cos and signed sin, float32 [positions, 1, head_dim] each, such that rotated = x * cos + swap_halves(x) * sin.

    positions: length of the tables, the longest sequence.
    """
    frequencies, scale = inverse_frequencies(rope, head_dim)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate x [tokens, heads, head_dim] in place. cos, sin: rows of rotary_tables, float32 [tokens, 1, head_dim]."""
    swapped = torch.roll(x, x.shape[-1] // 2, dims=-1)
    if x.dtype == torch.float32:
        x.mul_(cos).add_(swapped.mul_(sin))
    else:
        x.copy_(x * cos + swapped * sin)


def _llama3(rope: RopeSpec, plain: Tensor) -> Tensor:
    """Llama 3.1 scaling (as in transformers): frequencies of long waves are divided by the factor, short waves are
    kept, waves between are blended. plain: unscaled frequencies [head_dim / 2]."""
    wavelength = 2 * math.pi / plain
    long_wave = rope.original_positions / rope.low_freq_factor
    short_wave = rope.original_positions / rope.high_freq_factor
    blend = (rope.original_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * plain / rope.factor + blend * plain
    scaled = torch.where(wavelength > long_wave, plain / rope.factor, plain)
    return torch.where((wavelength >= short_wave) & (wavelength <= long_wave), blended, scaled)


def _yarn(rope: RopeSpec, plain: Tensor, head_dim: int) -> Tensor:
    """YaRN (arXiv 2309.00071): a linear ramp over the dimensions from kept to interpolated frequencies.

    plain: unscaled frequencies [head_dim / 2].
    """

    def dimension(rotations: float) -> float:
        """The dimension whose frequency makes so many rotations over the original context."""
        turns = rope.original_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def _yarn_attention_factor(rope: RopeSpec) -> float:
    """YaRN's factor on cos and sin, which scales attention scores by its square (section 3.4 of the paper)."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return rope.magnitude(rope.mscale) / rope.magnitude(rope.mscale_all_dim)
    return rope.magnitude(1.0)
