"""BatchNorm's backward reduce on the CPU, for planes (NCHW): runs of elements of one channel."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._formats import UP_TO_ZEN_4
from .._lanes import add, fma, fold, keep, splat, sub, sum_folded, sum_lanes, widen
from .._native import inline, kernel
from .._places import leave_place, take_place
from .._simd import (
    load,
    load_double,
    load_halves,
    load_one,
    load_part,
    prefetch_once,
    store,
    store_double,
    store_halves,
    width,
    words,
)
from .._sums import clear, sum_run
from .._views import AHEAD, PIXEL_ROWS
from .axes import offset
from .tiling import PIECE


@inline
def _add_sums(place: Any, apart: Any, first: Any, s1: Any, s2: Any) -> Any:
    """Onto a channel's two sums, or as the first of them."""
    if not first:
        s1, s2 = s1 + load_double(place), s2 + load_double(place + apart)
    store_double(place, s1)
    store_double(place + apart, s2)


@inline
def _sum_rows(T: Any, dy: Any, x: Any, axes: Any, count: Any, rows: Any, n: Any, m: Any, ahead: Any) -> Any:
    """Sums of dy and dy * (x - mean) over a channel's runs of n elements, where gaps lie between them.

    Those of short runs stay in lanes from run to run, up to PIXEL_ROWS vectors, before they are added up.
    """
    s1, s2 = 0.0, 0.0
    vectors = (n + 15) // 16
    if vectors > PIXEL_ROWS // 2:
        for row in range(rows):
            to_dy, to_x = offset(axes, count, row)
            a, b = sum_run(T, dy + to_dy, x + to_x, n, m, None, None, ahead)
            s1, s2 = s1 + a, s2 + b
        return s1, s2
    together, mean = PIXEL_ROWS // vectors, splat(m)
    for first in range(0, rows, together):
        lanes, products = splat(np.float32(0)), splat(np.float32(0))
        for row in range(first, min(rows, first + together)):
            to_dy, to_x = offset(axes, count, row)
            lanes, products = _add_plane(T, dy + to_dy, x + to_x, n, mean, lanes, products, True)
        s1, s2 = s1 + np.float64(sum_lanes(lanes)), s2 + np.float64(sum_lanes(products))
    return s1, s2


@kernel
def plane_sums(T: Any) -> Any:
    """Some channels of some samples a task, into sums[samples' block][2][channel]."""

    def run(args: Any, task: Any) -> Any:
        (
            dy, dy_c, x, x_c, mean, sums, pad, samples, channels, n, task_samples, task_channels, pieces, rows,
            ahead, outer_axes, inner_axes,
        ) = words(args, 17)  # fmt: skip
        outer, inner = args + 17 * 8, args + 17 * 8 + outer_axes * 24
        blocks = (channels + task_channels - 1) // task_channels
        row, first = task // blocks, task % blocks * task_channels
        last = min(channels, first + task_channels)
        place = sums + row * 2 * pad
        start, end = row * task_samples, min(samples, row * task_samples + task_samples)
        for sample in range(start, end):
            to_dy, to_x = offset(outer, outer_axes, sample // pieces)
            skipped = sample % pieces * PIECE
            count, d, p = min(n - skipped, PIECE), dy + to_dy + skipped * width(T), x + to_x + skipped * width(T)
            for c in range(first, last):
                m = load_one(mean + c * 4)
                if rows == 1:
                    s1, s2 = sum_run(T, d + c * dy_c, p + c * x_c, count, m, None, None, ahead)
                else:
                    s1, s2 = _sum_rows(T, d + c * dy_c, p + c * x_c, inner, inner_axes, rows, count, m, ahead)
                _add_sums(place + c * 8, pad, sample == start, s1, s2)

    return run


@inline
def _add_elements(T: Any, dy: Any, x: Any, count: Any, mean: Any, a: Any, b: Any, asks: Any) -> Any:
    if asks:
        prefetch_once(dy + AHEAD)
        prefetch_once(x + AHEAD)
    d = load_part(T, dy, count)
    return add(a, d), fma(d, keep(sub(load_part(T, x, count), mean), count), b)


@inline
def _add_plane(T: Any, dy: Any, x: Any, n: Any, mean: Any, a: Any, b: Any, asks: Any) -> Any:
    """A plane, or a run of one, onto 16 sums of dy and 16 of dy * (x - mean)."""
    step, both = 16 * width(T), asks and width(T) == 4  # in 16 bits two vectors are in a cache line
    for _ in range(n // 32):
        a, b = _add_elements(T, dy, x, 16, mean, a, b, asks)
        a, b = _add_elements(T, dy + step, x + step, 16, mean, a, b, both)
        dy, x = dy + 2 * step, x + 2 * step
    if n % 32 >= 16:
        a, b = _add_elements(T, dy, x, 16, mean, a, b, asks)
        dy, x = dy + step, x + step
    if n % 16 > 0:
        a, b = _add_elements(T, dy, x, n % 16, mean, a, b, both if n % 32 > 16 else asks)
    return a, b


@inline
def _add_small_planes(
    T: Any, dy: Any, dy_c: Any, x: Any, x_c: Any, n: Any, mean: Any, first: Any, last: Any, lanes: Any, asks: Any
) -> Any:
    """Planes of n elements of some channels, each onto 8 sums of dy and 8 of dy * (x - mean) in memory."""
    one, zero = np.float32(0), splat(np.float32(0))
    for c in range(first, last):
        a, b = _add_plane(T, dy + c * dy_c, x + c * x_c, n, splat(load_one(mean + c * 4)), zero, zero, asks)
        store(one, lanes, add(load(one, lanes), fold(a, b)))
        lanes += 64


@kernel
def small_plane_sums(T: Any) -> Any:
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
        clear(table, (last - first + 7) // 8 * 512)
        for chunk in range(start, end, together):
            for sample in range(chunk, min(end, chunk + together)):
                to_dy, to_x = offset(outer, outer_axes, sample)
                d, p = dy + to_dy, x + to_x
                # Two loops: 2x2 images take 1.1 instead of 1.2 ns. And on Zen in float32, 128x1024x49 takes 1.6 ms
                # without requests and 1.7 with, but 1024x1024x4 1.8 and 1.4.
                if n < 16:
                    _add_small_planes(T, d, dy_c, p, x_c, n & 15, mean, first, last, table, True)
                else:
                    _add_small_planes(T, d, dy_c, p, x_c, n, mean, first, last, table, width(T) == 2 or not UP_TO_ZEN_4)
            for c in range(first, last, 8):
                lanes, count, own = table + (c - first) * 64, min(8, last - c), place + c * 8
                both = widen(sum_folded(lanes, count))
                if chunk > start:
                    both = add(both, load_halves(own, own + pad))
                store_halves(both, own, own + pad, count)
                clear(lanes, 512)
        leave_place(table)

    return run
