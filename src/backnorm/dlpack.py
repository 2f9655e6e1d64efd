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

NDArray = npt.NDArray[Any]

_DEVICES = {1: "cpu", 2: "cuda", 3: "cpu", 10: "rocm", 13: "cuda"}
_BFLOAT = 4
_READ_ONLY = 1


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


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    """DLManagedTensor, in a capsule named dltensor."""

    _fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned, in a capsule named dltensor_versioned."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


_api = ctypes.pythonapi
_api.PyCapsule_IsValid.argtypes = (ctypes.py_object, ctypes.c_char_p)
_api.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_api.PyCapsule_GetPointer.restype = ctypes.c_void_p
_api.PyCapsule_New.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_api.PyCapsule_New.restype = ctypes.py_object


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
    versioned = bool(_api.PyCapsule_IsValid(capsule, b"dltensor_versioned"))
    kind: Any = _Versioned if versioned else _Managed
    name = b"dltensor_versioned" if versioned else b"dltensor"
    managed = ctypes.cast(_api.PyCapsule_GetPointer(capsule, name), ctypes.POINTER(kind)).contents
    dl = managed.tensor
    if (dl.code, dl.bits, dl.lanes) != (_BFLOAT, 16, 1):
        raise TypeError(f"a DLPack array of type code {dl.code} with {dl.bits} bits has no counterpart in NumPy")
    shape = tuple(dl.shape[i] for i in range(dl.ndim))
    bytes_strides = tuple(2 * dl.strides[i] for i in range(dl.ndim)) if dl.strides else None
    reach = (
        sum((n - 1) * s for n, s in zip(shape, bytes_strides)) + 2 if bytes_strides else 2 * int(np.prod(shape))
    )  # strides from DLPack producers are not negative
    if 0 in shape:
        return np.empty(shape, NUMPY[BF16])
    memory: Any = (ctypes.c_byte * reach).from_address(dl.data + dl.byte_offset)
    # The capsule was not renamed, so it is still its own owner: memory lives as long as the capsule does.
    memory._capsule = capsule
    view: NDArray = np.ndarray(shape, NUMPY[BF16], memory, 0, bytes_strides)
    # A producer from before version 1 cannot say; read-only then, as NumPy has it.
    view.flags.writeable = versioned and not managed.flags & _READ_ONLY
    return view


_lent: dict[int, tuple[Any, ...]] = {}
"""What lent arrays need to stay alive, by the address of their structure, until the borrower lets go."""


def _let_go(address: int) -> None:
    _lent.pop(address, None)


_release = _Deleter(_let_go)


class _Lender:
    """A bfloat16 NumPy array as a DLPack producer."""

    def __init__(self, array: NDArray) -> None:
        self._array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **_: Any) -> Any:
        array = self._array
        dims = ctypes.c_int64 * array.ndim
        shape, strides = dims(*array.shape), dims(*(s // 2 for s in array.strides))
        tensor = _DLTensor(array.ctypes.data, 1, 0, array.ndim, _BFLOAT, 16, 1, shape, strides, 0)
        managed = _Managed(tensor, None, _release)
        address = ctypes.addressof(managed)
        _lent[address] = (managed, array, shape, strides)
        return _api.PyCapsule_New(address, b"dltensor", None)


def to_library(array: NDArray, like: Any) -> Any:
    """The array in the library of `like`, found by its array namespace or its package's `from_dlpack`."""
    if hasattr(like, "__array_namespace__"):
        library = like.__array_namespace__()
    else:
        library = sys.modules[type(like).__module__.partition(".")[0]]
    if not hasattr(library, "from_dlpack"):
        raise TypeError(f"{library.__name__} offers no from_dlpack to return results with; pass out=")
    return library.from_dlpack(_Lender(array) if array.dtype == NUMPY[BF16] else array)
