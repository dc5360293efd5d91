"""Checkpoints: weights read by their Hugging Face names from safetensors (one file or shards) or GGUF."""

import re
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.core.runtime.progress import LoadProgress
from headrace.core.types.errors import ConfigError, shown
from headrace.engine.model.config import ModelSpec
from headrace.engine.model.config_fields import TEXTS, Fields
from headrace.engine.model.families import BY_MODEL_TYPE
from headrace.engine.model.float8 import Float8Weight
from headrace.engine.model.gguf_file import ROPE_DIVISORS, GgufFile
from headrace.engine.model.int8 import Int8Weight
from headrace.engine.model.quantization import Form, Stored, find_forms
from headrace.engine.model.quantization_scheme import read_scheme
from headrace.engine.model.source import ModelSource, read_json
from headrace.engine.model.tensor_names import FLOATS, Shapes, model_tensors, refuse_unread

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = "model-*-of-*.safetensors"  # beside other copies of the weights, such as consolidated.safetensors
_GGUF_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


Rows = list[int] | range
"""Rows of a tensor: single ones, or a range, of which no more is read from the file."""


class Tensors(Protocol):
    """Weights by Hugging Face name."""

    def read(self, name: str, shape: tuple[int, ...], rows: list[int] | None = None) -> Tensor:
        """A tensor in its stored dtype, of the given shape; with rows, only these rows of its first axis.

        Raises ConfigError when it is missing or has another shape.
        """
        ...


class Checkpoint(Tensors, Protocol):
    """Weights of a file, read on demand; safe for several threads."""

    def read(self, name: str, shape: tuple[int, ...], rows: Rows | None = None, columns: range | None = None) -> Tensor:
        """See Tensors. shape: of the whole tensor. columns: only these of a matrix's second axis."""
        ...

    def read_int8(
        self, name: str, shape: tuple[int, int], rows: Rows | None = None, columns: range | None = None
    ) -> Int8Weight | None:
        """A matrix as it is stored, in 8 bits; None if it is stored otherwise, or if columns begin or end within a
        block. Arguments and errors as of read()."""
        ...

    def read_float8(
        self, name: str, shape: tuple[int, int], rows: range | None = None, columns: range | None = None
    ) -> Float8Weight | None:
        """A matrix as it is stored, in FP8; None if it is stored otherwise, or if columns begin or end within a block.
        Arguments and errors as of read()."""
        ...


def check_files(source: ModelSource, spec: ModelSpec) -> None:
    """Read the headers of all files of a model's weights: that each of its tensors is there, in a shape and a dtype
    that can be read, and that the files are as long as they say. Raises ConfigError."""
    checkpoint = open_checkpoint(source, spec)
    if isinstance(checkpoint, GgufTensors):
        return  # the specification was made of these tensors
    if spec.library is None:
        checkpoint.check(model_tensors(spec))
    elif isinstance(checkpoint, SafetensorsCheckpoint):
        checkpoint.check_shards()


def open_checkpoint(source: ModelSource, spec: ModelSpec) -> "SafetensorsCheckpoint | GgufCheckpoint | GgufTensors":
    """Open a model's weights. Raises ConfigError when the files cannot be read, and for tensors in them that the model
    does not consist of; where transformers' modules compute it, these are found where the model is loaded."""
    if source.kind == "gguf":
        return GgufCheckpoint(source.path, spec) if spec.library is None else GgufTensors(source.path)
    checkpoint = SafetensorsCheckpoint(source.path)
    if spec.library is None:
        refuse_unread(spec, checkpoint.names, str(source.path))
    return checkpoint


