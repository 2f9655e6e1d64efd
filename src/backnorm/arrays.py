"""Other people's arrays: NumPy, PyTorch, and anything with DLPack, described and viewed without a copy."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import dlpack
from .datatypes import BY_NAME, NUMBERS, NUMPY, DataType, Format
from .spec import INVALID, Shape, TensorDesc
from .status import AclnnError, Status

NDArray = npt.NDArray[Any]
ND = int(Format.ND)


class Array(NamedTuple):
    """A caller's array: the object itself, its descriptor, and the NumPy array or torch tensor that has its memory."""

    owner: Any
    desc: TensorDesc
    memory: Any

    @property
    def address(self) -> int:
        """Where the first element lies."""
        return address_of(self.memory) if type(self.memory) is np.ndarray else self.memory.data_ptr()


def address_of(array: NDArray) -> int:
    """array.ctypes.data in a third of the time, where the data pointer follows the object's head, as it always did."""
    address: int = _Pointer.from_address(id(array) + _HEAD).value or 0
    return address


_Pointer, _HEAD = ctypes.c_size_t, object.__basicsize__
_some = np.zeros(1, np.uint8)
if address_of(_some) != _some.ctypes.data:

    def address_of(array: NDArray) -> int:
        address: int = array.ctypes.data
        return address


def is_torch(value: Any) -> bool:
    kind = getattr(sys.modules.get("torch"), "Tensor", None)  # None while another thread is importing torch
    return kind is not None and isinstance(value, kind)


def describe(value: Any, function: str, name: str) -> Array:
    """An argument as an Array. Anything that is no array is a TypeError."""
    if type(value) is np.ndarray:
        return _from_numpy(value, value)
    if is_torch(value):
        try:
            return _from_torch(value)
        except Exception as error:  # nested, fake, functional, freed: torch has many tensors without memory
            raise TypeError(f"{function}: {name} must be a dense tensor with memory of its own; got {error}") from error
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{function}: {name} must be an array without a mask; got a masked array")
    if isinstance(value, (np.ndarray, np.generic)):
        return _from_numpy(value, np.asarray(value))
    if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
        return _from_dlpack(value, function, name)
    raise TypeError(
        f"{function}: {name} must be an array of NumPy, PyTorch or a library with DLPack; got {type(value).__name__}"
    )


def describe_output(value: Any, function: str, name: str) -> Array:
    """The same for an array to write into."""
    array = describe(value, function, name)
    memory = array.memory
    if is_torch(memory):
        writable = memory is value or not is_torch(value)  # else a copy with the sign put right
    else:
        writable = memory is None or (memory.flags.writeable and not isinstance(value, np.generic))
    if not writable:
        raise AclnnError(INVALID, name, f"{function}: {name} must be writable in place; got a read-only array")
    return array


def _unknown(owner: Any, shape: tuple[int, ...], type_name: str, device: str = "cpu") -> Array:
    """An array whose type has no number; the rules refuse it, by its own name."""
    return Array(owner, _unknown_desc(shape, type_name, device), None)


def _unknown_desc(shape: Shape, type_name: str, device: str) -> TensorDesc:
    return TensorDesc(shape, DataType.UNDEFINED, (0,) * len(shape), ND, device, type_name)


@lru_cache(maxsize=4096)
def _numpy_desc(shape: Shape, strides: Shape, dtype: np.dtype[Any]) -> TensorDesc | None:
    """None where the strides are no whole elements."""
    size = dtype.itemsize
    if any(stride % size for stride in strides):
        return None
    return TensorDesc(shape, NUMBERS[dtype], tuple(stride // size for stride in strides))


def _from_numpy(owner: Any, view: NDArray) -> Array:
    if view.dtype not in NUMBERS:
        return _unknown(owner, view.shape, str(view.dtype))
    desc = _numpy_desc(view.shape, view.strides, view.dtype)
    if desc is None:  # a field of packed records
        copy = view.copy()
        copy.flags.writeable = False
        return _from_numpy(owner, copy)
    return Array(owner, desc, view)


@lru_cache(maxsize=4096)
def torch_desc(shape: Any, strides: Shape, kind: Any, device: Any) -> TensorDesc:
    type_name = str(kind).removeprefix("torch.")
    place = "cpu" if device.type == "cpu" else str(device)
    if type_name not in BY_NAME:
        return _unknown_desc(tuple(shape), type_name, place)
    return TensorDesc(tuple(shape), BY_NAME[type_name], strides, ND, place)


def _from_torch(value: Any) -> Array:
    if value.layout is not sys.modules["torch"].strided:
        raise TypeError(f"a {value.layout} tensor")
    plain = value.detach().resolve_neg() if value.is_neg() else value
    if plain.is_cpu and plain.data_ptr() == 0 and plain.numel():
        raise TypeError("a tensor whose memory was freed")
    return Array(value, torch_desc(value.shape, plain.stride(), value.dtype, value.device), plain)


def _torch_has_cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def _from_dlpack(value: Any, function: str, name: str) -> Array:
    try:
        device = dlpack.device_name(value)
        if device == "cpu":
            return _from_numpy(value, dlpack.to_numpy(value))
        if device.startswith("cuda") and _torch_has_cuda():
            from torch.utils.dlpack import from_dlpack

            return _from_torch(from_dlpack(value))._replace(owner=value)
    except dlpack.UnknownType as kind:
        return _unknown(value, (), str(kind))
    except Exception as error:  # whatever the library raises
        raise TypeError(f"{function}: {name} must be an array that DLPack can export; got {error}") from error
    raise AclnnError(
        Status.ACLNN_ERR_INNER_FIND_KERNEL_ERROR,
        name,
        f"{function}: {name} must be on a supported device (cpu, or cuda where PyTorch has it); got {device}",
    )


def empty_strided(shape: Shape, strides: Sequence[int], dtype: np.dtype[Any]) -> NDArray:
    """A new NumPy array that fills its memory, with these strides in bytes."""
    memory = np.empty(math.prod(shape), dtype)
    return memory if len(shape) == 1 else np.ndarray(shape, dtype, memory, 0, strides)


def allocate(desc: TensorDesc, like: Array) -> Array:
    """A new array of the library of `like`; for a library that is neither NumPy nor torch, a NumPy one."""
    try:
        if is_torch(like.memory):
            torch = sys.modules["torch"]
            dtype = getattr(torch, NUMPY[desc.dtype].name)
            tensor = torch.empty_strided(desc.shape, desc.strides, dtype=dtype, device=like.memory.device)
            if type(tensor) is not torch.Tensor:  # whose memory is not there
                raise TypeError(f"results must have memory; got a {type(tensor).__name__} in a mode of torch's")
            return Array(tensor, desc, tensor)
        numpy = NUMPY[desc.dtype]
        array = empty_strided(desc.shape, [stride * numpy.itemsize for stride in desc.strides], numpy)
        return Array(array, desc, array)
    except (MemoryError, ValueError, RuntimeError):
        raise MemoryError(f"an output of shape {list(desc.shape)} does not fit into memory") from None
