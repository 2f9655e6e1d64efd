"""From the device of a tensor to what computes there, loaded on first use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from .spec import Call, OpSpec
from .status import AclnnError, Status

if TYPE_CHECKING:
    from .plan import Plan


#: Takes the addresses of the workspace and of a plan's tensors, and (on a GPU) a stream or None for the current one.
Runner = Callable[[Sequence[int], int | None], None]


class Backend(Protocol):
    """One device's way to do an operator."""

    def tile(self, call: Call, writes: tuple[str, ...]) -> Any:
        """The integers of a call, `workspace_bytes` among them."""

    def prepare(self, plan: Plan) -> Runner:
        """What does the work."""


class _Cpu:
    def __init__(self, folder: str) -> None:
        self._folder = f".ops.{folder}"

    def tile(self, call: Call, writes: tuple[str, ...]) -> Any:
        return import_module(f"{self._folder}.tiling", __package__).tile(call, writes)

    def prepare(self, plan: Plan) -> Runner:
        from . import threads
        from .ops._copy import fill_with_zeros
        from .ops._program import Program

        program = Program(plan.tensors)
        if plan.tiling is None:
            for name in plan.writes:
                fill_with_zeros(program, name, plan.call.values[name])
        else:
            import_module(f"{self._folder}.cpu", __package__).build(program, plan.tiling, plan.call)
        return threads.Runner(program.code())


class _Cuda:
    """Triton's kernels; `gpu.py` and `gpu_tiling.py` of the operator's folder."""

    def __init__(self, folder: str) -> None:
        self._folder = f".ops.{folder}"

    def tile(self, call: Call, writes: tuple[str, ...]) -> Any:
        return import_module(f"{self._folder}.gpu_tiling", __package__).tile(call, writes)

    def prepare(self, plan: Plan) -> Runner:
        try:
            from .ops import _gpu, _launch
        except ImportError as error:
            raise AclnnError(
                Status.ACLNN_ERR_INNER_FIND_KERNEL_ERROR,
                "device",
                f"{plan.op.name}: the GPU's kernels need {error.name}; install backnorm[gpu]",
            ) from error
        if plan.tiling is None:
            launches = [step for name in plan.writes for step in _gpu.fill_with_zeros(name, plan.call.values[name])]
        else:
            gpu = import_module(f"{self._folder}.gpu", __package__)
            launches = gpu.launches(plan.tiling, plan.call, plan.writes)
        return _launch.prepare(launches, plan.tensors, plan.call.values[plan.tensors[0]].device)


#: By the type of a device.
BACKENDS: dict[str, Callable[[str], Backend]] = {"cpu": _Cpu, "cuda": _Cuda}


def find_backend(op: OpSpec, device: str, parameter: str) -> Backend:
    """The operator's backend for a device; an error, never another device, where there is none."""
    backend = BACKENDS.get(device.partition(":")[0])
    if backend is None:
        raise AclnnError(
            Status.ACLNN_ERR_INNER_FIND_KERNEL_ERROR,
            parameter,
            f"{op.name}: {parameter} must be on a supported device ({', '.join(BACKENDS)}); got {device}",
        )
    return backend(op.folder)
