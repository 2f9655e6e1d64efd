"""LayerNorm backward on the CPU.

Rows that fit the cache go through it once: some chunks of rows are a task; a row is read for its sums, then again, from
the cache, for dx and for the column sums of its chunk. Longer rows are split: a task is a span of columns of a chunk
for the sums, and a second sweep makes dx. A single split row needs no column sums: the second sweep writes their
outputs too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...datatypes import itemsize
from ...spec import Call
from .._copy import as_float32, pack, unpack
from .._native import inline, kernel
from .._program import WORKSPACE, Place, Program
from .._simd import (
    TAGS,
    add,
    fma,
    keep,
    load,
    load_double,
    load_one,
    load_part,
    mul,
    prefetch,
    scratch,
    splat,
    store,
    store_double,
    store_part,
    sub,
    sum_lanes,
    width,
    words,
)
from .._sums import clear, flush, reduce_partials, reduce_tasks
from .._views import AHEAD, CHUNK_ROWS
from .tiling import BLOCK, PIECE, SPAN, Tiling, partial_bytes

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
def _sweep(
    T: Any, U: Any, columns: Any, wants_dx: Any, this: Any, following: Any, n: Any, dy: Any, x: Any, w: Any, dx: Any,
    sums: Any, f: Any, next_dy: Any, next_x: Any, next_w: Any, m: Any, r: Any,
) -> Any:  # fmt: skip
    """Up to BLOCK columns of this row, from the cache: dx = rstd * (wdy - c1 - x_hat * c2), and dy * x_hat and dy onto
    the column sums. And of the following row, from memory: the sums of wdy and wdy * x_hat, which it returns; two
    vectors of each take turns. Both together, so that memory is read and written all the time."""
    size, out, zero = width(T), width(U), splat(np.float32(0))
    mean, rstd = splat(m), splat(r)
    a0, a1, b0, b1 = zero, zero, zero, zero
    c = 0
    while c + 32 <= n:
        at, k = c * size, c * 4
        if following:
            prefetch(next_dy + at + AHEAD)
            prefetch(next_x + at + AHEAD)
            a0, b0 = _sums_step(T, next_dy + at, next_x + at, next_w + k, 16, mean, rstd, a0, b0)
        if this:
            if not following:
                prefetch(next_dy + at)
                prefetch(next_x + at)
            _dx_step(T, U, columns, wants_dx, dy + at, x + at, w + k, dx + c * out, sums + 2 * k, 16, f)
        c += 16
        at, k = c * size, c * 4
        if following:
            if size == 4:  # else in the cache line asked for above
                prefetch(next_dy + at + AHEAD)
                prefetch(next_x + at + AHEAD)
            a1, b1 = _sums_step(T, next_dy + at, next_x + at, next_w + k, 16, mean, rstd, a1, b1)
        if this:
            if not following and size == 4:
                prefetch(next_dy + at)
                prefetch(next_x + at)
            _dx_step(T, U, columns, wants_dx, dy + at, x + at, w + k, dx + c * out, sums + 2 * k, 16, f)
        c += 16
    while c < n:
        at, k, count = c * size, c * 4, min(16, n - c)
        if following:
            a0, b0 = _sums_step(T, next_dy + at, next_x + at, next_w + k, count, mean, rstd, a0, b0)
        if this:
            _dx_step(T, U, columns, wants_dx, dy + at, x + at, w + k, dx + c * out, sums + 2 * k, count, f)
        c += 16
    return np.float64(sum_lanes(add(a0, a1))), np.float64(sum_lanes(add(b0, b1)))


@inline
def _factors(m: Any, r: Any, s: Any, q: Any, share: Any) -> Any:
    return splat(m), splat(r), splat(np.float32(-s * share)), splat(np.float32(-q * share))


@kernel
def _short_rows(T: Any, U: Any, columns: Any, wants_dx: Any) -> Any:
    """Some chunks of rows of one block a task: column sums into the chunks' partials, and dx. Steps count bytes."""

    def run(args: Any, task: Any) -> Any:
        (
            dy, dy_step, x, x_step, mean, rstd, w, dx, dx_step, streamed, sums, partial_step, rows, cols, chunk_rows,
            chunks, _,
        ) = words(args, 17)  # fmt: skip
        stage, zero = scratch(STAGE), np.float32(0)
        share, row_bytes = 1.0 / cols, cols * width(U)
        start, end = task * chunks * chunk_rows, min(rows, (task + 1) * chunks * chunk_rows)
        d, p = dy + start * dy_step, x + start * x_step
        m, r = load_one(mean + start * 4), load_one(rstd + start * 4)
        mine, f = sums, _factors(m, r, 0.0, 0.0, share)
        place = dx + start * dx_step
        first = staged = place % 64
        s, q = _sweep(T, U, columns, wants_dx, False, wants_dx, cols, d, p, w, dx, sums, f, d, p, w, m, r)
        for row in range(start, end):
            if columns and row % chunk_rows == 0:
                mine = sums + row // chunk_rows * partial_step
                clear(mine, partial_step)
            f = _factors(m, r, s, q, share)
            target = stage + staged if streamed else dx + row * dx_step
            if row + 1 < end:
                m, r = load_one(mean + row * 4 + 4), load_one(rstd + row * 4 + 4)
                s, q = _sweep(
                    T, U, columns, wants_dx, True, wants_dx, cols, d, p, w, target, mine, f, d + dy_step, p + x_step,
                    w, m, r,
                )  # fmt: skip
            else:
                _sweep(T, U, columns, wants_dx, True, False, cols, d, p, w, target, mine, f, d, p, w, m, r)
            d, p = d + dy_step, p + x_step
            if wants_dx and streamed:
                staged, place = staged + row_bytes, place + row_bytes
                if staged + row_bytes > STAGE - 64 or row + 1 == end:
                    # Whole cache lines go out; the rest stays for the next, but for the ends of a task.
                    rest = 0 if row + 1 == end else staged % 64
                    flush(stage + first, place - staged + first, staged - first - rest)
                    store(zero, stage, load(zero, stage + staged - rest))
                    first, staged = 0, rest

    return run


