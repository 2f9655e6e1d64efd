"""SyncBatchNorm's companions of the reduce operator on the CPU: a channel's statistics, and the work on each element.

Both are for dense tensors: planes (NCHW) or pixels (channels-last and 2-D). They are programs over addresses, made once
for a shape.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ._formats import TAGS
from ._lanes import add, fma, keep, splat, sub, sum_lanes
from ._native import inline, kernel
from ._program import Code, Place, Program
from ._simd import load, load_double, load_one, load_part, store, store_double, store_part, width, words
from ._sums import clear
from ._views import BLOCK, task_elements

#: Rows of pixels that are summed in float32.
_ROWS = 64
#: Elements of a block, and rows of pixels, whose mean is taken from all before they are squared. They are a sixteenth
#: of their block, so that even where they are far from the others, no more than four bits are lost.
_FIRST, _FIRST_ROWS = BLOCK // 16, _ROWS // 16


class Layout(NamedTuple):
    """A dense tensor of samples, channels and images; where `pixels`, the channels of an element are contiguous."""

    dtype: int
    pixels: bool
    samples: int
    channels: int
    image: int

    @property
    def rows(self) -> int:
        """Runs of contiguous elements: a channel's image, or the channels of a pixel."""
        return self.samples * (self.image if self.pixels else self.channels)

    @property
    def cols(self) -> int:
        return self.channels if self.pixels else self.image

    @property
    def numel(self) -> int:
        return self.rows * self.cols


# --- statistics -------------------------------------------------------------------------------------------------------


@inline
def _add_group(count: Any, mean: Any, m2: Any, k: Any, group_mean: Any, group_m2: Any) -> Any:
    """Mean and sum of squared deviations of `count` elements and `k` more."""
    delta, share = group_mean - mean, k / (count + k)
    return mean + delta * share, m2 + group_m2 + delta * delta * count * share


