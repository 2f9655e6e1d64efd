"""GroupNorm backward on the CPU, for pixels (channels-last).

A sample is read for its sums and then again for dx; where there are too few samples for the threads, in sweeps over
smaller tasks, which add in the same order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .._native import inline, kernel
from .._rows import STAGE
from .._simd import base, load, load_one, prefetch, scratch, store_one, store_wide, stream, width, words
from .._sums import flush, sum_columns, total_columns, total_wide
from .._views import PIXEL_ROWS
from .planes import dx_of, put_dx, total_group

#: Elements of a run of dx that are kept back to be written past the caches together.
BLOCK = 512
#: dx is made of so many chunks at a time, the last ones first: those were read last, so the L2 cache has them still
#: (11.3 instead of 11.9 ms for 32 x 256 x 3136 in float32).
DX_CHUNKS = 8


@inline
def _coefficient(table: Any, column: Any, which: Any) -> Any:
    """Where a sample's table has mean (0), rstd, gamma, -c1 or -c2 (4) of a column: 16 of each together."""
    return table + (column >> 4) * 320 + which * 64 + (column & 15) * 4


@inline
def _spread(n: Any, mean: Any, rstd: Any, gamma: Any, table: Any, groups: Any, width_g: Any, together: Any) -> Any:
    """mean, rstd and gamma of each column into a sample's table."""
    column = 0
    for _ in range(together):
        for group in range(groups):
            m, r = load_one(mean + (n * groups + group) * 4), load_one(rstd + (n * groups + group) * 4)
            for c in range(group * width_g, group * width_g + width_g):
                place = _coefficient(table, column, 0)
                store_one(place, m)
                store_one(place + 64, r)
                store_one(place + 128, load_one(gamma + c * 4))
                column += 1


@inline
def _gather(
    T: Any, dy: Any, dy_h: Any, x: Any, x_h: Any, partials: Any, sums: Any, totals: Any, table: Any, mean: Any,
    rstd: Any, gamma: Any, groups: Any, width_g: Any, hw: Any, chunks: Any, together: Any, pad: Any, wants_dx: Any,
) -> Any:  # fmt: skip
    """From the chunks' sums of a sample to its channels', and to -c1 and -c2 in its table; addresses are its own."""
    channels = groups * width_g
    cols = channels * together
    apart = (cols + 15) // 16 * 128
    total_columns(partials, apart, chunks, cols, totals, apart)
    for c in range(0, channels, 16):
        store_wide(sums + c * 8, total_wide(totals + c * 8, channels * 8, together))
        store_wide(sums + pad + c * 8, total_wide(totals + apart + c * 8, channels * 8, together))
    if wants_dx:
        size = np.float64(width_g) * np.float64(hw)
        for group in range(groups):
            first = group * width_g
            m, r = load_one(mean + group * 4), load_one(rstd + group * 4)
            c1, c2 = total_group(
                T, dy + first * width(T), width(T), dy_h, x + first * width(T), width(T), x_h, hw, 1, m, r,
                gamma + first * 4, sums + first * 8, pad, width_g,
            )  # fmt: skip
            minus_c1, minus_c2 = np.float32(-c1 / size), np.float32(-c2 / size)
            for i in range(together):
                for c in range(i * channels + first, i * channels + first + width_g):
                    store_one(_coefficient(table, c, 3), minus_c1)
                    store_one(_coefficient(table, c, 4), minus_c2)


@inline
def _coefficients(table: Any) -> Any:
    """mean, rstd, gamma, -c1 and -c2 of 16 columns."""
    one = np.float32(0)
    mean, rstd, gamma = load(one, table), load(one, table + 64), load(one, table + 128)
    return mean, rstd, gamma, load(one, table + 192), load(one, table + 256)


@inline
def _pixels_dx(
    T: Any, streamed: Any, dy: Any, dy_h: Any, x: Any, x_h: Any, dx: Any, dx_h: Any, rows: Any, cols: Any, last: Any,
    table: Any, ahead: Any, stage: Any,
) -> Any:  # fmt: skip
    """dx of some rows, the last of which ends after `last` columns."""
    size, staged = width(T), 0
    if streamed and dx % 64 == 0 and dx_h % 64 == 0:
        _aligned_dx(T, dy, dy_h, x, x_h, dx, dx_h, rows, cols, last, table)
        return
    for row in range(rows):
        d, p, place = dy + row * dy_h, x + row * x_h, dx + row * dx_h
        n = last if row + 1 == rows else cols
        for first in range(0, n, BLOCK):
            c, end, t = first, min(n, first + BLOCK), table + first * 20
            target = stage + staged - first * size if streamed else place
            while c + 16 <= end:
                at = c * size
                if ahead > 0:
                    prefetch(d + at + ahead)
                    prefetch(p + at + ahead)
                put_dx(T, d + at, p + at, target + at, 16, _coefficients(t))
                c, t = c + 16, t + 320
            if c < end:
                put_dx(T, d + c * size, p + c * size, target + c * size, end - c, _coefficients(t))
            if streamed:
                staged += (end - first) * size
                if staged + BLOCK * size > STAGE or (row + 1 == rows and end == n):
                    flush(stage, place + end * size - staged, staged)
                    staged = 0


