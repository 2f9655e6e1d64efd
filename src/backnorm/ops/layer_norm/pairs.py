"""LayerNorm backward on the CPU, rows of whole vectors whose dx goes past the caches, two at a time: their column sums
are then loaded and stored once, and memory is read in its order all the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .._formats import ON_ZEN_5, _feature
from .._lanes import add, fma, mul, splat, sub, sum_lanes
from .._native import inline, kernel
from .._rows import add_block, begin_run, end_run, extend_run, factors, sums_step, sweep
from .._simd import load, load_one, prefetch_once, store, width, words
from .._sums import begin_chunks, end_chunk
from .._views import AHEAD, ROW_BLOCK

#: Zen 5 gains by it: 16384 x 1024 in float32 comes at 0.91 instead of 0.87 of the probe's speed, 8192 x 4096 in
#: bfloat16 takes 3.4 instead of 3.6 ms. A Xeon loses 5 to 10 % in 16 bits. Without AVX-512 there are too few registers.
LONGEST_OF_PAIRS = 8192 if ON_ZEN_5 and _feature("avx512f") else 0


@inline
def _dx(T: Any, dy: Any, x: Any, w: Any, f: Any) -> Any:
    """dy, x_hat and dx of 16 columns."""
    mean, rstd, minus_c1, minus_c2 = f
    d, x_hat = load(T, dy), mul(sub(load(T, x), mean), rstd)
    return d, x_hat, mul(rstd, fma(x_hat, minus_c2, fma(d, w, minus_c1)))


@inline
def _finish(T: Any, U: Any, columns: Any, c: Any, pair: Any, w: Any, sums: Any, runs: Any) -> Any:
    """dx of 16 columns of two rows, onto their runs; and dy * x_hat and dy onto the column sums."""
    dy, dy_step, x, x_step, f, f_2 = pair
    one, at = np.float32(0), c * width(T)
    weight = load(one, w + c * 4)
    d, x_hat, value = _dx(T, dy + at, x + at, weight, f)
    d_2, x_hat_2, value_2 = _dx(T, dy + dy_step + at, x + x_step + at, weight, f_2)
    if columns:
        place = sums + c * 8
        store(one, place, fma(d_2, x_hat_2, fma(d, x_hat, load(one, place))))
        store(one, place + 64, add(add(load(one, place + 64), d), d_2))
    return extend_run(U, runs[0], value, 16), extend_run(U, runs[1], value_2, 16)


@inline
def _sums(
    T: Any, U: Any, columns: Any, single: Any, cols: Any, dy: Any, x: Any, m: Any, r: Any, w: Any, c: Any, pair: Any,
    sums: Any, runs: Any,
) -> Any:  # fmt: skip
    """A row's sums of wdy and wdy * x_hat, in the order of `sweep`. With every 32 columns of it, 16 of the pair before
    are finished, from column c on."""
    size, zero, mean, rstd = width(T), splat(np.float32(0)), splat(m), splat(r)
    s, q, span = 0.0, 0.0, (0.0, 0.0)
    for first in range(0, cols, cols if single else ROW_BLOCK):
        end = cols if single else min(cols, first + ROW_BLOCK)
        a, b, a0, b0, a1, b1 = zero, zero, zero, zero, zero, zero
        k = first
        while k + 32 <= end:
            if k == first + ROW_BLOCK:  # more additions would be too many roundings
                a, b, a0, a1, b0, b1 = add(a0, a1), add(b0, b1), zero, zero, zero, zero
            d, p = dy + k * size, x + k * size
            prefetch_once(d + AHEAD)
            prefetch_once(p + AHEAD)
            a0, b0 = sums_step(T, d, p, w + k * 4, 16, mean, rstd, a0, b0)
            if size == 4:  # else in the cache line asked for above
                prefetch_once(d + 64 + AHEAD)
                prefetch_once(p + 64 + AHEAD)
            a1, b1 = sums_step(T, d + 16 * size, p + 16 * size, w + k * 4 + 64, 16, mean, rstd, a1, b1)
            runs = _finish(T, U, columns, c, pair, w, sums, runs)
            k, c = k + 32, c + 16
        if k < end:
            prefetch_once(dy + k * size + AHEAD)
            prefetch_once(x + k * size + AHEAD)
            a0, b0 = sums_step(T, dy + k * size, x + k * size, w + k * 4, 16, mean, rstd, a0, b0)
        s_1, q_1 = sum_lanes(add(a, add(a0, a1))), sum_lanes(add(b, add(b0, b1)))
        s, q, span = add_block(s, q, span, np.float64(s_1), np.float64(q_1), end, cols)
    return s, q, c, runs


@inline
def _alone(T: Any, U: Any, columns: Any, single: Any, sums_up: Any, cols: Any, dy: Any, x: Any, m: Any, r: Any, w: Any,
           f: Any, sums: Any, run: Any) -> Any:  # fmt: skip
    """A row without another: its sums, or what is made with them."""
    size, s, q, span = width(T), 0.0, 0.0, (0.0, 0.0)
    for c in range(0, cols, cols if single else ROW_BLOCK):
        n = cols if single else min(ROW_BLOCK, cols - c)
        d, p, v = dy + c * size, x + c * size, w + c * 4
        if sums_up:
            a, b, _ = sweep(T, U, columns, True, False, True, n, 0, 0, 0, run, 0, f, d, p, v, AHEAD, AHEAD, m, r)
            s, q, span = add_block(s, q, span, a, b, c + n, cols)
        else:
            _, _, run = sweep(T, U, columns, True, True, False, n, d, p, v, run, sums + c * 8, f, d, p, v, 0, 0, m, r)
    return s, q, run


@kernel
def pairs(T: Any, U: Any, columns: Any, single: Any) -> Any:
    """Some chunks of an even number of rows a task: dx, and the column sums, the same bits as `_whole_rows` makes."""

    def run(args: Any, task: Any) -> Any:
        (
            dy, dy_step, x, x_step, mean, rstd, w, dx, dx_step, streamed, partials, partial_step, rows, cols,
            chunk_rows, chunks,
        ) = words(args, 16)  # fmt: skip
        share, apart = 1.0 / cols, cols * 8
        start, end = task * chunks * chunk_rows, min(rows, (task + 1) * chunks * chunk_rows)
        totals = partials + task * partial_step
        sums = totals
        if columns:
            sums = begin_chunks(totals, apart, chunks)
        nothing, left = factors(np.float32(0), np.float32(0), 0.0, 0.0, share), chunk_rows
        f, f_2 = nothing, nothing
        for row in range(start, min(end, start + 2)):
            m, r = load_one(mean + row * 4), load_one(rstd + row * 4)
            none = begin_run(U, dx, 0)
            s, q, _ = _alone(
                T, U, columns, single, True, cols, dy + row * dy_step, x + row * x_step, m, r, w, nothing, sums, none
            )
            f, f_2 = f_2, factors(m, r, s, q, share)
        for row in range(start, end - 1, 2):
            d, p, o = dy + row * dy_step, x + row * x_step, dx + row * dx_step
            runs = begin_run(U, o, streamed), begin_run(U, o + dx_step, streamed)
            pair, c = (d, dy_step, p, x_step, f, f_2), 0
            for following in range(row + 2, min(end, row + 4)):
                m, r = load_one(mean + following * 4), load_one(rstd + following * 4)
                s, q, c, runs = _sums(
                    T, U, columns, single, cols, dy + following * dy_step, x + following * x_step, m, r, w, c, pair,
                    sums, runs,
                )  # fmt: skip
                f, f_2 = f_2, factors(m, r, s, q, share)
            while c < cols:
                runs = _finish(T, U, columns, c, pair, w, sums, runs)
                c += 16
            end_run(U, runs[0])
            end_run(U, runs[1])
            left -= 2
            if columns and chunks > 1 and left == 0:
                end_chunk(sums, cols, totals, apart)
                left = chunk_rows
        if (end - start) % 2 == 1:
            last = begin_run(U, dx + (end - 1) * dx_step, streamed)
            d, p = dy + (end - 1) * dy_step, x + (end - 1) * x_step
            _, _, last = _alone(
                T, U, columns, single, False, cols, d, p, np.float32(0), np.float32(0), w, f_2, sums, last
            )
            end_run(U, last)
        if columns and chunks > 1 and (end - start) % chunk_rows != 0:
            end_chunk(sums, cols, totals, apart)

    return run
