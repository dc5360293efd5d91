"""Copies of whole pages into another process's memory, past the caches where that was built (streaming.c)."""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

from core.native import load_library
from transfer.layout import Bytes

STREAMED_BYTES = 1 << 14  # what is smaller may as well stay in the caches


def copy(target: Bytes, source: Bytes) -> None:
    """target[...] = source, of the same shape."""
    stream = _stream()
    if stream is None or target.nbytes < STREAMED_BYTES or not _dense(target, source):
        target[...] = source
    else:
        stream(_address(target), _address(source), target.nbytes)


def _dense(target: Bytes, source: Bytes) -> bool:
    return target.flags.c_contiguous and source.flags.c_contiguous and target.shape == source.shape


def _address(array: Bytes) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


@cache
def _stream() -> Callable[[int, int, int], None] | None:
    library = load_library(Path(__file__).with_name("streaming.c"))
    if library is None:
        return None
    function = library.headrace_copy
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64), None
    return function
