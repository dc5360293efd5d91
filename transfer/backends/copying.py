"""Copies pages into mapped memory, with non-temporal stores where streaming.c was compiled."""

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy.typing as npt

from headrace.core.runtime.native_library import load_library
from headrace.transfer.backends.strided_pool import page_numbers
from headrace.transfer.protocol.layout import Bytes

STREAMED_BYTES = 1 << 14  # smaller copies may stay in the caches


def copy(target: Bytes, source: Bytes) -> None:
    """Copy source to target; both have the same shape."""
    library = _library()
    if library is None or target.nbytes < STREAMED_BYTES or not _dense(target, source):
        target[...] = source
    else:
        library.headrace_copy(_address(target), _address(source), target.nbytes)


def copy_rows(target: Bytes, rows: Sequence[int], source: Bytes, own: Sequence[int]) -> None:
    """Copy source[own[i]] to target[rows[i]] for every i, between dense tables [rows, bytes].

    Raises IndexError for a row outside a table, ValueError for lists or rows of different sizes.
    """
    to, taken, size = page_numbers(rows, len(target)), page_numbers(own, len(source)), target.shape[1]
    if len(to) != len(taken) or size != source.shape[1]:
        raise ValueError(f"{len(taken)} rows of {source.shape[1]} bytes to {len(to)} of {size}")
    library = _library()
    if library is not None and size >= STREAMED_BYTES:
        library.headrace_copy_rows(_address(target), _address(to), _address(source), _address(taken), len(to), size)
        return
    for row, taken_row in zip(rows, own, strict=True):
        target[row] = source[taken_row]


def _dense(target: Bytes, source: Bytes) -> bool:
    return target.flags.c_contiguous and source.flags.c_contiguous and target.shape == source.shape


def _address(array: npt.NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


@cache
def _library() -> ctypes.CDLL | None:
    library = load_library(Path(__file__).parent, "streaming")
    if library is not None:
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        library.headrace_copy.argtypes, library.headrace_copy.restype = (pointer, pointer, size), None
        rows = library.headrace_copy_rows
        rows.argtypes, rows.restype = (pointer, pointer, pointer, pointer, size, size), None
    return library