class CountedCheckpoint:
    """A checkpoint of whose weights those that are read are counted."""

    def __init__(self, checkpoint: Checkpoint, loading: LoadProgress) -> None:
        self._checkpoint = checkpoint
        self._loading = loading

    def read(self, name: str, shape: tuple[int, ...], rows: Rows | None = None, columns: range | None = None) -> Tensor:
        """See Checkpoint."""
        tensor = self._checkpoint.read(name, shape, rows, columns)
        self._loading.read(tensor.numel())
        return tensor

    def read_int8(
        self, name: str, shape: tuple[int, int], rows: Rows | None = None, columns: range | None = None
    ) -> Int8Weight | None:
        """See Checkpoint."""
        weight = self._checkpoint.read_int8(name, shape, rows, columns)
        if weight is not None:
            self._loading.read(weight.values.numel())
        return weight

    def read_float8(
        self, name: str, shape: tuple[int, int], rows: range | None = None, columns: range | None = None
    ) -> Float8Weight | None:
        """See Checkpoint."""
        weight = self._checkpoint.read_float8(name, shape, rows, columns)
        if weight is not None:
            self._loading.read(weight.values.numel())
        return weight


class SafetensorsCheckpoint:
    """Weights of a folder: of model.safetensors where it is there, as transformers has it, else of the shards that an
    index names, else of all files that are named as shards, else of all .safetensors files.

    names: of all tensors in these files.
    """

    def __init__(self, folder: Path) -> None:
        """Read the index and the headers. Shards that the index names may be missing: stages read only theirs. Raises
        ConfigError for unreadable files, and for a name that two of them have."""
        self._folder = folder
        self._files: dict[str, Any] = {}
        index = folder / INDEX
        self._file_of = Fields(INDEX, read_json(index)).get("weight_map", TEXTS) if index.is_file() else {}
        if (folder / SINGLE).is_file():
            self._file_of, names = {}, [SINGLE]
        elif index.is_file():
            names = [name for name in sorted(set(self._file_of.values())) if _in_folder(folder, name).is_file()]
        else:
            names = sorted(path.name for path in [*folder.glob(SHARDS)] or folder.glob("*.safetensors"))
            if not names:
                raise ConfigError(f"model folder {folder} has no .safetensors file")
        stored: dict[str, str] = {}
        for file in names:
            for name in self._open(file).keys():  # noqa: SIM118
                if name in stored:
                    raise ConfigError(f"{folder}: {stored[name]} and {file} both have a tensor {name!r:.100}")
                stored[name] = file
        self._file_of = self._file_of or stored
        tensors = {name: each for file in names for name, each in _header(folder / file).items()}
        try:
            scheme = read_scheme(folder, read_json(folder / "config.json"), read_json)
            self._forms, parts = find_forms(tensors, scheme, self._whole)
        except ConfigError as error:
            raise ConfigError(f"{folder}: {error}") from error
        self.names = (self._file_of.keys() | stored.keys()) - parts | self._forms.keys()

    def check(self, tensors: Shapes) -> None:
        """Raises ConfigError for a tensor that read() would refuse."""
        for name, shape in tensors.items():
            if name in self._forms:
                self._form(name, shape)
            else:
                self._stored(name, shape)

    def check_shards(self) -> None:
        """Raises ConfigError for a shard that the index names and that is not there."""
        for file in sorted(set(self._file_of.values())):
            if not (self._folder / file).is_file():
                raise ConfigError(f"{INDEX} names {file}, which is not in {self._folder}")

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor that is there."""
        if name in self._forms:
            return self._forms[name].shape
        return tuple(self._open(self._file_of[name]).get_slice(name).get_shape())

    def read(self, name: str, shape: tuple[int, ...], rows: Rows | None = None, columns: range | None = None) -> Tensor:
        """See Checkpoint. A quantised weight in float32, of which all is expanded."""
        if name in self._forms:
            try:
                expanded = self._form(name, shape).expand(self._whole)
            except (IndexError, RuntimeError) as error:  # parts whose shapes or indices contradict each other
                raise ConfigError(f"quantised tensor {name} in {self._folder} cannot be expanded: {error}") from error
            some = expanded if rows is None else expanded[_slice(rows) if isinstance(rows, range) else rows]
            return some if columns is None else some[:, _slice(columns)]
        stored = self._stored(name, shape)
        if columns is None and not isinstance(rows, range):
            whole: Tensor = self._open(self._file_of[name]).get_tensor(name)
            return whole if rows is None else whole[rows]
        within = _slice(rows) if rows is None or isinstance(rows, range) else slice(None)
        part: Tensor = stored[within] if columns is None else stored[within, _slice(columns)]
        return part[rows] if isinstance(rows, list) else part

    def read_int8(
        self, name: str, shape: tuple[int, int], rows: Rows | None = None, columns: range | None = None
    ) -> None:
        """None: weights in 8 bits have other scales."""

    def read_float8(
        self, name: str, shape: tuple[int, int], rows: range | None = None, columns: range | None = None
    ) -> Float8Weight | None:
        """See Checkpoint."""
        form = self._form(name, shape) if name in self._forms else None
        whole = form.float8(self._whole) if form is not None and form.float8 is not None else None
        return None if whole is None else whole.part(rows or range(shape[0]), columns or range(shape[1]))

    def _whole(self, name: str) -> Tensor:
        """A tensor as it is stored."""
        whole: Tensor = self._open(self._file_of[name]).get_tensor(name)
        return whole

    def _form(self, name: str, shape: tuple[int, ...]) -> Form:
        """A quantised weight of the expected shape."""
        form = self._forms[name]
        if form.shape != shape:
            raise _misshapen(name, shape, form.shape)
        return form

    def _stored(self, name: str, shape: tuple[int, ...]) -> Any:
        """A tensor in its file, of the expected shape and of a dtype that can be read."""
        if name not in self._file_of:
            raise _missing(name, shape, self._folder)
        file = self._open(self._file_of[name])
        if name not in file.keys():  # noqa: SIM118
            raise _missing(name, shape, self._folder / self._file_of[name])
        stored = file.get_slice(name)
        if (dtype := stored.get_dtype()) not in FLOATS:
            raise ConfigError(
                f"tensor {name} in {self._folder / self._file_of[name]} is stored as {dtype}, which is no weight; "
                f"supported are {', '.join(FLOATS)}, and quantised weights with their scales"
            )
        if (found := tuple(stored.get_shape())) != shape:
            raise _misshapen(name, shape, found)
        return stored

    def _open(self, name: str) -> Any:
        if name not in self._files:
            try:
                self._files[name] = safe_open(self._folder / name, framework="pt", device="cpu")
            except (OSError, ValueError, RuntimeError, SafetensorError) as error:  # RuntimeError: it cannot be mapped
                raise ConfigError(f"{self._folder / name} cannot be read as safetensors: {error}") from error
        return self._files[name]


class NamedTensors(Tensors, Protocol):
    """Tensors as files name and shape them."""

    @property
    def names(self) -> AbstractSet[str]:
        """Of all of them."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor that is there."""
        ...