@inline
def _aligned_dx(
    T: Any, dy: Any, dy_h: Any, x: Any, x_h: Any, dx: Any, dx_h: Any, rows: Any, cols: Any, last: Any, table: Any
) -> Any:
    """The same where all rows begin with a cache line: past the caches without a stage (1.2 instead of 2.2 ms for
    2 x 320 x 4096 in float32 on one thread)."""
    size, step = width(T), 16 * width(T)
    for row in range(rows):
        n = (last if row + 1 == rows else cols) * size
        d, p, target, t = base(dy + row * dy_h), base(x + row * x_h), base(dx + row * dx_h), base(table)
        whole = n // step * step
        for at in range(0, whole, step):
            stream(T, target + at, dx_of(T, d + at, p + at, 16, _coefficients(t + at // size * 20)))
        if whole < n:
            put_dx(T, d + whole, p + whole, target + whole, (n - whole) // size, _coefficients(t + whole // size * 20))


@kernel
def pixels(T: Any, wants_dx: Any, step: Any) -> Any:
    """step 0: some samples a task, all of each. Else a sweep of split ones: 1 spreads (a sample a task), 2 sums (some
    chunks of a sample), 3 gathers (a sample), 4 makes dx (some chunks)."""
    by_chunk = step in (2, 4)
    spreads, sums_up, gathers, makes_dx = (step in (0, own) for own in (1, 2, 3, 4))

    def run(args: Any, task: Any) -> Any:
        (
            dy, dy_n, dy_h, x, x_n, x_h, dx, dx_n, dx_h, streamed, mean, rstd, gamma, partials, sums, pad, totals,
            tables, samples, groups, width_g, hw, chunks, together, per, ahead,
        ) = words(args, 26)  # fmt: skip
        stage = scratch(STAGE)
        cols, rows = groups * width_g * together, (hw + together - 1) // together
        ragged = (hw - (rows - 1) * together) * groups * width_g
        vectors = (cols + 15) // 16
        tasks = (chunks + per - 1) // per
        start, stop = task * per, min(samples, task * per + per)
        if by_chunk:
            start, stop = task // tasks, task // tasks + 1
        for n in range(start, stop):
            d, p, table = dy + n * dy_n, x + n * x_n, tables + n * vectors * 320
            mine, place = partials + n * chunks * vectors * 128, sums + n * 2 * pad
            first, last = (task % tasks * per, min(chunks, task % tasks * per + per)) if by_chunk else (0, chunks)
            if spreads:
                _spread(n, mean, rstd, gamma, table, groups, width_g, together)
            if sums_up:
                for chunk in range(first, last):
                    row = chunk * PIXEL_ROWS
                    count = min(PIXEL_ROWS, rows - row)
                    sum_columns(
                        T, d + row * dy_h, dy_h, p + row * x_h, x_h, count, cols,
                        ragged if row + count == rows else cols, table, 320, True, mine + chunk * vectors * 128,
                    )  # fmt: skip
            if gathers:
                _gather(
                    T, d, dy_h // together, p, x_h // together, mine, place, totals + n * (vectors * 256 + 128), table,
                    mean + n * groups * 4, rstd + n * groups * 4, gamma, groups, width_g, hw, chunks, together, pad,
                    wants_dx,
                )  # fmt: skip
            if makes_dx and wants_dx:
                for done in range(0, last - first, DX_CHUNKS):
                    end = last - done
                    row = max(first, end - DX_CHUNKS) * PIXEL_ROWS
                    count = min(rows, end * PIXEL_ROWS) - row
                    _pixels_dx(
                        T, streamed, d + row * dy_h, dy_h, p + row * x_h, x_h, dx + n * dx_n + row * dx_h, dx_h, count,
                        cols, ragged if row + count == rows else cols, table, ahead, stage,
                    )  # fmt: skip

    return run
