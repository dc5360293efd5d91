"""Reads the weights of a stage: those of a layer, joined while loading, and those outside the layers."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.engine.dtypes import Precision
from headrace.engine.model.arithmetic import Weight
from headrace.engine.model.checkpoint import Checkpoint
from headrace.engine.model.config import ModelSpec
from headrace.engine.model.int8 import join, quantize


class HeadWeights(NamedTuple):
    """Weights outside the layers; empty tensors on stages that do not use them."""

    embedding: Tensor  # [vocabulary, hidden]
    norm: Tensor  # [hidden], of the final RMSNorm
    head: Tensor  # [vocabulary, hidden]


class LayerReader:
    """Reads tensors of one layer; tensors that are read together are joined along their first axis."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        layer: int,
        precision: Precision,
        device: str,
        pack: Callable[[Weight], Weight],
    ) -> None:
        """layer: counted from the model's first. pack: Arithmetic.pack."""
        self._checkpoint = checkpoint
        self.layer = layer
        self._prefix = f"model.layers.{layer}"
        self._precision = precision
        self._device = device
        self._pack = pack

    def vector(self, parts: dict[str, int], kind: str = "weight") -> Tensor:
        """Norms or biases [out], in the dtype of computation. parts: sizes by name. Raises ConfigError for a missing or
        misshapen tensor."""
        return self._fused(self._precision.compute, parts, kind)

    def matrix(self, parts: dict[str, int], columns: int) -> Weight:
        """Weights [out, columns], packed. parts: rows by name. Raises ConfigError for a missing or misshapen
        tensor."""
        return self._pack(self._matrix(parts, columns))

    def unquantized(self, name: str, shape: tuple[int, int]) -> Tensor:
        """A matrix in the dtype of computation whatever the quantisation, not packed. Raises ConfigError for a missing
        or misshapen tensor."""
        rounded = self._checkpoint.read(f"{self._prefix}.{name}.weight", shape).to(self._precision.model)
        return rounded.to(device=self._device, dtype=self._precision.compute, copy=True)

    def float32(self, name: str, kind: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor in float32, not rounded to the model's dtype. Raises ConfigError for a missing or misshapen
        tensor."""
        stored = self._checkpoint.read(f"{self._prefix}.{name}.{kind}", shape)
        return stored.to(device=self._device, dtype=torch.float32, copy=True)

    def _matrix(self, parts: dict[str, int], columns: int) -> Weight:
        if not self._precision.int8:
            return self._fused(self._precision.held, parts, "weight", columns)
        shapes = {self._name(name, "weight"): (rows, columns) for name, rows in parts.items()}
        stored = [self._checkpoint.read_int8(name, shape) for name, shape in shapes.items()]
        found = [part for part in stored if part is not None]
        if len(found) == len(parts):
            return join(found)
        return join([quantize(self._checkpoint.read(name, shape)) for name, shape in shapes.items()])

    def _fused(self, dtype: torch.dtype, parts: dict[str, int], kind: str, *columns: int) -> Tensor:
        whole = torch.empty((sum(parts.values()), *columns), dtype=dtype, device=self._device)
        start = 0
        for name, rows in parts.items():
            whole[start : start + rows] = self._read(name, kind, (rows, *columns)).to(self._precision.model)
            start += rows
        return whole

    def _read(self, name: str, kind: str, shape: tuple[int, ...]) -> Tensor:
        return self._checkpoint.read(self._name(name, kind), shape)

    def _name(self, name: str, kind: str) -> str:
        return f"{self._prefix}.{name}.{kind}"


def load_head(
    spec: ModelSpec, checkpoint: Checkpoint, *, first: bool, last: bool, precision: Precision, device: str
) -> HeadWeights:
    """Read the embedding for the first stage, norm and head for the last; a tied head is the embedding itself.

    Raises ConfigError for a missing or misshapen tensor.
    """
    nothing = torch.empty(0, dtype=precision.held, device=device)
    table = (spec.vocab_size, spec.hidden_size)

    def read(name: str, shape: tuple[int, ...], dtype: torch.dtype = precision.held) -> Tensor:
        rounded = checkpoint.read(name, shape).to(precision.model)
        return rounded.to(device=device, dtype=dtype, copy=True)  # a copy, so that the file can be unmapped

    embedding = read("model.embed_tokens.weight", table) if first or (last and spec.tied) else nothing
    if not last:
        return HeadWeights(embedding, nothing, nothing)
    head = embedding if spec.tied else read("lm_head.weight", table)
    return HeadWeights(embedding, read("model.norm.weight", (spec.hidden_size,), precision.compute), head)
