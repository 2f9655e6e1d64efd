"""GroupNorm backward on the CPU, where groups are rows of elements, as LayerNorm's are, with a weight and column sums
for each element: groups of small planes, and samples of pixels that are one group and not long.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .._lanes import add, slide, splat, sum_lanes, widen, zeros_wide
from .._native import inline, kernel
from .._places import holds, leave_place, mark, take_place
from .._rows import begin_run, end_run, factors, sweep
from .._simd import load, load_one, load_part, store, store_double, store_wide, width, words
from .._sums import clear
from .._views import ROW_BLOCK


@inline
def _spread_weights(gamma: Any, channels: Any, hw: Any, w: Any) -> Any:
    """A group's gamma, each hw times; up to 15 more are written behind them."""
    for c in range(channels):
        g = splat(load_one(gamma + c * 4))
        for at in range(c * hw, c * hw + hw, 16):
            store(np.float32(0), w + at * 4, g)


@inline
def _spread_pixels_weights(gamma: Any, channels: Any, hw: Any, w: Any) -> Any:
    """The group's gamma, hw times; up to 15 more are written behind them."""
    one = np.float32(0)
    for i in range(hw):
        for c in range(0, channels, 16):
            store(one, w + (i * channels + c) * 4, load_part(one, gamma + c * 4, min(16, channels - c)))


@inline
def _channel_sums(columns: Any, channels: Any, hw: Any, sums: Any, pad: Any) -> Any:
    """The sums of each channel's columns, of dy and `pad` bytes further of dy * x_hat."""
    one, zero = np.float32(0), splat(np.float32(0))
    for c in range(channels):
        a, b = zero, zero
        k, end = c * hw, c * hw + hw
        while k < end:
            place, count = columns + (k >> 4) * 128 + (k & 15) * 4, min(16 - (k & 15), end - k)
            a, b = add(a, load_part(one, place + 64, count)), add(b, load_part(one, place, count))
            k += count
        store_double(sums + c * 8, np.float64(sum_lanes(a)))
        store_double(sums + pad + c * 8, np.float64(sum_lanes(b)))


@inline
def _pixels_channel_sums(columns: Any, channels: Any, hw: Any, sums: Any, pad: Any) -> Any:
    """The same, where a channel's columns are as far apart as there are channels: 16 channels at a time. Sums and the
    table have room for as many."""
    one = np.float32(0)
    for c in range(0, channels, 16):
        a, b = zeros_wide(), zeros_wide()
        for k in range(c, hw * channels, channels):
            place, lane = columns + (k >> 4) * 128, k & 15
            b = add(b, widen(slide(load(one, place), load(one, place + 128), lane)))
            a = add(a, widen(slide(load(one, place + 64), load(one, place + 192), lane)))
        store_wide(sums + c * 8, a)
        store_wide(sums + pad + c * 8, b)


