"""Loads C libraries built when the package was installed. Each is optional and has a replacement in Python."""

import ctypes
from pathlib import Path
from sysconfig import get_config_var


def load_library(folder: Path, name: str) -> ctypes.CDLL | None:
    """The library of this name built from the C files of a folder, where it lies; None if it was not built."""
    library = folder / f"{name}{get_config_var('EXT_SUFFIX')}"
    return ctypes.CDLL(str(library)) if library.is_file() else None
