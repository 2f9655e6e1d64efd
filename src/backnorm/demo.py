"""The example call of each operator through the array functions and through the two phases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from . import acl, aclnn, functional
from .ops import OPS
from .spec import OpSpec

Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Line:
    """One output of one example call, beside its golden value."""

    operator: str
    door: str
    output: str
    result: Float32
    golden: npt.NDArray[np.float64]
    tolerance: float

    @property
    def passed(self) -> bool:
        return np.allclose(self.result, self.golden, rtol=self.tolerance, atol=self.tolerance)


def run_demo() -> list[Line]:
    lines = []
    for op in OPS.values():
        inputs = {
            param.name: np.array(op.example.inputs[param.name], np.float32)
            if param.kind == "tensor"
            else op.example.inputs[param.name]
            for param in op.inputs
        }
        doors = {"arrays": _through_arrays(op, inputs), "two phases": _through_two_phases(op, inputs)}
        for name, golden in op.example.golden.items():
            for door, results in doors.items():
                line = Line(op.name, door, name, results[name], np.array(golden, np.float64), op.example.tolerance)
                lines.append(line)
    return lines


def _through_arrays(op: OpSpec, inputs: Mapping[str, Any]) -> dict[str, Float32]:
    arguments = {param.array_name: inputs[param.name] for param in op.inputs}
    results = getattr(functional, op.name)(**arguments)
    return {param.name: result for param, result in zip(op.outputs, results)}


def _through_two_phases(op: OpSpec, inputs: Mapping[str, Any]) -> dict[str, Float32]:
    """What an aclnn client does, step by step."""
    results = {param.name: np.full(np.shape(op.example.golden[param.name]), np.nan, np.float32) for param in op.outputs}
    _check(acl.init())
    _check(acl.rt.set_device(0))
    stream, ret = acl.rt.create_stream()
    _check(ret)

    handles: dict[str, int] = {}
    addresses: dict[str, int] = {}
    destroy: list[tuple[Callable[[int | None], int], int]] = []
    for name, value in {**inputs, **results}.items():
        if isinstance(value, np.ndarray):
            addresses[name], ret = acl.rt.malloc(value.nbytes, acl.ACL_MEM_MALLOC_HUGE_FIRST)
            _check(ret)
            _copy(addresses[name], value.ctypes.data, value.nbytes, acl.ACL_MEMCPY_HOST_TO_DEVICE)
            handles[name] = acl.create_tensor(
                value.shape, acl.ACL_FLOAT, None, 0, acl.ACL_FORMAT_ND, value.shape, addresses[name]
            )
            destroy.append((acl.destroy_tensor, handles[name]))
        elif op.by_name[name].kind == "int_array":
            handles[name] = acl.create_int_array(value)
            destroy.append((acl.destroy_int_array, handles[name]))
        elif op.by_name[name].kind == "bool_array":
            handles[name] = acl.create_bool_array(value)
            destroy.append((acl.destroy_bool_array, handles[name]))
        else:
            handles[name] = value

    workspace_size, executor, ret = getattr(aclnn, f"{op.c_name}GetWorkspaceSize")(**handles)
    _check(ret)
    workspace = 0
    if workspace_size:
        workspace, ret = acl.rt.malloc(workspace_size, acl.ACL_MEM_MALLOC_HUGE_FIRST)
        _check(ret)
    _check(getattr(aclnn, op.c_name)(workspace, workspace_size, executor, stream))
    _check(acl.rt.synchronize_stream(stream))
    for name, result in results.items():
        _copy(result.ctypes.data, addresses[name], result.nbytes, acl.ACL_MEMCPY_DEVICE_TO_HOST)

    for function, handle in destroy:
        _check(function(handle))
    for address in (*addresses.values(), *([workspace] if workspace else [])):
        _check(acl.rt.free(address))
    _check(acl.rt.destroy_stream(stream))
    _check(acl.rt.reset_device(0))
    _check(acl.finalize())
    return results


def _copy(dst: int, src: int, size: int, kind: int) -> None:
    _check(acl.rt.memcpy(dst, size, src, size, kind))


def _check(ret: int) -> None:
    if ret:
        raise RuntimeError(f"acl returned {ret}: {acl.get_recent_err_msg()}")
