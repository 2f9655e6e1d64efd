"""BatchNorm's backward reduce on the CPU, for planes (NCHW) and pixels (channels-last and 2-D)."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from llvmlite.binding import get_host_cpu_name

from ...datatypes import itemsize
from ...spec import Call
from .._copy import as_float32, copy, unpack
from .._formats import TAGS
from .._native import inline, kernel
from .._places import free_all, leave_place, place_arguments, take_place
from .._program import WORKSPACE, Place, Program
from .._simd import (
    add,
    fma,
    keep,
    load,
    load_double,
    load_one,
    load_part,
    prefetch,
    splat,
    store,
    store_double,
    store_one,
    sub,
    sum_lanes,
    width,
    words,
)
from .._sums import ColumnResult, add_columns, add_up, clear, reduce_columns, sum_columns, sum_run, task_columns
from .._views import AHEAD, PIXEL_ROWS
from .._workers import _get
from .layout import Axis
from .tiling import PIECE, Tiling, padded

#: Zen's own prefetchers are better left alone in float32: 65536x512 takes 8.1 to 8.3 ms, with memory asked for ahead
#: 8.4 to 8.8 (PyTorch 8.0 to 8.1). A Xeon takes 11.4, and 10.7 with it; both need it in 16 bits (here 4.1, not 4.6).
ON_ZEN = get_host_cpu_name().startswith("znver")

#: Around what there is once.
ONCE = Axis(1, 0, 0)


@inline
def _add_sums(place: Any, apart: Any, first: Any, s1: Any, s2: Any) -> Any:
    """Onto a channel's two sums, or as the first of them."""
    if not first:
        s1, s2 = s1 + load_double(place), s2 + load_double(place + apart)
    store_double(place, s1)
    store_double(place + apart, s2)


@inline
def _offset(axes: Any, count: Any, index: Any) -> Any:
    """Bytes to one of the places around which `count` axes lead: (size, step in gradOut, step in input) each."""
    dy, x = 0, 0
    for i in range(count - 1, 0, -1):
        place, size = axes + 24 * i, _get(axes + 24 * i)
        dy, x = dy + index % size * _get(place + 8), x + index % size * _get(place + 16)
        index //= size
    return dy + index * _get(axes + 8), x + index * _get(axes + 16)


@inline
def _sum_rows(T: Any, dy: Any, x: Any, axes: Any, count: Any, rows: Any, n: Any, m: Any) -> Any:
    """Sums of dy and dy * (x - mean) over a channel's runs of n elements, where gaps lie between them.

    Those of short runs stay in lanes from run to run, up to PIXEL_ROWS vectors, before they are added up.
    """
    s1, s2 = 0.0, 0.0
    vectors = (n + 15) // 16
    if vectors > PIXEL_ROWS // 2:
        for row in range(rows):
            to_dy, to_x = _offset(axes, count, row)
            a, b = sum_run(T, dy + to_dy, x + to_x, n, m, None, None)
            s1, s2 = s1 + a, s2 + b
        return s1, s2
    together, mean = PIXEL_ROWS // vectors, splat(m)
    for first in range(0, rows, together):
        lanes, products = splat(np.float32(0)), splat(np.float32(0))
        for row in range(first, min(rows, first + together)):
            to_dy, to_x = _offset(axes, count, row)
            lanes, products = _add_plane(T, dy + to_dy, x + to_x, n, mean, lanes, products, True)
        s1, s2 = s1 + np.float64(sum_lanes(lanes)), s2 + np.float64(sum_lanes(products))
    return s1, s2


