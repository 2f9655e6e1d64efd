"""BatchNorm's backward reduce on the CPU, for planes (NCHW) and pixels (channels-last and 2-D)."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite.binding import get_host_cpu_name

from ...datatypes import itemsize
from ...spec import Call
from .._copy import as_float32, copy_images, unpack
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
from .tiling import Tiling, padded

#: Zen's own prefetchers are better left alone in float32: 65536x512 takes 8.1 to 8.3 ms, with memory asked for ahead
#: 8.4 to 8.8 (PyTorch 8.0 to 8.1). A Xeon takes 11.4, and 10.7 with it; both need it in 16 bits (here 4.1, not 4.6).
ON_ZEN = get_host_cpu_name().startswith("znver")


@inline
def _add_sums(place: Any, apart: Any, first: Any, s1: Any, s2: Any) -> Any:
    """Onto a channel's two sums, or as the first of them."""
    if not first:
        s1, s2 = s1 + load_double(place), s2 + load_double(place + apart)
    store_double(place, s1)
    store_double(place + apart, s2)


@kernel
def _plane_sums(T: Any) -> Any:
    """Some channels of some samples a task, into sums[samples' block][2][channel]."""

    def run(args: Any, task: Any) -> Any:
        dy, dy_n, dy_c, x, x_n, x_c, mean, sums, pad, samples, channels, hw, task_samples, task_channels = words(
            args, 14
        )
        blocks = (channels + task_channels - 1) // task_channels
        row, first = task // blocks, task % blocks * task_channels
        last = min(channels, first + task_channels)
        place = sums + row * 2 * pad
        start, end = row * task_samples, min(samples, row * task_samples + task_samples)
        for n in range(start, end):
            for c in range(first, last):
                m = load_one(mean + c * 4)
                s1, s2 = sum_run(T, dy + n * dy_n + c * dy_c, x + n * x_n + c * x_c, hw, m, None, None)
                _add_sums(place + c * 8, pad, n == start, s1, s2)

    return run


@inline
def _add_elements(T: Any, dy: Any, x: Any, count: Any, mean: Any, a: Any, b: Any, asks: Any) -> Any:
    if asks:
        prefetch(dy + AHEAD)
        prefetch(x + AHEAD)
    d = load_part(T, dy, count)
    return add(a, d), fma(d, keep(sub(load_part(T, x, count), mean), count), b)


