"""Attention over the paged KV pool: one interface, an implementation per device and dtype.

On a GPU, in 16 bits, keys and values are attended to by FlashInfer, which reads pages where they are, if it is there
and agrees with plain torch in a trial at the start; else by torch's flash kernel, which has them gathered first unless
pages have a multiple of 256 tokens. Our own Triton kernel over pages is slower than that from some thousand tokens on
(docs/gpu.md), and has to be asked for. Nothing is chosen by its speed: two servers of a fleet that had chosen otherwise
would give other texts.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple, TypeVar

import torch

from headrace.core.config import AttentionChoice, MlaForm
from headrace.core.types.errors import ConfigError
from headrace.engine.attention.cpu import CpuPass
from headrace.engine.attention.gpu import SdpaPass
from headrace.engine.attention.latent import LatentProjections, LatentSdpa, latent_attention
from headrace.engine.attention.native import NativePass, NativeWork
from headrace.engine.attention.paged import Attention
from headrace.engine.attention.trial import Tried, check_agreement
from headrace.engine.attention.work import MakeWork, PlanWork
from headrace.engine.kv.pool import KVPool
from headrace.engine.model.arithmetic import Arithmetic
from headrace.engine.model.mla_spec import MlaSpec
from headrace.engine.native.kernel_calls import Kernels

log = logging.getLogger(__name__)
FLASHINFER_HEAD_DIMS = (64, 128, 256)  # for which it has kernels on every GPU
FLASHINFER_LATENTS = (128, 256, 512)  # of latents
FLASHINFER_KEYS = 64  # of the rotated key beside a latent: its multiples
FLASHINFER_TILE = 128  # rows of a tile; where one ends within a token's heads, its plans fail for some lengths

Made = TypeVar("Made", bound=Tried)


class ChosenAttention(NamedTuple):
    """How rows attend over a pool."""

    begin: Attention
    name: str
    """What computes it, and on a GPU why, in words."""


def choose_attention(
    pool: KVPool,
    *,
    native_units: bool,
    kernels: Kernels | None = None,
    wanted: AttentionChoice = "auto",
    heads: int = 0,
    compiled: bool = False,
) -> ChosenAttention:
    """The fastest attention for the pool's device and dtype.

    native_units: the device multiplies matrices of the pool's dtype in hardware. kernels: the native ones, where they
    work. wanted: on a GPU. heads: of queries; 0: as many as of keys. compiled: Triton compiles kernels for the device.
    Raises ConfigError when an attention is wanted that does not work here.
    """
    dtype = pool.tensor.dtype
    trial = _Trial(pool, heads or pool.geometry.kv_heads, partial(SdpaPass, pool), wanted)
    made, why = trial.flashinfer(_no_flashinfer(pool, trial.heads), partial(_flashinfer, pool, trial.heads))
    if made is not None:
        return ChosenAttention(made, "FlashInfer")
    if wanted == "triton":
        ours, _ = trial.run("triton", "our Triton kernel", _no_triton(pool, compiled), partial(_triton, pool))
        assert ours is not None, "it is an error where it does not work"
        return ChosenAttention(ours, "our Triton kernel over pages")
    if _on_cpu(pool):
        if kernels is not None:
            return ChosenAttention(partial(NativePass, pool, kernels), "native kernels")
        return ChosenAttention(partial(CpuPass, pool, compute_dtype=dtype if native_units else torch.float32), "torch")
    if dtype == torch.float32:
        return ChosenAttention(partial(SdpaPass, pool), "torch, row by row")
    from headrace.engine.attention.varlen import VarlenPass, reads_pages

    where = "over pages" if reads_pages(pool) else "behind a gather"
    return ChosenAttention(partial(VarlenPass, pool), f"torch's flash kernel {where} ({why})")


def choose_latent_attention(
    mla: MlaSpec,
    pool: KVPool,
    form: MlaForm,
    projections: Sequence[LatentProjections],
    *,
    heads: int,
    kernels: Kernels | None = None,
    wanted: AttentionChoice = "auto",
) -> ChosenAttention:
    """The fastest attention over a pool of latents on its device. form: not "auto". projections: of each layer of the
    pool. heads: of queries. kernels, wanted, errors: as of choose_attention()."""
    plain = partial(LatentSdpa, mla, pool)
    trial = _Trial(pool, heads, plain, wanted)
    no_latents = "rows in expanded form do not read latents" if form == "expanded" else _no_latents(mla, pool, heads)
    absorbed, why = trial.flashinfer(no_latents, partial(_flashinfer_latents, mla, pool, heads, plain))
    begin = latent_attention(mla, pool, form, projections, kernels=kernels, absorbed=absorbed)
    terms = f"--mla {form}" if absorbed is not None or _on_cpu(pool) else f"--mla {form}; {why}"
    return ChosenAttention(begin, f"{'torch' if absorbed is None else 'FlashInfer'} over latents ({terms})")


def choose_work(kernels: Kernels | None, arithmetic: Arithmetic) -> MakeWork | None:
    """What attends to pages in passes of models whose layers differ: native kernels or our own in Triton; None where
    there are neither."""
    if kernels is not None:
        return partial(NativeWork, kernels)
    if not arithmetic.compiled:
        return None
    from headrace.engine.attention.triton_work import TritonWork

    return TritonWork


class _Trial(NamedTuple):
    """What attention over one pool is chosen by."""

    pool: KVPool
    heads: int
    """Of queries."""
    plain: Tried
    """By torch, which others are to agree with."""
    wanted: AttentionChoice

    def flashinfer(self, why_not: str, make: Callable[[], Made]) -> tuple[Made | None, str]:
        """See run()."""
        if not why_not and find_spec("flashinfer") is None:
            why_not = "it is not installed: pip install 'headrace[flashinfer]'"
        return self.run("flashinfer", "FlashInfer", why_not, make)

    def run(
        self, option: AttentionChoice, name: str, why_not: str, make: Callable[[], Made]
    ) -> tuple[Made | None, str]:
        """An attention, or None and why not. option: of --attention. why_not: if that is known, else "". Raises
        ConfigError when it is wanted and does not work."""
        if self.wanted not in ("auto", option):
            return None, f"{name}: it is not wanted"
        reason = why_not
        if not reason:
            try:
                made = make()
                check_agreement(made, self.plain, self.pool, self.heads)
                return made, ""
            except Exception as error:  # compilers and bindings raise errors of many kinds
                reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            if self.wanted == "auto":
                log.warning("attention is not computed by %s: %s", name, reason)
        if self.wanted == option:
            device = self.pool.tensor.device
            raise ConfigError(f"--attention {option} does not work on {device}: {reason}; write --attention torch")
        return None, f"{name}: {reason}"


def _on_cpu(pool: KVPool) -> bool:
    return pool.tensor.device.type == "cpu"


def _no_16_bits(pool: KVPool) -> str:
    """Why neither FlashInfer nor Triton is for a pool; "" where they may be."""
    if _on_cpu(pool):
        return "it is for GPUs"
    if pool.tensor.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in bfloat16 and float16, not in {str(pool.tensor.dtype).removeprefix('torch.')}"
    return ""


def _no_flashinfer(pool: KVPool, heads: int) -> str:
    """Why FlashInfer cannot attend over a pool; "" where it may."""
    geometry = pool.geometry
    if reason := _no_16_bits(pool):
        return reason
    if geometry.head_dim not in FLASHINFER_HEAD_DIMS:
        return f"it has no kernels for heads of {geometry.head_dim}"
    if heads % geometry.kv_heads:
        return f"{heads} query heads cannot share {geometry.kv_heads} KV heads evenly"
    return ""


def _no_latents(mla: MlaSpec, pool: KVPool, heads: int) -> str:
    """Why FlashInfer cannot attend over a pool of latents; "" where it may."""
    if reason := _no_16_bits(pool):
        return reason
    if mla.kv_rank not in FLASHINFER_LATENTS or mla.rope_dim % FLASHINFER_KEYS:
        return f"it has no kernels for latents of {mla.kv_rank} and rotated keys of {mla.rope_dim}"
    if FLASHINFER_TILE % heads:
        return f"{heads} query heads do not divide its tiles of {FLASHINFER_TILE}"
    return ""


def _no_triton(pool: KVPool, compiled: bool) -> str:
    """Why our Triton kernel cannot attend over a pool; "" where it may."""
    if reason := _no_16_bits(pool):
        return reason
    return "" if compiled else "nothing is compiled by Triton (--compile)"


def _flashinfer(pool: KVPool, heads: int) -> Attention:
    from headrace.engine.attention.flashinfer import FlashInfer

    return FlashInfer(pool, heads)


def _flashinfer_latents(mla: MlaSpec, pool: KVPool, heads: int, otherwise: PlanWork) -> PlanWork:
    from headrace.engine.attention.flashinfer import FlashInferLatents

    return FlashInferLatents(mla, pool, heads, otherwise)


def _triton(pool: KVPool) -> Attention:
    from headrace.engine.attention.triton_work import TritonPass

    return partial(TritonPass, pool)
