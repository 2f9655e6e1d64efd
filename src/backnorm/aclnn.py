"""The two phases of every operator, by exact C name.

`workspaceSize, executor, ret = aclnnXxxGetWorkspaceSize(...)` checks and plans, looking at no data;
`ret = aclnnXxx(workspace, workspaceSize, executor, stream)` queues the work on a stream.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from .acl.entry import Converter, Text, attempt, status_call
from .acl.memory import BadAddress
from .acl.messages import AclFailure
from .acl.runtime import runtime
from .acl.streams import Task
from .acl.tensors import BoolArray, Executor, IntArray, Tensor
from .arguments import to_bool, to_handle, to_int64, to_uint64
from .ops import OPS
from .plan import make_plan
from .spec import ACLNN, INVALID, NULLPTR, Dead, OpSpec
from .status import AclnnError, Status

EXECUTOR_MARK = 8

_KINDS: dict[str, type] = {"tensor": Tensor, "int_array": IntArray, "bool_array": BoolArray}
_CHECKS: dict[str, Callable[[str, Any], Any]] = {"int64": to_int64, "bool": to_bool}


def plan_executor(op: OpSpec, arguments: Sequence[Any], door: str) -> tuple[int, int]:
    """Phase one: (workspace bytes, executor handle) for arguments in C's order, handles for tensors and arrays.

    Descriptors never change and addresses are copied, so the caller may destroy tensors and arrays at once.
    """
    values: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    addresses: dict[str, int] = {}
    with runtime.lock:
        objects = runtime.objects
        for (name, kind), value in zip(_kinds(op), arguments):
            if kind is None:
                values[name] = value
            elif not value:
                values[name] = None
            else:
                thing: Any = objects.get(value)
                alive = type(thing) is kind
                if not alive:
                    values[name] = Dead(value)
                elif kind is Tensor:
                    values[name] = thing.desc
                    tensors[name], addresses[name] = thing, thing.address
                else:
                    values[name] = thing.values
    try:
        plan = make_plan(op, values, runtime.product.name, door)
    except AclnnError as error:
        raise AclFailure(error.status, str(error)) from None
    return plan.workspace_bytes, runtime.register(Executor(plan, tensors, addresses), EXECUTOR_MARK)


@cache
def _kinds(op: OpSpec) -> list[tuple[str, type | None]]:
    """Each parameter's name and what its handle stands for, None where it is no handle."""
    return [(param.name, _KINDS.get(param.kind)) for param in op.params]


def run_executor(op: OpSpec, workspace: int, workspace_size: int, handle: int, stream_handle: int) -> None:
    """Phase two: check every address, then queue. The executor is used up, unless it is repeatable and all is well."""
    with runtime.lock:
        executor = _executor(op, handle)
        used_up = True
        try:
            task = _make_task(executor, workspace, workspace_size)
            try:
                runtime.stream(stream_handle).submit(task)
            except AclFailure as failure:
                raise AclFailure(
                    Status.ACLNN_ERR_RUNTIME_ERROR, f"the runtime refused the stream: {failure} ({failure.status})"
                ) from None
            used_up = not executor.repeatable
        finally:
            if used_up:
                runtime.drop(handle)


def _executor(op: OpSpec, handle: int) -> Executor:
    if not handle:
        raise AclFailure(NULLPTR, "executor must not be null; got null")
    executor = runtime.get(handle, Executor)
    if executor is None:
        if runtime.was_made(handle, EXECUTOR_MARK):
            raise AclFailure(
                NULLPTR,
                f"executor must be live; got {handle:#x}, which was used up by an earlier call or destroyed: plan again"
                f" with {op.c_name}GetWorkspaceSize, or call aclSetAclOpExecutorRepeatable before the first run",
            )
        raise AclFailure(NULLPTR, f"executor must be live; got {handle:#x}, a destroyed or foreign handle")
    if executor.plan.op is not op:
        runtime.drop(handle)
        raise AclFailure(
            NULLPTR, f"executor must come from {op.c_name}GetWorkspaceSize; got {executor.plan.op.c_name}'s"
        )
    return executor


