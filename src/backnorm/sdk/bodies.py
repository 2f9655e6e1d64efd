"""What the C functions do: the Python functions of `backnorm.acl` and `backnorm.aclnn`, with C's arguments.

Runs in the interpreter the library started or was loaded into. Handles and addresses come as integers, outputs as
pointers that are written when the call succeeds.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from typing import Any

from .. import acl, aclnn
from ..acl.entry import attempt
from ..acl.messages import AclFailure, add_internal_error, take_messages
from ..acl.runtime import runtime
from ..forks import preparing
from ..ops import OPS
from ..spec import C, OpSpec
from ..status import Status
from .interface import ALL_FUNCTIONS, Function, Parameter
from .library import PREFIX

Body = Callable[..., Any]

#: Variables that may change between the start of Python and aclInit.
_VARIABLES = ("BACKNORM_DEVICE", "BACKNORM_NUM_THREADS", "BACKNORM_SOC", "BACKNORM_TRACE")


def python_function(function: Function) -> Any:
    """`acl.rt.malloc` for aclrtMalloc."""
    if function.name.startswith("aclnn"):
        return getattr(aclnn, function.name)
    module, name = (acl.rt, function.name[5:]) if function.name.startswith("aclrt") else (acl, function.name[3:])
    return getattr(module, re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())


def connect(ffi: Any, lib: Any) -> None:
    """Put a Python function behind every function of the library."""
    special = _special_bodies(ffi, lib)
    for function in ALL_FUNCTIONS:
        body = special.get(function.name) or _plain_body(ffi, function)
        ffi.def_extern(name=PREFIX + function.name, error=function.failed, onerror=_on_error(function))(body)
    ffi.def_extern(name=f"{PREFIX}finish_work")(_finish_work)


def _on_error(function: Function) -> Callable[..., None]:
    def report(kind: type, error: BaseException, trace: object) -> None:
        add_internal_error(function.name, error)

    return report


def _plain_body(ffi: Any, function: Function) -> Body:
    """Inputs as they come, in order; outputs written on success. A null output is refused as a null argument."""
    call = python_function(function)
    outputs = [i for i, param in enumerate(function.params) if param.is_output]
    texts = [i for i, param in enumerate(function.params) if param.type == "const char*"]
    before_init = getattr(call, "before_init", None)
    if before_init is None:
        return call  # type: ignore[no-any-return]  # one that returns no status
    if not outputs and not texts:  # C's types need no checks
        return lambda *args: attempt(function.name, call.__wrapped__, args, None, before_init)[1]

    def body(*args: Any) -> int:
        for i in outputs:
            if not args[i]:
                return _refuse_null(function, function.params[i], before_init)
        given = [_decode(ffi, arg) if i in texts else arg for i, arg in enumerate(args) if i not in outputs]
        if not outputs:
            return int(call(*given))
        *values, ret = call(*given)
        if ret == 0:
            for i, value in zip(outputs, values):
                args[i][0] = value
        return int(ret)

    return body


def _refuse_null(function: Function, output: Parameter, before_init: bool = False) -> int:
    null = Status.ACLNN_ERR_PARAM_NULLPTR if function.returns == "aclnnStatus" else Status.ACL_ERROR_INVALID_PARAM

    def refuse() -> None:
        raise AclFailure(null, f"{output.name} must not be null; got null")

    return attempt(function.name, refuse, (), None, before_init)[1]


def _decode(ffi: Any, text: Any) -> str | None:
    return os.fsdecode(ffi.string(text)) if text else None


def _special_bodies(ffi: Any, lib: Any) -> dict[str, Body]:
    """The functions whose arguments differ from Python's: arrays with their lengths, texts, and both phases."""
    kept = threading.local()
    names: dict[str, Any] = {}

    def init(path: Any) -> int:
        for name in _VARIABLES:
            value = lib.getenv(name.encode())
            if value:
                os.environ[name] = os.fsdecode(ffi.string(value))
            else:
                os.environ.pop(name, None)
        return acl.init(_decode(ffi, path))

    def numbers(pointer: Any, count: int) -> Any:
        if pointer:
            return tuple(ffi.unpack(pointer, count)) if count else ()
        return None if count else ()

    def create_tensor(
        dims: Any, rank: int, dtype: int, strides: Any, offset: int, format: int, storage: Any, n: int, data: int
    ) -> int:
        steps = numbers(strides, rank) if strides else None
        return acl.create_tensor(numbers(dims, rank), dtype, steps, offset, format, numbers(storage, n), data)

    def get_list(function: Function) -> Body:
        call = python_function(function)

        def body(tensor: int, array: Any, count: Any) -> int:
            if not array or not count:
                return _refuse_null(function, function.params[2 if array else 1])
            values, ret = call(tensor)
            if ret == 0:
                memory = lib.new_array(len(values))
                if not memory:
                    raise MemoryError
                memory[0 : len(values)] = values
                array[0], count[0] = memory, len(values)
            return int(ret)

        return body

    def recent_message() -> int:
        """The text lives until this thread's next call."""
        message = take_messages()
        kept.text = None if message is None else ffi.new("char[]", message.encode("utf-8", "surrogateescape"))
        return int(ffi.cast("uintptr_t", kept.text)) if message is not None else 0

    def soc_name() -> int:
        name = runtime.soc
        if name not in names:
            names[name] = ffi.new("char[]", os.fsencode(name))
        return int(ffi.cast("uintptr_t", names[name]))

    bodies: dict[str, Body] = {
        "aclInit": init,
        "aclCreateTensor": create_tensor,
        "aclCreateIntArray": lambda values, size: acl.create_int_array(numbers(values, size)),
        "aclCreateBoolArray": lambda values, size: acl.create_bool_array(numbers(values, size)),
        "aclGetRecentErrMsg": recent_message,
        "aclrtGetSocName": soc_name,
    }
    by_name = {function.name: function for function in ALL_FUNCTIONS}
    for name in ("aclGetViewShape", "aclGetViewStrides", "aclGetStorageShape"):
        bodies[name] = get_list(by_name[name])
    for op in OPS.values():
        bodies[f"{op.c_name}GetWorkspaceSize"] = _phase_one(op)
        bodies[op.c_name] = _phase_two(op, lib)
    return bodies


def _phase_one(op: OpSpec) -> Body:
    name = f"{op.c_name}GetWorkspaceSize"

    def work(*args: Any) -> tuple[int, int]:
        return aclnn.plan_executor(op, args, C)

    def body(*args: Any) -> int:
        # The out-pointers come last, and only whether they are given matters to the rules.
        *given, size_out, executor_out = args
        (size, executor), ret = attempt(name, work, (*given, bool(size_out), bool(executor_out)), (0, 0), False)
        if ret == 0:
            size_out[0], executor_out[0] = size, executor
        return ret

    return body


def _phase_two(op: OpSpec, lib: Any) -> Body:
    def body(*args: int) -> int:
        _load_kernels(lib)
        return attempt(op.c_name, aclnn.run_executor, (op, *args), None, False)[1]

    return body


_loaded = False


def _load_kernels(lib: Any) -> None:
    """What compiles kernels is loaded here and not on a stream's thread, so that exit() comes to us before it."""
    global _loaded
    with preparing:
        if _loaded:
            return
        if runtime.hardware.tensors == "cpu":
            from .. import threads

            threads._get_pool()
        lib.finish_work_at_exit()
        _loaded = True


def _finish_work() -> None:
    for stream in runtime.streams():
        stream.wait(stream.queued, None)
