"""The acl runtime without an NPU, pyACL style. The `aclrt` functions are in `backnorm.acl.rt`.

Outputs come first and the status last; handles and addresses are integers, null is None or 0.
Wrong arity or type is a TypeError; every other mistake is a code, explained by `get_recent_err_msg`.
"""

from __future__ import annotations

import json
import os
from typing import TypeVar

import numpy as np

from ..datatypes import NUMPY
from ..spec import INVALID, NULLPTR, TensorDesc, contiguous_strides
from ..status import Status
from . import rt
from .constants import *  # noqa: F403
from .entry import (
    Bits16,
    BoolList,
    Float,
    Handle,
    Int32,
    Int64,
    IntList,
    Size,
    Text,
    handle_call,
    pure_call,
    status_call,
    value_call,
)
from .messages import AclFailure, take_messages
from .runtime import kind_name, runtime
from .tensors import BoolArray, Executor, IntArray, Tensor

T = TypeVar("T")

INNER, INNER_NULLPTR = Status.ACLNN_ERR_INNER, Status.ACLNN_ERR_INNER_NULLPTR

get_soc_name = rt.get_soc_name

# --- init and finalize ------------------------------------------------------------------------------------------------


@status_call(before_init=True)
def init(path: Text = None) -> None:
    """Start the runtime. A configuration file must be JSON; nothing in it applies here."""
    if path is not None:
        try:
            if not os.path.isfile(path) or os.path.getsize(path) > 1 << 20:
                raise ValueError("no file of at most 1 MiB")
            with open(path, encoding="utf-8") as file:
                json.loads(file.read() or "{}")
        except (OSError, ValueError, RecursionError) as error:
            raise AclFailure(
                Status.ACL_ERROR_INVALID_PARAM, f"path must name a JSON file or be null; got {path!r}: {error}"
            ) from None
    runtime.initialize(os.environ.get("BACKNORM_SOC"), os.environ.get("BACKNORM_DEVICE"))


@status_call(before_init=True)
def finalize() -> None:
    """Wait for all work, report on stderr what was not released, and end the runtime."""
    runtime.finalize()


@value_call(0, before_init=True)
def finalize_reference() -> int:
    """As finalize; gives the number of users left, which is 0."""
    runtime.finalize()
    return 0


@status_call(before_init=True)
def set_soc(name: Text) -> None:
    """Choose the product whose rules phase one applies, for the whole process; stronger than BACKNORM_SOC."""
    if name is None:
        raise AclFailure(Status.ACL_ERROR_INVALID_PARAM, "name must not be null; got null")
    runtime.soc = name


def get_recent_err_msg() -> str | None:
    """This thread's messages since the last call, newest first; None when there are none."""
    return take_messages()


# --- tensors and arrays -----------------------------------------------------------------------------------------------


@handle_call
def create_tensor(
    view_dims: IntList,
    data_type: Int32,
    strides: IntList,
    offset: Int64,
    format: Int32,
    storage_dims: IntList,
    data: Handle,
) -> int:
    """A view over memory at `data`. Dimensions are copied; strides None means contiguous."""
    shape = _dims("viewDims", view_dims)
    storage = shape if storage_dims is None else _dims("storageDims", storage_dims)
    steps = contiguous_strides(shape) if strides is None else tuple(strides)
    if len(steps) != len(shape):
        raise AclFailure(INVALID, f"strides must have one number an axis ({len(shape)}); got {len(steps)}")
    desc = TensorDesc(shape, data_type, steps, format, runtime.hardware.tensors)
    return runtime.register(Tensor(desc, offset, storage, data or 0))


def _dims(what: str, dims: IntList) -> tuple[int, ...]:
    if dims is None:
        raise AclFailure(NULLPTR, f"{what} must not be null; got null")
    if any(size < 0 for size in dims):
        raise AclFailure(INVALID, f"{what} must not be negative; got {list(dims)}")
    return tuple(dims)


@handle_call
def create_int_array(values: IntList) -> int:
    if values is None:
        raise AclFailure(NULLPTR, "value must not be null; got null")
    return runtime.register(IntArray(tuple(values)))


@handle_call
def create_bool_array(values: BoolList) -> int:
    if values is None:
        raise AclFailure(NULLPTR, "value must not be null; got null")
    return runtime.register(BoolArray(tuple(values)))


def _destroy(handle: int | None, kind: type[T]) -> None:
    if handle:
        with runtime.lock:
            _live(handle, kind)
            runtime.drop(handle)


