"""LayerNorm backward on the CPU.

Rows that fit the cache go through it once: a chunk of rows is a task; a row is read for its sums and for the column
sums of the chunk, then again, from the cache, for dx. Longer rows are split: a task is a span of columns of a chunk for
the sums, and a second sweep makes dx. Rows are read one after the other: four at a time save work on the column sums,
but are no streams a prefetcher follows, and cost a third of the memory's speed below 4 KiB a row.
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
from .._sums import BLOCK, SPAN, inline, kernel, reduce_partials
from .tiling import Tiling, padded


@inline
def _sums(T: Any, dy: Any, x: Any, m: Any, r: Any, w: Any, dw: Any, db: Any, n: Any) -> Any:
    """Sums of wdy and wdy * x_hat over up to SPAN columns of a row; adds to dw and db unless dw is None."""
    one, size = np.float32(0), width(T)
    mean, rstd = splat(m), splat(r)
    s1, s2 = 0.0, 0.0
    for start in range(0, n, BLOCK):
        a, b = splat(one), splat(one)
        c, end = start, min(n, start + BLOCK)
        while c < end:
            left, at = end - c, c * size
            if left >= 16:
                wv, d, x_hat = load(one, w + c * 4), load(T, dy + at), mul(sub(load(T, x + at), mean), rstd)
            else:
                wv, d = load_part(one, w + c * 4, left), load_part(T, dy + at, left)
                x_hat = keep(mul(sub(load_part(T, x + at, left), mean), rstd), left)
            p = mul(d, x_hat)
            if dw is not None:
                store(one, dw + c * 4, add(load(one, dw + c * 4), p))
                store(one, db + c * 4, add(load(one, db + c * 4), d))
            a, b = fma(d, wv, a), fma(p, wv, b)
            c += 16
        s1 += np.float64(sum_lanes(a))
        s2 += np.float64(sum_lanes(b))
    return s1, s2


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
        if partials is not None:
            _clear(partials + task * pad * 8, 2 * pad)
        for row in range(task * chunk_rows, min(rows, task * chunk_rows + chunk_rows)):
            d, p, m, r = dy + row * dy_step, x + row * x_step, load_one(mean + row * 4), load_one(rstd + row * 4)
            s1, s2 = 0.0, 0.0
            for c in range(0, cols, SPAN):
                if partials is None:
                    dw, db = None, None
                else:
                    dw = partials + task * pad * 8 + c * 4
                    db = dw + pad * 4
                a, b = _sums(T, d + c * size, p + c * size, m, r, w + c * 4, dw, db, min(SPAN, cols - c))
                s1 += a
                s2 += b
            if dx is not None:
                c1, c2 = np.float32(s1 / cols), np.float32(s2 / cols)
                _finish(T, U, d, p, w, dx + row * dx_step, cols, m, r, c1, c2, streamed)


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
        start = span * SPAN
        n = min(SPAN, cols - start)
        if partials is None:
            dw, db = None, None
        else:
            dw = partials + chunk * pad * 8 + start * 4
            db = dw + pad * 4
            _clear(dw, (n + 15) // 16 * 16)
            _clear(db, (n + 15) // 16 * 16)
        for row in range(chunk * chunk_rows, min(rows, chunk * chunk_rows + chunk_rows)):
            s1, s2 = _sums(
                T, dy + row * dy_step + start * size, x + row * x_step + start * size, load_one(mean + row * 4),
                load_one(rstd + row * 4), w + start * 4, dw, db, n,
            )  # fmt: skip
            if row_sums is not None:
                store_double(row_sums + (row * spans + span) * 16, s1)
                store_double(row_sums + (row * spans + span) * 16 + 8, s2)


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
            _whole_rows, tiling.chunks, rows * cols, T, U, *inputs, dx, dx_step, partials, rows, cols,
            tiling.chunk_rows, tiling.streamed,
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
