"""Tensors over memory that torch has not allocated, by DLPack (https://dmlc.github.io/dlpack/latest/c_api.html)."""

import ctypes

import torch
from torch import Tensor

_KINDS = {"cpu": 1, "cuda": 2}  # DLDeviceType
_UNSIGNED = 1  # DLDataTypeCode
_LIBC = ctypes.CDLL(None)
_LIBC.malloc.argtypes, _LIBC.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.argtypes, _capsule.restype = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p), ctypes.py_object


class _Managed(ctypes.Structure):
    """DLManagedTensor of one dimension, and behind it the size that its shape points to."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("size", ctypes.c_int64),
    )


def tensor_at(address: int, size: int, device: torch.device) -> Tensor:
    """Bytes at an address that this device reads and writes, on whatever device they are: uint8 [size]. The memory has
    to stay for as long as the tensor or a view of it is used.

    DLPack takes our word for the device. From __cuda_array_interface__ torch would ask the driver, which for memory of
    another GPU that is mapped here names that one.
    """
    block = _LIBC.malloc(ctypes.sizeof(_Managed))  # free() is its deleter: no Python when the last view ends
    managed = _Managed.from_address(block)
    managed.data, managed.size, managed.byte_offset = address, size, 0
    managed.device_type, managed.device_id = _KINDS[device.type], device.index or 0
    managed.code, managed.bits, managed.lanes = _UNSIGNED, 8, 1
    managed.ndim, managed.shape, managed.strides = 1, block + _Managed.size.offset, None
    managed.manager, managed.deleter = None, ctypes.cast(_LIBC.free, ctypes.c_void_p).value
    made: Tensor = torch.utils.dlpack.from_dlpack(_capsule(block, b"dltensor", None))
    return made