def _make_task(executor: Executor, workspace: int, workspace_size: int) -> Task:
    plan = executor.plan
    if workspace_size > 0 and not workspace:
        raise AclFailure(NULLPTR, f"workspace must not be null with workspaceSize {workspace_size}; got null")
    if workspace_size < plan.workspace_bytes:
        raise AclFailure(
            INVALID, f"workspaceSize must be what phase one gave ({plan.workspace_bytes} bytes); got {workspace_size}"
        )
    blocks = set()
    if workspace_size:
        try:
            block = runtime.memory.locate(workspace, workspace + workspace_size, "device")
        except BadAddress as reason:
            raise AclFailure(INVALID, f"workspace must be live device memory: {reason}") from None
        blocks.add(block)
    starts = []
    for name in plan.tensors:
        try:
            block, start, low, high = executor.tensors[name].locate(runtime.memory, executor.addresses[name])
        except BadAddress as reason:
            raise AclFailure(INVALID, f"{name} must lie inside one live device allocation: {reason}") from None
        if low < workspace + plan.workspace_bytes and workspace < high:
            raise AclFailure(INVALID, f"workspace must be apart from {name}; got {workspace:#x}, which lies on it")
        blocks.add(block)
        starts.append(start)
    return Task(plan.op.c_name, lambda queue: plan.execute(workspace, starts, queue), tuple(blocks))


def _phase_one(op: OpSpec) -> Callable[..., tuple[int, int, int]]:
    name = f"{op.c_name}GetWorkspaceSize"
    params = [param for param in op.params if param.kind != "out_pointer"]
    checks = [_CHECKS.get(param.kind, to_handle) for param in params]
    convert = Converter(name, _signature([param.name for param in params]), checks)

    def work(*args: Any) -> tuple[int, int]:
        return plan_executor(op, (*args, True, True), ACLNN)  # the out-pointers, which come last

    def get_workspace_size(*args: Any, **kwargs: Any) -> tuple[int, int, int]:
        (size, executor), ret = attempt(name, work, convert(args, kwargs), (0, 0), False)
        return size, executor, ret

    _dress(get_workspace_size, convert, f"Phase one of {op.title}: (workspaceSize, executor, ret).")
    return get_workspace_size


def _phase_two(op: OpSpec) -> Callable[..., int]:
    names = ["workspace", "workspaceSize", "executor", "stream"]
    checks: list[Callable[[str, Any], Any]] = [to_handle, to_uint64, to_handle, to_handle]
    convert = Converter(op.c_name, _signature(names), checks)

    def work(*args: int) -> None:
        run_executor(op, *args)

    def run(*args: Any, **kwargs: Any) -> int:
        return attempt(op.c_name, work, convert(args, kwargs), None, False)[1]

    _dress(run, convert, f"Phase two of {op.title}: queues the work on the stream.")
    return run


def _signature(names: list[str]) -> inspect.Signature:
    return inspect.Signature([inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names])


def _dress(fn: Any, convert: Converter, doc: str) -> None:
    """Give a generated function the name, signature and docstring that help() shows."""
    fn.__name__ = fn.__qualname__ = convert.function
    fn.__signature__, fn.__doc__ = convert.signature, doc


aclnnLayerNormBackwardGetWorkspaceSize = _phase_one(OPS["layer_norm_backward"])
aclnnLayerNormBackward = _phase_two(OPS["layer_norm_backward"])
aclnnGroupNormBackwardGetWorkspaceSize = _phase_one(OPS["group_norm_backward"])
aclnnGroupNormBackward = _phase_two(OPS["group_norm_backward"])
aclnnBatchNormReduceBackwardGetWorkspaceSize = _phase_one(OPS["batch_norm_backward_reduce"])
aclnnBatchNormReduceBackward = _phase_two(OPS["batch_norm_backward_reduce"])


@status_call
def aclnnInit(configPath: Text = None) -> None:
    """Optional: the operators need aclInit alone."""
    runtime.initialize_aclnn()


@status_call
def aclnnFinalize() -> None:
    runtime.finalize_aclnn()
