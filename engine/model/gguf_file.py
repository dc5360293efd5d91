"""GGUF models: metadata, tensor table, and dequantised tensors, of one file or of the parts that gguf-split makes.

Blocks are dequantised by the gguf package.
"""

import mmap
import struct
from functools import cache
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from headrace.core.types.errors import ConfigError
from headrace.core.types.kv.geometry import ceil_div
from headrace.engine.model.gguf_header import GgufHeader, TensorInfo
from headrace.engine.model.gguf_parts import part_paths

ROPE_DIVISORS = "rope_freqs.weight"  # a tensor that is part of the configuration
JOINED_ROWS = 64  # rows dequantised as one
Q8_BLOCK = 32  # values of a block of kind Q8_0, after their scale in float16


class GgufFile:
    """A memory-mapped GGUF model.

    name: of its first file. metadata: of that file, values by key; of an array only its length. tensors: table entries
    of all its files by name.
    """

    def __init__(self, path: Path) -> None:
        """Parse the headers of a file and of the other parts of its model. Raises ConfigError when one of them is
        missing, no readable GGUF, or of another model."""
        paths = part_paths(path)
        self.name = paths[0].name
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._data_of: dict[str, mmap.mmap] = {}
        for number, each in enumerate(paths):
            try:
                self._open(each, number, len(paths))
            except (OSError, ValueError, OverflowError, IndexError, struct.error) as error:
                raise ConfigError(f"{each} cannot be read as a GGUF file: {error}") from error
        total = self.metadata.get("split.tensors.count")
        if len(paths) > 1 and total != len(self.tensors):
            raise ConfigError(
                f"the {len(paths)} parts of {paths[0]} have {len(self.tensors)} tensors, and the first says "
                f"{total!r:.40}: they are of different models"
            )

    def _open(self, path: Path, number: int, count: int) -> None:
        """Add one of so many parts. Raises ValueError and others for one that cannot be read, or is another part."""
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        metadata, tensors = GgufHeader(data).parse()
        said = metadata.get("split.no", 0), metadata.get("split.count", 0)
        if said != (number, count) and (count > 1 or said[1] not in (0, 1)):
            place = "is no part" if not said[1] else f"is part {_plus_one(said[0])} of {said[1]!r:.20}"
            raise ValueError(
                f"by its metadata it {place} of a model, by its name part {number + 1} of {count}; parts are named "
                "NAME-00001-of-00003.gguf, as they were published"
            )
        for name, info in tensors.items():
            if name in self.tensors:
                raise ValueError(f"tensor {name!r:.80} is in another part, too: they are of different models")
            if info.offset + info.byte_count > len(data):
                raise ValueError(f"it ends before tensor {name} does")
            if not _expandable(info.kind):
                raise ValueError(
                    f"tensor {name} is of kind {info.kind.name}, which cannot be expanded; "
                    f"write the model in another one, such as Q8_0 or F16"
                )
            self._data_of[name] = data
        self.tensors.update(tensors)
        if number == 0:
            self.metadata = metadata
        architecture = self.metadata.get("general.architecture")
        if (found := metadata.get("general.architecture", architecture)) != architecture:
            raise ValueError(f"it is of a {found!r:.40} model, the first part of a {architecture!r:.40}")

    def read(
        self, name: str, rows: NDArray[np.intp] | None = None, columns: range | None = None
    ) -> NDArray[np.float32]:
        """A tensor dequantised to a new float32 array in torch order. rows: only these of its first axis. columns: only
        these of a matrix's second axis.

        Raises KeyError for an unknown name.
        """
        info, raw = self.tensors[name], self._raw(name)
        if columns is not None:
            block, block_bytes = map(int, GGML_QUANT_SIZES[info.kind])
            first = columns.start // block
            blocks = raw[:, first * block_bytes : ceil_div(columns.stop, block) * block_bytes]
            values = _floats(blocks if rows is None else blocks[rows], info.kind)
            return values[:, columns.start - first * block : columns.stop - first * block]
        if rows is None:
            return _floats(raw, info.kind).reshape(info.shape)
        if len(info.shape) == 1:
            return _floats(raw, info.kind).reshape(-1)[rows]
        wanted = raw.reshape(info.shape[0], -1, info.row_bytes)[rows].reshape(-1, info.row_bytes)
        return _floats(wanted, info.kind).reshape(len(rows), *info.shape[1:])

    def read_q8(
        self, name: str, rows: NDArray[np.intp] | None = None, columns: range | None = None
    ) -> tuple[NDArray[np.int8], NDArray[np.float32]] | None:
        """The values [rows, columns] and scales [rows, columns / 32] of a matrix of kind Q8_0; None for other kinds.

        rows, columns: only these; None also for columns that begin or end within a block. Raises KeyError for an
        unknown name.
        """
        info, raw = self.tensors[name], self._raw(name)
        first, stop = (0, info.shape[-1]) if columns is None else (columns.start, columns.stop)
        if info.kind != GGMLQuantizationType.Q8_0 or first % Q8_BLOCK or stop % Q8_BLOCK:
            return None
        within = (raw if rows is None else raw[rows]).reshape(-1, info.shape[-1] // Q8_BLOCK, Q8_BLOCK + 2)
        blocks = within[:, first // Q8_BLOCK : stop // Q8_BLOCK]
        scales = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16)[:, :, 0].astype(np.float32)
        return np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8).reshape(len(blocks), -1), scales

    def _raw(self, name: str) -> NDArray[np.uint8]:
        """A tensor as it is stored: [rows, bytes of a row]."""
        info = self.tensors[name]
        return np.frombuffer(self._data_of[name], np.uint8, info.byte_count, info.offset).reshape(-1, info.row_bytes)


def _plus_one(number: object) -> object:
    return number + 1 if isinstance(number, int) else number


@cache
def _expandable(kind: GGMLQuantizationType) -> bool:
    """Whether tensors of this kind can be read: gguf has no list of those that it dequantises."""
    try:
        _floats(np.zeros((1, int(GGML_QUANT_SIZES[kind][1])), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _floats(raw: NDArray[np.uint8], kind: GGMLQuantizationType) -> NDArray[np.float32]:
    """Dequantise rows: uint8 [rows, row bytes] → new float32 [rows, row elements]."""
    if kind == GGMLQuantizationType.F32:
        return raw.view(np.float32).copy()
    if kind == GGMLQuantizationType.F16:
        return raw.view(np.float16).astype(np.float32)
    # gguf dequantises sixteen rows at a time, whatever their length: joined into longer rows it is several times
    # faster.
    joined = gcd(len(raw), JOINED_ROWS)
    values: NDArray[np.float32] = dequantize(raw.reshape(-1, joined * raw.shape[-1]), kind)
    return values.reshape(len(raw), -1)
