"""A channel's statistics, and what SyncBatchNorm does to each element, for tensors on the CPU."""

from __future__ import annotations

import math

import numpy as np
import torch

from .. import threads
from ..datatypes import BY_NAME
from ..ops._channels import Layout, elements, statistics
from . import openmp

Tensor = torch.Tensor


def dense(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """The tensor without gaps, as planes or pixels; as the one it is `like`."""
    pixels = _is_pixels(tensor if like is None else like)
    shape = tensor.shape
    if not pixels:
        return tensor.contiguous()
    axes = (0, *range(2, len(shape)), 1)
    back = (0, len(shape) - 1, *range(1, len(shape) - 1))
    return tensor.permute(axes).contiguous().permute(back)


def _is_pixels(tensor: Tensor) -> bool:
    """Whether the channels of an element are contiguous, rather than the elements of a channel."""
    return tensor.stride(1) == 1 and tensor.shape[1] > 1 and not tensor.is_contiguous()


def _layout(tensor: Tensor) -> Layout:
    openmp.adopt()
    samples, channels, *rest = tensor.shape
    image = math.prod(rest)
    # Elements of one channel each: a row of channels is what is contiguous.
    pixels = image == 1 or _is_pixels(tensor)
    return Layout(BY_NAME[str(tensor.dtype).removeprefix("torch.")], pixels, samples, channels, image)


def merge(counts: Tensor, means: Tensor, m2s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and sum of squared deviations of groups together, in float64: [groups] and [groups, channels]."""
    total = counts.sum()
    share = (counts / total.clamp(min=1)).unsqueeze(1)
    mean = (means * share).sum(0)
    return total, mean, (m2s + counts.unsqueeze(1) * (means - mean).square()).sum(0)


def local_statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and sum of squared deviations of each channel of a dense tensor on the CPU, in float64."""
    channels = x.shape[1]
    if x.numel() == 0:
        zeros = torch.zeros(channels, dtype=torch.float64)
        return torch.zeros((), dtype=torch.float64), zeros, zeros
    program = statistics(_layout(x))
    partials = torch.empty(len(program.counts), 2, channels, dtype=torch.float64)
    sums = np.empty(program.sums + 16, np.float32)
    aligned = -(-sums.ctypes.data // 64) * 64
    threads.run(program.code, (0, x.data_ptr(), partials.data_ptr(), aligned))
    return merge(torch.from_numpy(program.counts), partials[:, 0], partials[:, 1])


def each_element(x: Tensor, dy: Tensor | None, mean: Tensor, a: Tensor, b: Tensor | None, c: Tensor) -> Tensor:
    """(x - mean) * a + c, or with dy that + dy * b, channel by channel in float32; x and dy are dense and alike."""
    out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    if x.numel() == 0:
        return out
    table = torch.stack([mean, a, c if b is None else b, c]).to(torch.float32)
    code = elements(_layout(x), dy is not None)
    threads.run(code, (0, x.data_ptr(), 0 if dy is None else dy.data_ptr(), table.data_ptr(), out.data_ptr()))
    return out