class GgufTensors:
    """Tensors of a GGUF file by the names and in the shapes that they have there, dequantised to float32.

    path, metadata: of the file. names: of its tensors. file: itself.
    """

    def __init__(self, path: Path) -> None:
        """Read the header. Raises ConfigError for a file that is no readable GGUF."""
        self.file = GgufFile(path)
        self.path, self.metadata = path, self.file.metadata
        self.names = self.file.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor that is there."""
        return self.file.tensors[name].shape

    def read(self, name: str, shape: tuple[int, ...], rows: list[int] | None = None) -> Tensor:
        """See Tensors."""
        if name not in self.names:
            raise _missing(name, shape, self.path)
        if (found := self.shape(name)) != shape:
            raise _misshapen(name, shape, found)
        return torch.from_numpy(self.file.read(name, None if rows is None else np.array(rows, np.intp)))


class GgufCheckpoint:
    """Weights of a GGUF file, dequantised to float32; those of kind Q8_0 also as they are."""

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        """Read the header. Raises ConfigError for a file that is no readable GGUF, and for tensors in it that the model
        does not consist of."""
        self._path = path
        self._file = GgufFile(path)
        self._spec = spec
        known = {gguf_tensor_name(name) for name in model_tensors(spec)}
        refuse_unread(spec, self._file.tensors.keys() - known - {ROPE_DIVISORS}, str(path))

    def check(self, tensors: Shapes) -> None:
        """Raises ConfigError for a tensor that read() would refuse."""
        for name, shape in tensors.items():
            self._checked_name(name, shape)

    def read(self, name: str, shape: tuple[int, ...], rows: Rows | None = None, columns: range | None = None) -> Tensor:
        """See Checkpoint."""
        return torch.from_numpy(
            self._file.read(self._checked_name(name, shape), self._row_order(name, shape[0], rows), columns)
        )

    def read_int8(
        self, name: str, shape: tuple[int, int], rows: Rows | None = None, columns: range | None = None
    ) -> Int8Weight | None:
        """See Checkpoint."""
        order = self._row_order(name, shape[0], rows)
        found = self._file.read_q8(self._checked_name(name, shape), order, columns)
        if found is None:
            return None
        values, scales = map(torch.from_numpy, found)
        return Int8Weight(values, scales, values.shape[1])

    def read_float8(
        self, name: str, shape: tuple[int, int], rows: range | None = None, columns: range | None = None
    ) -> None:
        """None: no kind of GGUF is in FP8."""

    def _checked_name(self, name: str, shape: tuple[int, ...]) -> str:
        gguf_name = gguf_tensor_name(name)
        if gguf_name not in self._file.tensors:
            raise _missing(f"{name} ({gguf_name})", shape, self._path)
        found = self._file.tensors[gguf_name].shape
        if found != shape:
            raise _misshapen(f"{name} ({gguf_name})", shape, found)
        return gguf_name

    def _row_order(self, name: str, count: int, rows: Rows | None) -> NDArray[np.intp] | None:
        """Where the wanted rows of a tensor are in the file; None for all of them, in order.

        llama.cpp stores the rows of each query and key head of Llama models for pairwise rotation: (half, 2) instead of
        (2, half).
        """
        order = self._permutation(name, count)
        if rows is None:
            return order
        return np.array(rows, dtype=np.intp) if order is None else order[rows]

    def _permutation(self, name: str, rows: int) -> NDArray[np.intp] | None:
        heads = {"q_proj": self._spec.heads, "k_proj": self._spec.kv_heads}.get(name.split(".")[-2])
        if heads is None or not BY_MODEL_TYPE[self._spec.family].gguf_pairs:
            return None
        return np.arange(rows).reshape(heads, self._spec.head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def gguf_tensor_name(name: str) -> str:
    """GGUF tensor name for a Hugging Face name; unknown names are returned unchanged."""
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in _GGUF_LAYER:
        return _GGUF_TOP.get(name, name)
    return f"blk.{match[1]}.{_GGUF_LAYER[match[2]]}.{match[3]}"


def _header(path: Path) -> dict[str, Stored]:
    """Dtypes and shapes of the tensors of a file that was opened."""
    with path.open("rb") as file:
        header = msgspec.json.decode(file.read(int.from_bytes(file.read(8), "little")))
    return {
        name: Stored(each["dtype"], tuple(each["shape"])) for name, each in header.items() if name != "__metadata__"
    }


def _in_folder(folder: Path, name: str) -> Path:
    """A file that an index names. Raises ConfigError for one elsewhere."""
    if Path(name).is_absolute() or ".." in Path(name).parts or not name.isprintable():
        raise ConfigError(f"{INDEX}: 'weight_map' names {shown(name)!r}, which is no file of the model folder")
    return folder / name


def _slice(part: range | None) -> slice:
    return slice(None) if part is None else slice(part.start, part.stop)


def _missing(name: str, shape: tuple[int, ...], where: Path) -> ConfigError:
    return ConfigError(f"tensor {name} of shape {list(shape)} is missing in {where}")


def _misshapen(name: str, expected: tuple[int, ...], found: tuple[int, ...]) -> ConfigError:
    return ConfigError(f"tensor {name} should have shape {list(expected)} by the model's config, found {list(found)}")
