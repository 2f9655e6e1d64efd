"""The sums more than one CPU kernel is made of, in an order that depends on sizes alone.

float32 within BLOCK elements of a run or CHUNK_ROWS rows of a column, float64 beyond.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from ._simd import (
    add,
    add_wide,
    fma,
    keep,
    load,
    load_double,
    load_one,
    load_part,
    mul,
    narrow,
    splat,
    store,
    store_double,
    store_part,
    store_wide,
    sub,
    sum_lanes,
    take_task,
    widen,
    width,
    zeros_wide,
)
from ._views import BLOCK, SPAN

_SOURCES = hashlib.sha256(
    b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py")))
).hexdigest()


def kernel(function: Any) -> Any:
    """Compile without the interpreter's lock, and keep the code on disk.

    Numba takes code from its cache while the function's own file is unchanged; ours are made of pieces of other files,
    so the hash of all of them takes the place of that stamp. The CPU's name and features are in Numba's key already.
    """
    try:
        compiled: Any = njit(nogil=True, cache=True)(function)
        compiled._cache._cache_file._source_stamp = _SOURCES
    except (RuntimeError, AttributeError):  # nowhere to keep it; compiled anew in every process
        return njit(nogil=True)(function)
    return compiled


inline: Any = njit(nogil=True)  # a piece of kernels; LLVM decides whether to inline it


@inline
def _terms(T: Any, dy: Any, x: Any, mean: Any, rstd: Any, g: Any) -> Any:
    """wdy and x_hat of 16 elements; g None stands for 1."""
    wdy = load(T, dy)
    if g is not None:
        wdy = mul(wdy, splat(g))
    return wdy, mul(sub(load(T, x), mean), rstd)


@inline
def sum_block(T: Any, dy: Any, x: Any, n: Any, m: Any, r: Any, g: Any) -> Any:
    """Sums of wdy = dy * g and wdy * x_hat over up to BLOCK elements.

    Four vectors of sums take turns: each sees 16 additions, a quarter of the digits lost and none of the waiting.
    """
    zero = splat(np.float32(0))
    a0, a1, a2, a3, b0, b1, b2, b3 = zero, zero, zero, zero, zero, zero, zero, zero
    mean, rstd = splat(m), splat(r)
    size = width(T)
    step, end = 16 * size, n * size
    at = 0
    while at + 4 * step <= end:
        wdy, x_hat = _terms(T, dy + at, x + at, mean, rstd, g)
        a0, b0 = add(a0, wdy), fma(wdy, x_hat, b0)
        wdy, x_hat = _terms(T, dy + at + step, x + at + step, mean, rstd, g)
        a1, b1 = add(a1, wdy), fma(wdy, x_hat, b1)
        wdy, x_hat = _terms(T, dy + at + 2 * step, x + at + 2 * step, mean, rstd, g)
        a2, b2 = add(a2, wdy), fma(wdy, x_hat, b2)
        wdy, x_hat = _terms(T, dy + at + 3 * step, x + at + 3 * step, mean, rstd, g)
        a3, b3 = add(a3, wdy), fma(wdy, x_hat, b3)
        at += 4 * step
    while at + step <= end:
        wdy, x_hat = _terms(T, dy + at, x + at, mean, rstd, g)
        a0, b0 = add(a0, wdy), fma(wdy, x_hat, b0)
        at += step
    if at < end:
        left = (end - at) // size
        wdy = load_part(T, dy + at, left)
        if g is not None:
            wdy = keep(mul(wdy, splat(g)), left)
        x_hat = keep(mul(sub(load_part(T, x + at, left), mean), rstd), left)
        a1, b1 = add(a1, wdy), fma(wdy, x_hat, b1)
    s1, s2 = add(add(a0, a1), add(a2, a3)), add(add(b0, b1), add(b2, b3))
    return np.float64(sum_lanes(s1)), np.float64(sum_lanes(s2))


@inline
def sum_span(T: Any, dy: Any, x: Any, n: Any, m: Any, r: Any, g: Any) -> Any:
    """The same over up to SPAN elements."""
    s1, s2 = 0.0, 0.0
    size = width(T)
    for i in range(0, n, BLOCK):
        a, b = sum_block(T, dy + i * size, x + i * size, min(BLOCK, n - i), m, r, g)
        s1 += a
        s2 += b
    return s1, s2


@inline
def sum_run(T: Any, dy: Any, x: Any, n: Any, m: Any, r: Any, g: Any) -> Any:
    """The same over a whole run."""
    s1, s2 = 0.0, 0.0
    size = width(T)
    for i in range(0, n, SPAN):
        a, b = sum_span(T, dy + i * size, x + i * size, min(SPAN, n - i), m, r, g)
        s1 += a
        s2 += b
    return s1, s2


@inline
def sum_columns(
    T: Any, dy: Any, dy_step: Any, x: Any, x_step: Any, rows: Any, cols: Any, m: Any, r: Any, sums: Any
) -> Any:
    """float32 sums of dy and dy * x_hat down up to CHUNK_ROWS rows, into sums and sums + 4 * padded columns.

    m and r hold a mean and an rstd for each column; steps count bytes. Row after row: several at a time are no streams
    a prefetcher follows (20 against 33 GB/s for rows of 1 KiB on two cores of a Zen 4).
    """
    size, one = width(T), np.float32(0)
    padded = (cols + 15) // 16 * 64
    for c in range(0, 2 * padded, 64):
        store(one, sums + c, splat(one))
    for row in range(rows):
        d, p = dy + row * dy_step, x + row * x_step
        c = 0
        while c < cols:
            left, at, k = cols - c, c * size, c * 4
            if left >= 16:
                a = load(T, d + at)
                b = mul(a, mul(sub(load(T, p + at), load(one, m + k)), load(one, r + k)))
            else:
                a = load_part(T, d + at, left)
                x_mu = sub(load_part(T, p + at, left), load_part(one, m + k, left))
                b = keep(mul(a, mul(x_mu, load_part(one, r + k, left))), left)
            store(one, sums + k, add(load(one, sums + k), a))
            store(one, sums + padded + k, add(load(one, sums + padded + k), b))
            c += 16


@inline
def _total64(partials: Any, step: Any, count: Any, vectors: Any) -> Any:
    """float64 sums of up to 64 columns of `count` float32 partials, `step` bytes apart."""
    one = np.float32(0)
    a, b, e, f = zeros_wide(), zeros_wide(), zeros_wide(), zeros_wide()
    at = partials
    for _ in range(count):
        a = add_wide(a, widen(load(one, at)))
        if vectors > 1:
            b = add_wide(b, widen(load(one, at + 64)))
        if vectors > 2:
            e = add_wide(e, widen(load(one, at + 128)))
        if vectors > 3:
            f = add_wide(f, widen(load(one, at + 192)))
        at += step
    return a, b, e, f


@kernel
def reduce_partials(
    next_task: Any, tasks: Any, U: Any, partials: Any, step: Any, count: Any, cols: Any, out: Any
) -> Any:
    """out[c] = the sum of `count` float32 partials, rounded to the output's type; 64 columns a task."""
    while True:
        task = take_task(next_task)
        if task >= tasks:
            return
        c = task * 64
        a, b, e, f = _total64(partials + c * 4, step, count, min(4, (cols - c + 15) // 16))
        _store_some(U, out, c, cols, narrow(a))
        _store_some(U, out, c + 16, cols, narrow(b))
        _store_some(U, out, c + 32, cols, narrow(e))
        _store_some(U, out, c + 48, cols, narrow(f))


@kernel
def reduce_partials_wide(next_task: Any, tasks: Any, partials: Any, step: Any, count: Any, cols: Any, out: Any) -> Any:
    """The same into float64, for sums that are used further; out is padded to whole vectors."""
    while True:
        task = take_task(next_task)
        if task >= tasks:
            return
        c = task * 64
        vectors = min(4, (cols - c + 15) // 16)
        a, b, e, f = _total64(partials + c * 4, step, count, vectors)
        store_wide(out + c * 8, a)
        if vectors > 1:
            store_wide(out + (c + 16) * 8, b)
        if vectors > 2:
            store_wide(out + (c + 32) * 8, e)
        if vectors > 3:
            store_wide(out + (c + 48) * 8, f)


@inline
def _store_some(U: Any, out: Any, c: Any, cols: Any, value: Any) -> Any:
    if c + 16 <= cols:
        store(U, out + c * width(U), value)
    elif c < cols:
        store_part(U, out + c * width(U), value, cols - c)


@inline
def add_partials(partials: Any, step: Any, count: Any, cols: Any, out: Any) -> Any:
    """The same into float64, by the caller's thread: out[c] for sums that are used further."""
    for c in range(cols):
        total = 0.0
        for i in range(count):
            total += np.float64(load_one(partials + i * step + c * 4))
        store_double(out + c * 8, total)


@kernel
def reduce_sums(next_task: Any, tasks: Any, sums: Any, step: Any, count: Any, cols: Any, out: Any) -> Any:
    """out[c] = sum of `count` float64 sums, `step` bytes apart; 256 columns a task."""
    while True:
        task = take_task(next_task)
        if task >= tasks:
            return
        for c in range(task * 256, min(cols, task * 256 + 256)):
            total = 0.0
            for i in range(count):
                total += load_double(sums + i * step + c * 8)
            store_double(out + c * 8, total)
