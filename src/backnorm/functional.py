"""The three array functions: describe, plan, allocate, execute."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from . import dlpack, workspace
from .arguments import to_bool, to_bool_array, to_int64, to_int_array
from .arrays import Array, address_of, allocate, describe, describe_output, empty_strided, is_torch
from .ops import OPS
from .plan import Plan, make_plan
from .products import PRODUCTS, Product, find_product
from .spec import (
    ARRAYS,
    INVALID,
    Call,
    OpSpec,
    Param,
    TensorDesc,
    contiguous_strides,
    dense_strides,
    listing,
)
from .status import AclnnError, Status


def layer_norm_backward(
    grad_out: Any,
    input: Any,
    normalized_shape: Sequence[int],
    mean: Any,
    rstd: Any,
    weight: Any = None,
    bias: Any = None,
    output_mask: Sequence[bool] = (True, True, True),
    *,
    out: Sequence[Any] | None = None,
    product: str = "Any",
) -> tuple[Any, Any, Any]:
    """Gradients of LayerNorm from the saved mean and reciprocal standard deviation of each row.

    Returns (grad_input, grad_weight, grad_bias), None where `output_mask` is false. `out` takes arrays to
    write into, in the same order. `product` applies the rules of one Ascend product instead of all.
    A broken rule raises AclnnError.
    """
    grad_input, grad_weight, grad_bias = _run(
        OPS["layer_norm_backward"],
        (grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask),
        out,
        product,
    )
    return grad_input, grad_weight, grad_bias


def group_norm_backward(
    grad_out: Any,
    input: Any,
    mean: Any,
    rstd: Any,
    weight: Any,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: Sequence[bool] = (True, True, True),
    *,
    out: Sequence[Any] | None = None,
    product: str = "Any",
) -> tuple[Any, Any, Any]:
    """Gradients of GroupNorm from the saved statistics of each sample and group.

    `grad_out` and `input` are read row-major as (N, C, HxW), whatever their shapes and strides.
    Returns (grad_input, grad_weight, grad_bias), None where `output_mask` is false. `out` takes arrays to
    write into, in the same order. `product` applies the rules of one Ascend product instead of all.
    A broken rule raises AclnnError.
    """
    grad_input, grad_weight, grad_bias = _run(
        OPS["group_norm_backward"],
        (grad_out, input, mean, rstd, weight, N, C, HxW, group, output_mask),
        out,
        product,
    )
    return grad_input, grad_weight, grad_bias


def batch_norm_backward_reduce(
    grad_out: Any,
    input: Any,
    mean: Any,
    invstd: Any,
    weight: Any = None,
    input_g: bool = True,
    weight_g: bool = True,
    bias_g: bool = True,
    *,
    out: Sequence[Any] | None = None,
    product: str = "Any",
) -> tuple[Any, Any, Any, Any]:
    """The sums over all axes but 1 that SyncBatchNorm's backward pass needs from each rank.

    Returns (sum_dy, sum_dy_xmu, grad_weight, grad_bias), None where the switches are false: `input_g` for the
    first two, `weight_g` and `bias_g` for the others. `out` takes arrays to write into, in the same order.
    `product` applies the rules of one Ascend product instead of all. A broken rule raises AclnnError.
    """
    sum_dy, sum_dy_xmu, grad_weight, grad_bias = _run(
        OPS["batch_norm_backward_reduce"],
        (grad_out, input, mean, invstd, weight, input_g, weight_g, bias_g),
        out,
        product,
    )
    return sum_dy, sum_dy_xmu, grad_weight, grad_bias


class _Kind:
    """Calls with the same arguments but for the data: what they request, and their plans by the outputs given."""

    def __init__(self, op: OpSpec, inputs: tuple[Any, ...], profile: Product) -> None:
        self.values: dict[str, Any] = {"workspaceSize": True, "executor": True}
        self.values.update(zip((param.name for param in op.inputs), inputs))
        self._op, self._profile = op, profile
        call = Call(op, self.values, profile)
        self.wanted = tuple(call.requests(param) for param in op.outputs)
        self.complete = all(param.optional or self.values[param.name] is not None for param in op.inputs)
        self._call = call
        self.plans: dict[Any, tuple[Plan, tuple[TensorDesc | None, ...]]] = {}

    def plan(self, outputs: tuple[TensorDesc | None, ...] | None) -> tuple[Plan, tuple[TensorDesc | None, ...]]:
        """The plan for outputs described so, or (None) for those an array function allocates, which it also gives."""
        if outputs not in self.plans:
            descs = outputs
            if descs is None:
                descs = tuple(
                    _default_output(param, self._call) if wanted and self.complete else None
                    for param, wanted in zip(self._op.outputs, self.wanted)
                )
            values = {**self.values, **dict(zip((param.name for param in self._op.outputs), descs))}
            plan = make_plan(self._op, values, self._profile.name, ARRAYS)
            if len(self.plans) > 64:
                self.plans.clear()
            self.plans[outputs] = plan, descs
        return self.plans[outputs]


@lru_cache(maxsize=1024)
def kind_of_call(op_name: str, inputs: tuple[Any, ...], product: str) -> _Kind:
    op = OPS[op_name]
    return _Kind(op, inputs, _profile(op, product))


class _Known(NamedTuple):
    """A call of torch tensors or NumPy arrays that was made before."""

    plan: Plan
    #: What allocates each result; None where it is masked off.
    outputs: tuple[Callable[[], Any] | None, ...]
    #: Where the plan's tensors stand among the arguments and then the results.
    places: tuple[int, ...]
    #: Runs a CPU's plan on them; False where one has no memory.
    run: Callable[..., bool] | None
    #: Where the memory of a tensor begins; and whether it is a GPU's.
    address: Callable[[Any], int]
    on_gpu: bool


#: By everything but the data: to find a call here takes a small part of the time of describing it anew.
_known: dict[Any, _Known] = {}
_MOST_KNOWN = 4096
#: Tells calls apart in native code: `_calls.describer` of arrays alone, and from the first call of torch tensors on of
#: both.
_describe: Callable[..., bytes] | None = None


def _key(op: OpSpec, arguments: tuple[Any, ...], out: Sequence[Any] | None, product: str) -> Any:
    """What tells a call of torch tensors or NumPy arrays from others; None for any other call."""
    if _describe is not None:
        try:
            description = _describe(*arguments) if out is None else _describe(*arguments, *out)
        except (RuntimeError, OverflowError):
            return None
        if description:
            return op.name, product, description
    return _torch_key(op, arguments, out, product)


def _torch_key(op: OpSpec, arguments: tuple[Any, ...], out: Sequence[Any] | None, product: str) -> Any:
    """The same without native code, for plain dense tensors alone."""
    torch: Any = sys.modules.get("torch")
    tensor = getattr(torch, "Tensor", None)
    if tensor is None or type(arguments[1]) is not tensor:
        return None
    parameter = torch.nn.Parameter
    key: list[Any] = [op.name, product, out is None]
    try:
        for (_, _, convert, label), value in zip(_input_table(op.name), arguments):
            kind = type(value)
            if kind is tensor or kind is parameter:
                if value.is_neg():
                    return None
                key += (value.shape, value.stride(), value.dtype, value.device)
            elif kind is int or value is None:
                key.append(value)
            elif convert is not None:
                key.append(convert(label, value))
            else:
                return None
        for value in out or ():
            if type(value) is tensor:
                if value.is_neg():
                    return None
                key += (value.shape, value.stride(), value.dtype, value.device)
            elif value is None:
                key.append(None)
            else:
                return None
    except RuntimeError:  # of tensors without strides: nested, sparse
        return None
    return tuple(key)


def _run(op: OpSpec, arguments: tuple[Any, ...], out: Sequence[Any] | None, product: str) -> tuple[Any, ...]:
    """A call with its arguments in the order of op.inputs."""
    if not isinstance(product, str):
        _profile(op, product)
    if out is not None and (type(out) not in (tuple, list) or len({*map(id, out)}) < len(op.outputs)):
        _given_outputs(op, out)
    key = _key(op, arguments, out, product)
    known = _known.get(key)
    if known is None:
        plan, made = _run_anew(op, arguments, out, product)
        _remember(key, op, arguments, out, product, plan, made)
        return made
    plan, outputs, places, run, address, on_gpu = known
    results: tuple[Any, ...] = ()
    addresses: list[int] = []
    try:
        results = tuple([None if new is None else new() for new in outputs] if out is None else out)
        if run is not None:
            done = run(*arguments, *results)
        else:
            everything = (*arguments, *results)
            addresses = [address(everything[place]) for place in places]
            done = 0 not in addresses
    except (RuntimeError, MemoryError):  # of tensors that look plain but wrap others; of results that do not fit
        done = False
    if not done:  # no memory, which the long way tells
        return _run_anew(op, arguments, out, product)[1]
    if run is None:
        execute(plan, addresses, arguments[1].device if on_gpu else None)
    if out is None or None not in outputs:
        return results
    return tuple([None if new is None else result for result, new in zip(results, outputs)])


def _are_numpy(op: OpSpec, arguments: tuple[Any, ...], out: Sequence[Any] | None) -> bool:
    """Whether all arrays of a call are NumPy's, and used in place."""
    arrays = [value for (_, _, convert, _), value in zip(_input_table(op.name), arguments) if convert is None]
    return all(
        value is None or (type(value) is np.ndarray and not any(step % value.itemsize for step in value.strides))
        for value in (*arrays, *(out or ()))
    )


