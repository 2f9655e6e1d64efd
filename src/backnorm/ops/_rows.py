"""Rows that are normalized whole, for the CPU kernels of LayerNorm and of GroupNorm's small groups: dx and the column
sums of one row and the sums of the next, in one loop; and the stage through which short rows of dx pass the caches.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ._native import inline
from ._simd import (
    add,
    copy_bytes,
    fma,
    keep,
    load,
    load_line,
    load_part,
    mul,
    prefetch,
    splat,
    store,
    store_part,
    stream_line,
    sub,
    sum_lanes,
    width,
)
from ._sums import flush, flush_lines
from ._views import LONGEST_BLOCK

#: Bytes of dx that are kept back to be written past the caches together.
STAGE = 4096


@inline
def _sums_step(T: Any, dy: Any, x: Any, w: Any, count: Any, mean: Any, rstd: Any, a: Any, b: Any) -> Any:
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
        store_part(U, dx, mul(rstd, fma(x_hat, minus_c2, fma(d, wv, minus_c1))), count)
    if columns:
        store(one, sums, fma(d, x_hat, load(one, sums)))
        store(one, sums + 64, add(load(one, sums + 64), d))


@inline
def sweep(
    T: Any, U: Any, columns: Any, wants_dx: Any, this: Any, following: Any, n: Any, dy: Any, x: Any, w: Any, dx: Any,
    sums: Any, f: Any, next_dy: Any, next_x: Any, next_w: Any, dy_ahead: Any, x_ahead: Any, m: Any,
    r: Any, late: Any = None,
) -> Any:  # fmt: skip
    """Up to LONGEST_BLOCK columns of this row, from the cache: dx = rstd * (wdy - c1 - x_hat * c2), and dy * x_hat and
    dy onto the column sums. And of the following row, from memory: the sums of wdy and wdy * x_hat, which it returns;
    two vectors of each take turns. Both together, so that memory is read and written all the time. What lies `ahead`
    bytes after the following row is asked for; without a following row, next_dy and next_x themselves are. `late`
    lines, see `start_lines`, go out meanwhile, as many as `gone_lines` says."""
    size, out, zero = width(T), width(U), splat(np.float32(0))
    mean, rstd = splat(m), splat(r)
    a0, a1, b0, b1 = zero, zero, zero, zero
    c = 0
    while c + 32 <= n:
        at, k = c * size, c * 4
        if following:
            prefetch(next_dy + at + dy_ahead)
            prefetch(next_x + at + x_ahead)
            a0, b0 = _sums_step(T, next_dy + at, next_x + at, next_w + k, 16, mean, rstd, a0, b0)
        if this:
            if not following:
                prefetch(next_dy + at)
                prefetch(next_x + at)
            _dx_step(T, U, columns, wants_dx, dy + at, x + at, w + k, dx + c * out, sums + 2 * k, 16, f)
            if late is not None and c * out < late[2]:
                stream_line(late[1] + c * out, load_line(late[0] + c * out))
        c += 16
        at, k = c * size, c * 4
        if following:
            if size == 4:  # else in the cache line asked for above
                prefetch(next_dy + at + dy_ahead)
                prefetch(next_x + at + x_ahead)
            a1, b1 = _sums_step(T, next_dy + at, next_x + at, next_w + k, 16, mean, rstd, a1, b1)
        if this:
            if not following and size == 4:
                prefetch(next_dy + at)
                prefetch(next_x + at)
            _dx_step(T, U, columns, wants_dx, dy + at, x + at, w + k, dx + c * out, sums + 2 * k, 16, f)
            if late is not None and out == 4 and c * out < late[2]:
                stream_line(late[1] + c * out, load_line(late[0] + c * out))
        c += 16
    while c < n:
        at, k, count = c * size, c * 4, min(16, n - c)
        if following:
            # At a row's end too: without it, 375 columns took 5.3 instead of 3.7 ms.
            prefetch(next_dy + at + dy_ahead)
            prefetch(next_x + at + x_ahead)
            a0, b0 = _sums_step(T, next_dy + at, next_x + at, next_w + k, count, mean, rstd, a0, b0)
        if this:
            _dx_step(T, U, columns, wants_dx, dy + at, x + at, w + k, dx + c * out, sums + 2 * k, count, f)
        c += 16
    return np.float64(sum_lanes(add(a0, a1))), np.float64(sum_lanes(add(b0, b1)))


@inline
def gone_lines(U: Any, n: Any) -> Any:
    """Bytes of late lines that a sweep over so many columns of both rows writes, if there are as many."""
    return n // 32 * 32 * width(U)


@inline
def factors(m: Any, r: Any, s: Any, q: Any, share: Any) -> Any:
    return splat(m), splat(r), splat(np.float32(-s * share)), splat(np.float32(-q * share))


#: Bytes of each half of a stage of lines: the longest block, and a line before and after it.
LINES = LONGEST_BLOCK * 4 + 128
STAGE_OF_LINES = 2 * LINES


@inline
def start_lines(place: Any) -> Any:
    """A stage of two halves, for dx from this address on. One is filled while the other's lines go out, one for each
    vector or two: written all at once they hold up the loads (0.80 against 0.97 of the probe for rows of 64 columns).

    The state: where in the stage the next row goes; where the half at hand ends, and where what is to be written begins
    in it; the address of the end; and the other half's `late` lines: from where, to where, how many bytes."""
    return place % 64, place % 64, place % 64, place, (0, 0, 0)


@inline
def grow_lines(stage: Any, state: Any, row_bytes: Any, most: Any, gone: Any, last: Any) -> Any:
    """After a row was put into the stage and `gone` bytes of late lines were written. The next has up to `most` bytes.
    What does not fill a line moves on to the other half; all goes with the last row, after which memory goes on
    elsewhere."""
    at, staged, first, place, late = state
    at, staged, place = at + row_bytes, staged + row_bytes, place + row_bytes
    source, target, left = late
    gone = min(gone, left)
    source, target, left = source + gone, target + gone, left - gone
    if last or staged + most > LINES - 64:
        flush_lines(source, target, left)
        half = at - staged
        if last:
            flush(stage + half + first, place - staged + first, staged - first)
        else:
            rest = staged % 64
            source, target, left = stage + half, place - staged, staged - rest
            if first > 0:
                copy_bytes(target + first, source + first, 64 - first)
                source, target, left = source + 64, target + 64, left - 64
            store(np.float32(0), stage + LINES - half, load(np.float32(0), stage + at - rest))
            at, staged, first = LINES - half + rest, rest, 0
    return at, staged, first, place, (source, target, left)


@inline
def start_stage(place: Any) -> Any:
    """An empty stage for dx from this address on: where its bytes begin, where they end, and the address of the end."""
    return place % 64, place % 64, place


@inline
def grow_stage(stage: Any, state: Any, row_bytes: Any, last: Any) -> Any:
    """After a row was put at the stage's end. Whole cache lines go out when it is full, the rest stays for the next
    row; all goes with the last row, after which memory goes on elsewhere."""
    first, staged, place = state
    staged, place = staged + row_bytes, place + row_bytes
    if staged + row_bytes > STAGE - 64 or last:
        rest = 0 if last else staged % 64
        flush(stage + first, place - staged + first, staged - first - rest)
        store(np.float32(0), stage, load(np.float32(0), stage + staged - rest))
        first, staged = 0, rest
    return first, staged, place
