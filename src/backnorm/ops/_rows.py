"""Rows that are normalized whole, for the CPU kernels of LayerNorm and of GroupNorm's small groups: dx and the column
sums of one row and the sums of the next, in one loop; and the runs in which dx is written, past the caches or not.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ._formats import _feature
from ._lanes import add, fma, keep, mul, slide, splat, sub, sum_lanes
from ._native import inline
from ._simd import load, load_part, prefetch, prefetch_once, store, store_or_stream, store_part, width
from ._views import ROW_BLOCK, ROW_SPAN

#: Columns of a row whose sums are made before dx of as many of the other. Without AVX-512 a vector takes two registers,
#: and there are too few for both at once: rows in the caches took 1.05 to 1.3 times as long. But where float32 goes
#: past the caches, loads and stores should alternate.
STRIP = 32 if _feature("avx512f") else 256


@inline
def begin_run(U: Any, place: Any, past_caches: Any) -> Any:
    """A run of elements that are written from this address on, `past_caches` in whole vectors of memory wherever it
    begins: stores that cross cache lines are slow, and memory past the caches takes no others.

    The state: whether it goes past the caches; where the next vector of memory is; the last 16 elements; how many of
    them wait for that vector to be full; and how many of its elements come before the run.
    """
    past_caches = past_caches if place % width(U) == 0 else 0
    waiting = place % (16 * width(U)) // width(U) if past_caches else 0
    return past_caches, place - waiting * width(U), splat(np.float32(0)), waiting, waiting


@inline
def extend_run(U: Any, run: Any, value: Any, count: Any) -> Any:
    """The next `count` elements of a run."""
    past_caches, place, last, waiting, before = run
    if waiting + count >= 16:
        full = slide(last, value, 16 - waiting)
        if before > 0:
            store_part(U, place + before * width(U), slide(full, full, before), 16 - before)
            before = 0
        else:
            store_or_stream(U, place, full, past_caches)
        place += 16 * width(U)
    return past_caches, place, slide(last, value, count), (waiting + count) % 16, before


@inline
def room_in_run(run: Any) -> Any:
    """How many elements would fill the vector of memory that a run is at, 0 if it begins one."""
    return -run[3] % 16


@inline
def pass_over(run: Any, size: Any) -> Any:
    """The run after so many bytes, whole vectors, that were written by other means."""
    past_caches, place, last, waiting, before = run
    return past_caches, place + size, last, waiting, before


@inline
def end_run(U: Any, run: Any) -> Any:
    """What still waits."""
    _, place, last, waiting, before = run
    count = waiting - before
    if count > 0:
        store_part(U, place + before * width(U), slide(last, last, 16 - count), count)


@inline
def sums_step(T: Any, dy: Any, x: Any, w: Any, count: Any, mean: Any, rstd: Any, a: Any, b: Any) -> Any:
    wdy = mul(load_part(T, dy, count), load_part(np.float32(0), w, count))
    x_hat = keep(mul(sub(load_part(T, x, count), mean), rstd), count)
    return add(a, wdy), fma(wdy, x_hat, b)


@inline
def _dx_step(
    T: Any, U: Any, columns: Any, wants_dx: Any, dy: Any, x: Any, w: Any, dx: Any, sums: Any, count: Any, f: Any
) -> Any:
    mean, rstd, minus_c1, minus_c2 = f
    one = np.float32(0)
    d, wv = load_part(T, dy, count), load_part(one, w, count)
    x_hat = keep(mul(sub(load_part(T, x, count), mean), rstd), count)
    if wants_dx:
        dx = extend_run(U, dx, mul(rstd, fma(x_hat, minus_c2, fma(d, wv, minus_c1))), count)
    if columns:
        store(one, sums, fma(d, x_hat, load(one, sums)))
        store(one, sums + 64, add(load(one, sums + 64), d))
    return dx


@inline
def _strip(
    T: Any, U: Any, columns: Any, wants_dx: Any, this: Any, following: Any, first: Any, end: Any, dy: Any, x: Any,
    w: Any, dx: Any, sums: Any, f: Any, next_dy: Any, next_x: Any, next_w: Any, dy_ahead: Any, x_ahead: Any, mean: Any,
    rstd: Any, a0: Any, b0: Any, a1: Any, b1: Any,
) -> Any:  # fmt: skip
    """Some columns, a multiple of 32, of a sweep."""
    size = width(T)
    if following:
        for c in range(first, end, 32):
            at, k = c * size, c * 4
            prefetch_once(next_dy + at + dy_ahead)
            prefetch_once(next_x + at + x_ahead)
            a0, b0 = sums_step(T, next_dy + at, next_x + at, next_w + k, 16, mean, rstd, a0, b0)
            at, k = at + 16 * size, k + 64
            if size == 4:  # else in the cache line asked for above
                prefetch_once(next_dy + at + dy_ahead)
                prefetch_once(next_x + at + x_ahead)
            a1, b1 = sums_step(T, next_dy + at, next_x + at, next_w + k, 16, mean, rstd, a1, b1)
    if this:
        for c in range(first, end, 16):
            at, k = c * size, c * 4
            if not following:
                prefetch(next_dy + at)
                prefetch(next_x + at)
            dx = _dx_step(T, U, columns, wants_dx, dy + at, x + at, w + k, dx, sums + 2 * k, 16, f)
    return a0, b0, a1, b1, dx


@inline
def sweep(
    T: Any, U: Any, columns: Any, wants_dx: Any, this: Any, following: Any, n: Any, dy: Any, x: Any, w: Any, dx: Any,
    sums: Any, f: Any, next_dy: Any, next_x: Any, next_w: Any, dy_ahead: Any, x_ahead: Any, m: Any, r: Any,
) -> Any:  # fmt: skip
    """Up to LONGEST_BLOCK columns of this row, from the cache: dx = rstd * (wdy - c1 - x_hat * c2), onto a run, and
    dy * x_hat and dy onto the column sums. And of the following row, from memory: the sums of wdy and wdy * x_hat; two
    vectors of each take turns, and begin anew after ROW_BLOCK columns. Both together, so that memory is read and
    written all the time. Returns the sums and the run. What lies `ahead` bytes after the following row is asked for;
    without a following row, next_dy and next_x themselves are."""
    size, zero = width(T), splat(np.float32(0))
    mean, rstd = splat(m), splat(r)
    a0, a1, b0, b1, a, b = zero, zero, zero, zero, zero, zero
    alternate = STRIP == 32 or (size == 4 and dx[0] != 0)
    c = 0
    while c + 32 <= n:
        if c == ROW_BLOCK:  # more additions would be too many roundings
            a, b, a0, a1, b0, b1 = add(a0, a1), add(b0, b1), zero, zero, zero, zero
        if alternate:
            end = c + 32
            a0, b0, a1, b1, dx = _strip(
                T, U, columns, wants_dx, this, following, c, end, dy, x, w, dx, sums, f, next_dy, next_x, next_w,
                dy_ahead, x_ahead, mean, rstd, a0, b0, a1, b1,
            )  # fmt: skip
        else:
            end = min(c + STRIP, n // 32 * 32)
            a0, b0, a1, b1, dx = _strip(
                T, U, columns, wants_dx, this, following, c, end, dy, x, w, dx, sums, f, next_dy, next_x, next_w,
                dy_ahead, x_ahead, mean, rstd, a0, b0, a1, b1,
            )  # fmt: skip
        c = end
    while c < n:
        at, k, count = c * size, c * 4, min(16, n - c)
        if following:
            # At a row's end too: without it, 375 columns took 5.3 instead of 3.7 ms.
            prefetch_once(next_dy + at + dy_ahead)
            prefetch_once(next_x + at + x_ahead)
            a0, b0 = sums_step(T, next_dy + at, next_x + at, next_w + k, count, mean, rstd, a0, b0)
        if this:
            dx = _dx_step(T, U, columns, wants_dx, dy + at, x + at, w + k, dx, sums + 2 * k, count, f)
        c += 16
    s, q = sum_lanes(add(a, add(a0, a1))), sum_lanes(add(b, add(b0, b1)))
    return np.float64(s), np.float64(q), dx


@inline
def add_block(s: Any, q: Any, span: Any, a: Any, b: Any, end: Any, cols: Any) -> Any:
    """A block's sums onto those of its span of a row, and those of a whole span onto the row's: in the order of rows
    that are split, so that a row's bits do not depend on how many there are."""
    a, b = span[0] + a, span[1] + b
    if end % ROW_SPAN == 0 or end >= cols:
        return s + a, q + b, (0.0, 0.0)
    return s, q, (a, b)


@inline
def factors(m: Any, r: Any, s: Any, q: Any, share: Any) -> Any:
    return splat(m), splat(r), splat(np.float32(-s * share)), splat(np.float32(-q * share))