def _remember(
    key: Any, op: OpSpec, arguments: tuple[Any, ...], out: Sequence[Any] | None, product: str, plan: Plan,
    results: Sequence[Any],
) -> None:  # fmt: skip
    """Keep a call of plain tensors, or of plain arrays: if it has still the key that it had before it was made, since
    another thread may have changed an argument meanwhile. The first call of a kind of library has none yet."""
    global _describe
    from .ops import _calls

    new: Callable[[Any], Callable[[], Any]]
    if _torch_key(op, arguments, out, product) is not None:
        torch: Any = sys.modules["torch"]
        _describe = _calls.describer(torch) or _describe
        new = _new_tensor
        address, on_gpu = torch.Tensor.data_ptr, arguments[1].is_cuda
    elif _are_numpy(op, arguments, out):
        torch = None
        _describe = _describe or _calls.describer(None)
        new, address, on_gpu = _new_array, address_of, False
    else:
        return
    if key is None or key != _key(op, arguments, out, product):
        return
    names = [param.name for param in (*op.inputs, *op.outputs)]
    places = tuple(names.index(name) for name in plan.tensors)
    outputs = tuple(None if result is None else new(result) for result in results)
    run = _calls.runner(torch, plan, places) if plan.writes else None
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    _known[key] = _Known(plan, outputs, places, run, address, on_gpu)


