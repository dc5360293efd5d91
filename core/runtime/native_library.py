"""Compiled parts, built when the package is installed. All of them are optional: there is Python for each."""

import ctypes
from pathlib import Path
from sysconfig import get_config_var


def load_library(source: Path) -> ctypes.CDLL | None:
    """The library that was built from a C file, beside it; None where it was not."""
    library = source.with_suffix(get_config_var("EXT_SUFFIX"))
    return ctypes.CDLL(str(library)) if library.is_file() else None
