"""Layer arithmetic in Triton kernels, for GPUs: where Triton is installed and works."""

import logging
from importlib.util import find_spec

import torch

from headrace.core.config import Compile
from headrace.core.types.errors import ConfigError
from headrace.engine.model.arithmetic import Arithmetic

log = logging.getLogger(__name__)


def choose_arithmetic(wanted: Compile, device: str, plain: Arithmetic) -> Arithmetic:
    """Triton kernels on a GPU, where they are wanted and work; else plain.

    wanted: "auto" takes them where Triton is installed and works, "products" with dense matrix products among them.
    plain: arithmetic without compilation. Raises ConfigError when wanted is "on" or "products" and they do not work.
    """
    if wanted == "off" or (wanted == "auto" and device == "cpu"):
        return plain
    reason = _missing(device)
    if not reason:
        from headrace.engine.triton.arithmetic import TritonArithmetic
        from headrace.engine.triton.products import OwnProducts

        compiled = TritonArithmetic(OwnProducts(dense=wanted == "products"))
        try:
            compiled.gate(
                torch.zeros(1, 2, device=device)
            )  # compiling the smallest kernel shows whether a compiler works
            return compiled
        except (RuntimeError, OSError) as error:
            reason = str(error).partition("\n")[0]
    if wanted != "auto":
        raise ConfigError(f"nothing can be compiled for {device}: {reason}; write --compile off")
    log.warning("layers are not compiled, so every pass is slower: %s", reason)
    return plain


def _missing(device: str) -> str:
    """Why there are no Triton kernels; "" where there may be."""
    if device == "cpu":
        return "its kernels are compiled at installation"
    return "" if find_spec("triton") is not None else "Triton is not installed"
