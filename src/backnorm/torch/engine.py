"""Torch tensors straight to a plan: what the array functions do, in less time, for dense tensors of one device.

A plan is found by the shapes, strides, types and devices of a call's tensors, so a call of a known kind costs one
look-up, the allocation of its results and the kernels.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ..arrays import torch_desc
from ..datatypes import NUMPY
from ..forks import free_in_children
from ..functional import execute, kind_of_call
from ..ops import OPS
from ..plan import Plan
from ..spec import INVALID
from ..status import AclnnError
from . import openmp

Tensor = torch.Tensor
Results = tuple[Tensor | None, ...]

#: The data types of the operators.
TYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
#: Kinds of calls kept; a model has some dozens.
_MOST_KEPT = 4096


class _Prepared(NamedTuple):
    plan: Plan
    #: What allocates each result; None where it is masked off.
    outputs: tuple[Callable[[], Tensor] | None, ...]
    #: Where the plan's tensors stand among the call's tensors and then its results.
    places: tuple[int, ...]
    #: Runs a CPU's plan on them; False where one has no memory.
    run: Callable[..., bool] | None


_prepared: dict[Any, _Prepared] = {}
#: Tells calls apart in native code; `_calls.describer`, from the first call on.
_describe: Callable[..., bytes] | None = None


def _key(op_name: str, tensors: Sequence[Tensor | None], rest: tuple[Any, ...]) -> Any:
    if _describe is not None:
        try:
            description = _describe(*tensors)
        except RuntimeError:  # of tensors that wrap others
            description = b""
        if description:
            return op_name, rest, description
    return op_name, rest, *[None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors]


def _prepare(op_name: str, tensors: Sequence[Tensor | None], rest: tuple[Any, ...]) -> _Prepared:
    global _describe
    from ..ops import _calls

    _describe = _calls.describer(torch)
    assert tensors[1] is not None
    device = tensors[1].device
    if device.type == "cpu":
        openmp.adopt()
    op = OPS[op_name]
    given, others = iter(tensors), iter(rest)
    names, inputs = [], []
    for param in op.inputs:
        if param.kind == "tensor":
            tensor = next(given)
            names.append(param.name)
            inputs.append(
                None if tensor is None else torch_desc(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            )
        else:
            inputs.append(next(others))
    plan, descs = kind_of_call(op_name, tuple(inputs), "Any").plan(None)
    names += [param.name for param in op.outputs]
    outputs = tuple(
        None
        if desc is None
        else partial(
            torch.empty_strided, desc.shape, desc.strides, dtype=getattr(torch, NUMPY[desc.dtype].name), device=device
        )
        for desc in descs
    )
    places = tuple(names.index(name) for name in plan.tensors)
    run = _calls.runner(torch, plan, places) if plan.writes else None
    return _Prepared(plan, outputs, places, run)


def run(op_name: str, tensors: tuple[Tensor | None, ...], rest: tuple[Any, ...]) -> Results:
    """A call: its tensors in the order of the operator's parameters, and the other arguments in theirs."""
    key = _key(op_name, tensors, rest)
    prepared = _prepared.get(key)
    if prepared is None:
        prepared = _prepare(op_name, tensors, rest)
        if len(_prepared) >= _MOST_KEPT:
            _prepared.clear()
        _prepared[key] = prepared
    results = [None if new is None else new() for new in prepared.outputs]
    if prepared.run is not None and prepared.run(*tensors, *results):
        return tuple(results)
    plan, input = prepared.plan, tensors[1]
    assert input is not None
    everything = (*tensors, *results)
    addresses = [everything[place].data_ptr() for place in prepared.places]  # type: ignore[union-attr]
    if 0 in addresses:
        _refuse_freed(plan, addresses)
    execute(plan, addresses, input.device if input.is_cuda else None)
    return tuple(results)


def _refuse_freed(plan: Plan, addresses: Sequence[int]) -> None:
    for name, address in zip(plan.tensors, addresses):
        if address == 0 and plan.call.values[name].numel:
            word = plan.op.by_name[name].array_name
            message = f"{plan.op.name}: {word} must have memory; got a tensor whose memory was freed"
            raise AclnnError(INVALID, word, message)


# --- what was done ----------------------------------------------------------------------------------------------------

_counts: Counter[tuple[str, str]] = Counter()
_lock = free_in_children(threading.Lock())


def count(op_name: str, where: str) -> None:
    """Note a call of an operator: done by "backnorm", or, with the reason, by aten."""
    with _lock:
        _counts[op_name, where] += 1


def stats() -> dict[str, dict[str, int]]:
    """How many calls of each operator were done by backnorm, and how many by aten, with the reason.

    For example {"layer_norm_backward": {"backnorm": 24, "aten: input is float64": 2}, ...}. Calls from compiled models
    count too. `reset_stats()` begins anew.
    """
    with _lock:
        return {
            op_name: {where: number for (name, where), number in sorted(_counts.items()) if name == op_name}
            for op_name in OPS
        }


def reset_stats() -> None:
    """Forget the calls counted so far."""
    with _lock:
        _counts.clear()
