"""BatchNorm's backward reduce on the CPU, for planes (NCHW) and pixels (channels-last and 2-D)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...datatypes import itemsize
from ...spec import Call
from .._copy import as_float32, copy_images, unpack
from .._native import inline, kernel
from .._program import WORKSPACE, Place, Program
from .._simd import (
    TAGS,
    add,
    fma,
    keep,
    load,
    load_double,
    load_one,
    load_part,
    prefetch,
    store,
    store_double,
    store_one,
    sub,
    width,
    words,
)
from .._sums import add_columns, clear, reduce_columns, reduce_partials, reduce_tasks, sum_columns, sum_run
from .._views import AHEAD, PIXEL_ROWS
from .tiling import Tiling, padded


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
                if n > start:
                    s1, s2 = s1 + load_double(place + c * 8), s2 + load_double(place + pad + c * 8)
                store_double(place + c * 8, s1)
                store_double(place + pad + c * 8, s2)

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


@inline
def _pair_terms(T: Any, dy: Any, dy_apart: Any, x: Any, x_apart: Any, count: Any, table: Any, sums: Any) -> Any:
    one = np.float32(0)
    mean = load(one, table)
    a, b = load_part(T, dy, count), load_part(T, dy + dy_apart, count)
    c, d = sub(load_part(T, x, count), mean), sub(load_part(T, x + x_apart, count), mean)
    store(one, sums, add(add(load(one, sums), a), b))
    store(one, sums + 64, fma(b, keep(d, count), fma(a, keep(c, count), load(one, sums + 64))))


@inline
def _sum_pairs(
    T: Any, dy: Any, dy_step: Any, dy_apart: Any, x: Any, x_step: Any, x_apart: Any, rows: Any, cols: Any, table: Any,
    sums: Any,
) -> Any:  # fmt: skip
    """As `sum_columns` without scales, of so many rows and as many others, a distance apart."""
    size = width(T)
    clear(sums, (cols + 15) // 16 * 128)
    for row in range(rows):
        d, p, c = dy + row * dy_step, x + row * x_step, 0
        while c < cols:
            at, count = c * size, min(16, cols - c)
            if size == 4 or c % 32 == 0:
                prefetch(d + at + AHEAD)
                prefetch(p + at + AHEAD)
                prefetch(d + dy_apart + at + AHEAD)
                prefetch(p + x_apart + at + AHEAD)
            if count == 16:
                _pair_terms(T, d + at, dy_apart, p + at, x_apart, 16, table + c * 4, sums + c * 8)
            else:
                _pair_terms(T, d + at, dy_apart, p + at, x_apart, count, table + c * 4, sums + c * 8)
            c += 16


@kernel
def _pixel_sums(T: Any) -> Any:
    """Some chunks of the rows of a sample a task, into its own float64 sums of dy and of dy * (x - mean).

    The rows of its first and of its second half take turns: four streams of memory come 1.15 to 1.2 times as fast as
    two, and the sums are loaded and stored half as often.
    """

    def run(args: Any, task: Any) -> Any:
        dy, dy_n, dy_h, x, x_n, x_h, table, partials, step, channels, together, hw, chunks, task_chunks = words(
            args, 14
        )
        tasks = (chunks + task_chunks - 1) // task_chunks
        n, first = task // tasks, task % tasks * task_chunks * PIXEL_ROWS
        cols, rows = channels * together, (hw + together - 1) // together
        sums = partials + task * step
        totals, apart = sums + (cols + 15) // 16 * 128, (cols + 15) // 16 * 128
        clear(totals, 2 * apart)
        end = min(rows, first + task_chunks * PIXEL_ROWS)
        last = (hw - (end - 1) * together) * channels if end == rows else cols
        half = (end - first - (1 if last < cols else 0)) // 2
        d, p = dy + n * dy_n + first * dy_h, x + n * x_n + first * x_h
        for row in range(0, half, PIXEL_ROWS // 2):
            count = min(PIXEL_ROWS // 2, half - row)
            _sum_pairs(T, d + row * dy_h, dy_h, half * dy_h, p + row * x_h, x_h, half * x_h, count, cols, table, sums)
            add_columns(sums, cols, totals, apart)
        if first + 2 * half < end:
            sum_columns(
                T, d + 2 * half * dy_h, dy_h, p + 2 * half * x_h, x_h, end - first - 2 * half, cols, last, table, 64,
                False, sums,
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
        program.job(_repeat_means(), 1, 1, mean, channels, tiling.together, table, pad * 4)
        program.job(
            _pixel_sums(T), count, elements, *arguments, table, partials, pad * 24, channels,
            tiling.together, tiling.image, tiling.chunks, tiling.task_chunks,
        )  # fmt: skip
        program.job(reduce_columns(), 2 * pad // 16, 2 * count * pad, partials + pad * 8, pad * 24, count, totals)
        sums, apart, step, count = totals, pad * 8, channels * 8, tiling.together
    else:
        count, pad = -(-tiling.samples // tiling.task_samples), padded(channels)
        program.job(
            _plane_sums(T), count * -(-channels // tiling.task_channels), elements, *arguments, mean, partials, pad * 8,
            tiling.samples, channels, tiling.image, tiling.task_samples, tiling.task_channels,
        )  # fmt: skip
        sums, apart, step = partials, pad * 8, 2 * pad * 8
    for name, start, factors in (
        ("sumDy", sums, 0), ("sumDyXmu", sums + apart, 0), ("gradWeight", sums + apart, invstd), ("gradBias", sums, 0),
    ):  # fmt: skip
        if name in program:
            out = Place(WORKSPACE, tiling.scattered[name]) if name in tiling.scattered else Place(name, 0)
            reduce = reduce_partials(TAGS[call.values[name].dtype], True)
            program.job(
                reduce, reduce_tasks(channels), count * channels, start, 128, step, count, channels, factors, out
            )
            if name in tiling.scattered:
                unpack(program, name, call.values[name], out)
