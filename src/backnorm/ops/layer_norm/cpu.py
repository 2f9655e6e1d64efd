"""LayerNorm backward on the CPU.

Rows that fit the cache go through it once: a chunk of rows is a task; four rows are read together for their sums and
for the column sums of the chunk, then again, from the cache, for dx. Longer rows are split: a task is a span of columns
of a chunk for the sums, and a second sweep makes dx.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...threads import launch as on_threads
from .._memory import address, as_float32, part, tag
from .._simd import (
    add,
    fma,
    keep,
    load,
    load_double,
    load_one,
    load_part,
    mul,
    prefetch,
    splat,
    store,
    store_double,
    store_part,
    stream,
    sub,
    sum_lanes,
    take_task,
    width,
)
from .._sums import BLOCK, SPAN, inline, kernel, reduce_partials
from .tiling import Tiling, padded


@inline
def _rows4(
    T: Any, dy: Any, dy_step: Any, x: Any, x_step: Any, mean: Any, rstd: Any, w: Any, dw: Any, db: Any, n: Any
) -> Any:
    """Row sums of wdy and wdy * x_hat of four rows over up to BLOCK columns; adds to dw and db unless dw is None."""
    one, size = np.float32(0), width(T)
    zero = splat(one)
    a0, a1, a2, a3, b0, b1, b2, b3 = zero, zero, zero, zero, zero, zero, zero, zero
    m0, m1, m2, m3 = (
        splat(load_one(mean)),
        splat(load_one(mean + 4)),
        splat(load_one(mean + 8)),
        splat(load_one(mean + 12)),
    )
    r0, r1, r2, r3 = (
        splat(load_one(rstd)),
        splat(load_one(rstd + 4)),
        splat(load_one(rstd + 8)),
        splat(load_one(rstd + 12)),
    )
    c = 0
    while c < n:
        left, at = n - c, c * size
        if left >= 16:
            wv = load(one, w + c * 4)
            # Short rows are no stream a prefetcher follows: ask for the next four while these are summed.
            for k in range(4, 8):
                prefetch(dy + k * dy_step + at)
                prefetch(x + k * x_step + at)
            d0, x0 = load(T, dy + at), mul(sub(load(T, x + at), m0), r0)
            d1, x1 = load(T, dy + dy_step + at), mul(sub(load(T, x + x_step + at), m1), r1)
            d2, x2 = load(T, dy + 2 * dy_step + at), mul(sub(load(T, x + 2 * x_step + at), m2), r2)
            d3, x3 = load(T, dy + 3 * dy_step + at), mul(sub(load(T, x + 3 * x_step + at), m3), r3)
        else:
            wv = load_part(one, w + c * 4, left)
            d0, x0 = load_part(T, dy + at, left), keep(mul(sub(load_part(T, x + at, left), m0), r0), left)
            d1, x1 = (
                load_part(T, dy + dy_step + at, left),
                keep(mul(sub(load_part(T, x + x_step + at, left), m1), r1), left),
            )
            d2, x2 = (
                load_part(T, dy + 2 * dy_step + at, left),
                keep(mul(sub(load_part(T, x + 2 * x_step + at, left), m2), r2), left),
            )
            d3, x3 = (
                load_part(T, dy + 3 * dy_step + at, left),
                keep(mul(sub(load_part(T, x + 3 * x_step + at, left), m3), r3), left),
            )
        p0, p1, p2, p3 = mul(d0, x0), mul(d1, x1), mul(d2, x2), mul(d3, x3)
        if dw is not None:
            store(one, dw + c * 4, add(load(one, dw + c * 4), add(add(p0, p1), add(p2, p3))))
            store(one, db + c * 4, add(load(one, db + c * 4), add(add(d0, d1), add(d2, d3))))
        a0, a1, a2, a3 = fma(d0, wv, a0), fma(d1, wv, a1), fma(d2, wv, a2), fma(d3, wv, a3)
        b0, b1, b2, b3 = fma(p0, wv, b0), fma(p1, wv, b1), fma(p2, wv, b2), fma(p3, wv, b3)
        c += 16
    return (
        np.float64(sum_lanes(a0)), np.float64(sum_lanes(a1)), np.float64(sum_lanes(a2)), np.float64(sum_lanes(a3)),
        np.float64(sum_lanes(b0)), np.float64(sum_lanes(b1)), np.float64(sum_lanes(b2)), np.float64(sum_lanes(b3)),
    )  # fmt: skip


@inline
def _rows1(T: Any, dy: Any, x: Any, mean: Any, rstd: Any, w: Any, dw: Any, db: Any, n: Any) -> Any:
    """The same for one row."""
    one, size = np.float32(0), width(T)
    a, b = splat(one), splat(one)
    m, r = splat(load_one(mean)), splat(load_one(rstd))
    c = 0
    while c < n:
        left, at = n - c, c * size
        if left >= 16:
            wv, d, x_hat = load(one, w + c * 4), load(T, dy + at), mul(sub(load(T, x + at), m), r)
        else:
            wv, d = load_part(one, w + c * 4, left), load_part(T, dy + at, left)
            x_hat = keep(mul(sub(load_part(T, x + at, left), m), r), left)
        p = mul(d, x_hat)
        if dw is not None:
            store(one, dw + c * 4, add(load(one, dw + c * 4), p))
            store(one, db + c * 4, add(load(one, db + c * 4), d))
        a, b = fma(d, wv, a), fma(p, wv, b)
        c += 16
    return np.float64(sum_lanes(a)), np.float64(sum_lanes(b))


@inline
def _finish(
    T: Any, U: Any, dy: Any, x: Any, w: Any, dx: Any, n: Any, m: Any, r: Any, c1: Any, c2: Any, streamed: Any
) -> Any:
    """dx = rstd * (wdy - c1 - x_hat * c2) for one row; a short first vector makes the streamed ones aligned."""
    one, size = np.float32(0), width(T)
    mean, rstd, minus_c1, minus_c2 = splat(m), splat(r), splat(-c1), splat(-c2)
    c = 0
    lead = (-dx % (16 * width(U))) // width(U) if streamed else 0
    while c < n:
        left, at = n - c, c * size
        count = min(left, lead) if lead else min(left, 16)
        lead = 0
        if count == 16:
            x_hat = mul(sub(load(T, x + at), mean), rstd)
            value = mul(rstd, fma(x_hat, minus_c2, fma(load(T, dy + at), load(one, w + c * 4), minus_c1)))
            if streamed:
                stream(U, dx + c * width(U), value)
            else:
                store(U, dx + c * width(U), value)
        else:
            x_hat = mul(sub(load_part(T, x + at, count), mean), rstd)
            wdy = fma(load_part(T, dy + at, count), load_part(one, w + c * 4, count), minus_c1)
            store_part(U, dx + c * width(U), mul(rstd, fma(x_hat, minus_c2, wdy)), count)
        c += count


@inline
def _clear(sums: Any, n: Any) -> Any:
    for c in range(0, n * 4, 64):
        store(np.float32(0), sums + c, splat(np.float32(0)))


@kernel
def _whole_rows(
    next_task: Any, tasks: Any, T: Any, U: Any, dy: Any, dy_step: Any, x: Any, x_step: Any, mean: Any, rstd: Any,
    w: Any, dx: Any, dx_step: Any, partials: Any, rows: Any, cols: Any, chunk_rows: Any, streamed: Any,
) -> Any:  # fmt: skip
    """A chunk of rows a task: column sums into its partials, and dx; None is not wanted. Steps count bytes."""
    pad = (cols + 15) // 16 * 16
    size = width(T)
    while True:
        task = take_task(next_task)
        if task >= tasks:
            return
        row, last = task * chunk_rows, min(rows, task * chunk_rows + chunk_rows)
        if partials is not None:
            _clear(partials + task * pad * 8, 2 * pad)
        while row < last:
            d0, x0, m0, r0 = dy + row * dy_step, x + row * x_step, mean + row * 4, rstd + row * 4
            count = 4 if row + 4 <= last else 1
            s0, s1, s2, s3, q0, q1, q2, q3 = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
            for span in range(0, cols, SPAN):
                end = min(cols, span + SPAN)
                t0, t1, t2, t3, u0, u1, u2, u3 = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
                for c in range(span, end, BLOCK):
                    n, at = min(BLOCK, end - c), c * size
                    if partials is None:
                        dw, db = None, None
                    else:
                        dw = partials + task * pad * 8 + c * 4
                        db = dw + pad * 4
                    if count == 4:
                        e0, e1, e2, e3, f0, f1, f2, f3 = _rows4(
                            T, d0 + at, dy_step, x0 + at, x_step, m0, r0, w + c * 4, dw, db, n
                        )
                        t0, t1, t2, t3 = t0 + e0, t1 + e1, t2 + e2, t3 + e3
                        u0, u1, u2, u3 = u0 + f0, u1 + f1, u2 + f2, u3 + f3
                    else:
                        e0, f0 = _rows1(T, d0 + at, x0 + at, m0, r0, w + c * 4, dw, db, n)
                        t0, u0 = t0 + e0, u0 + f0
                s0, s1, s2, s3 = s0 + t0, s1 + t1, s2 + t2, s3 + t3
                q0, q1, q2, q3 = q0 + u0, q1 + u1, q2 + u2, q3 + u3
            if dx is not None:
                for k in range(count):
                    s = s0 if k == 0 else s1 if k == 1 else s2 if k == 2 else s3
                    q = q0 if k == 0 else q1 if k == 1 else q2 if k == 2 else q3
                    _finish(
                        T, U, d0 + k * dy_step, x0 + k * x_step, w, dx + (row + k) * dx_step, cols,
                        load_one(m0 + k * 4), load_one(r0 + k * 4), np.float32(s / cols), np.float32(q / cols),
                        streamed,
                    )  # fmt: skip
            row += count


@kernel
def _split_sums(
    next_task: Any, tasks: Any, T: Any, dy: Any, dy_step: Any, x: Any, x_step: Any, mean: Any, rstd: Any, w: Any,
    partials: Any, row_sums: Any, rows: Any, cols: Any, chunk_rows: Any, spans: Any,
) -> Any:  # fmt: skip
    """A span of columns of a chunk of rows a task: column sums into partials, row sums into row_sums[row][span]."""
    pad = (cols + 15) // 16 * 16
    size = width(T)
    while True:
        task = take_task(next_task)
        if task >= tasks:
            return
        chunk, span = task // spans, task % spans
        start, end = span * SPAN, min(cols, span * SPAN + SPAN)
        row, last = chunk * chunk_rows, min(rows, chunk * chunk_rows + chunk_rows)
        if partials is not None:
            length = (end - start + 15) // 16 * 16
            _clear(partials + chunk * pad * 8 + start * 4, length)
            _clear(partials + chunk * pad * 8 + pad * 4 + start * 4, length)
        while row < last:
            d0, x0, m0, r0 = dy + row * dy_step, x + row * x_step, mean + row * 4, rstd + row * 4
            count = 4 if row + 4 <= last else 1
            t0, t1, t2, t3, u0, u1, u2, u3 = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
            for c in range(start, end, BLOCK):
                n, at = min(BLOCK, end - c), c * size
                if partials is None:
                    dw, db = None, None
                else:
                    dw = partials + chunk * pad * 8 + c * 4
                    db = dw + pad * 4
                if count == 4:
                    e0, e1, e2, e3, f0, f1, f2, f3 = _rows4(
                        T, d0 + at, dy_step, x0 + at, x_step, m0, r0, w + c * 4, dw, db, n
                    )
                    t0, t1, t2, t3 = t0 + e0, t1 + e1, t2 + e2, t3 + e3
                    u0, u1, u2, u3 = u0 + f0, u1 + f1, u2 + f2, u3 + f3
                else:
                    e0, f0 = _rows1(T, d0 + at, x0 + at, m0, r0, w + c * 4, dw, db, n)
                    t0, u0 = t0 + e0, u0 + f0
            if row_sums is not None:
                for k in range(count):
                    place = row_sums + ((row + k) * spans + span) * 16
                    store_double(place, t0 if k == 0 else t1 if k == 1 else t2 if k == 2 else t3)
                    store_double(place + 8, u0 if k == 0 else u1 if k == 1 else u2 if k == 2 else u3)
            row += count


@kernel
def _split_dx(
    next_task: Any, tasks: Any, T: Any, U: Any, dy: Any, dy_step: Any, x: Any, x_step: Any, mean: Any, rstd: Any,
    w: Any, dx: Any, dx_step: Any, row_sums: Any, cols: Any, spans: Any, streamed: Any,
) -> Any:  # fmt: skip
    """Eight spans of a row a task."""
    per_row = (spans + 7) // 8
    while True:
        task = take_task(next_task)
        if task >= tasks:
            return
        row, start = task // per_row, task % per_row * 8 * SPAN
        s, q = 0.0, 0.0
        for span in range(spans):
            s += load_double(row_sums + (row * spans + span) * 16)
            q += load_double(row_sums + (row * spans + span) * 16 + 8)
        _finish(
            T, U, dy + row * dy_step + start * width(T), x + row * x_step + start * width(T), w + start * 4,
            dx + row * dx_step + start * width(U), min(cols - start, 8 * SPAN),
            load_one(mean + row * 4), load_one(rstd + row * 4), np.float32(s / cols), np.float32(q / cols), streamed,
        )  # fmt: skip


def launch(tiling: Tiling, tensors: Mapping[str, Any], workspace: Any) -> None:
    rows, cols = tiling.rows, tiling.cols
    base = address(workspace)
    views = dict(tensors)
    for name, place in tiling.packed.items():
        views[name] = part(workspace, place, tensors[name].shape, tensors[name].dtype)
        if name != "gradInputOut":
            views[name][...] = tensors[name]
    dy, x = views["gradOut"], views["input"]
    T, size = tag(x), x.itemsize
    mean = as_float32(tensors, "mean", tiling.converted, rows, workspace)
    rstd = as_float32(tensors, "rstd", tiling.converted, rows, workspace)
    w = as_float32(tensors, "weightOptional", tiling.converted, cols, workspace)
    inputs = (address(dy), tiling.steps[0] * size, address(x), tiling.steps[1] * size, mean, rstd, w)
    columns = [name for name in ("gradWeightOut", "gradBiasOut") if name in tensors]
    partials = base + tiling.partials if columns else None
    dx, dx_step, U = None, 0, T
    if "gradInputOut" in tensors:
        out = views["gradInputOut"]
        dx, dx_step, U = address(out), tiling.steps[2] * out.itemsize, tag(out)

    if not tiling.split:
        on_threads(
            _whole_rows, tiling.chunks, rows * cols, T, U, *inputs, dx, dx_step, partials, rows, cols, tiling.chunk_rows,
            tiling.streamed,
        )  # fmt: skip
    else:
        row_sums = base + tiling.row_sums if dx is not None else None
        on_threads(
            _split_sums, tiling.chunks * tiling.spans, rows * cols, T, *inputs, partials, row_sums, rows, cols,
            tiling.chunk_rows, tiling.spans,
        )  # fmt: skip
        if dx is not None:
            on_threads(
                _split_dx, rows * -(-tiling.spans // 8), rows * cols, T, U, *inputs, dx, dx_step, row_sums, cols,
                tiling.spans, tiling.streamed,
            )  # fmt: skip
    for name in columns:
        out = tensors[name]
        if name in tiling.scattered:
            out = part(workspace, tiling.scattered[name], out.shape, out.dtype)
        start = base + tiling.partials + (0 if name == "gradWeightOut" else padded(cols) * 4)
        on_threads(
            reduce_partials,
            -(-cols // 64),
            tiling.chunks * cols,
            tag(out),
            start,
            padded(cols) * 8,
            tiling.chunks,
            cols,
            address(out),
        )
        if name in tiling.scattered:
            tensors[name][...] = out
    if "gradInputOut" in tiling.packed:
        tensors["gradInputOut"][...] = views["gradInputOut"]