def _new_tensor(like: Any) -> Callable[[], Any]:
    torch: Any = sys.modules["torch"]
    return partial(torch.empty_strided, like.shape, like.stride(), dtype=like.dtype, device=like.device)


def _new_array(like: Any) -> Callable[[], Any]:
    strides = tuple(step * like.itemsize for step in contiguous_strides(like.shape))
    if like.size and like.strides == strides:
        return partial(np.empty, like.shape, like.dtype)
    return partial(empty_strided, like.shape, like.strides, like.dtype)


def _run_anew(
    op: OpSpec, arguments: tuple[Any, ...], out: Sequence[Any] | None, product: str
) -> tuple[Plan, tuple[Any, ...]]:
    """The plan and the results of a call."""
    places: dict[str, Array] = {}
    inputs = []
    for (name, word, convert, label), value in zip(_input_table(op.name), arguments):
        if convert is not None:
            inputs.append(convert(label, value))
        elif value is None:
            inputs.append(None)
        else:
            array = places[name] = describe(value, op.name, word)
            inputs.append(array.desc)
    kind = kind_of_call(op.name, tuple(inputs), product)
    results: list[Array | None] = []
    if out is None:
        plan, descs = kind.plan(None)
        input = places["input"]
        give_back = _returner(input.owner)
        results += [None if desc is None else allocate(desc, input) for desc in descs]
    else:
        give_back = None
        for param, given, wanted in zip(op.outputs, _given_outputs(op, out), kind.wanted):
            asked = wanted and given is not None
            results.append(describe_output(given, op.name, param.array_name) if asked else None)
        plan, descs = kind.plan(tuple([None if array is None else array.desc for array in results]))
    for param, result in zip(op.outputs, results):
        if result is not None:
            places[param.name] = result
    addresses = [places[name].address for name in plan.tensors]
    input = places["input"]
    execute(plan, addresses, None if input.desc.device == "cpu" else input.memory.device)
    if give_back is None:
        return plan, tuple([None if array is None else array.owner for array in results])
    return plan, tuple([None if array is None else give_back(array) for array in results])