def _live(handle: int | None, kind: type[T], null: Status = INNER_NULLPTR, dead: Status = INNER) -> T:
    """The object of a handle, with the codes of the aclnn side for null and for dead or foreign."""
    word = kind_name(kind)
    if not handle:
        raise AclFailure(null, f"{word} must not be null; got null")
    thing = runtime.get(handle, kind)
    if thing is None:
        raise AclFailure(dead, f"{word} must be live; got {handle:#x}, a destroyed or foreign handle")
    return thing


@status_call
def destroy_tensor(tensor: Handle) -> None:
    _destroy(tensor, Tensor)


@status_call
def destroy_int_array(array: Handle) -> None:
    _destroy(array, IntArray)


@status_call
def destroy_bool_array(array: Handle) -> None:
    _destroy(array, BoolArray)


def _tensor(handle: int | None) -> Tensor:
    return _live(handle, Tensor, NULLPTR, NULLPTR)


@value_call([])
def get_view_shape(tensor: Handle) -> list[int]:
    return list(_tensor(tensor).desc.shape)


@value_call([])
def get_view_strides(tensor: Handle) -> list[int]:
    return list(_tensor(tensor).desc.strides)


@value_call(0)
def get_view_offset(tensor: Handle) -> int:
    return _tensor(tensor).offset


@value_call([])
def get_storage_shape(tensor: Handle) -> list[int]:
    return list(_tensor(tensor).storage_shape)


@value_call(-1)
def get_data_type(tensor: Handle) -> int:
    return _tensor(tensor).desc.dtype


@value_call(-1)
def get_format(tensor: Handle) -> int:
    return _tensor(tensor).desc.format


@value_call(0)
def get_raw_tensor_addr(tensor: Handle) -> int:
    return _tensor(tensor).address


@status_call
def set_raw_tensor_addr(tensor: Handle, addr: Handle) -> None:
    _live(tensor, Tensor).address = addr or 0


# --- executors --------------------------------------------------------------------------------------------------------


@status_call
def set_acl_op_executor_repeatable(executor: Handle) -> None:
    """Let an executor run any number of times, until it is destroyed or a run fails."""
    _live(executor, Executor).repeatable = True


@status_call
def destroy_acl_op_executor(executor: Handle) -> None:
    with runtime.lock:
        _live(executor, Executor)
        runtime.drop(executor or 0)


def _set_addr(executor: int | None, index: int, tensor: int | None, addr: int | None, outputs: bool | None) -> None:
    """Move one tensor of an executor; `index` counts the tensor parameters of the kind, absent ones too."""
    with runtime.lock:
        found = _live(executor, Executor)
        moved = _live(tensor, Tensor)
        names = [
            param.name
            for param in found.plan.op.params
            if param.kind == "tensor" and (outputs is None or outputs == (param.requested is not None))
        ]
        if index >= len(names):
            raise AclFailure(INVALID, f"index must be from 0 to {len(names) - 1}; got {index}")
        name = names[index]
        if name not in found.tensors:
            raise AclFailure(INVALID, f"index must name a tensor the executor has; got {index}, the absent {name}")
        if moved.desc != found.tensors[name].desc or moved.offset != found.tensors[name].offset:
            raise AclFailure(INVALID, f"tensor must be like the {name} the executor was planned for; got another")
        moved.address = found.addresses[name] = addr or 0


@status_call
def set_tensor_addr(executor: Handle, index: Size, tensor: Handle, addr: Handle) -> None:
    """`index` counts all tensor parameters in the order of phase one."""
    _set_addr(executor, index, tensor, addr, None)


@status_call
def set_input_tensor_addr(executor: Handle, index: Size, tensor: Handle, addr: Handle) -> None:
    _set_addr(executor, index, tensor, addr, False)


@status_call
def set_output_tensor_addr(executor: Handle, index: Size, tensor: Handle, addr: Handle) -> None:
    _set_addr(executor, index, tensor, addr, True)


# --- pure functions ---------------------------------------------------------------------------------------------------


@pure_call
def data_type_size(data_type: Int32) -> int:
    """Bytes of an element; 0 for a type without a fixed size."""
    return NUMPY[data_type].itemsize if data_type in NUMPY else 0


@pure_call
def float16_to_float(value: Bits16) -> float:
    """The float behind the 16 bits of a half."""
    return float(np.uint16(value).view(np.float16))


@pure_call
def float_to_float16(value: Float) -> int:
    """The 16 bits of the nearest half."""
    with np.errstate(over="ignore"):
        return int(np.float16(value).view(np.uint16))
