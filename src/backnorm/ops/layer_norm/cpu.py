"""LayerNorm backward on the CPU.

Rows that fit the cache go through it once: a chunk of rows is a task; a row is read for its sums and for the column
sums of the chunk, then again, from the cache, for dx. Longer rows are split: a task is a span of columns of a chunk for
the sums, and a second sweep makes dx.
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
from .._sums import inline, kernel, reduce_partials
from .._views import BLOCK, SPAN
from .tiling import Tiling, padded


@inline
def _block(T: Any, dy: Any, x: Any, m: Any, r: Any, w: Any, dw: Any, db: Any, n: Any, first: Any) -> Any:
    """Sums of wdy and wdy * x_hat over up to BLOCK columns of a row; adds to dw and db (or begins them) unless None."""
    one, size = np.float32(0), width(T)
    mean, rstd = splat(m), splat(r)
    a, b = splat(one), splat(one)
    c = 0
    while c + 16 <= n:
        d, x_hat = load(T, dy + c * size), mul(sub(load(T, x + c * size), mean), rstd)
        wv, p, k = load(one, w + c * 4), mul(d, x_hat), c * 4
        if dw is not None:
            if first:
                store(one, dw + k, p)
                store(one, db + k, d)
            else:
                store(one, dw + k, add(load(one, dw + k), p))
                store(one, db + k, add(load(one, db + k), d))
        a, b = fma(d, wv, a), fma(p, wv, b)
        c += 16
    if c < n:
        left, k = n - c, c * 4
        d = load_part(T, dy + c * size, left)
        x_hat = keep(mul(sub(load_part(T, x + c * size, left), mean), rstd), left)
        wv, p = load_part(one, w + k, left), mul(d, x_hat)
        if dw is not None:
            if first:
                store_part(one, dw + k, p, left)
                store_part(one, db + k, d, left)
            else:
                store_part(one, dw + k, add(load_part(one, dw + k, left), p), left)
                store_part(one, db + k, add(load_part(one, db + k, left), d), left)
        a, b = fma(d, wv, a), fma(p, wv, b)
    return np.float64(sum_lanes(a)), np.float64(sum_lanes(b))


@inline
def _four_rows(
    T: Any, dy: Any, dy_step: Any, x: Any, x_step: Any, mean: Any, rstd: Any, w: Any, dw: Any, db: Any, n: Any,
    first: Any,
) -> Any:  # fmt: skip
    """The same for four rows together: a quarter of the traffic on the column sums, for rows long enough to be four
    streams (34 against 28 GB/s at 4096 columns; below 2048 it is slower). Each row adds as it would alone."""
    one, size = np.float32(0), width(T)
    zero = splat(one)
    a0, a1, a2, a3, b0, b1, b2, b3 = zero, zero, zero, zero, zero, zero, zero, zero
    m0, m1 = splat(load_one(mean)), splat(load_one(mean + 4))
    m2, m3 = splat(load_one(mean + 8)), splat(load_one(mean + 12))
    r0, r1 = splat(load_one(rstd)), splat(load_one(rstd + 4))
    r2, r3 = splat(load_one(rstd + 8)), splat(load_one(rstd + 12))
    dy1, dy2, dy3 = dy + dy_step, dy + 2 * dy_step, dy + 3 * dy_step
    x1, x2, x3 = x + x_step, x + 2 * x_step, x + 3 * x_step
    for c in range(0, n, 16):
        at, k = c * size, c * 4
        wv = load(one, w + k)
        d0, d1, d2, d3 = load(T, dy + at), load(T, dy1 + at), load(T, dy2 + at), load(T, dy3 + at)
        p0, p1 = mul(d0, mul(sub(load(T, x + at), m0), r0)), mul(d1, mul(sub(load(T, x1 + at), m1), r1))
        p2, p3 = mul(d2, mul(sub(load(T, x2 + at), m2), r2)), mul(d3, mul(sub(load(T, x3 + at), m3), r3))
        if dw is not None:
            p, d = add(add(p0, p1), add(p2, p3)), add(add(d0, d1), add(d2, d3))
            if not first:
                p, d = add(load(one, dw + k), p), add(load(one, db + k), d)
            store(one, dw + k, p)
            store(one, db + k, d)
        a0, a1, a2, a3 = fma(d0, wv, a0), fma(d1, wv, a1), fma(d2, wv, a2), fma(d3, wv, a3)
        b0, b1, b2, b3 = fma(p0, wv, b0), fma(p1, wv, b1), fma(p2, wv, b2), fma(p3, wv, b3)
    return (
        np.float64(sum_lanes(a0)), np.float64(sum_lanes(a1)), np.float64(sum_lanes(a2)), np.float64(sum_lanes(a3)),
        np.float64(sum_lanes(b0)), np.float64(sum_lanes(b1)), np.float64(sum_lanes(b2)), np.float64(sum_lanes(b3)),
    )  # fmt: skip


@inline
def _add_sums(place: Any, begin: Any, a: Any, b: Any) -> Any:
    if begin:
        store_double(place, a)
        store_double(place + 8, b)
    else:
        store_double(place, load_double(place) + a)
        store_double(place + 8, load_double(place + 8) + b)


@inline
def _sums(
    T: Any, dy: Any, dy_step: Any, x: Any, x_step: Any, mean: Any, rstd: Any, w: Any, dw: Any, db: Any, n: Any,
    row: Any, last: Any, first: Any, sums: Any, sums_step: Any,
) -> Any:  # fmt: skip
    """Row sums of the rows from `row` to `last` over up to SPAN columns, into sums; column sums onto dw and db.

    Block by block, so that the column sums of a block stay in the L1 cache for all the rows.
    """
    size = width(T)
    for c in range(0, n, BLOCK):
        length = min(BLOCK, n - c)
        if dw is None:
            dw_c, db_c = None, None
        else:
            dw_c, db_c = dw + c * 4, db + c * 4
        if last - row == 4 and length % 16 == 0:
            a0, a1, a2, a3, b0, b1, b2, b3 = _four_rows(
                T, dy + row * dy_step + c * size, dy_step, x + row * x_step + c * size, x_step, mean + row * 4,
                rstd + row * 4, w + c * 4, dw_c, db_c, length, first,
            )  # fmt: skip
            place = sums + row * sums_step
            _add_sums(place, c == 0, a0, b0)
            _add_sums(place + sums_step, c == 0, a1, b1)
            _add_sums(place + 2 * sums_step, c == 0, a2, b2)
            _add_sums(place + 3 * sums_step, c == 0, a3, b3)
        else:
            for i in range(row, last):
                m, r = load_one(mean + i * 4), load_one(rstd + i * 4)
                a, b = _block(
                    T, dy + i * dy_step + c * size, x + i * x_step + c * size, m, r, w + c * 4, dw_c, db_c, length,
                    first and i == row,
                )  # fmt: skip
                _add_sums(sums + i * sums_step, c == 0, a, b)


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


@kernel
def _whole_rows(
    next_task: Any, tasks: Any, T: Any, U: Any, dy: Any, dy_step: Any, x: Any, x_step: Any, mean: Any, rstd: Any,
    w: Any, dx: Any, dx_step: Any, dw: Any, db: Any, partial_step: Any, sums: Any, rows: Any, cols: Any,
    chunk_rows: Any, group_rows: Any, streamed: Any,
) -> Any:  # fmt: skip
    """A chunk of rows a task: column sums into its partials, and dx; None is not wanted. Steps count bytes."""
    while True:
        task = take_task(next_task)
        if task >= tasks:
            return
        start, end = task * chunk_rows, min(rows, task * chunk_rows + chunk_rows)
        if dw is None:
            my_dw, my_db = None, None
        else:
            my_dw, my_db = dw + task * partial_step, db + task * partial_step
        for row in range(start, end, group_rows):
            last = min(end, row + group_rows)
            _sums(T, dy, dy_step, x, x_step, mean, rstd, w, my_dw, my_db, cols, row, last, row == start, sums, 16)
            if dx is not None:
                for i in range(row, last):
                    c1 = np.float32(load_double(sums + i * 16) / cols)
                    c2 = np.float32(load_double(sums + i * 16 + 8) / cols)
                    m, r = load_one(mean + i * 4), load_one(rstd + i * 4)
                    _finish(T, U, dy + i * dy_step, x + i * x_step, w, dx + i * dx_step, cols, m, r, c1, c2, streamed)


@kernel
def _split_sums(
    next_task: Any, tasks: Any, T: Any, dy: Any, dy_step: Any, x: Any, x_step: Any, mean: Any, rstd: Any, w: Any,
    dw: Any, db: Any, partial_step: Any, sums: Any, rows: Any, cols: Any, chunk_rows: Any, group_rows: Any, spans: Any,
) -> Any:  # fmt: skip
    """A span of columns of a chunk of rows a task: column sums into its partials, row sums into sums[row][span]."""
    size = width(T)
    while True:
        task = take_task(next_task)
        if task >= tasks:
            return
        chunk, c = task // spans, task % spans * SPAN
        start, end = chunk * chunk_rows, min(rows, chunk * chunk_rows + chunk_rows)
        if dw is None:
            my_dw, my_db = None, None
        else:
            my_dw, my_db = dw + chunk * partial_step + c * 4, db + chunk * partial_step + c * 4
        for row in range(start, end, group_rows):
            _sums(
                T, dy + c * size, dy_step, x + c * size, x_step, mean, rstd, w + c * 4, my_dw, my_db,
                min(SPAN, cols - c), row, min(end, row + group_rows), row == start, sums + task % spans * 16,
                spans * 16,
            )  # fmt: skip


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
    partial_step, sums = padded(cols) * 8, base + tiling.row_sums
    dw = base + tiling.partials if columns else None
    db = base + tiling.partials + padded(cols) * 4 if columns else None
    # An output may lie on gradOut or input, which are still read when the column sums are written.
    direct = [name for name in tiling.direct if address(tensors[name]) not in (inputs[0], inputs[2])]
    if "gradWeightOut" in direct:
        dw = address(tensors["gradWeightOut"])
    if "gradBiasOut" in direct:
        db = address(tensors["gradBiasOut"])
    dx, dx_step, U = None, 0, T
    if "gradInputOut" in tensors:
        out = views["gradInputOut"]
        dx, dx_step, U = address(out), tiling.steps[2] * out.itemsize, tag(out)

    if not tiling.split:
        on_threads(
            _whole_rows, tiling.chunks, rows * cols, T, U, *inputs, dx, dx_step, dw, db, partial_step, sums, rows, cols,
            tiling.chunk_rows, tiling.group_rows, tiling.streamed,
        )  # fmt: skip
    else:
        on_threads(
            _split_sums, tiling.chunks * tiling.spans, rows * cols, T, *inputs, dw, db, partial_step, sums, rows, cols,
            tiling.chunk_rows, tiling.group_rows, tiling.spans,
        )  # fmt: skip
        if dx is not None:
            on_threads(
                _split_dx, rows * -(-tiling.spans // 8), rows * cols, T, U, *inputs, dx, dx_step, sums, cols,
                tiling.spans, tiling.streamed,
            )  # fmt: skip
    for name in columns:
        if name in direct:
            continue
        out = tensors[name]
        if name in tiling.scattered:
            out = part(workspace, tiling.scattered[name], out.shape, out.dtype)
        start = dw if name == "gradWeightOut" else db
        on_threads(
            reduce_partials, -(-cols // 64), tiling.chunks * cols, tag(out), start, partial_step, tiling.chunks, cols,
            address(out),
        )  # fmt: skip
        if name in tiling.scattered:
            tensors[name][...] = out
    if "gradInputOut" in tiling.packed:
        tensors["gradInputOut"][...] = views["gradInputOut"]
