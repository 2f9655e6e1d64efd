"""`torch.ops.backnorm.*`: the three operators for torch's dispatcher, with aten's signatures.

As aten's, they return None where a result is masked off. On the CPU and on CUDA the engine does them; shapes alone are
computed by the fake kernels; vmap takes one sample after the other, with the bits of single calls; and their own
gradients (double backward) come from `formulas.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from . import engine, formulas
from .engine import Results

Tensor = torch.Tensor

_library = torch.library.Library("backnorm", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag,)

_SCHEMAS = {
    "layer_norm_backward": "(Tensor grad_out, Tensor input, SymInt[] normalized_shape, Tensor mean, Tensor rstd,"
    " Tensor? weight=None, Tensor? bias=None, bool[3] output_mask=[True, True, True]) -> (Tensor, Tensor, Tensor)",
    "group_norm_backward": "(Tensor grad_out, Tensor input, Tensor mean, Tensor rstd, Tensor? weight, SymInt N,"
    " SymInt C, SymInt HxW, int group, bool[3] output_mask=[True, True, True]) -> (Tensor, Tensor, Tensor)",
    "batch_norm_backward_reduce": "(Tensor grad_out, Tensor input, Tensor mean, Tensor invstd, Tensor? weight=None,"
    " bool input_g=True, bool weight_g=True, bool bias_g=True) -> (Tensor, Tensor, Tensor, Tensor)",
}


# --- kernels ----------------------------------------------------------------------------------------------------------


def layer_norm_backward(
    grad_out: Tensor, input: Tensor, normalized_shape: Sequence[int], mean: Tensor, rstd: Tensor,
    weight: Tensor | None = None, bias: Tensor | None = None, output_mask: Sequence[bool] = (True, True, True),
) -> Results:  # fmt: skip
    rest = (tuple(normalized_shape), tuple(output_mask))
    results = engine.run("layer_norm_backward", (grad_out, input, mean, rstd, weight, bias), rest)
    engine.count("layer_norm_backward", "backnorm")
    return results


def group_norm_backward(
    grad_out: Tensor, input: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, N: int, C: int, HxW: int,
    group: int, output_mask: Sequence[bool] = (True, True, True),
) -> Results:  # fmt: skip
    rest = (N, C, HxW, group, tuple(output_mask))
    results = engine.run("group_norm_backward", (grad_out, input, mean, rstd, weight), rest)
    engine.count("group_norm_backward", "backnorm")
    return results


def batch_norm_backward_reduce(
    grad_out: Tensor, input: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None = None, input_g: bool = True,
    weight_g: bool = True, bias_g: bool = True,
) -> Results:  # fmt: skip
    rest = (input_g, weight_g, bias_g)
    results = engine.run("batch_norm_backward_reduce", (grad_out, input, mean, invstd, weight), rest)
    engine.count("batch_norm_backward_reduce", "backnorm")
    return results


KERNELS: dict[str, Callable[..., Results]] = {
    "layer_norm_backward": layer_norm_backward,
    "group_norm_backward": group_norm_backward,
    "batch_norm_backward_reduce": batch_norm_backward_reduce,
}

# --- shapes -----------------------------------------------------------------------------------------------------------


def _masked(mask: Sequence[bool], *makers: Callable[[], Tensor]) -> Results:
    return tuple(make() if wanted else None for wanted, make in zip(mask, makers))


def _layer_norm_shapes(
    grad_out: Tensor, input: Tensor, normalized_shape: Sequence[int], mean: Tensor, rstd: Tensor,
    weight: Tensor | None = None, bias: Tensor | None = None, output_mask: Sequence[bool] = (True, True, True),
) -> Results:  # fmt: skip
    like = input if weight is None else weight

    def column() -> Tensor:
        return like.new_empty(normalized_shape)

    return _masked(output_mask, lambda: torch.empty_like(input), column, column)


def _group_norm_shapes(
    grad_out: Tensor, input: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, N: int, C: int, HxW: int,
    group: int, output_mask: Sequence[bool] = (True, True, True),
) -> Results:  # fmt: skip
    def column() -> Tensor:
        return mean.new_empty((C,) if weight is None else weight.shape)

    return _masked(output_mask, lambda: torch.empty_like(input), column, column)


def _batch_norm_shapes(
    grad_out: Tensor, input: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None = None, input_g: bool = True,
    weight_g: bool = True, bias_g: bool = True,
) -> Results:  # fmt: skip
    channels = (input.shape[1],)

    def sums() -> Tensor:
        return mean.new_empty(channels)

    def column() -> Tensor:
        return (mean if weight is None else weight).new_empty(channels)

    return _masked((input_g, input_g, weight_g, bias_g), sums, sums, column, column)


_SHAPES: dict[str, Callable[..., Results]] = {
    "layer_norm_backward": _layer_norm_shapes,
    "group_norm_backward": _group_norm_shapes,
    "batch_norm_backward_reduce": _batch_norm_shapes,
}

# --- vmap -------------------------------------------------------------------------------------------------------------


def _one_by_one(name: str) -> Callable[..., Any]:
    def rule(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        operator = getattr(torch.ops.backnorm, name).default
        if info.batch_size == 0:  # no call to stack: the shapes of one
            one = [
                a.new_empty(a.shape[:dim] + a.shape[dim + 1 :]) if isinstance(dim, int) else a
                for a, dim in zip(arguments, in_dims)
            ]
            shapes = _SHAPES[name](*one)
            empty = tuple(None if result is None else result.new_empty((0, *result.shape)) for result in shapes)
            return empty, tuple(None if result is None else 0 for result in empty)
        calls = [
            operator(*[a.select(dim, i) if isinstance(dim, int) else a for a, dim in zip(arguments, in_dims)])
            for i in range(info.batch_size)
        ]
        results = tuple(None if column[0] is None else torch.stack(column) for column in zip(*calls))
        return results, tuple(None if result is None else 0 for result in results)

    return rule


# --- gradients of the gradients ---------------------------------------------------------------------------------------


def _layer_norm_formula(inputs: Sequence[Any]) -> tuple[Callable[..., Any], tuple[int, ...]]:
    normalized_shape, mean, rstd, weight = (*inputs, None)[2:6]

    def formula(dy: Tensor, x: Tensor, w: Tensor | None = weight) -> Any:
        return formulas.layer_norm_backward(dy, x, mean, rstd, w, normalized_shape)

    return formula, (0, 1) if weight is None else (0, 1, 5)


def _group_norm_formula(inputs: Sequence[Any]) -> tuple[Callable[..., Any], tuple[int, ...]]:
    mean, rstd, weight, *sizes = inputs[2:9]

    def formula(dy: Tensor, x: Tensor, w: Tensor | None = weight) -> Any:
        return formulas.group_norm_backward(dy, x, mean, rstd, w, sizes)

    return formula, (0, 1) if weight is None else (0, 1, 4)


def _batch_norm_formula(inputs: Sequence[Any]) -> tuple[Callable[..., Any], tuple[int, ...]]:
    weight = (*inputs, None)[4]

    def formula(dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor) -> Any:
        return formulas.batch_norm_backward_reduce(dy, x, mean, invstd, weight)

    return formula, (0, 1, 2, 3)


#: By operator: a function of the inputs as the dispatcher gives them, without those that have their default at the end,
#: to the formula and the places of what it is a function of.
_FORMULAS: dict[str, Callable[[Sequence[Any]], tuple[Callable[..., Any], tuple[int, ...]]]] = {
    "layer_norm_backward": _layer_norm_formula,
    "group_norm_backward": _group_norm_formula,
    "batch_norm_backward_reduce": _batch_norm_formula,
}


class _Differentiable(torch.autograd.function._SingleLevelFunction):
    """A call whose gradients may be asked for."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        name, keyset, *inputs = arguments
        ctx.name = name
        ctx.save_for_backward(*[value for value in inputs if isinstance(value, Tensor)])
        ctx.others = [None if isinstance(value, Tensor) else (value,) for value in inputs]
        # Gradients may be asked for on an outer level of torch.func too; within torch.autograd's functions this is off.
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            return _below_autograd(name, keyset, inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        tensors = iter(ctx.saved_tensors)
        inputs = [next(tensors) if other is None else other[0] for other in ctx.others]
        formula, differentiable = _FORMULAS[ctx.name](inputs)
        asked = [i for i, grad in enumerate(grads) if grad is not None]

        def requested(*values: Tensor) -> tuple[Tensor, ...]:
            results = formula(*values)
            return tuple(results[i] for i in asked)

        found: list[Tensor | None] = [None] * len(inputs)
        if asked:
            vjp = torch.func.vjp(requested, *[inputs[i] for i in differentiable])[1]
            for i, gradient in zip(differentiable, vjp(tuple(grads[i] for i in asked))):
                found[i] = gradient
        return (None, None, *found)


def _below_autograd(name: str, keyset: Any, inputs: Sequence[Any]) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return getattr(torch.ops.backnorm, name).default.redispatch(keyset & torch._C._after_autograd_keyset, *inputs)


def _tangent(value: Any) -> Tensor | None:
    return forward_ad.unpack_dual(value).tangent if isinstance(value, Tensor) else None


def _by_formula(name: str, inputs: Sequence[Any]) -> Results:
    """The operator from torch's own operations: what forward-mode differentiation goes through."""
    formula, differentiable = _FORMULAS[name](inputs)
    shapes = _SHAPES[name](*inputs)  # which results are asked for
    results = formula(*[inputs[i] for i in differentiable])
    return tuple(None if shape is None else result for shape, result in zip(shapes, results))


def _autograd(name: str) -> Callable[..., Any]:
    """The operator for torch's autograd keys. torch.library.register_autograd would do but for torch.func's
    transforms, which its autograd.Function refuses; here the dispatcher has already come down to one of their levels,
    so a function of a single level is what is needed."""

    apply: Any = getattr(_Differentiable, "apply")  # noqa: B009 (torch's stubs have it not)

    def kernel(keyset: Any, *inputs: Any) -> Any:
        if forward_ad._current_level >= 0 and any(_tangent(v) is not None for v in inputs):
            return _by_formula(name, inputs)
        if torch.is_grad_enabled() and any(isinstance(v, Tensor) and v.requires_grad for v in inputs):
            with enable_single_level_autograd_function():
                return apply(name, keyset, *inputs)
        return _below_autograd(name, keyset, inputs)

    return kernel


for _name, _schema in _SCHEMAS.items():
    _library.define(_name + _schema, tags=_TAGS)
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, KERNELS[_name], _device)
    torch.library.register_fake(f"backnorm::{_name}", _SHAPES[_name], lib=_library)
    torch.library.register_vmap(f"backnorm::{_name}", _one_by_one(_name), lib=_library)
    _library.impl(_name, _autograd(_name), "Autograd", with_keyset=True)
