"""Writes GGUF files with the gguf package."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFValueType, GGUFWriter


def write_gguf(
    path: Path, architecture: str, keys: Mapping[str, Any], tensors: Mapping[str, Any], part_tensors: int = 0
) -> list[Path]:
    """Write a file; returns the paths of its parts, in order.

    keys: those without a dot in front belong to the architecture. Whole numbers are uint32. tensors: float32 arrays, or
    pairs of bytes and a kind. part_tensors: of a part, 0 for one file.
    """
    writer = GGUFWriter(path, architecture, split_max_tensors=part_tensors)
    for name, value in keys.items():
        key = name.removeprefix(".") if name.startswith(".") else f"{architecture}.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_key_value(key, list(value), GGUFValueType.ARRAY)
    for name, value in tensors.items():
        data, kind = value if isinstance(value, tuple) else (np.ascontiguousarray(value, np.float32), None)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(path.parent.glob(f"{path.stem}-*-of-*.gguf")) if part_tensors else [path]