@kernel
def _plane_sums(T: Any) -> Any:
    """Some channels of some samples a task, into sums[samples' block][2][channel]."""

    def run(args: Any, task: Any) -> Any:
        (
            dy, dy_c, x, x_c, mean, sums, pad, samples, channels, n, task_samples, task_channels, pieces, rows,
            outer_axes, inner_axes,
        ) = words(args, 16)  # fmt: skip
        outer, inner = args + 16 * 8, args + 16 * 8 + outer_axes * 24
        blocks = (channels + task_channels - 1) // task_channels
        row, first = task // blocks, task % blocks * task_channels
        last = min(channels, first + task_channels)
        place = sums + row * 2 * pad
        start, end = row * task_samples, min(samples, row * task_samples + task_samples)
        for sample in range(start, end):
            to_dy, to_x = _offset(outer, outer_axes, sample // pieces)
            skipped = sample % pieces * PIECE
            count, d, p = min(n - skipped, PIECE), dy + to_dy + skipped * width(T), x + to_x + skipped * width(T)
            for c in range(first, last):
                m = load_one(mean + c * 4)
                if rows == 1:
                    s1, s2 = sum_run(T, d + c * dy_c, p + c * x_c, count, m, None, None)
                else:
                    s1, s2 = _sum_rows(T, d + c * dy_c, p + c * x_c, inner, inner_axes, rows, count, m)
                _add_sums(place + c * 8, pad, sample == start, s1, s2)

    return run


@inline
def _add_elements(T: Any, dy: Any, x: Any, count: Any, mean: Any, a: Any, b: Any, asks: Any) -> Any:
    if asks:
        prefetch(dy + AHEAD)
        prefetch(x + AHEAD)
    d = load_part(T, dy, count)
    return add(a, d), fma(d, keep(sub(load_part(T, x, count), mean), count), b)


@inline
def _add_plane(T: Any, dy: Any, x: Any, n: Any, mean: Any, a: Any, b: Any, asks: Any) -> Any:
    """A plane, or a run of one, onto 16 sums of dy and 16 of dy * (x - mean)."""
    step = 16 * width(T)
    for _ in range(n // 16):
        a, b = _add_elements(T, dy, x, 16, mean, a, b, asks)
        dy, x = dy + step, x + step
    if n % 16 > 0:
        a, b = _add_elements(T, dy, x, n % 16, mean, a, b, asks)
    return a, b


@inline
def _add_small_planes(
    T: Any, dy: Any, dy_c: Any, x: Any, x_c: Any, n: Any, mean: Any, first: Any, last: Any, lanes: Any, asks: Any
) -> Any:
    """Planes of n elements of some channels, each onto 32 sums in memory."""
    one = np.float32(0)
    for c in range(first, last):
        a, b = _add_plane(
            T, dy + c * dy_c, x + c * x_c, n, splat(load_one(mean + c * 4)), load(one, lanes), load(one, lanes + 64),
            asks,
        )  # fmt: skip
        store(one, lanes, a)
        store(one, lanes + 64, b)
        lanes += 128


@kernel
def _small_plane_sums(T: Any) -> Any:
    """The same of small planes. The lanes of a channel's sums are added up after `together` samples, not after each."""

    def run(args: Any, task: Any, thread: Any) -> Any:
        (
            dy, dy_c, x, x_c, mean, sums, pad, samples, channels, n, task_samples, task_channels, outer_axes, together,
            places, place_step, place_count,
        ) = words(args, 17)  # fmt: skip
        outer = args + 17 * 8
        table = take_place(places, place_step, place_count, thread)
        blocks = (channels + task_channels - 1) // task_channels
        row, first = task // blocks, task % blocks * task_channels
        last = min(channels, first + task_channels)
        place = sums + row * 2 * pad
        start, end = row * task_samples, min(samples, row * task_samples + task_samples)
        clear(table, (last - first) * 128)
        for chunk in range(start, end, together):
            for sample in range(chunk, min(end, chunk + together)):
                to_dy, to_x = _offset(outer, outer_axes, sample)
                d, p = dy + to_dy, x + to_x
                # Two loops: 2x2 images take 1.1 instead of 1.2 ns. And on Zen in float32, 128x1024x49 takes 1.6 ms
                # without requests and 1.7 with, but 1024x1024x4 1.8 and 1.4.
                if n < 16:
                    _add_small_planes(T, d, dy_c, p, x_c, n & 15, mean, first, last, table, True)
                else:
                    _add_small_planes(T, d, dy_c, p, x_c, n, mean, first, last, table, width(T) == 2 or not ON_ZEN)
            lanes = table
            for c in range(first, last):
                s1 = np.float64(sum_lanes(load(np.float32(0), lanes)))
                s2 = np.float64(sum_lanes(load(np.float32(0), lanes + 64)))
                _add_sums(place + c * 8, pad, chunk == start, s1, s2)
                clear(lanes, 128)
                lanes += 128
        leave_place(table)

    return run


@kernel
def _repeat_means() -> Any:
    """The means of a row of pixels."""

    def run(args: Any, task: Any) -> Any:
        mean, channels, together, table, size = words(args, 5)
        clear(table, size)
        for i in range(together):
            for c in range(channels):
                store_one(table + (i * channels + c) * 4, load_one(mean + c * 4))

    return run


@kernel
def _pixel_sums(T: Any) -> Any:
    """Some chunks of the rows of a sample, or all of some samples, a task, into its own float64 sums of dy and of
    dy * (x - mean)."""

    def run(args: Any, task: Any) -> Any:
        (
            dy, dy_h, x, x_h, table, partials, step, channels, together, pixels, samples, task_samples, chunks,
            task_chunks, ahead, fours, outer_axes,
        ) = words(args, 17)  # fmt: skip
        outer = args + 17 * 8
        tasks = (chunks + task_chunks - 1) // task_chunks
        cols, rows = channels * together, (pixels + together - 1) // together
        start, end = task // tasks * task_samples, min(samples, task // tasks * task_samples + task_samples)
        first, stop = task % tasks * task_chunks * PIXEL_ROWS, min(rows, (task % tasks + 1) * task_chunks * PIXEL_ROWS)
        sums = partials + task * step
        totals, apart = sums + (cols + 15) // 16 * 128, (cols + 15) // 16 * 128
        clear(sums, 3 * apart)
        summed = 0
        for sample in range(start, end):
            to_dy, to_x = _offset(outer, outer_axes, sample)
            d, p = dy + to_dy, x + to_x
            for row in range(first, stop, PIXEL_ROWS):
                count = min(PIXEL_ROWS, stop - row)
                if summed + count > PIXEL_ROWS:
                    add_columns(sums, cols, totals, apart)
                    clear(sums, apart)
                    summed = 0
                summed += count
                last = (pixels - (rows - 1) * together) * channels if row + count == rows else cols
                sum_columns(
                    T, d + row * dy_h, dy_h, p + row * x_h, x_h, count, cols, last, table, None, sums, ahead, fours
                )
        add_columns(sums, cols, totals, apart)

    return run


def _in_bytes(axes: list[Axis], size: int) -> list[int]:
    """Axes as `_offset` reads them."""
    return [number for axis in axes for number in (axis.size, axis.dy * size, axis.x * size)]


def build(program: Program, tiling: Tiling, call: Call) -> None:
    """The jobs of a call."""
    layout, channels, size = tiling.layout, tiling.channels, itemsize(call.input.dtype)
    dy, x = Place("gradOut", 0), Place("input", 0)
    for name, (place, strides) in layout.packed.items():
        desc, target = call.values[name], Place(WORKSPACE, place)
        copy(program, desc.shape, Place(name, 0), desc.strides, desc.dtype, target, strides, desc.dtype)
        dy, x = (target, x) if name == "gradOut" else (dy, target)
    outer, inner = layout.outer or [ONCE], layout.inner or [ONCE]
    mean = as_float32(program, "mean", call.mean, channels, tiling.converted.get("mean"))
    invstd: Any = 0
    if "gradWeight" in program:
        invstd = as_float32(program, "invstd", call.invstd, channels, tiling.converted.get("invstd"))
    T, elements = TAGS[call.input.dtype], call.input.numel
    partials, totals = Place(WORKSPACE, tiling.partials), Place(WORKSPACE, tiling.totals)
    if layout.pixels:
        table, pad, count = Place(WORKSPACE, tiling.table), padded(tiling.cols), tiling.pixel_tasks
        alone = ON_ZEN and size == 4 and tiling.ahead == AHEAD and not tiling.fours
        row = tiling.together * size
        program.job(_repeat_means(), 1, 1, mean, channels, tiling.together, table, pad * 4)
        program.job(
            _pixel_sums(T), count, elements, dy, layout.run.dy * row, x, layout.run.x * row, table, partials, pad * 24,
            channels, tiling.together, layout.run.size, tiling.samples, tiling.task_samples, tiling.chunks,
            tiling.task_chunks, 0 if alone else tiling.ahead, tiling.fours, len(outer), *_in_bytes(outer, size),
        )  # fmt: skip
        per = task_columns(2 * pad)
        program.job(
            reduce_columns(), -(-2 * pad // per), 2 * count * pad, partials + pad * 8, pad * 24, count, 2 * pad, per,
            totals,
        )  # fmt: skip
        sums, apart, step, count = totals, pad * 8, channels * 8, tiling.together
    else:
        count, pad = tiling.sample_tasks, padded(channels)
        tasks = count * -(-channels // tiling.task_channels)
        planes = (
            dy, layout.channel.dy * size, x, layout.channel.x * size, mean, partials, pad * 8, tiling.samples, channels,
            layout.run.size, tiling.task_samples, tiling.task_channels,
        )  # fmt: skip
        if tiling.samples_together:
            free_all(program, tiling.tables)
            program.job(
                _small_plane_sums(T), tasks, elements, *planes, len(outer), tiling.samples_together,
                *place_arguments(tiling.tables), *_in_bytes(outer, size),
            )  # fmt: skip
        else:
            program.job(
                _plane_sums(T), tasks, elements, *planes, tiling.pieces, prod(axis.size for axis in inner), len(outer),
                len(inner), *_in_bytes(outer, size), *_in_bytes(inner, size),
            )  # fmt: skip
        sums, apart, step = partials, pad * 8, 2 * pad * 8
    results = []
    for name, start, factors in (
        ("gradWeight", sums + apart, invstd), ("gradBias", sums, 0), ("sumDy", sums, 0), ("sumDyXmu", sums + apart, 0),
    ):  # fmt: skip
        if name in program:
            out = Place(WORKSPACE, tiling.scattered[name]) if name in tiling.scattered else Place(name, 0)
            results.append(ColumnResult(call.values[name].dtype, start, factors, out))
    add_up(program, results, True, step, count, channels)
    for name, offset in tiling.scattered.items():
        unpack(program, name, call.values[name], Place(WORKSPACE, offset))
