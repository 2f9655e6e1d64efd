"""Other people's arrays: NumPy, PyTorch, and anything with DLPack, described and viewed without a copy."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from . import dlpack
from .datatypes import BF16, BY_NAME, NUMPY, DataType
from .spec import INVALID, TensorDesc
from .status import AclnnError, Status

NDArray = npt.NDArray[Any]


@dataclass(frozen=True)
class Array:
    """A caller's array: the object itself, its descriptor, and a NumPy view of its memory."""

    owner: Any
    desc: TensorDesc
    view: NDArray | None  # None where the memory is not the CPU's


def is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def describe(value: Any, function: str, name: str) -> Array:
    """An argument as an Array. Anything that is no array is a TypeError."""
    if isinstance(value, (np.ndarray, np.generic)):
        return _from_numpy(value, np.asarray(value))
    if is_torch(value):
        return _from_torch(value, function, name)
    if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
        device = dlpack.device_name(value)
        if device != "cpu":
            raise AclnnError(
                Status.ACLNN_ERR_INNER_FIND_KERNEL_ERROR,
                name,
                f"{function}: {name} must be on a supported device (cpu); got {device}",
            )
        return _from_numpy(value, dlpack.to_numpy(value))
    raise TypeError(
        f"{function}: {name} must be an array of NumPy, PyTorch or a library with DLPack; got {type(value).__name__}"
    )


def describe_output(value: Any, function: str, name: str) -> Array:
    """The same for an array to write into."""
    array = describe(value, function, name)
    if isinstance(value, np.generic) or (array.view is not None and not array.view.flags.writeable):
        raise AclnnError(INVALID, name, f"{function}: {name} must be writable in place; got a read-only array")
    return array


def _from_numpy(owner: Any, view: NDArray) -> Array:
    dtype = BY_NAME.get(view.dtype.name, DataType.UNDEFINED) if view.dtype.isnative else DataType.UNDEFINED
    if any(stride % view.itemsize for stride in view.strides):
        view = view.copy()  # a field of packed records: its strides are no whole elements
        view.flags.writeable = False
    strides = tuple(stride // view.itemsize for stride in view.strides)
    return Array(owner, TensorDesc(view.shape, dtype, strides), view)


def _from_torch(value: Any, function: str, name: str) -> Array:
    torch = sys.modules["torch"]
    if value.layout is not torch.strided or value.is_neg() or value.is_conj():
        raise TypeError(f"{function}: {name} must be a plain strided tensor; got {value.layout} (call .contiguous())")
    dtype = BY_NAME.get(str(value.dtype).removeprefix("torch."), DataType.UNDEFINED)
    desc = TensorDesc(tuple(value.shape), dtype, tuple(value.stride()), device=str(value.device))
    if value.device.type != "cpu" or dtype == DataType.UNDEFINED:
        return Array(value, desc, None)
    plain = value.detach()
    view = plain.view(torch.int16).numpy().view(NUMPY[BF16]) if dtype == BF16 else plain.numpy()
    return Array(value, desc, view)


def allocate(desc: TensorDesc, like: Array) -> Array:
    """A new array of the library of `like`; for a library that is neither NumPy nor torch, a NumPy one."""
    if is_torch(like.owner):
        torch = sys.modules["torch"]
        dtype = getattr(torch, NUMPY[desc.dtype].name)
        new = torch.empty_strided(desc.shape, desc.strides, dtype=dtype, device=like.owner.device)
        return _from_torch(new, "allocate", "output")
    numpy = NUMPY[desc.dtype]
    memory = np.empty(desc.numel, numpy)
    view = np.ndarray(desc.shape, numpy, memory, 0, [stride * numpy.itemsize for stride in desc.strides])
    return Array(view, desc, view)


def give_back(output: Array, like: Array) -> Any:
    """What `allocate` made, as an array of the library of `like`."""
    if is_torch(like.owner) or isinstance(like.owner, (np.ndarray, np.generic)):
        return output.owner
    assert output.view is not None
    return dlpack.to_library(output.view, like.owner)
