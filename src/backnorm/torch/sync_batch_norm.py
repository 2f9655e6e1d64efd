"""BatchNorm over the batches of all processes, on torch.distributed: gloo on CPUs, nccl on GPUs.

Forward: each process's statistics, one all_gather, the statistics of all (in float64, by every process in the order of
ranks, so that all have the same bits), and the normalized elements. Backward: backnorm's reduce operator, one
all_reduce of its two sums, and the gradient of each element.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F

from . import channels
from .modules import call, is_ours

Tensor = torch.Tensor


def _all_gather(local: Tensor, group: Any, world_size: int) -> Tensor:
    parts = [torch.empty_like(local) for _ in range(world_size)]
    dist.all_gather(parts, local, group)
    return torch.stack(parts)


def _statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and sum of squared deviations of each channel, in float64, on the tensor's device."""
    if x.is_cpu:
        return channels.local_statistics(x)
    count = torch.full((), x.numel() // x.shape[1], dtype=torch.float64, device=x.device)
    if x.numel() == 0:
        zeros = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
        return count, zeros, zeros
    # Without eps, 1 / invstd² is the variance; 0 stands for that of equal elements.
    mean, invstd = torch.batch_norm_stats(x, 0.0)
    variance = torch.where(invstd == 0, 0.0, invstd.double() ** -2)
    return count, mean.double(), variance * count


def _normalize(x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if not x.is_cpu:
        return torch.batch_norm_elemt(x, weight, bias, mean, invstd, 0.0) if x.numel() else torch.empty_like(x)
    scale = invstd if weight is None else invstd * weight
    return channels.each_element(x, None, mean, scale, None, torch.zeros_like(mean) if bias is None else bias)


def _gradient(
    dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, sums: Tensor, counts: Tensor
) -> Tensor:
    """weight·invstd·(dy − Σdy/n − (x − mean)·invstd²·Σdy·(x − mean)/n), with the sums over all processes."""
    if x.numel() == 0:
        return torch.zeros_like(x)
    if not x.is_cpu:
        weight = None if weight is None else weight.to(mean.dtype)
        counts = counts.to(torch.int32)
        return torch.batch_norm_backward_elemt(dy, x, mean, invstd, weight, sums[0], sums[1], counts)
    wide, share = invstd.double(), sums.double() / counts.sum()
    scale = wide if weight is None else wide * weight
    return channels.each_element(x, dy, mean, -scale * wide.square() * share[1], scale, -scale * share[0])


def _update(running: Tensor | None, momentum: float, new: Tensor) -> None:
    if running is not None:
        running.copy_(running * (1 - momentum) + new.to(running.dtype) * momentum)


class _SyncBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
        running_var: Tensor | None, eps: float, momentum: float, group: Any, world_size: int,
    ) -> Tensor:  # fmt: skip
        x = channels.dense(input)
        c = x.shape[1]
        count, mean, m2 = _statistics(x)
        table = _all_gather(torch.cat([count.reshape(1), mean, m2]), group, world_size)
        counts = table[:, 0]
        total, mean, m2 = channels.merge(counts, table[:, 1 : c + 1], table[:, c + 1 :])
        if x.is_cpu and total == 1:  # asking a GPU would make the process wait for it
            raise ValueError("SyncBatchNorm: input must have more than 1 value per channel over all processes; got 1")
        variance = m2 / total.clamp(min=1)
        if not (x.is_cpu and total == 0):
            _update(running_mean, momentum, mean)
            _update(running_var, momentum, m2 / (total - 1).clamp(min=1))
        mean, invstd = mean.float(), (variance + eps).rsqrt().float()
        ctx.save_for_backward(input, weight, bias, mean, invstd, counts)
        ctx.eps, ctx.group = eps, group
        return _normalize(x, mean, invstd, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        input, weight, bias, mean, invstd, counts = ctx.saved_tensors
        asked = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # create_graph: gradients that can be differentiated again
            return *_differentiable_gradients(grads[0], (input, weight, bias), asked, ctx.eps, ctx.group), *[None] * 6
        x = channels.dense(input)
        dy = channels.dense(grads[0], like=x)
        sum_dy, sum_dy_xmu, dw, db = call(
            torch.ops.backnorm.batch_norm_backward_reduce.default, dy, x, mean, invstd, weight, *asked
        )
        dx = None
        if asked[0]:
            sums = torch.stack([sum_dy, sum_dy_xmu])
            dist.all_reduce(sums, group=ctx.group)
            dx = _gradient(dy, x, mean, invstd, weight, sums, counts)
        return dx, dw, None if db is None else db.to(bias.dtype), *[None] * 6


# --- from torch's own operations: float64, and gradients of gradients -------------------------------------------------


class _AllReduce(torch.autograd.Function):
    """The sum over all processes; so is its gradient."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = local.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _AllReduce.apply(grads[0].contiguous(), ctx.group), None


def _differentiable(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The normalized input, and the statistics of all processes: count, mean and sum of squared deviations."""
    axes = [axis for axis in range(input.ndim) if axis != 1]
    by_channel = [-1 if axis == 1 else 1 for axis in range(input.ndim)]
    x = input if input.dtype == torch.float64 else input.float()
    count = torch.full((), x.numel() // x.shape[1], dtype=x.dtype, device=x.device)
    dist.all_reduce(count, group=group)
    size = count.clamp(min=1)
    mean: Tensor = _AllReduce.apply(x.sum(axes), group) / size
    centered = x - mean.reshape(by_channel)
    m2: Tensor = _AllReduce.apply(centered.square().sum(axes), group)
    y = centered * (m2 / size + eps).rsqrt().reshape(by_channel)
    if weight is not None:
        y = y * weight.to(x.dtype).reshape(by_channel)
    if bias is not None:
        y = y + bias.to(x.dtype).reshape(by_channel)
    return y.to(input.dtype), count, mean, m2


def _differentiable_gradients(
    dy: Tensor, values: tuple[Tensor | None, ...], asked: tuple[bool, ...], eps: float, group: Any
) -> tuple[Tensor | None, ...]:
    # Views, so that a gradient stops here even where dy depends on the input too.
    input, weight, bias = (None if value is None else value.view_as(value) for value in values)
    assert input is not None
    y = _differentiable(input, weight, bias, eps, group)[0]
    wanted = [value for value, ask in zip((input, weight, bias), asked) if ask]
    found = iter(torch.autograd.grad(y, wanted, dy, create_graph=True))  # type: ignore[arg-type]
    return tuple(next(found) if ask else None for ask in asked)


# --- the module -------------------------------------------------------------------------------------------------------


@torch.compiler.disable  # collectives, and addresses of memory: nothing to trace
def _synchronized(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, eps: float, momentum: float, group: Any, world_size: int,
) -> Tensor:  # fmt: skip
    if is_ours(input, weight, bias):
        result: Tensor = _SyncBatchNorm.apply(
            input, weight, bias, running_mean, running_var, eps, momentum, group, world_size
        )
        return result
    result, count, mean, m2 = _differentiable(input, weight, bias, eps, group)
    if count > 0:
        _update(running_mean, momentum, mean.detach())
        _update(running_var, momentum, m2.detach() / (count - 1).clamp(min=1))
    return result


class SyncBatchNorm(torch.nn.modules.batchnorm._BatchNorm):
    """torch.nn.SyncBatchNorm on CPUs too, with backnorm's backward pass. One process, and eval, are as in torch.

    It is no torch.nn.SyncBatchNorm, which DistributedDataParallel refuses on CPUs.
    """

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True,
        track_running_stats: bool = True, process_group: Any = None, device: Any = None, dtype: Any = None,
        **options: Any,
    ) -> None:  # fmt: skip
        options.update(device=device, dtype=dtype)  # and `bias`, where torch has it
        super().__init__(num_features, eps, momentum, affine, track_running_stats, **options)
        self.process_group = process_group

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"SyncBatchNorm: input must have at least 2 axes; got {input.ndim}")
        if input.shape[1] == 0:
            raise ValueError("SyncBatchNorm: input must have channels; got none in axis 1")
        if input.shape[1] != self.num_features and (self.affine or self.track_running_stats):
            raise ValueError(f"SyncBatchNorm: input must have {self.num_features} channels; got {input.shape[1]}")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        group = None
        if self.training and dist.is_available() and dist.is_initialized():
            group = self.process_group or dist.group.WORLD
        world_size = 1 if group is None else dist.get_world_size(group)
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # the average of all batches so far
                momentum = 1.0 / float(self.num_batches_tracked)
        tracked = not self.training or self.track_running_stats
        running_mean = self.running_mean if tracked else None
        running_var = self.running_var if tracked else None
        if world_size > 1:
            if input.device.type not in ("cpu", "cuda"):
                raise ValueError(f"SyncBatchNorm: input must be on a CPU or a CUDA device; got {input.device}")
            result: Tensor = _synchronized(
                input, self.weight, self.bias, running_mean, running_var, self.eps, momentum, group, world_size
            )
            return result
        from_batch = self.training or (self.running_mean is None and self.running_var is None)
        return F.batch_norm(input, running_mean, running_var, self.weight, self.bias, from_batch, momentum, self.eps)

    @classmethod
    def convert_sync_batchnorm(cls, module: Any, process_group: Any = None) -> Any:
        """The module with every BatchNorm in it replaced by one of this class, as torch.nn.SyncBatchNorm does."""
        converted = torch.nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)
        for layer in converted.modules():
            if type(layer) is torch.nn.SyncBatchNorm:
                cast(Any, layer).__class__ = cls
        return converted
