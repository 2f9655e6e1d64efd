"""LayerNorm backward on the CPU, rows of up to SHORT columns: a row stays in registers from its sums to its dx, and so
do the weight and the sums of the columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .._formats import _feature
from .._lanes import add, fma, keep, mul, settle, splat, sub, sum_lanes
from .._native import inline, kernel
from .._rows import begin_run, end_run, extend_run, factors
from .._simd import load_one, load_part, prefetch, store, width, words
from .._sums import add_columns, begin_chunks
from .._views import PAGE

#: Four vectors. Without AVX-512 there are too few registers: no rows are short then.
SHORT = 64 if _feature("avx512f") else 0


@inline
def _vector(
    T: Any, U: Any, gives: Any, dy: Any, x: Any, count: Any, f: Any, mean: Any, rstd: Any, held: Any, dx: Any, a: Any,
    b: Any,
) -> Any:  # fmt: skip
    """Up to 16 columns. Of the row that is held, if it `gives` anything: dx onto a run, and dy * x_hat and dy onto the
    column sums. Of the following row: read and held, and its wdy and wdy * x_hat onto its sums a and b."""
    w, d, x_hat, dw, db = held
    if gives:
        _, r, minus_c1, minus_c2 = f
        dx = extend_run(U, dx, mul(r, fma(x_hat, minus_c2, fma(d, w, minus_c1))), count)
        dw, db = fma(d, x_hat, dw), add(db, d)
    d, x_hat = settle(load_part(T, dy, count)), settle(keep(mul(sub(load_part(T, x, count), mean), rstd), count))
    wdy = mul(d, w)
    return (w, d, x_hat, dw, db), dx, add(a, wdy), fma(wdy, x_hat, b)


@inline
def _row(
    T: Any, U: Any, gives: Any, vectors: Any, ragged: Any, cols: Any, dy: Any, x: Any, f: Any, m: Any, r: Any,
    held: Any, dx: Any,
) -> Any:  # fmt: skip
    """What is done with each vector of a row; and the sums of the following row, in the order of `sweep`."""
    v0, v1, v2, v3 = held
    step, zero, mean, rstd = 16 * width(T), splat(np.float32(0)), splat(m), splat(r)
    a0, a1, b0, b1 = zero, zero, zero, zero
    n = cols if ragged and vectors == 1 else 16
    v0, dx, a0, b0 = _vector(T, U, gives, dy, x, n, f, mean, rstd, v0, dx, a0, b0)
    if vectors > 1:
        d, p = dy + step, x + step
        if ragged and vectors == 2:
            v1, dx, a0, b0 = _vector(T, U, gives, d, p, cols - 16, f, mean, rstd, v1, dx, a0, b0)
        else:
            v1, dx, a1, b1 = _vector(T, U, gives, d, p, 16, f, mean, rstd, v1, dx, a1, b1)
    if vectors > 2:
        d, p, n = dy + 2 * step, x + 2 * step, cols - 32 if ragged and vectors == 3 else 16
        v2, dx, a0, b0 = _vector(T, U, gives, d, p, n, f, mean, rstd, v2, dx, a0, b0)
    if vectors > 3:
        d, p = dy + 3 * step, x + 3 * step
        if ragged:
            v3, dx, a0, b0 = _vector(T, U, gives, d, p, cols - 48, f, mean, rstd, v3, dx, a0, b0)
        else:
            v3, dx, a1, b1 = _vector(T, U, gives, d, p, 16, f, mean, rstd, v3, dx, a1, b1)
    s, q = sum_lanes(add(zero, add(a0, a1))), sum_lanes(add(zero, add(b0, b1)))
    return np.float64(s), np.float64(q), (v0, v1, v2, v3), dx


@inline
def _hold(w: Any, i: Any, cols: Any) -> Any:
    """What is held of 16 columns before the first row: the weight, and zeros."""
    zero = splat(np.float32(0))
    return load_part(np.float32(0), w + i * 64, min(16, max(0, cols - 16 * i))), zero, zero, zero, zero


@inline
def _put_sums(held: Any, place: Any) -> Any:
    """The column sums of 16 columns to memory; they begin anew."""
    w, d, x_hat, dw, db = held
    zero = splat(np.float32(0))
    store(np.float32(0), place, dw)
    store(np.float32(0), place + 64, db)
    return w, d, x_hat, zero, zero


@kernel
def short_rows(T: Any, U: Any, vectors: Any, ragged: Any) -> Any:
    """Some chunks of rows a task: dx, and the column sums, as `_whole_rows` makes them, bit for bit. `ragged`: the last
    vector is not full.

    Memory is read once and in order, and Zen's prefetchers need no more than to be told of the next page: 131072x64 in
    float32 takes 1.45 ms so, with every line asked for ahead 1.68, and 1.82 as a whole row.
    """

    def run(args: Any, task: Any) -> Any:
        (
            dy, dy_step, x, x_step, mean, rstd, w, dx, dx_step, streamed, partials, partial_step, rows, cols,
            chunk_rows, chunks, columns,
        ) = words(args, 17)  # fmt: skip
        share, apart = 1.0 / cols, vectors * 128
        start, end = task * chunks * chunk_rows, min(rows, (task + 1) * chunks * chunk_rows)
        totals = partials + task * partial_step
        sums = totals
        if columns:
            sums = begin_chunks(totals, apart, chunks)
        d, p, left = dy + start * dy_step, x + start * x_step, chunk_rows
        m, r = load_one(mean + start * 4), load_one(rstd + start * 4)
        held = _hold(w, 0, cols), _hold(w, 1, cols), _hold(w, 2, cols), _hold(w, 3, cols)
        f, results = factors(m, r, 0.0, 0.0, share), begin_run(U, dx + start * dx_step, streamed)
        s, q, held, results = _row(T, U, False, vectors, ragged, cols, d, p, f, m, r, held, results)
        f = factors(m, r, s, q, share)
        for row in range(start, end):
            if row + 1 < end:  # after the last row it is read once more, for nothing
                d, p = d + dy_step, p + x_step
                m, r = load_one(mean + row * 4 + 4), load_one(rstd + row * 4 + 4)
            if d % PAGE < dy_step:
                prefetch(d + PAGE)
                prefetch(p + PAGE)
            s, q, held, results = _row(T, U, True, vectors, ragged, cols, d, p, f, m, r, held, results)
            f = factors(m, r, s, q, share)
            if row + 1 == end or dx_step != cols * width(U) or not streamed:
                end_run(U, results)
                results = begin_run(U, dx + (row + 1) * dx_step, streamed)
            left -= 1
            if columns and (left == 0 or row + 1 == end):
                v0, v1, v2, v3 = held
                v0 = _put_sums(v0, sums)
                if vectors > 1:
                    v1 = _put_sums(v1, sums + 128)
                if vectors > 2:
                    v2 = _put_sums(v2, sums + 256)
                if vectors > 3:
                    v3 = _put_sums(v3, sums + 384)
                held, left = (v0, v1, v2, v3), chunk_rows
                if chunks > 1:
                    add_columns(sums, cols, totals, apart)

    return run
