"""GGUF reader: metadata, tensor table, dequantised tensors, and the ModelSpec of the file.

The header is parsed here because gguf.GGUFReader takes seconds for a vocabulary that the engine does not need;
blocks are dequantised by the gguf package. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from collections import Counter
from functools import cache
from math import gcd, inf, prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from headrace.core.types.errors import ConfigError
from headrace.core.types.kv.geometry import ceil_div
from headrace.engine.model.config import ModelSpec, RopeKind, RopeSpec
from headrace.engine.model.config_fields import ABOVE_ONE, COUNT, LAYERS, NAME, POSITIVE, SIZE, Fields
from headrace.engine.model.families import FAMILIES

ROPE_DIVISORS = "rope_freqs.weight"  # a tensor that is part of the configuration
PER_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")  # may be arrays in GGUF
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
MAX_KEYS = 1 << 16  # of the metadata
MAX_ITEMS = 1 << 22  # of an array in it: a vocabulary has some hundred thousand
MAX_TENSORS = 1 << 20
MAX_DIMENSIONS = 4  # of a tensor, as in ggml
JOINED_ROWS = 64  # rows dequantised as one
_KINDS = frozenset(int(kind) for kind in GGMLQuantizationType)
T = TypeVar("T")
Q8_BLOCK = 32  # values of a block of kind Q8_0, after their scale in float16


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


class GgufFile:
    """A memory-mapped GGUF file.

    name: of the file. metadata: values by key; of an array only its length. tensors: table entries by name.
    """

    def __init__(self, path: Path) -> None:
        """Parse the header. Raises ConfigError when the file is no readable GGUF."""
        self.name = path.name
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self.metadata, self.tensors = _Header(self._data).parse()
            _refuse_split(self.metadata)
            for name, info in self.tensors.items():
                if info.offset + info.byte_count > len(self._data):
                    raise ValueError(f"it ends before tensor {name} does")
                if not _expandable(info.kind):
                    raise ValueError(
                        f"tensor {name} is of kind {info.kind.name}, which cannot be expanded; "
                        f"write the model in another one, such as Q8_0 or F16"
                    )
        except (OSError, ValueError, OverflowError, IndexError, struct.error) as error:
            raise ConfigError(f"{path} cannot be read as a GGUF file: {error}") from error

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
        return _floats(raw[rows], info.kind).reshape(len(rows), *info.shape[1:])

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
        return np.frombuffer(self._data, np.uint8, info.byte_count, info.offset).reshape(-1, info.row_bytes)


def spec_from_gguf(file: GgufFile) -> ModelSpec:
    """ModelSpec of a GGUF file. Raises ConfigError for an architecture that the engine cannot run, and for a key that
    is missing or has a value of the wrong type or range."""
    architecture = Fields(file.name, file.metadata).get("general.architecture", NAME)
    known = [family.model_type for family in FAMILIES if family.gguf]
    if architecture not in known:
        raise ConfigError(f"GGUF architecture {architecture!r} is not supported; supported are {', '.join(known)}")
    keys = _keys_of(file, f"{architecture}.")
    if keys.get("expert_count", COUNT, 0):
        raise ConfigError("GGUF models with experts are not supported; supported are dense models")
    hidden, heads = keys.get("embedding_length", SIZE), keys.get("attention.head_count", SIZE)
    head_dim = keys.get("attention.key_length", SIZE, hidden // heads)
    if (rotated := keys.get("rope.dimension_count", COUNT, head_dim)) != head_dim:
        raise ConfigError(f"rope.dimension_count {rotated} must equal the head size {head_dim}")
    if "token_embd.weight" not in file.tensors:
        raise ConfigError("tensor token_embd.weight is missing in the GGUF file")
    epsilon = keys.get("attention.layer_norm_rms_epsilon", POSITIVE)
    return ModelSpec(
        family=architecture,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=keys.get("feed_forward_length", SIZE),
        layers=keys.get("block_count", LAYERS),
        heads=heads,
        kv_heads=keys.get("attention.head_count_kv", SIZE, heads),
        head_dim=head_dim,
        norm_eps=float(f"{epsilon:.6g}"),  # stored as float32: 1e-05 reads 9.99…e-06
        rope=_rope(file, keys, head_dim),
        max_positions=keys.get("context_length", SIZE),
        sliding_window=keys.optional("attention.sliding_window", COUNT),
        tied="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
    )


def _keys_of(file: GgufFile, prefix: str) -> Fields:
    """Metadata of the keys below the architecture's name. Raises ConfigError for sizes with one value per layer."""
    for key in PER_LAYER:
        if isinstance(file.metadata.get(prefix + key), Length):
            raise ConfigError(f"{prefix}{key} differs from layer to layer, which is not supported")
    below = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    return Fields(file.name, below, prefix)


def _rope(file: GgufFile, keys: Fields, head_dim: int) -> RopeSpec:
    theta = keys.get("rope.freq_base", ABOVE_ONE, 10000.0)
    if ROPE_DIVISORS in file.tensors:  # llama.cpp stores Llama 3 scaling as divisors
        divisors = tuple(float(value) for value in file.read(ROPE_DIVISORS).reshape(-1))
        if len(divisors) * 2 != head_dim or not all(0 < value < inf for value in divisors):
            raise ConfigError(f"{file.name}: tensor {ROPE_DIVISORS} must hold {head_dim // 2} numbers above 0")
        return RopeSpec(kind="divisors", theta=theta, divisors=divisors)
    kinds: dict[str, RopeKind] = {"none": "default", "linear": "linear", "yarn": "yarn"}
    scaling = keys.get("rope.scaling.type", NAME, "none")
    if scaling not in kinds:
        raise ConfigError(f"GGUF rope.scaling.type {scaling!r} is not supported; supported are {', '.join(kinds)}")
    positions = keys.get("context_length", SIZE)
    return RopeSpec(
        kind=kinds[scaling],
        theta=theta,
        factor=keys.get("rope.scaling.factor", POSITIVE, 1.0),
        original_positions=keys.get("rope.scaling.original_context_length", SIZE, positions),
        beta_fast=keys.get("rope.scaling.yarn_beta_fast", POSITIVE, 32.0),
        beta_slow=keys.get("rope.scaling.yarn_beta_slow", POSITIVE, 1.0),
    )


class _Header:
    """Parser of the file header; one pass over its bytes."""

    def __init__(self, data: mmap.mmap) -> None:
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


def _refuse_split(metadata: dict[str, Any]) -> None:
    count, number = metadata.get("split.count", 0), metadata.get("split.no", 0)
    if isinstance(count, int) and count > 1:
        raise ValueError(
            f"it is part {number + 1 if isinstance(number, int) else '?'} of {count} of a model; join them by "
            "llama.cpp's llama-gguf-split --merge FIRST_PART JOINED"
        )


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
