"""LayerNorm and GroupNorm whose backward pass is backnorm's, with torch.nn's arguments and state dicts.

Their forward pass is aten's, asked for statistics in float32 whatever the data are. float64, other devices and
forward-mode differentiation go through torch's own functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .engine import TYPES

Tensor = torch.Tensor
Statistics = tuple[Tensor, Tensor, Tensor]


def is_ours(input: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether backnorm differentiates a layer of these tensors; else torch does, or says what is wrong with them."""
    return (
        not input.is_nested
        and not any(is_traceable_wrapper_subclass(t) for t in (input, weight, bias) if t is not None)
        and input.device.type in ("cpu", "cuda")
        and input.dtype in TYPES
        and all(t is None or t.dtype in (torch.float32, input.dtype) for t in (weight, bias))
        and input.ndim <= 8
        and forward_ad._current_level < 0
    )


def call(operator: Any, *arguments: Any) -> Any:
    """An operator in a backward pass. Nobody asks for gradients of gradients where grad mode is off: autograd's share
    of the dispatcher, some 5 microseconds in Python, is left out then."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or forward_ad._current_level >= 0:
        return operator(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


def _as_autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Autocast on CUDA runs these layers in float32; on CPUs it leaves them alone."""
    input = tensors[0]
    if input is not None and input.is_cuda and torch.is_autocast_enabled("cuda"):
        return tuple(t if t is None or t.dtype == torch.float64 else t.float() for t in tensors)
    return tensors


def _float32(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float()


def _to(gradient: Tensor | None, like: Tensor | None) -> Tensor | None:
    """A gradient in the type of its parameter."""
    return gradient if gradient is None or like is None else gradient.to(like.dtype)


def _traced(input: Tensor, rows: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> Statistics:
    """The forward pass for a compiler, which would round aten's statistics of 16-bit data to 16 bits: `rows` is a shape
    whose last axis is normalized; weight and bias have axes as the input."""
    x = input.float().reshape(rows)
    variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    rstd = (variance + eps).rsqrt()
    y = ((x - mean) * rstd).reshape(input.shape)
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return y.to(input.dtype), mean, rstd


class _LayerNorm(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Statistics:
        if torch.compiler.is_compiling() and input.dtype != torch.float32:
            rows = (*input.shape[: input.ndim - len(normalized_shape)], math.prod(normalized_shape))
            return _traced(input, rows, weight, bias, eps)
        if input.is_cpu and input.dtype != torch.float32:
            # Beside a float32 weight, aten keeps the statistics of 16-bit data in float32 too.
            weight = input.new_ones(normalized_shape, dtype=torch.float32) if weight is None else weight.float()
            bias = _float32(bias)
        return torch.native_layer_norm(input, normalized_shape, weight, bias, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Statistics) -> None:
        input, normalized_shape, weight, bias, _ = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, weight, bias, *output[1:])
        ctx.normalized_shape = list(normalized_shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        dy = grads[0]
        if dy is None:
            return None, None, None, None, None
        input, weight, bias, mean, rstd = ctx.saved_tensors
        asked = [ctx.needs_input_grad[i] for i in (0, 2, 3)]
        dx, dw, db = call(
            torch.ops.backnorm.layer_norm_backward.default,
            dy, input, ctx.normalized_shape, mean, rstd, weight, bias, asked,
        )  # fmt: skip
        return dx, None, dw, _to(db, bias), None


class _GroupNorm(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Statistics:
        n, c = input.shape[:2]
        sizes = (n, c, math.prod(input.shape[2:]), num_groups)
        if torch.compiler.is_compiling() and input.dtype != torch.float32:
            by_channel = (c, *[1] * (input.ndim - 2))
            weight, bias = (None if t is None else t.reshape(by_channel) for t in (weight, bias))
            y, mean, rstd = _traced(input, (n, num_groups, c // num_groups * sizes[2]), weight, bias, eps)
            return y, mean.view(n, num_groups), rstd.view(n, num_groups)
        if input.is_cpu:
            x = input if _is_channels_last(input) else input.contiguous()
            if input.dtype == torch.float32:
                return torch.native_group_norm(x, weight, bias, *sizes, eps)
            # Beside a float32 weight, aten keeps the statistics of 16-bit data in float32 too.
            weight = input.new_ones(c, dtype=torch.float32) if weight is None else weight.float()
            return torch.native_group_norm(x, weight, _float32(bias), *sizes, eps)
        x = input.contiguous()
        if input.dtype == torch.float32:
            return torch.native_group_norm(x, weight, bias, *sizes, eps)
        y = torch.native_group_norm(x, weight, bias, *sizes, eps)[0]
        if input.numel() == 0:
            zeros = torch.zeros(n, num_groups, device=input.device)
            return y, zeros, zeros
        # On CUDA it keeps them in 16 bits; a group is a channel of this one, which keeps float32.
        mean, rstd = torch.batch_norm_stats(x.view(1, n * num_groups, -1), eps)
        return y, mean.view(n, num_groups), rstd.view(n, num_groups)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Statistics) -> None:
        input, num_groups, weight, bias, _ = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, weight, bias, *output[1:])
        ctx.num_groups = num_groups

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        dy = grads[0]
        if dy is None:
            return None, None, None, None, None
        input, weight, bias, mean, rstd = ctx.saved_tensors
        n, c = input.shape[:2]
        asked = [ctx.needs_input_grad[i] for i in (0, 2, 3)]
        dx, dw, db = call(
            torch.ops.backnorm.group_norm_backward.default,
            dy, input, mean, rstd, _float32(weight), n, c, math.prod(input.shape[2:]), ctx.num_groups, asked,
        )  # fmt: skip
        return dx, None, _to(dw, weight), _to(db, bias), None


def _is_channels_last(input: Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return input.ndim in formats and input.is_contiguous(memory_format=formats[input.ndim])


def layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """torch.nn.functional.layer_norm with backnorm's backward pass."""
    if not is_ours(input, weight, bias):
        return F.layer_norm(input, list(normalized_shape), weight, bias, eps)
    input, weight, bias = _as_autocast(input, weight, bias)  # type: ignore[assignment]
    result: Tensor = _LayerNorm.apply(input, list(normalized_shape), weight, bias, eps)[0]
    return result


def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """torch.nn.functional.group_norm with backnorm's backward pass."""
    fits = input.ndim >= 2 and input.shape[1] % num_groups == 0 and input.numel() != num_groups
    if not fits or not is_ours(input, weight, bias):
        return F.group_norm(input, num_groups, weight, bias, eps)
    input, weight, bias = _as_autocast(input, weight, bias)  # type: ignore[assignment]
    result: Tensor = _GroupNorm.apply(input, num_groups, weight, bias, eps)[0]
    return result


class LayerNorm(torch.nn.LayerNorm):
    """torch.nn.LayerNorm with backnorm's backward pass."""

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class GroupNorm(torch.nn.GroupNorm):
    """torch.nn.GroupNorm with backnorm's backward pass."""

    def forward(self, input: Tensor) -> Tensor:
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps)
