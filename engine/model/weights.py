"""Reads the weights of a stage: those of a layer, joined while loading, and those outside the layers."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.engine.dtypes import Precision
from headrace.engine.model import float8
from headrace.engine.model.arithmetic import Weight
from headrace.engine.model.checkpoint import Checkpoint
from headrace.engine.model.config import ModelSpec
from headrace.engine.model.float8 import Float8Weight
from headrace.engine.model.int8 import join, quantize
from headrace.engine.model.lora import LoraAdapter
from headrace.engine.model.sharding import Shard

ALL: Mapping[str, range] = MappingProxyType({})  # rows: of no tensor a part only


class Delta(NamedTuple):
    """What an adapter adds to some outputs of a linear layer, or of several that are joined: x @ down.T @ up.T."""

    outputs: range
    """Where they are among those of the joined layers, of a shard."""
    down: Weight
    """[rank, in], packed."""
    up: Weight
    """[outputs, rank], packed; with the adapter's scaling."""

    def moved(self, first: int) -> "Delta":
        """The same where the layer's outputs begin further on."""
        return self._replace(outputs=range(self.outputs.start + first, self.outputs.stop + first))


Deltas = Mapping[str, Sequence[Delta]]
"""By the adapter's fingerprint; adapters that leave a layer as it is are absent."""


def make_delta(
    outputs: range, read: tuple[Tensor, Tensor], precision: Precision, device: str, pack: Callable[[Weight], Weight]
) -> Delta:
    """What LoraAdapter.read() gives, rounded to the model's dtype and packed in the dtype of computation."""
    down, up = (pack(part.to(precision.model).to(device, precision.compute).contiguous()) for part in read)
    return Delta(outputs, down, up)


class HeadWeights(NamedTuple):
    """Weights outside the layers; empty tensors on stages that do not use them."""

    embedding: Tensor  # [vocabulary block, hidden]
    norm: Tensor  # [hidden], of the final RMSNorm
    head: Tensor  # [vocabulary block, hidden]


