"""The only road to a kernel: check a call, decide what is to be done, do it.

`make_plan` knows descriptors alone, so a plan is made once for a kind of call and kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from . import backends
from .forks import preparing
from .ops import OPS
from .products import PRODUCTS
from .spec import INVALID, Call, OpSpec, TensorDesc
from .status import AclnnError, Status


class _Prepared:
    """What does a plan's work, made when it is first asked for and kept with the plan."""

    def __get__(self, plan: Plan, _: Any) -> backends.Runner:
        kept: dict[str, backends.Runner] = vars(plan)
        with preparing:
            if "runner" not in kept:
                kept["runner"] = plan.backend.prepare(plan)
            return kept["runner"]


@dataclass(frozen=True)
class Plan:
    """What one call will do. Holds no pointers."""

    op: OpSpec
    call: Call
    #: The tensors that are read and written; all other tensors are never looked at.
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    workspace_bytes: int
    #: The kernels' integers; None where there is nothing to sum, and `writes` are filled with zeros.
    tiling: Any
    backend: backends.Backend

    @property
    def tensors(self) -> tuple[str, ...]:
        """The tensors whose addresses `execute` takes."""
        return (*self.reads, *self.writes)

    runner = _Prepared()

    def execute(self, workspace: int, addresses: Sequence[int], stream: int | None = None) -> None:
        """Run on `workspace_bytes` of scratch memory and the tensors, each by the address of its first element; on a
        GPU, queue it on a stream of CUDA's, by default PyTorch's current one."""
        if self.writes:
            self.runner((workspace, *addresses), stream)


def make_plan(op: OpSpec, values: Mapping[str, Any], product: str, door: str) -> Plan:
    """The plan of a call under a product, or an AclnnError for the first broken rule."""
    return _make_plan(op.name, tuple(values[param.name] for param in op.params), product, door)


@lru_cache(maxsize=4096)
def _make_plan(op_name: str, key: tuple[Any, ...], product: str, door: str) -> Plan:
    op = OPS[op_name]
    call = Call(op, dict(zip((param.name for param in op.params), key)), PRODUCTS[product])
    broken = call.first_broken()
    if broken:
        raise call.error(broken, door)
    writes = tuple(param.name for param in op.outputs if call.requests(param))
    inputs = [p.name for p in op.inputs if p.kind == "tensor" and not p.unused and call.present(p.name)]
    device = _one_device(call, (*inputs, *writes))
    backend = backends.find_backend(op, device, op.by_name[inputs[0]].array_name)
    if not writes:
        return Plan(op, call, (), (), 0, None, backend)
    if call.input.numel == 0:
        with_elements = tuple(name for name in writes if call.values[name].numel)
        return Plan(op, call, (), with_elements, 0, None, backend)
    tiling = backend.tile(call, writes)
    if tiling.workspace_bytes >= 2**63:
        raise AclnnError(
            Status.ACLNN_ERR_INNER_TILING_ERROR,
            "workspaceSize",
            f"workspaceSize must fit 63 bits; got a call that needs {tiling.workspace_bytes} bytes",
        )
    return Plan(op, call, tuple(inputs), writes, tiling.workspace_bytes, tiling, backend)


def _one_device(call: Call, names: tuple[str, ...]) -> str:
    first: TensorDesc = call.values[names[0]]
    for name in names:
        device = call.values[name].device
        if device != first.device:
            word = call.op.by_name[name].array_name
            raise AclnnError(
                INVALID,
                word,
                f"{call.op.name}: {word} must be on the device of {call.op.by_name[names[0]].array_name}"
                f" ({first.device}); got {device}",
            )
    return first.device
