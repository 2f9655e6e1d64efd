"""GroupNorm backward on the CPU, for whole groups of small planes (NCHW).

Fixed costs are most of what such a group takes: channels of several groups are added up together, and some groups are
summed before dx of the first is made, which then need not wait for its sums.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .._lanes import add, add_lane, all_finite, mul, widen, zeros_wide
from .._native import inline, kernel
from .._rows import begin_run, end_run
from .._simd import (
    load_double,
    load_halves,
    load_one,
    load_twice,
    scratch,
    store_double,
    store_halves,
    store_wide,
    width,
    words,
)
from .._sums import clear, sum_eight_planes
from .planes import joined_dx, plane_dx, plane_factors, total_group
from .tiling import MOST_SUMS

#: Bytes of the sums of a batch's groups, 8 channels' at a time.
_GROUP_SUMS = MOST_SUMS * 128


@inline
def _total(both: Any, width_g: Any) -> Any:
    """Sums of 8 channels' sums, or of each group's among them, in the lane of its first channel, as by `sum_lanes`."""
    if width_g > 4:
        both = add_lane(both, 4)
    if width_g > 2:
        both = add_lane(both, 2)
    return add_lane(both, 1) if width_g > 1 else both


@kernel
def small_planes(T: Any, wants_dx: Any) -> Any:
    """What `whole_planes` does, for planes of up to LARGEST_LANES elements: `batch` groups of a sample at a time, of
    which those that have 8 channels together are summed in one go."""

    def run(args: Any, task: Any) -> Any:
        (
            dy, dy_n, dy_c, x, x_n, x_c, dx, dx_n, dx_c, streamed, mean, rstd, gamma, sums, sums_n, pad, tasks, groups,
            width_g, hw, joined, together, per, ahead, batch, at_once,
        ) = words(args, 26)  # fmt: skip
        size, lanes, group_sums = np.float64(width_g) * np.float64(hw), scratch(512), scratch(_GROUP_SUMS)
        streamed = streamed if dx % width(T) == 0 else 0
        group, stop = task * per, min(tasks, task * per + per)
        n, g = group // groups, group % groups
        results = begin_run(T, dx + n * dx_n + g * width_g * dx_c, streamed)
        if together > 1:
            clear(sums + n // together * sums_n + 2 * pad, 2 * pad + 128)
        while group < stop:
            end, first = min(min(group + batch, stop), group + groups - g), g * width_g
            d, p, weights = dy + n * dy_n + first * dy_c, x + n * x_n + first * x_c, gamma + first * 4
            place, target = sums + n // together * sums_n + first * 8, dx + n * dx_n + first * dx_c
            total_at = group_sums
            for begin in range(group, end, at_once):
                channels, total, finite = min(at_once, end - begin) * width_g, zeros_wide(), True
                for c in range(0, channels, 8):
                    count, own = min(8, channels - c), place + c * 8
                    both = sum_eight_planes(
                        T, d + c * dy_c, dy_c, p + c * x_c, x_c, count, hw, mean + begin * 4, rstd + begin * 4, width_g,
                        lanes,
                    )  # fmt: skip
                    store_halves(both, own, own + pad, count)
                    if together > 1:
                        own += 2 * pad
                        store_halves(add(load_halves(own, own + pad), both), own, own + pad, 8)
                    if wants_dx:
                        w = load_twice(weights + c * 4, count)
                        total, finite = add(total, mul(both, widen(w))), finite and all_finite(w)
                store_wide(total_at, _total(total, width_g))
                if not finite:
                    for i in range(min(at_once, end - begin)):
                        m, r, c = load_one(mean + (begin + i) * 4), load_one(rstd + (begin + i) * 4), i * width_g
                        c1, c2 = total_group(
                            T, d + c * dy_c, dy_c, 0, p + c * x_c, x_c, 0, 1, hw, m, r, weights + c * 4, place + c * 8,
                            pad, width_g,
                        )  # fmt: skip
                        store_double(total_at + c * 8, c1)
                        store_double(total_at + c * 8 + 64, c2)
                d, p, weights = d + channels * dy_c, p + channels * x_c, weights + channels * 4
                place, total_at = place + channels * 8, total_at + 128
            if wants_dx:
                d, p, weights = dy + n * dy_n + first * dy_c, x + n * x_n + first * x_c, gamma + first * 4
                for i in range(end - group):
                    m, r = load_one(mean + (group + i) * 4), load_one(rstd + (group + i) * 4)
                    total_at = group_sums + i // at_once * 128 + i % at_once * width_g * 8
                    c1, c2 = load_double(total_at), load_double(total_at + 64)
                    if joined:
                        f = plane_factors(m, r, load_one(weights), c1, c2, size)
                        results = joined_dx(T, streamed, d, p, target, width_g, hw, weights, f, ahead, results)
                    else:
                        for c in range(width_g):
                            f = plane_factors(m, r, load_one(weights + c * 4), c1, c2, size)
                            results = plane_dx(
                                T, streamed, d + c * dy_c, p + c * x_c, target + c * dx_c, hw, f, ahead, results
                            )
                    d, p, weights = d + width_g * dy_c, p + width_g * x_c, weights + width_g * 4
                    target += width_g * dx_c
            g += end - group
            group = end
            n, g = (n, g) if g < groups else (n + 1, 0)
        end_run(T, results)

    return run
