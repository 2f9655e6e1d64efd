"""The gradients as formulas of torch's own operations, differentiable as often as one likes.

They give the gradients of the operators themselves (double backward). The saved statistics enter as numbers; so that
their dependence on the input is differentiated too, `mean` and `rstd` are continued from the saved values by what the
input's own mean and variance change: rstd = (1 / rstd² + change of variance) ** -1/2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

Tensor = torch.Tensor
Three = tuple[Tensor, Tensor, Tensor]


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _statistics(x: Tensor, mean: Tensor, rstd: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """mean and rstd with the saved values and the derivatives of x's own."""
    center = x.mean(axes, keepdim=True)
    variance = (x - center).square().mean(axes, keepdim=True)
    change = variance - variance.detach()
    return mean.detach() + (center - center.detach()), rstd.detach() * (1 + rstd.detach().square() * change).rsqrt()


def layer_norm_backward(
    grad_out: Tensor, input: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, normalized_shape: Sequence[int]
) -> Three:
    """grad_input, grad_weight and grad_bias."""
    cols = math.prod(normalized_shape)
    dy, x = _wide(grad_out).reshape(-1, cols), _wide(input).reshape(-1, cols)
    mean, rstd = _statistics(x, _wide(mean).reshape(-1, 1), _wide(rstd).reshape(-1, 1), (1,))
    x_hat = (x - mean) * rstd
    wdy = dy if weight is None else dy * _wide(weight).reshape(cols)
    c1, c2 = wdy.mean(1, keepdim=True), (wdy * x_hat).mean(1, keepdim=True)
    dx = (rstd * (wdy - c1 - x_hat * c2)).reshape(input.shape).to(input.dtype)
    kind = input.dtype if weight is None else weight.dtype
    dw, db = ((s.sum(0).reshape(tuple(normalized_shape)).to(kind)) for s in (dy * x_hat, dy))
    return dx, dw, db


def group_norm_backward(
    grad_out: Tensor, input: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, sizes: Sequence[int]
) -> Three:
    """grad_input, grad_weight and grad_bias; `sizes` are N, C, HxW and group."""
    n, c, hw, group = sizes
    shape = (n, group, c // group, hw)
    dy, x = _wide(grad_out).reshape(shape), _wide(input).reshape(shape)
    mean, rstd = (_wide(s).reshape(n, group, 1, 1) for s in (mean, rstd))
    kind, weight_shape = mean.dtype if weight is None else weight.dtype, (c,) if weight is None else weight.shape
    mean, rstd = _statistics(x, mean, rstd, (2, 3))
    x_hat = (x - mean) * rstd
    wdy = dy if weight is None else dy * _wide(weight).reshape(group, c // group, 1)
    c1, c2 = wdy.mean((2, 3), keepdim=True), (wdy * x_hat).mean((2, 3), keepdim=True)
    dx = (rstd * (wdy - c1 - x_hat * c2)).reshape(input.shape).to(input.dtype)
    dw, db = (s.sum((0, 3)).reshape(weight_shape).to(kind) for s in (dy * x_hat, dy))
    return dx, dw, db


def batch_norm_backward_reduce(
    grad_out: Tensor, input: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """sum_dy, sum_dy_xmu, grad_weight and grad_bias. The statistics are those of all ranks: plain inputs here."""
    by_channel = [-1 if axis == 1 else 1 for axis in range(input.ndim)]
    axes = [axis for axis in range(input.ndim) if axis != 1]
    dy = _wide(grad_out)
    sum_dy = dy.sum(axes)
    sum_dy_xmu = (dy * (_wide(input) - _wide(mean).reshape(by_channel))).sum(axes)
    kind = mean.dtype if weight is None else weight.dtype
    grad_weight = sum_dy_xmu * _wide(invstd)
    return sum_dy.to(mean.dtype), sum_dy_xmu.to(mean.dtype), grad_weight.to(kind), sum_dy.to(kind)
