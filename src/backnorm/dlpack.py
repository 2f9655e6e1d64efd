"""DLPack where NumPy's own falls short: bfloat16, and handing a result to the library an input came from.

The structures are those of DLPack 1.0 (`dlpack.h`); only CPU memory is read or lent.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from .datatypes import BF16, NUMPY
from .spec import contiguous_strides, span

NDArray = npt.NDArray[Any]

_DEVICES = {1: "cpu", 2: "cuda", 3: "cpu", 10: "rocm", 13: "cuda"}
_BFLOAT = 4
_READ_ONLY = 1


class UnknownType(Exception):
    """A type that NumPy has no counterpart for; the text names it."""


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """The head of DLManagedTensor, in a capsule named dltensor."""

    _fields_ = (("tensor", _DLTensor),)


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned, in a capsule named dltensor_versioned."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


_api = ctypes.pythonapi
_api.PyCapsule_IsValid.argtypes = (ctypes.py_object, ctypes.c_char_p)
_api.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_api.PyCapsule_GetPointer.restype = ctypes.c_void_p


def _open(capsule: Any) -> Any:
    """The structure in a capsule, which stays its owner."""
    for kind, name in ((_Versioned, b"dltensor_versioned"), (_Managed, b"dltensor")):
        if _api.PyCapsule_IsValid(capsule, name):
            return ctypes.cast(_api.PyCapsule_GetPointer(capsule, name), ctypes.POINTER(kind)).contents
    raise TypeError(f"__dlpack__ must give a DLPack capsule; got {type(capsule).__name__}")


def device_name(value: Any) -> str:
    kind, number = value.__dlpack_device__()
    name = _DEVICES.get(int(kind), f"DLPack device {int(kind)}")
    return name if name == "cpu" else f"{name}:{number}"


def to_numpy(value: Any) -> NDArray:
    """A NumPy view of a CPU array; it keeps the exporter's memory alive."""
    try:
        return np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError):  # NumPy knows no bfloat16
        return _bfloat16_view(value)


def _bfloat16_view(value: Any) -> NDArray:
    try:
        capsule = value.__dlpack__(max_version=(1, 0))
    except TypeError:  # a producer from before version 1
        capsule = value.__dlpack__()
    managed = _open(capsule)
    dl = managed.tensor
    if (dl.code, dl.bits, dl.lanes) != (_BFLOAT, 16, 1):
        raise UnknownType(f"DLPack type {dl.code} of {dl.bits} bits")
    if _DEVICES.get(dl.device_type) != "cpu" or not 0 <= dl.ndim <= 64 or (dl.ndim and not dl.shape):
        raise TypeError(f"a capsule for device {dl.device_type} with {dl.ndim} axes, which is not what it said")
    shape = tuple(dl.shape[i] for i in range(dl.ndim))
    if 0 in shape:
        return np.empty(shape, NUMPY[BF16])
    if not dl.data:
        raise TypeError("a capsule without data")
    strides = tuple(dl.strides[i] for i in range(dl.ndim)) if dl.strides else contiguous_strides(shape)
    low, high = span(shape, strides)
    memory: Any = (ctypes.c_byte * (2 * (high - low + 1))).from_address(dl.data + dl.byte_offset + 2 * low)
    memory._capsule = capsule  # the view keeps the memory object, and that the capsule
    view: NDArray = np.ndarray(shape, NUMPY[BF16], memory, -2 * low, [2 * stride for stride in strides])
    # A producer from before version 1 cannot say; read-only then, as NumPy has it.
    view.flags.writeable = isinstance(managed, _Versioned) and not managed.flags & _READ_ONLY
    return view


class _Lender:
    """A bfloat16 NumPy array as a DLPack producer: NumPy's own capsule of its bits, with the type put right."""

    def __init__(self, array: NDArray) -> None:
        self._array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **_: Any) -> Any:
        capsule = self._array.view(np.int16).__dlpack__()
        _open(capsule).tensor.code = _BFLOAT
        return capsule


def importer(like: Any) -> Any:
    """The `from_dlpack` of an array's library: of its array namespace, or of the package its type comes from."""
    try:
        if hasattr(like, "__array_namespace__"):
            return like.__array_namespace__().from_dlpack
        return sys.modules[type(like).__module__.partition(".")[0]].from_dlpack
    except Exception as error:  # whatever the library raises
        raise TypeError(
            f"the library of {type(like).__name__} must offer from_dlpack to return results with, or out= be passed;"
            f" got {error!r}"
        ) from error


def lend(array: NDArray, from_dlpack: Any) -> Any:
    """The array as one of the library that `from_dlpack` belongs to."""
    return from_dlpack(_Lender(array) if isinstance(array, np.ndarray) and array.dtype == NUMPY[BF16] else array)