@cache
def _input_table(op_name: str) -> tuple[tuple[str, str, Callable[[str, Any], Any] | None, str], ...]:
    """Of every input: its names, how a value that is no tensor is converted, and what to call it in messages."""
    return tuple(
        (param.name, param.array_name, _CONVERT.get(param.kind), f"{op_name}: {param.array_name}")
        for param in OPS[op_name].inputs
    )


def execute(plan: Plan, addresses: Sequence[int], gpu: Any) -> None:
    """Run a plan in this thread's workspace: on the CPU, or on a GPU, which is then PyTorch's device."""
    if gpu is None:
        plan.execute(workspace.take(plan.workspace_bytes), addresses)
    else:
        memory, stream, _keep = workspace.take_on_gpu(plan.workspace_bytes, gpu)
        plan.execute(memory, addresses, stream)


def _returner(input: Any) -> Callable[[Array], Any] | None:
    """How a result becomes an array of the library that input came from; None where it is one already."""
    if isinstance(input, (np.ndarray, np.generic)) or is_torch(input):
        return None
    from_dlpack = dlpack.importer(input)
    return lambda array: dlpack.lend(array.owner, from_dlpack)


def _default_output(param: Param, call: Call) -> TensorDesc:
    """What an array function allocates; grad_input takes the memory format of input."""
    assert param.shape is not None
    assert param.dtype is not None
    input: TensorDesc = call.input
    shape = param.shape(call)
    strides = dense_strides(input) if param.array_name == "grad_input" else contiguous_strides(shape)
    return TensorDesc(shape, param.dtype(call), strides, device=input.device)


def _given_outputs(op: OpSpec, out: Sequence[Any] | None) -> Sequence[Any]:
    if out is None:
        return (None,) * len(op.outputs)
    if not isinstance(out, (tuple, list)):
        raise TypeError(f"{op.name}: out must be a tuple of {len(op.outputs)} arrays or None; got {type(out).__name__}")
    if len(out) != len(op.outputs):
        words = ", ".join(param.array_name for param in op.outputs)
        raise AclnnError(INVALID, "out", f"{op.name}: out must have {len(op.outputs)} places ({words}); got {len(out)}")
    given = [id(array) for array in out if array is not None]
    if len(set(given)) < len(given):
        raise AclnnError(INVALID, "out", f"{op.name}: out must have an array of its own in each place; got one twice")
    return out


def _profile(op: OpSpec, product: str) -> Product:
    profile = find_product(product) if isinstance(product, str) else None
    if profile is None:
        raise AclnnError(
            Status.ACL_ERROR_INVALID_PARAM,
            "product",
            f"{op.name}: product must be {listing(list(PRODUCTS))}, or a chip name that starts with one;"
            f" got {product!r}",
        )
    return profile


_CONVERT: dict[str, Callable[[str, Any], Any]] = {
    "int64": to_int64,
    "int_array": to_int_array,
    "bool": to_bool,
    "bool_array": to_bool_array,
}