@inline
def _add_small_plane(T: Any, dy: Any, x: Any, n: Any, m: Any, lanes: Any) -> Any:
    """A plane onto 16 sums of dy and 16 of dy * (x - mean)."""
    one, step, mean = np.float32(0), 16 * width(T), splat(m)
    a, b = load(one, lanes), load(one, lanes + 64)
    # On Zen in float32, 128x1024x49 takes 1.6 ms without requests and 1.7 with, but 1024x1024x4 1.8 and 1.4.
    asks = width(T) == 2 or n < 16 or not ON_ZEN
    for _ in range(n // 16):
        a, b = _add_elements(T, dy, x, 16, mean, a, b, asks)
        dy, x = dy + step, x + step
    if n % 16 > 0:
        a, b = _add_elements(T, dy, x, n % 16, mean, a, b, asks)
    store(one, lanes, a)
    store(one, lanes + 64, b)


@kernel
def _small_plane_sums(T: Any) -> Any:
    """The same of small planes. The lanes of a channel's sums are added up after `together` samples, not after each."""

    def run(args: Any, task: Any, thread: Any) -> Any:
        (
            dy, dy_n, dy_c, x, x_n, x_c, mean, sums, pad, samples, channels, hw, task_samples, task_channels, together,
            places, place_step, place_count,
        ) = words(args, 18)  # fmt: skip
        table = take_place(places, place_step, place_count, thread)
        blocks = (channels + task_channels - 1) // task_channels
        row, first = task // blocks, task % blocks * task_channels
        last = min(channels, first + task_channels)
        place = sums + row * 2 * pad
        start, end = row * task_samples, min(samples, row * task_samples + task_samples)
        clear(table, (last - first) * 128)
        for chunk in range(start, end, together):
            for n in range(chunk, min(end, chunk + together)):
                lanes = table
                for c in range(first, last):
                    m = load_one(mean + c * 4)
                    _add_small_plane(T, dy + n * dy_n + c * dy_c, x + n * x_n + c * x_c, hw, m, lanes)
                    lanes += 128
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
    """Some chunks of the rows of a sample a task, into its own float64 sums of dy and of dy * (x - mean)."""

    def run(args: Any, task: Any) -> Any:
        (
            dy, dy_n, dy_h, x, x_n, x_h, table, partials, step, channels, together, hw, chunks, task_chunks, ahead,
            fours,
        ) = words(args, 16)  # fmt: skip
        tasks = (chunks + task_chunks - 1) // task_chunks
        n, first = task // tasks, task % tasks * task_chunks * PIXEL_ROWS
        cols, rows = channels * together, (hw + together - 1) // together
        sums = partials + task * step
        totals, apart = sums + (cols + 15) // 16 * 128, (cols + 15) // 16 * 128
        clear(totals, 2 * apart)
        end = min(rows, first + task_chunks * PIXEL_ROWS)
        last = (hw - (end - 1) * together) * channels if end == rows else cols
        d, p = dy + n * dy_n, x + n * x_n
        for row in range(first, end, PIXEL_ROWS):
            count = min(PIXEL_ROWS, end - row)
            sum_columns(
                T, d + row * dy_h, dy_h, p + row * x_h, x_h, count, cols, last if row + count == end else cols, table,
                None, sums, ahead, fours,
            )  # fmt: skip
            add_columns(sums, cols, totals, apart)

    return run


def build(program: Program, tiling: Tiling, call: Call) -> None:
    """The jobs of a call."""
    images, channels, size = tiling.images, tiling.channels, itemsize(call.input.dtype)
    arguments: list[Any] = []
    for name in ("gradOut", "input"):
        place = Place(name, 0)
        if name in images.packed:
            copy_images(program, name, call.values[name], images, tiling.shape, True)
            place = Place(WORKSPACE, images.packed[name])
        outer, inner = images.steps[name]
        arguments += [place, outer * size, inner * tiling.together * size]
    mean = as_float32(program, "mean", call.mean, channels, tiling.converted.get("mean"))
    invstd: Any = 0
    if "gradWeight" in program:
        invstd = as_float32(program, "invstd", call.invstd, channels, tiling.converted.get("invstd"))
    T, elements = TAGS[call.input.dtype], call.input.numel
    partials, totals = Place(WORKSPACE, tiling.partials), Place(WORKSPACE, tiling.totals)
    if images.pixels:
        table, pad, count = Place(WORKSPACE, tiling.table), padded(tiling.cols), tiling.pixel_tasks
        alone = ON_ZEN and size == 4 and tiling.ahead == AHEAD and not tiling.fours
        ahead = 0 if alone else tiling.ahead
        program.job(_repeat_means(), 1, 1, mean, channels, tiling.together, table, pad * 4)
        program.job(
            _pixel_sums(T), count, elements, *arguments, table, partials, pad * 24, channels,
            tiling.together, tiling.image, tiling.chunks, tiling.task_chunks, ahead, tiling.fours,
        )  # fmt: skip
        per = task_columns(2 * pad)
        program.job(
            reduce_columns(), -(-2 * pad // per), 2 * count * pad, partials + pad * 8, pad * 24, count, 2 * pad, per,
            totals,
        )  # fmt: skip
        sums, apart, step, count = totals, pad * 8, channels * 8, tiling.together
    else:
        count, pad = -(-tiling.samples // tiling.task_samples), padded(channels)
        arguments += [mean, partials, pad * 8, tiling.samples, channels, tiling.image]
        arguments += [tiling.task_samples, tiling.task_channels]
        if tiling.samples_together:
            free_all(program, tiling.tables)
            arguments += [tiling.samples_together, *place_arguments(tiling.tables)]
        sum_planes = _small_plane_sums if tiling.samples_together else _plane_sums
        program.job(sum_planes(T), count * -(-channels // tiling.task_channels), elements, *arguments)
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
