"""Loads C libraries built when the package was installed. Each is optional and has a replacement in Python."""

import ctypes
from pathlib import Path
from sysconfig import get_config_var


def load_library(source: Path) -> ctypes.CDLL | None:
    """The library built from a C source file, which lies beside it; None if it was not built."""
    library = source.with_suffix(get_config_var("EXT_SUFFIX"))
    return ctypes.CDLL(str(library)) if library.is_file() else None
