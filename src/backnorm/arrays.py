"""Other people's arrays: NumPy, PyTorch, and anything with DLPack, described and viewed without a copy."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import dlpack
from .datatypes import BF16, BY_NAME, F16, F32, NUMBERS, NUMPY, DataType, Format
from .spec import INVALID, TensorDesc
from .status import AclnnError, Status

NDArray = npt.NDArray[Any]
ND = int(Format.ND)


class Array(NamedTuple):
    """A caller's array: the object itself, its descriptor, and a NumPy view of its memory."""

    owner: Any
    desc: TensorDesc
    view: NDArray | None  # None where the memory is not the CPU's


def is_torch(value: Any) -> bool:
    kind = getattr(sys.modules.get("torch"), "Tensor", None)  # None while another thread is importing torch
    return kind is not None and isinstance(value, kind)


def describe(value: Any, function: str, name: str) -> Array:
    """An argument as an Array. Anything that is no array is a TypeError."""
    if type(value) is np.ndarray:
        return _from_numpy(value, value)
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{function}: {name} must be an array without a mask; got a masked array")
    if isinstance(value, (np.ndarray, np.generic)):
        return _from_numpy(value, np.asarray(value))
    if is_torch(value):
        try:
            return _from_torch(value)
        except Exception as error:  # nested, fake, functional, freed: torch has many tensors without memory
            raise TypeError(f"{function}: {name} must be a dense tensor with memory of its own; got {error}") from error
    if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
        return _from_dlpack(value, function, name)
    raise TypeError(
        f"{function}: {name} must be an array of NumPy, PyTorch or a library with DLPack; got {type(value).__name__}"
    )


def describe_output(value: Any, function: str, name: str) -> Array:
    """The same for an array to write into."""
    array = describe(value, function, name)
    in_place = not isinstance(value, np.generic) and not (is_torch(value) and value.is_neg())
    if not in_place or (array.view is not None and not array.view.flags.writeable):
        raise AclnnError(INVALID, name, f"{function}: {name} must be writable in place; got a read-only array")
    return array


def _unknown(owner: Any, shape: tuple[int, ...], type_name: str, device: str = "cpu") -> Array:
    """An array whose type has no number; the rules refuse it, by its own name."""
    return Array(owner, TensorDesc(shape, DataType.UNDEFINED, (0,) * len(shape), ND, device, type_name), None)


def _from_numpy(owner: Any, view: NDArray) -> Array:
    number = NUMBERS.get(view.dtype)
    if number is None:
        return _unknown(owner, view.shape, str(view.dtype))
    size = view.itemsize
    if any([stride % size for stride in view.strides]):  # noqa: C419 (a list is twice as fast here)
        view = view.copy()  # a field of packed records: its strides are no whole elements
        view.flags.writeable = False
    return Array(owner, TensorDesc(view.shape, number, tuple([stride // size for stride in view.strides])), view)


def _from_torch(value: Any) -> Array:
    torch = sys.modules["torch"]
    if value.layout is not torch.strided or value.is_nested:
        raise TypeError(f"a {'nested' if value.is_nested else value.layout} tensor")
    kind, on_cpu = value.dtype, value.is_cpu
    number = _TORCH_NUMBERS.get(kind)
    if number is None:
        type_name = str(kind).removeprefix("torch.")
        if type_name not in BY_NAME:
            return _unknown(value, tuple(value.shape), type_name, str(value.device))
        number = _TORCH_NUMBERS[kind] = BY_NAME[type_name]
    device = "cpu" if on_cpu else str(value.device)
    desc = TensorDesc(tuple(value.shape), number, value.stride(), ND, device)
    if not on_cpu or number not in (F32, F16, BF16):
        return Array(value, desc, None)
    if value.data_ptr() == 0 and value.numel():
        raise TypeError("a tensor whose memory was freed")
    plain = value.detach() if value.requires_grad else value
    plain = plain.resolve_neg() if plain.is_neg() else plain
    view = plain.view(torch.int16).numpy().view(NUMPY[BF16]) if number == BF16 else plain.numpy()
    return Array(value, desc, view)


_TORCH_NUMBERS: dict[Any, DataType] = {}
"""The numbers of torch's types met so far; torch may not be there to ask beforehand."""


def _from_dlpack(value: Any, function: str, name: str) -> Array:
    try:
        device = dlpack.device_name(value)
        if device == "cpu":
            return _from_numpy(value, dlpack.to_numpy(value))
    except dlpack.UnknownType as kind:
        return _unknown(value, (), str(kind))
    except Exception as error:  # whatever the library raises
        raise TypeError(f"{function}: {name} must be an array that DLPack can export; got {error}") from error
    raise AclnnError(
        Status.ACLNN_ERR_INNER_FIND_KERNEL_ERROR,
        name,
        f"{function}: {name} must be on a supported device (cpu); got {device}",
    )


def allocate(desc: TensorDesc, like: Array) -> Array:
    """A new array of the library of `like`; for a library that is neither NumPy nor torch, a NumPy one."""
    try:
        if is_torch(like.owner):
            torch = sys.modules["torch"]
            dtype = getattr(torch, NUMPY[desc.dtype].name)
            return _from_torch(torch.empty_strided(desc.shape, desc.strides, dtype=dtype, device=like.owner.device))
        numpy = NUMPY[desc.dtype]
        memory = np.empty(desc.numel, numpy)
        view = np.ndarray(desc.shape, numpy, memory, 0, [stride * numpy.itemsize for stride in desc.strides])
        return Array(view, desc, view)
    except (MemoryError, ValueError, RuntimeError):
        raise MemoryError(f"an output of shape {list(desc.shape)} does not fit into memory") from None
