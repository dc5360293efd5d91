"""Header of a GGUF file: metadata and tensor table.

Parsed here because gguf.GGUFReader takes seconds for a vocabulary that the engine does not need. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from collections import Counter
from math import prod
from typing import Any, NamedTuple, TypeVar

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from headrace.core.types.kv.geometry import ceil_div

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
MAX_KEYS = 1 << 16  # of the metadata
MAX_ITEMS = 1 << 22  # of an array in it: a vocabulary has some hundred thousand
MAX_TENSORS = 1 << 20
MAX_DIMENSIONS = 4  # of a tensor, as in ggml
_KINDS = frozenset(int(kind) for kind in GGMLQuantizationType)
T = TypeVar("T")


class TensorInfo(NamedTuple):
    """Entry of the tensor table."""

    shape: tuple[int, ...]  # in torch order
    kind: GGMLQuantizationType
    offset: int  # bytes from the start of the file

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the last axis."""
        block, block_bytes = GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // int(block) * int(block_bytes)

    @property
    def byte_count(self) -> int:
        """Stored bytes of the tensor."""
        return prod(self.shape[:-1]) * self.row_bytes


class Length(NamedTuple):
    """Stands for an array of the metadata: the engine needs none of them, and some are long."""

    items: int


class GgufHeader:
    """Parser of the header of one file; one pass over its bytes."""

    def __init__(self, data: mmap.mmap) -> None:
        """data: the whole file."""
        self._data = data
        self._at = 0

    def parse(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        """(metadata, tensor table). Raises ValueError or struct.error for bytes that are no GGUF header."""
        if self._data[:4] != b"GGUF":
            raise ValueError("it does not start with GGUF")
        self._at = 4
        version, tensor_count, key_count = self._scalar("<I"), self._scalar("<Q"), self._scalar("<Q")
        if version not in (2, 3):
            raise ValueError(f"it is version {version}; versions 2 and 3 are supported")
        if key_count > MAX_KEYS or tensor_count > MAX_TENSORS:
            raise ValueError(
                f"it has {key_count} metadata keys and {tensor_count} tensors; at most {MAX_KEYS} and {MAX_TENSORS}"
            )
        metadata = _unique("metadata keys", [(self._string(), self._value()) for _ in range(key_count)])
        table = _unique("tensors", [self._tensor() for _ in range(tensor_count)])
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise ValueError(f"general.alignment must be a positive whole number, found {alignment!r:.40}")
        start = ceil_div(self._at, alignment) * alignment
        return metadata, {name: info._replace(offset=start + info.offset) for name, info in table.items()}

    def _scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return value

    def _string(self) -> str:
        length = self._scalar("<Q")
        self._at += length
        return self._data[self._at - length : self._at].decode()

    def _value(self) -> Any:
        kind = self._scalar("<I")
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise ValueError(f"metadata of type {kind} is unknown")
        item, count = self._scalar("<I"), self._scalar("<Q")
        if count > MAX_ITEMS:
            raise ValueError(f"it has a metadata array of {count} items; at most {MAX_ITEMS} are supported")
        if item in _SCALARS:
            self._at += count * struct.calcsize(_SCALARS[item])
        elif item == _STRING:
            for _ in range(count):
                self._at += 8 + struct.unpack_from("<Q", self._data, self._at)[0]
        else:
            raise ValueError(f"metadata arrays of items of type {item} are not supported")
        return Length(count)

    def _tensor(self) -> tuple[str, TensorInfo]:
        name = self._string()
        if not name.isprintable():
            raise ValueError(f"a tensor has the name {name!r:.80}")
        dimensions = self._scalar("<I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise ValueError(f"tensor {name!r:.80} has {dimensions} dimensions; 1 to {MAX_DIMENSIONS} are supported")
        sizes = [self._scalar("<Q") for _ in range(dimensions)]
        number = self._scalar("<I")
        if number not in _KINDS:
            raise ValueError(f"tensor {name!r:.80} is of kind {number}, which this version of gguf does not know")
        kind = GGMLQuantizationType(number)
        if not all(sizes) or sizes[0] % GGML_QUANT_SIZES[kind][0]:
            raise ValueError(
                f"tensor {name!r:.80} has rows of {sizes[0]} values, which are no whole {kind.name} blocks"
            )
        return name, TensorInfo(tuple(reversed(sizes)), kind, self._scalar("<Q"))


def _unique(what: str, pairs: list[tuple[str, T]]) -> dict[str, T]:
    found = dict(pairs)
    if len(found) < len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"two {what} have the name {name!r:.80}")
    return found