@kernel
def group_rows(T: Any, U: Any, pixels: Any, columns: Any, wants_dx: Any, single: Any) -> Any:
    """Groups as rows, like LayerNorm's: some chunks of samples, and of those some groups, a task, `together` of them at
    a time. `single`: rows of one block.

    Groups of planes, or of pixels whose channels are all of one group.

    Every element of those groups has its weight in a table and its sums down a chunk's samples in another; the latter
    become the chunk's channel sums, in sums[chunk][2][channel]. So no plane needs a sum across lanes, nor a remainder.
    """
    spread, add_up = (
        (_spread_pixels_weights, _pixels_channel_sums) if pixels else (_spread_weights, _channel_sums)
    )  # fmt: skip

    def run(args: Any, task: Any, thread: Any) -> Any:
        (
            dy, dy_n, dy_g, x, x_n, x_g, dx, dx_n, dx_g, streamed, mean, rstd, gamma, sums, pad, samples, groups,
            width_g, hw, together, task_groups, chunk, chunks, dy_ahead, x_ahead, places, place_step, place_count,
        ) = words(args, 28)  # fmt: skip
        weights, cols, size = take_place(places, place_step, place_count, thread), width_g * hw, width(T)
        share, apart, row_bytes = 1.0 / cols, (cols + 15) // 16 * 64, cols * width(U)
        table = weights + together * apart + 64
        blocks = 1 if single else (cols + ROW_BLOCK - 1) // ROW_BLOCK
        tasks = (groups + task_groups - 1) // task_groups
        block, begin = task // tasks, task % tasks * task_groups
        for start in range(block * chunks * chunk, min(samples, (block + 1) * chunks * chunk), chunk):
            end = min(samples, start + chunk)
            for first in range(begin, min(groups, begin + task_groups), together):
                last = min(groups, begin + task_groups, first + together)
                if wants_dx and not holds(weights, first + 1):
                    for g in range(first, last):
                        spread(gamma + g * width_g * 4, width_g, hw, weights + (g - first) * apart)
                    mark(weights, first + 1)
                if columns:
                    clear(table, (last - first) * apart * 2)
                d, p, at = dy + start * dy_n + first * dy_g, x + start * x_n + first * x_g, (start * groups + first) * 4
                m, r = load_one(mean + at), load_one(rstd + at)
                f, s, q = factors(m, r, 0.0, 0.0, share), 0.0, 0.0
                results = begin_run(U, dx, streamed)
                for i in range(blocks if wants_dx else 0):
                    c = i * ROW_BLOCK
                    k, at = cols if single else min(ROW_BLOCK, cols - c), c * size
                    a, b, _ = sweep(
                        T, U, columns, wants_dx, False, True, k, 0, 0, 0, results, 0, f, d + at, p + at,
                        weights + c * 4, dy_ahead, x_ahead, m, r,
                    )  # fmt: skip
                    s, q = s + a, q + b
                for n in range(start, end):
                    results = begin_run(U, dx + n * dx_n + first * dx_g, streamed)
                    for g in range(first, last):
                        f, own = factors(m, r, s, q, share), (g - first) * apart
                        next_n, next_g = (n, g + 1) if g + 1 < last else (n + 1, first)
                        s, q, next_d, next_p = 0.0, 0.0, d, p
                        if next_n < end:
                            at = (next_n * groups + next_g) * 4
                            m, r = load_one(mean + at), load_one(rstd + at)
                            next_d, next_p = dy + next_n * dy_n + next_g * dy_g, x + next_n * x_n + next_g * x_g
                        for i in range(blocks):
                            c = i * ROW_BLOCK
                            k, at = cols if single else min(ROW_BLOCK, cols - c), c * size
                            w, mine = weights + own + c * 4, table + 2 * own + c * 8
                            if next_n < end:
                                later = 0 if wants_dx else 1  # what a sweep that sums no following row asks for
                                a, b, results = sweep(
                                    T, U, columns, wants_dx, True, wants_dx, k, d + at, p + at, w, results, mine, f,
                                    next_d + at + later * dy_ahead, next_p + at + later * x_ahead,
                                    weights + (next_g - first) * apart + c * 4, dy_ahead, x_ahead, m, r,
                                )  # fmt: skip
                                s, q = s + a, q + b
                            else:
                                _, _, results = sweep(
                                    T, U, columns, wants_dx, True, False, k, d + at, p + at, w, results, mine, f,
                                    d + at, p + at, w, 0, 0, m, r,
                                )  # fmt: skip
                        d, p = next_d, next_p
                        if wants_dx and (g + 1 == last or dx_g != row_bytes or not streamed):
                            end_run(U, results)
                            results = begin_run(U, dx + n * dx_n + (g + 1) * dx_g, streamed)
                if columns:
                    for g in range(first, last):
                        place = sums + start // chunk * 2 * pad + g * width_g * 8
                        add_up(table + (g - first) * apart * 2, width_g, hw, place, pad)
        leave_place(weights)

    return run