class _Part(NamedTuple):
    """What is read of one tensor."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    wanted: range | None  # of its rows; None: all

    @property
    def rows(self) -> range | None:
        """The wanted rows, None for all of them."""
        return None if self.wanted == range(self.shape[0]) else self.wanted

    @property
    def height(self) -> int:
        """How many rows are wanted."""
        return self.shape[0] if self.wanted is None else len(self.wanted)


class LayerReader:
    """Reads tensors of one layer; tensors that are read together are joined along their first axis.

    A shard reads parts of them: `rows` and `columns` say which. In 8 bits, rows of a matrix are the same numbers as in
    the whole one. Columns are too where they begin and end between blocks of int8.BLOCK (of 32 for GGUF's Q8_0);
    elsewhere the part is quantised in blocks from its own first column on, so that the scales, and with them the
    model's outputs, differ slightly from those of the unsharded model in 8 bits.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        layer: int,
        precision: Precision,
        device: str,
        pack: Callable[[Weight], Weight],
        adapters: Sequence[LoraAdapter] = (),
        pack_delta: Callable[[Weight], Weight] | None = None,
    ) -> None:
        """layer: counted from the model's first. pack: Arithmetic.pack. pack_delta: the same for adapters' weights,
        which are in the dtype of computation."""
        self._checkpoint = checkpoint
        self.layer = layer
        self._prefix = f"model.layers.{layer}"
        self._precision = precision
        self._device = device
        self._pack = pack
        self._adapters = adapters
        self._pack_delta = pack_delta or pack

    def vector(self, parts: Mapping[str, int], kind: str = "weight", *, rows: Mapping[str, range] = ALL) -> Tensor:
        """Norms or biases [out], in the dtype of computation. parts: sizes of the whole tensors by name. rows: by name,
        what to read of them; names that are absent are read whole. Raises ConfigError for a missing or misshapen
        tensor."""
        wanted = [_Part(self._name(name, kind), (size,), rows.get(name)) for name, size in parts.items()]
        return self._fused(self._precision.compute, wanted)

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

    def matrix(
        self,
        parts: Mapping[str, int],
        width: int,
        *,
        rows: Mapping[str, range] = ALL,
        columns: range | None = None,
        rounded: bool = False,
    ) -> Weight:
        """Weights [out, in], packed. parts: rows of the whole tensors by name. width: their columns. rows: by name,
        what to read of them; names that are absent are read whole. columns: only these. rounded: to the model's dtype,
        before they are quantised in 8 bits. Raises ConfigError for a missing or misshapen tensor."""
        if columns == range(width):
            columns = None
        wanted = [_Part(self._name(name, "weight"), (count, width), rows.get(name)) for name, count in parts.items()]
        if self._precision.float8 and (stored := self._in_float8(wanted, columns)) is not None:
            return stored.to(self._device)
        return self._pack(
            self._in_8_bits(wanted, columns, rounded)
            if self._precision.int8
            else self._fused(self._precision.held, wanted, columns)
        )

    def deltas(
        self, parts: Mapping[str, int], *, rows: Mapping[str, range] = ALL, columns: range | None = None
    ) -> Deltas:
        """What adapters add to the matrix that matrix() makes of the same arguments."""
        found: dict[str, list[Delta]] = {}
        start = 0
        for name, count in parts.items():
            wanted = rows.get(name, range(count))
            outputs = range(start, start := start + len(wanted))
            for adapter in self._adapters:
                if (module := f"{self._prefix}.{name}") in adapter.modules:
                    read = adapter.read(module, wanted, columns)
                    delta = make_delta(outputs, read, self._precision, self._device, self._pack_delta)
                    found.setdefault(adapter.fingerprint, []).append(delta)
        return found

    @property
    def on_cpu(self) -> bool:
        """Whether weights are for the CPU."""
        return torch.device(self._device).type == "cpu"

    @property
    def device(self) -> str:
        """Where weights are read to."""
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        """Of computation."""
        return self._precision.compute

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor of the checkpoint, such as self_attn.q_proj.weight, rounded to the model's dtype, to take a part of
        or to reorder. Raises ConfigError when it is missing or misshapen."""
        return self._checkpoint.read(f"{self._prefix}.{name}", shape).to(self._precision.model)

    def packed(self, weight: Tensor) -> Weight:
        """Weights [out, in] made of what tensor() returned, packed; never in 8 bits."""
        # Packed weights are held in the dtype of computation, and with linear layers in 8 bits all are packed.
        dtype = self._precision.compute if self._precision.int8 else self._precision.held
        return self._pack(weight.to(device=self._device, dtype=dtype, copy=True))

    def placed(self, values: Tensor) -> Tensor:
        """What tensor() returned, in the dtype of computation, not packed."""
        return values.to(device=self._device, dtype=self._precision.compute, copy=True)

    def _in_8_bits(self, parts: list[_Part], columns: range | None, rounded: bool) -> Weight:
        read = self._checkpoint
        if not rounded:
            stored = [read.read_int8(part.name, (part.shape[0], part.shape[1]), part.rows, columns) for part in parts]
            found = [part for part in stored if part is not None]
            if len(found) == len(parts):
                return join(found)
        wide = [read.read(part.name, part.shape, part.rows, columns) for part in parts]
        return join([quantize(each.to(self._precision.model) if rounded else each) for each in wide])

    def _in_float8(self, parts: list[_Part], columns: range | None) -> Float8Weight | None:
        """None where a part is stored otherwise."""
        found: list[Float8Weight] = []
        for part in parts:
            stored = self._checkpoint.read_float8(part.name, (part.shape[0], part.shape[1]), part.rows, columns)
            if stored is None:
                return None
            found.append(stored)
        return float8.join(found)

    def _fused(self, dtype: torch.dtype, parts: list[_Part], columns: range | None = None) -> Tensor:
        width = parts[0].shape[1:] if columns is None else (len(columns),)
        whole = torch.empty((sum(part.height for part in parts), *width), dtype=dtype, device=self._device)
        start = 0
        for part in parts:
            read = self._checkpoint.read(part.name, part.shape, part.rows, columns)
            whole[start : start + part.height] = read.to(self._precision.model)
            start += part.height
        return whole

    def _name(self, name: str, kind: str) -> str:
        return f"{self._prefix}.{name}.{kind}"


def load_head(
    spec: ModelSpec, checkpoint: Checkpoint, shard: Shard, *, first: bool, last: bool, precision: Precision, device: str
) -> HeadWeights:
    """Read the embedding for the first stage, norm and head for the last; a tied head is the embedding itself.

    Of embedding and head the shard's rows, filled up with zeros to a block. Raises ConfigError for a missing or
    misshapen tensor.
    """
    nothing = torch.empty(0, dtype=precision.held, device=device)

    def table(name: str) -> Tensor:
        rows, shape = shard.vocabulary, (spec.vocab_size, spec.hidden_size)
        block = torch.empty((shard.vocabulary_block, spec.hidden_size), dtype=precision.held, device=device)
        if rows:
            part = None if len(rows) == spec.vocab_size else rows
            block[: len(rows)] = checkpoint.read(name, shape, part).to(precision.model)
        block[len(rows) :].zero_()
        return block

    embedding = table("model.embed_tokens.weight") if first or (last and spec.tied) else nothing
    if not last:
        return HeadWeights(embedding, nothing, nothing)
    head = embedding if spec.tied else table("lm_head.weight")
    norm = checkpoint.read("model.norm.weight", (spec.hidden_size,)).to(precision.model)
    return HeadWeights(embedding, norm.to(device=device, dtype=precision.compute, copy=True), head)