@inline
def _sum_block(T: Any, x: Any, n: Any) -> Any:
    """Mean and sum of squared deviations of up to BLOCK elements; four vectors of sums take turns."""
    zero, size = splat(np.float32(0)), width(T)
    step, end, at = 16 * size, n * size, 0
    first = zero
    few = min(n, _FIRST)
    for i in range(0, few, 16):
        first = add(first, load_part(T, x + i * size, min(16, few - i)))
    shift = np.float32(sum_lanes(first) / np.float32(few))
    center = splat(shift)
    a0, a1, a2, a3, b0, b1, b2, b3 = zero, zero, zero, zero, zero, zero, zero, zero
    while at + 4 * step <= end:
        t0, t1 = sub(load(T, x + at), center), sub(load(T, x + at + step), center)
        t2, t3 = sub(load(T, x + at + 2 * step), center), sub(load(T, x + at + 3 * step), center)
        a0, a1, a2, a3 = add(a0, t0), add(a1, t1), add(a2, t2), add(a3, t3)
        b0, b1, b2, b3 = fma(t0, t0, b0), fma(t1, t1, b1), fma(t2, t2, b2), fma(t3, t3, b3)
        at += 4 * step
    while at < end:
        left = min(16, (end - at) // size)
        t = keep(sub(load_part(T, x + at, left), center), left)
        a0, b0 = add(a0, t), fma(t, t, b0)
        at += step
    s1 = np.float64(sum_lanes(add(add(a0, a1), add(a2, a3))))
    s2 = np.float64(sum_lanes(add(add(b0, b1), add(b2, b3))))
    return np.float64(shift) + s1 / n, s2 - s1 * s1 / n


@kernel
def _plane_statistics(T: Any) -> Any:
    """Some channels of some samples a task, into partials[samples' block][mean, m2][channel]."""

    def run(args: Any, task: Any) -> Any:
        x, partials, samples, channels, image, task_samples, task_channels = words(args, 7)
        blocks = (channels + task_channels - 1) // task_channels
        row, first = task // blocks, task % blocks * task_channels
        size, place = width(T), partials + row * channels * 16
        start, end = row * task_samples, min(samples, row * task_samples + task_samples)
        for n in range(start, end):
            for c in range(first, min(channels, first + task_channels)):
                plane = x + (n * channels + c) * image * size
                count, mean, m2 = (n - start) * image, 0.0, 0.0
                if n > start:
                    mean, m2 = load_double(place + c * 8), load_double(place + (channels + c) * 8)
                for i in range(0, image, BLOCK):
                    k = min(BLOCK, image - i)
                    block_mean, block_m2 = _sum_block(T, plane + i * size, k)
                    mean, m2 = _add_group(count, mean, m2, k, block_mean, block_m2)
                    count += k
                store_double(place + c * 8, mean)
                store_double(place + (channels + c) * 8, m2)

    return run


@kernel
def _pixel_statistics(T: Any) -> Any:
    """Some rows a task, into partials[task][mean, m2][channel]; `sums` is the task's own memory for float32 sums."""

    def run(args: Any, task: Any) -> Any:
        x, partials, sums, rows, channels, task_rows = words(args, 6)
        one, size = np.float32(0), width(T)
        vectors = (channels + 15) // 16
        place, sums = partials + task * channels * 16, sums + task * vectors * 192
        start, end = task * task_rows, min(rows, task * task_rows + task_rows)
        for row in range(start, end, _ROWS):
            count, few = min(_ROWS, end - row), min(_FIRST_ROWS, end - row)
            share = splat(np.float32(1) / np.float32(few))
            clear(sums, vectors * 192)
            for r in range(few):
                line = x + (row + r) * channels * size
                for v in range(vectors):
                    t = load_part(T, line + v * 16 * size, min(16, channels - v * 16))
                    store(one, sums + v * 192, fma(t, share, load(one, sums + v * 192)))
            for r in range(count):
                line, s = x + (row + r) * channels * size, sums
                for v in range(vectors):
                    t = sub(load_part(T, line + v * 16 * size, min(16, channels - v * 16)), load(one, s))
                    store(one, s + 64, add(load(one, s + 64), t))
                    store(one, s + 128, fma(t, t, load(one, s + 128)))
                    s += 192
            for c in range(channels):
                s = sums + c // 16 * 192 + c % 16 * 4
                s1, s2 = np.float64(load_one(s + 64)), np.float64(load_one(s + 128))
                chunk_mean, chunk_m2 = np.float64(load_one(s)) + s1 / count, s2 - s1 * s1 / count
                mean, m2 = 0.0, 0.0
                if row > start:
                    mean, m2 = load_double(place + c * 8), load_double(place + (channels + c) * 8)
                mean, m2 = _add_group(row - start, mean, m2, count, chunk_mean, chunk_m2)
                store_double(place + c * 8, mean)
                store_double(place + (channels + c) * 8, m2)

    return run


class Statistics(NamedTuple):
    """A program from `x` to `partials`, float64 [part][mean, m2][channel], through float32 memory `sums`."""

    code: Code
    #: Elements of a channel in each part.
    counts: npt.NDArray[np.float64]
    sums: int


@lru_cache(maxsize=1024)
def statistics(layout: Layout) -> Statistics:
    program = Program(("x", "partials", "sums"))
    x, partials, sums = (Place(name, 0) for name in ("x", "partials", "sums"))
    per_task, tag = task_elements(layout.numel), TAGS[layout.dtype]
    if layout.pixels:
        task_rows = max(_ROWS, per_task // layout.channels // _ROWS * _ROWS)
        tasks = -(-layout.rows // task_rows)
        arguments = (x, partials, sums, layout.rows, layout.channels, task_rows)
        program.job(_pixel_statistics(tag), tasks, layout.numel, *arguments)
        counts = [min(task_rows, layout.rows - task * task_rows) for task in range(tasks)]
        return Statistics(program.code(), np.array(counts, np.float64), tasks * -(-layout.channels // 16) * 48)
    task_channels = max(1, min(layout.channels, per_task // layout.image))
    task_samples = max(1, min(16, per_task // (task_channels * layout.image)))
    parts = -(-layout.samples // task_samples)
    tasks = parts * -(-layout.channels // task_channels)
    sizes = (layout.samples, layout.channels, layout.image, task_samples, task_channels)
    program.job(_plane_statistics(tag), tasks, layout.numel, x, partials, *sizes)
    counts = [min(task_samples, layout.samples - part * task_samples) * layout.image for part in range(parts)]
    return Statistics(program.code(), np.array(counts, np.float64), 0)


# --- elements ---------------------------------------------------------------------------------------------------------


@kernel
def _plane_elements(T: Any, with_dy: Any) -> Any:
    """Some planes a task."""

    def run(args: Any, task: Any) -> Any:
        x, dy, table, out, rows, channels, image, task_rows = words(args, 8)
        size, apart = width(T), channels * 4
        for row in range(task * task_rows, min(rows, task * task_rows + task_rows)):
            t = table + row % channels * 4
            mean, a, b, c = (
                splat(load_one(t)), splat(load_one(t + apart)), splat(load_one(t + 2 * apart)),
                splat(load_one(t + 3 * apart)),
            )  # fmt: skip
            at, end = row * image * size, (row + 1) * image * size
            while at + 16 * size <= end:
                value = fma(sub(load(T, x + at), mean), a, c)
                if with_dy:
                    value = fma(load(T, dy + at), b, value)
                store(T, out + at, value)
                at += 16 * size
            if at < end:
                left = (end - at) // size
                value = fma(sub(load_part(T, x + at, left), mean), a, c)
                if with_dy:
                    value = fma(load_part(T, dy + at, left), b, value)
                store_part(T, out + at, value, left)

    return run


@kernel
def _pixel_elements(T: Any, with_dy: Any) -> Any:
    """Some rows a task."""

    def run(args: Any, task: Any) -> Any:
        x, dy, table, out, rows, channels, task_rows = words(args, 7)
        one, size, apart = np.float32(0), width(T), channels * 4
        for row in range(task * task_rows, min(rows, task * task_rows + task_rows)):
            for c in range(0, channels, 16):
                at, t, n = (row * channels + c) * size, table + c * 4, min(16, channels - c)
                mean, a = load_part(one, t, n), load_part(one, t + apart, n)
                value = fma(sub(load_part(T, x + at, n), mean), a, load_part(one, t + 3 * apart, n))
                if with_dy:
                    value = fma(load_part(T, dy + at, n), load_part(one, t + 2 * apart, n), value)
                store_part(T, out + at, value, n)

    return run


@lru_cache(maxsize=1024)
def elements(layout: Layout, with_dy: bool) -> Code:
    """A program: out = (x - mean) * a + c, or with `dy` that + dy * b; float32 table [mean, a, b, c][channel]."""
    program = Program(("x", "dy", "table", "out"))
    task_rows = max(1, task_elements(layout.numel) // layout.cols)
    arguments: list[Any] = [*(Place(name, 0) for name in ("x", "dy", "table", "out")), layout.rows, layout.channels]
    make = _pixel_elements if layout.pixels else _plane_elements
    arguments += [task_rows] if layout.pixels else [layout.image, task_rows]
    program.job(make(TAGS[layout.dtype], with_dy), -(-layout.rows // task_rows), layout.numel, *arguments)
    return program.code()