@kernel
def _whole_rows(T: Any, U: Any, columns: Any, wants_dx: Any) -> Any:
    """The same for rows of several blocks.

    A group of up to four rows is summed while dx of the one before is made, block by block: the former row by row, as
    memory likes it, the latter column by column, so that a block's column sums stay in the L1 cache.
    """

    def run(args: Any, task: Any) -> Any:
        (
            dy, dy_step, x, x_step, mean, rstd, w, dx, dx_step, streamed, sums, partial_step, rows, cols, chunk_rows,
            chunks, group_rows,
        ) = words(args, 17)  # fmt: skip
        stage, totals = scratch(STAGE), scratch(128)
        size, out, share = width(T), width(U), 1.0 / cols
        blocks = (cols + BLOCK - 1) // BLOCK
        start, end = task * chunks * chunk_rows, min(rows, (task + 1) * chunks * chunk_rows)
        mine, zero = sums, np.float32(0)
        none = _factors(zero, zero, 0.0, 0.0, 0.0)
        for group in range(start - group_rows, end, group_rows):
            here = totals + (group // group_rows & 1) * 64
            there = 2 * totals + 64 - here
            count = min(group_rows, end - group) if group >= start else 0
            next_count = min(group_rows, end - group - group_rows)
            if columns and count and group % chunk_rows == 0:
                mine = sums + group // chunk_rows * partial_step
                clear(mine, partial_step)
            for turn in range(blocks * group_rows):
                i, c = turn // blocks, turn % blocks * BLOCK
                row, n, following = group + group_rows + i, min(BLOCK, cols - c), wants_dx and i < next_count
                next_d, next_p, next_w = dy + row * dy_step + c * size, x + row * x_step + c * size, w + c * 4
                mean_row = min(row, end - 1) * 4
                m, r = load_one(mean + mean_row), load_one(rstd + mean_row)
                place, s, q = there + i * 16, 0.0, 0.0
                this = turn < blocks * count
                if this:
                    k = turn // count * BLOCK
                    row, width_here = group + turn % count, min(BLOCK, cols - k)
                    at = here + turn % count * 16
                    f = _factors(
                        load_one(mean + row * 4), load_one(rstd + row * 4), load_double(at), load_double(at + 8), share
                    )
                    d, p = dy + row * dy_step + k * size, x + row * x_step + k * size
                    result = dx + row * dx_step + k * out
                    target = stage if streamed else result
                    if following and n == width_here:
                        s, q = _sweep(
                            T, U, columns, wants_dx, True, True, n, d, p, w + k * 4, target, mine + k * 8, f, next_d,
                            next_p, next_w, m, r,
                        )  # fmt: skip
                    else:
                        _sweep(
                            T, U, columns, wants_dx, True, False, width_here, d, p, w + k * 4, target, mine + k * 8, f,
                            next_d, next_p, 0, zero, zero,
                        )  # fmt: skip
                        if following:
                            s, q = _sweep(
                                T, U, columns, wants_dx, False, True, n, 0, 0, 0, 0, 0, f, next_d, next_p, next_w, m, r
                            )
                    if wants_dx and streamed:
                        flush(stage, result, width_here * out)
                elif following:
                    s, q = _sweep(
                        T, U, columns, wants_dx, False, True, n, 0, 0, 0, 0, 0, none, next_d, next_p, next_w, m, r
                    )
                if following:
                    if c > 0:
                        s, q = s + load_double(place), q + load_double(place + 8)
                    store_double(place, s)
                    store_double(place + 8, q)

    return run


@inline
def _span_step(
    T: Any, columns: Any, dy: Any, x: Any, w: Any, sums: Any, count: Any, mean: Any, rstd: Any, a: Any, b: Any
) -> Any:
    one = np.float32(0)
    d = load_part(T, dy, count)
    wdy = mul(d, load_part(one, w, count))
    x_hat = keep(mul(sub(load_part(T, x, count), mean), rstd), count)
    if columns:
        store(one, sums, fma(d, x_hat, load(one, sums)))
        store(one, sums + 64, add(load(one, sums + 64), d))
    return add(a, wdy), fma(wdy, x_hat, b)


@kernel
def _split_sums(T: Any, columns: Any) -> Any:
    """A span of columns of a group of rows a task: row sums into totals[row][span], column sums onto the chunk's."""

    def run(args: Any, task: Any) -> Any:
        dy, dy_step, x, x_step, mean, rstd, w, sums, partial_step, totals, rows, cols, group_rows, spans = words(
            args, 14
        )
        size, zero = width(T), splat(np.float32(0))
        row, span = task // spans * group_rows, task % spans
        start, n = span * SPAN, min(SPAN, cols - span * SPAN)
        mine = sums + row // CHUNK_ROWS * partial_step + start * 8
        if columns and row % CHUNK_ROWS == 0:
            clear(mine, (n + 15) // 16 * 128)
        for i in range(row, min(rows, row + group_rows)):
            d, p, v = dy + i * dy_step + start * size, x + i * x_step + start * size, w + start * 4
            mean_v, rstd_v = splat(load_one(mean + i * 4)), splat(load_one(rstd + i * 4))
            s, q = 0.0, 0.0
            for first in range(0, n, BLOCK):
                a, b = zero, zero
                c, end = first, min(n, first + BLOCK)
                while c + 16 <= end:
                    at = c * size
                    prefetch(d + at + AHEAD)
                    prefetch(p + at + AHEAD)
                    a, b = _span_step(T, columns, d + at, p + at, v + c * 4, mine + c * 8, 16, mean_v, rstd_v, a, b)
                    c += 16
                if c < end:
                    at = c * size
                    a, b = _span_step(
                        T, columns, d + at, p + at, v + c * 4, mine + c * 8, end - c, mean_v, rstd_v, a, b
                    )
                s += np.float64(sum_lanes(a))
                q += np.float64(sum_lanes(b))
            store_double(totals + (i * spans + span) * 16, s)
            store_double(totals + (i * spans + span) * 16 + 8, q)

    return run


@kernel
def _split_totals() -> Any:
    """A row a task: the sums of its spans, into those of the first."""

    def run(args: Any, task: Any) -> Any:
        totals, spans = words(args, 2)
        place = totals + task * spans * 16
        s, q = 0.0, 0.0
        for span in range(spans):
            s += load_double(place + span * 16)
            q += load_double(place + span * 16 + 8)
        store_double(place, s)
        store_double(place + 8, q)

    return run


@kernel
def _split_dx(T: Any, U: Any) -> Any:
    """A piece of a row a task."""

    def run(args: Any, task: Any) -> Any:
        dy, dy_step, x, x_step, mean, rstd, w, dx, dx_step, streamed, totals, cols, spans = words(args, 13)
        stage = scratch(STAGE)
        pieces, size, out = (cols + PIECE - 1) // PIECE, width(T), width(U)
        row, start = task // pieces, task % pieces * PIECE
        m, r = load_one(mean + row * 4), load_one(rstd + row * 4)
        place = totals + row * spans * 16
        f = _factors(m, r, load_double(place), load_double(place + 8), 1.0 / cols)
        for c in range(start, min(cols, start + PIECE), BLOCK):
            n = min(BLOCK, cols - c)
            d, p, target = dy + row * dy_step + c * size, x + row * x_step + c * size, dx + row * dx_step + c * out
            _sweep(
                T, U, False, True, True, False, n, d, p, w + c * 4, stage if streamed else target, 0, f,
                d + AHEAD, p + AHEAD, 0, m, r,
            )  # fmt: skip
            if streamed:
                flush(stage, target, n * out)

    return run


@inline
def _single_step(
    T: Any, U: Any, W: Any, B: Any, dy: Any, x: Any, w: Any, dx: Any, dw: Any, db: Any, count: Any, f: Any
) -> Any:
    mean, rstd, minus_c1, minus_c2 = f
    d, wv = load_part(T, dy, count), load_part(np.float32(0), w, count)
    x_hat = mul(sub(load_part(T, x, count), mean), rstd)
    store_part(U, dx, mul(rstd, fma(x_hat, minus_c2, fma(d, wv, minus_c1))), count)
    store_part(W, dw, mul(d, x_hat), count)
    store_part(B, db, d, count)


@kernel
def _single_row(T: Any, U: Any, W: Any, B: Any) -> Any:
    """A piece of the only row a task: dx, and dy * x_hat and dy for the column outputs; 0 is not wanted.

    An output may lie on gradOut or input: all three are made before one is written.
    """

    def run(args: Any, task: Any) -> Any:
        dy, x, mean, rstd, w, dx, dw, db, totals, cols = words(args, 10)
        stage = scratch(3 * 2048)
        dx_stage, dw_stage, db_stage = stage, stage + 2048, stage + 4096
        size = width(T)
        m, r = load_one(mean), load_one(rstd)
        f = _factors(m, r, load_double(totals), load_double(totals + 8), 1.0 / cols)
        for c in range(task * PIECE, min(cols, task * PIECE + PIECE), BLOCK):
            n, e = min(BLOCK, cols - c), 0
            d, p, v = dy + c * size, x + c * size, w + c * 4
            while e + 16 <= n:
                prefetch(d + e * size + AHEAD)
                prefetch(p + e * size + AHEAD)
                _single_step(
                    T, U, W, B, d + e * size, p + e * size, v + e * 4, dx_stage + e * width(U), dw_stage + e * width(W),
                    db_stage + e * width(B), 16, f,
                )  # fmt: skip
                e += 16
            if e < n:
                _single_step(
                    T, U, W, B, d + e * size, p + e * size, v + e * 4, dx_stage + e * width(U), dw_stage + e * width(W),
                    db_stage + e * width(B), n - e, f,
                )  # fmt: skip
            if dx != 0:
                flush(dx_stage, dx + c * width(U), n * width(U))
            if dw != 0:
                flush(dw_stage, dw + c * width(W), n * width(W))
            if db != 0:
                flush(db_stage, db + c * width(B), n * width(B))

    return run


def build(program: Program, tiling: Tiling, call: Call) -> None:
    """The jobs of a call."""
    rows, cols, values = tiling.rows, tiling.cols, call.values
    places: dict[str, Place] = {}
    for name in ("gradOut", "input", "gradInputOut"):
        places[name] = Place(name, 0)
        if name in tiling.packed:
            places[name] = Place(WORKSPACE, tiling.packed[name])
            if name != "gradInputOut":
                pack(program, name, values[name], places[name])
    T = TAGS[call.input.dtype]
    size = itemsize(call.input.dtype)
    mean, rstd, w = (
        as_float32(program, name, values[name], count, tiling.converted.get(name))
        for name, count in (("mean", rows), ("rstd", rows), ("weightOptional", cols))
    )
    inputs = (places["gradOut"], tiling.steps[0] * size, places["input"], tiling.steps[1] * size, mean, rstd, w)
    columns = [name for name in ("gradWeightOut", "gradBiasOut") if name in program]
    sums, totals, elements = Place(WORKSPACE, tiling.partials), Place(WORKSPACE, tiling.totals), rows * cols
    wants_dx, dx_step, U = "gradInputOut" in program, 0, T
    dx: int | Place = 0
    if wants_dx:
        U = TAGS[call.gradInputOut.dtype]
        dx, dx_step = places["gradInputOut"], tiling.steps[2] * itemsize(call.gradInputOut.dtype)

    results = {
        name: Place(WORKSPACE, tiling.scattered[name]) if name in tiling.scattered else Place(name, 0)
        for name in columns
    }
    if not tiling.spans:
        rows_kernel = _short_rows if tiling.short else _whole_rows
        program.job(
            rows_kernel(T, U, bool(columns), wants_dx), -(-tiling.chunks // tiling.task_chunks), elements, *inputs, dx,
            dx_step, tiling.streamed, sums, partial_bytes(cols), rows, cols, tiling.chunk_rows, tiling.task_chunks,
            tiling.group_rows,
        )  # fmt: skip
    else:
        single, spans, pieces = rows == 1, tiling.spans, -(-cols // PIECE)
        sums_kernel = _split_sums(T, bool(columns) and not single)
        sums_arguments = program.arguments(
            *inputs, sums, partial_bytes(cols), totals, rows, cols, tiling.group_rows, spans
        )
        totals_arguments = program.arguments(totals, spans)
        dx_arguments = program.arguments(*inputs, dx, dx_step, tiling.streamed, totals, cols, spans)
        # Group after group of rows, whose second reading then comes from the cache.
        for group in range(-(-rows // tiling.group_rows)):
            first, last = group * tiling.group_rows, min(rows, (group + 1) * tiling.group_rows)
            size = (last - first) * cols
            program.run(sums_kernel, sums_arguments, group * spans, (group + 1) * spans, size)
            program.run(_split_totals(), totals_arguments, first, last, spans)
            if wants_dx and not single:
                program.run(_split_dx(T, U), dx_arguments, first * pieces, last * pieces, size)
        if single:
            dw, db = results.get("gradWeightOut", 0), results.get("gradBiasOut", 0)
            W, B = (TAGS[values[name].dtype] if name in columns else T for name in ("gradWeightOut", "gradBiasOut"))
            program.job(
                _single_row(T, U, W, B), pieces, elements, inputs[0], inputs[2], mean, rstd, w, dx, dw, db, totals, cols
            )
    for name in columns:
        if not (tiling.spans and rows == 1):
            program.job(
                reduce_partials(TAGS[values[name].dtype], False), reduce_tasks(cols), tiling.chunks * cols,
                sums + (64 if name == "gradBiasOut" else 0), 128, partial_bytes(cols), tiling.chunks, cols, 0,
                results[name],
            )  # fmt: skip
        if name in tiling.scattered:
            unpack(program, name, values[name], results[name])
    if "gradInputOut" in tiling.packed:
        unpack(program, "gradInputOut", call.gradInputOut, places["gradInputOut"])
