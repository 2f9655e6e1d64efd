"""BatchNorm's backward reduce on the CPU, for planes (NCHW) and pixels (channels-last and 2-D)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...threads import launch as on_threads
from .._memory import address, as_float32, part, tag
from .._simd import load_double, load_one, store_double, take_task
from .._sums import kernel, reduce_partials_wide, reduce_sums, sum_columns, sum_run
from .._views import CHUNK_ROWS
from .tiling import Tiling


@kernel
def _plane_sums(
    next_task: Any, tasks: Any, T: Any, dy: Any, dy_n: Any, dy_c: Any, x: Any, x_n: Any, x_c: Any, mean: Any, sums: Any,
    samples: Any, channels: Any, hw: Any, task_samples: Any, task_channels: Any,
) -> Any:  # fmt: skip
    """Some channels of some samples a task, into sums[samples' block][2][channel]."""
    blocks = (channels + task_channels - 1) // task_channels
    one = np.float32(1)
    while True:
        task = take_task(next_task)
        if task >= tasks:
            return
        row, first = task // blocks, task % blocks * task_channels
        last = min(channels, first + task_channels)
        place = sums + row * 2 * channels * 8
        for c in range(first, last):
            store_double(place + c * 8, 0.0)
            store_double(place + (channels + c) * 8, 0.0)
        for n in range(row * task_samples, min(samples, row * task_samples + task_samples)):
            for c in range(first, last):
                m = load_one(mean + c * 4)
                s1, s2 = sum_run(T, dy + n * dy_n + c * dy_c, x + n * x_n + c * x_c, hw, m, one, None)
                store_double(place + c * 8, load_double(place + c * 8) + s1)
                store_double(place + (channels + c) * 8, load_double(place + (channels + c) * 8) + s2)


@kernel
def _pixel_sums(
    next_task: Any, tasks: Any, T: Any, dy: Any, dy_n: Any, dy_h: Any, x: Any, x_n: Any, x_h: Any, mean: Any, ones: Any,
    partials: Any, channels: Any, hw: Any, chunks: Any,
) -> Any:  # fmt: skip
    """A chunk of the elements of a sample a task."""
    pad = (channels + 15) // 16 * 64
    while True:
        task = take_task(next_task)
        if task >= tasks:
            return
        n, row = task // chunks, task % chunks * CHUNK_ROWS
        sum_columns(
            T, dy + n * dy_n + row * dy_h, dy_h, x + n * x_n + row * x_h, x_h, min(CHUNK_ROWS, hw - row), channels,
            mean, ones, partials + task * 2 * pad,
        )  # fmt: skip


def launch(tiling: Tiling, tensors: Mapping[str, Any], workspace: Any) -> None:
    n, channels, hw, images = tiling.samples, tiling.channels, tiling.image, tiling.images
    base = address(workspace)
    arguments: list[Any] = []
    for name in ("gradOut", "input"):
        view = tensors[name]
        if name in images.packed:
            view = _pack(tiling, tensors[name], images.packed[name], workspace)
        outer, inner = images.steps[name]
        arguments += [address(view), outer * view.itemsize, inner * view.itemsize]
    T = tag(tensors["input"])
    mean = as_float32(tensors, "mean", tiling.converted, channels, workspace)
    partials = base + tiling.partials
    padded = (channels + 15) // 16 * 16
    totals = part(workspace, tiling.totals, (2, padded), np.float64)

    size = n * channels * hw
    if images.pixels:
        part(workspace, tiling.ones, (padded,), np.float32)[...] = 1
        count = n * tiling.chunks
        on_threads(
            _pixel_sums, count, size, T, *arguments, mean, base + tiling.ones, partials, channels, hw, tiling.chunks
        )
        both = 2 * padded
        on_threads(reduce_partials_wide, -(-both // 64), count * both, partials, both * 4, count, both, address(totals))
    else:
        rows = -(-n // tiling.task_samples)
        blocks = -(-channels // tiling.task_channels)
        on_threads(
            _plane_sums, rows * blocks, size, T, *arguments, mean, partials, n, channels, hw, tiling.task_samples,
            tiling.task_channels,
        )  # fmt: skip
        for k in (0, 1):
            sums = partials + k * channels * 8
            on_threads(
                reduce_sums, -(-channels // 256), rows * channels, sums, 2 * channels * 8, rows, channels,
                address(totals[k]),
            )  # fmt: skip

    sum_dy, sum_dy_xmu = totals[0, :channels], totals[1, :channels]
    with np.errstate(all="ignore"):
        results = {"sumDy": sum_dy, "sumDyXmu": sum_dy_xmu, "gradBias": sum_dy}
        if "gradWeight" in tensors:
            results["gradWeight"] = sum_dy_xmu * tensors["invstd"].astype(np.float64)
        for name in results.keys() & tensors.keys():
            tensors[name][...] = results[name].astype(np.float32).astype(tensors[name].dtype)


def _pack(tiling: Tiling, tensor: Any, place: int, workspace: Any) -> Any:
    """A copy of a tensor in the workspace, in the layout of the call."""
    samples, channels = tensor.shape[:2]
    image = tensor.size // (samples * channels)
    if tiling.images.pixels:
        room = part(workspace, place, (samples, *tensor.shape[2:], channels), tensor.dtype)
        room[...] = np.moveaxis(tensor, 1, -1)
    else:
        room = part(workspace, place, tensor.shape, tensor.dtype)
        room[...] = tensor
    assert room.size == samples * channels * image
    return room
