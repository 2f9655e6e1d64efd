"""LayerNorm backward on the CPU.

Rows that fit the cache go through it once: some chunks of rows are a task; a row is read for its sums, then again, from
the cache, for dx and for the column sums of its chunk. Short ones (short_rows.py) stay in registers in between, and
others may go two at a time (pairs.py). Longer rows, and few long ones, are split: a task is a piece of the columns of a
chunk for the sums, and a second sweep makes dx. A row is added up in the same order whichever way it goes. A single
split row needs no column sums: the second sweep writes their outputs too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...datatypes import itemsize
from ...spec import Call
from .._copy import as_float32, pack, unpack
from .._formats import TAGS
from .._lanes import add, fma, keep, mul, splat, sub, sum_lanes
from .._native import inline, kernel
from .._program import WORKSPACE, Place, Program
from .._rows import add_block, begin_run, end_run, factors, sweep
from .._simd import (
    load,
    load_double,
    load_one,
    load_part,
    prefetch,
    scratch,
    store,
    store_double,
    store_part,
    width,
    words,
)
from .._sums import ColumnResult, add_up, begin_chunks, clear, end_chunk, flush
from .._views import AHEAD, CHUNK_ROWS, LONGEST_BLOCK, ROW_BLOCK
from .pairs import LONGEST_OF_PAIRS, pairs
from .short_rows import SHORT, short_rows
from .tiling import Tiling, partial_bytes


@kernel
def _whole_rows(T: Any, U: Any, columns: Any, wants_dx: Any, single: Any) -> Any:
    """Some chunks of rows a task: dx, and the column sums. `single`: of one block each (to find that out costs 10 ns a
    row, half of what one of 64 columns takes). Steps count bytes.

    A row is summed while dx of the one before is made, block by block. Where a task has several chunks, their column
    sums are added up in float64; the chunk at hand has its own after those.
    """

    def run(args: Any, task: Any) -> Any:
        (
            dy, dy_step, x, x_step, mean, rstd, w, dx, dx_step, streamed, partials, partial_step, rows, cols,
            chunk_rows, chunks,
        ) = words(args, 16)  # fmt: skip
        size, out, share = width(T), width(U), 1.0 / cols
        blocks = 1 if single else (cols + ROW_BLOCK - 1) // ROW_BLOCK
        start, end = task * chunks * chunk_rows, min(rows, (task + 1) * chunks * chunk_rows)
        totals, apart = partials + task * partial_step, (cols + 15) // 16 * 128
        sums = totals
        if columns:
            sums = begin_chunks(totals, apart, chunks)
        d, p = dy + start * dy_step, x + start * x_step
        m, r = load_one(mean + start * 4), load_one(rstd + start * 4)
        s, q, span, left = 0.0, 0.0, (0.0, 0.0), chunk_rows
        f, results = factors(m, r, s, q, share), begin_run(U, dx + start * dx_step, streamed)
        if wants_dx:
            for i in range(blocks):
                c = i * ROW_BLOCK
                n, at = cols if single else min(ROW_BLOCK, cols - c), c * size
                a, b, _ = sweep(
                    T, U, columns, wants_dx, False, True, n, 0, 0, 0, results, 0, f, d + at, p + at,
                    w + c * 4, AHEAD, AHEAD, m, r,
                )  # fmt: skip
                s, q, span = add_block(s, q, span, a, b, c + n, cols)
        for row in range(start, end):
            f = factors(m, r, s, q, share)
            s, q = 0.0, 0.0
            if row + 1 < end:
                m, r = load_one(mean + row * 4 + 4), load_one(rstd + row * 4 + 4)
            for i in range(blocks):
                c = i * ROW_BLOCK
                n, at, v = cols if single else min(ROW_BLOCK, cols - c), c * size, w + c * 4
                if row + 1 < end:
                    a, b, results = sweep(
                        T, U, columns, wants_dx, True, wants_dx, n, d + at, p + at, v, results, sums + c * 8, f,
                        d + dy_step + at, p + x_step + at, v, AHEAD, AHEAD, m, r,
                    )  # fmt: skip
                    s, q, span = add_block(s, q, span, a, b, c + n, cols)
                else:
                    _, _, results = sweep(
                        T, U, columns, wants_dx, True, False, n, d + at, p + at, v, results, sums + c * 8, f, d + at,
                        p + at, v, 0, 0, m, r,
                    )  # fmt: skip
            if wants_dx and (row + 1 == end or dx_step != cols * out or not streamed):
                end_run(U, results)
                results = begin_run(U, dx + (row + 1) * dx_step, streamed)
            d, p, left = d + dy_step, p + x_step, left - 1
            if columns and chunks > 1 and (left == 0 or row + 1 == end):
                end_chunk(sums, cols, totals, apart)
                left = chunk_rows

    return run


@inline
def _one_step(
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
    """A piece of the columns of a chunk of rows a task: row sums into totals[row][block], and the column sums."""

    def run(args: Any, task: Any) -> Any:
        dy, dy_step, x, x_step, mean, rstd, w, sums, partial_step, totals, rows, cols, blocks, pieces, piece = words(
            args, 15
        )
        size, zero = width(T), splat(np.float32(0))
        chunk, start = task // pieces, task % pieces * piece
        n = min(piece, cols - start)
        mine = sums + chunk * partial_step + start * 8
        if columns:
            clear(mine, (n + 15) // 16 * 128)
        for i in range(chunk * CHUNK_ROWS, min(rows, chunk * CHUNK_ROWS + CHUNK_ROWS)):
            d, p, v = dy + i * dy_step + start * size, x + i * x_step + start * size, w + start * 4
            mean_v, rstd_v = splat(load_one(mean + i * 4)), splat(load_one(rstd + i * 4))
            place = totals + (i * blocks + start // ROW_BLOCK) * 16
            for first in range(0, n, ROW_BLOCK):
                a0, b0, a1, b1 = zero, zero, zero, zero
                c, end = first, min(n, first + ROW_BLOCK)
                while c + 32 <= end:
                    at = c * size
                    prefetch(d + at + AHEAD)
                    prefetch(p + at + AHEAD)
                    a0, b0 = _one_step(T, columns, d + at, p + at, v + c * 4, mine + c * 8, 16, mean_v, rstd_v, a0, b0)
                    c += 16
                    at = c * size
                    if size == 4:  # else in the cache line asked for above
                        prefetch(d + at + AHEAD)
                        prefetch(p + at + AHEAD)
                    a1, b1 = _one_step(T, columns, d + at, p + at, v + c * 4, mine + c * 8, 16, mean_v, rstd_v, a1, b1)
                    c += 16
                while c < end:
                    at, count = c * size, min(16, end - c)
                    a0, b0 = _one_step(
                        T, columns, d + at, p + at, v + c * 4, mine + c * 8, count, mean_v, rstd_v, a0, b0
                    )
                    c += 16
                store_double(place, np.float64(sum_lanes(add(a0, a1))))
                store_double(place + 8, np.float64(sum_lanes(add(b0, b1))))
                place += 16

    return run


@kernel
def _split_totals() -> Any:
    """A row a task: the sums of its blocks, as `add_block` adds them, into those of the first."""

    def run(args: Any, task: Any) -> Any:
        totals, cols, blocks = words(args, 3)
        place = totals + task * blocks * 16
        s, q, span = 0.0, 0.0, (0.0, 0.0)
        for block in range(blocks):
            a, b = load_double(place + block * 16), load_double(place + block * 16 + 8)
            s, q, span = add_block(s, q, span, a, b, (block + 1) * ROW_BLOCK, cols)
        store_double(place, s)
        store_double(place + 8, q)

    return run


@kernel
def _split_dx(T: Any, U: Any) -> Any:
    """A piece of the columns of a chunk of rows a task; the last row, read last, first."""

    def run(args: Any, task: Any) -> Any:
        (
            dy, dy_step, x, x_step, mean, rstd, w, dx, dx_step, streamed, totals, rows, cols, blocks, pieces, piece,
        ) = words(args, 16)  # fmt: skip
        size, out = width(T), width(U)
        first, start = task // pieces * CHUNK_ROWS, task % pieces * piece
        for row in range(min(rows, first + CHUNK_ROWS) - 1, first - 1, -1):
            m, r = load_one(mean + row * 4), load_one(rstd + row * 4)
            place = totals + row * blocks * 16
            f = factors(m, r, load_double(place), load_double(place + 8), 1.0 / cols)
            results = begin_run(U, dx + row * dx_step + start * out, streamed)
            for c in range(start, min(cols, start + piece), ROW_BLOCK):
                n = min(ROW_BLOCK, cols - c)
                d, p = dy + row * dy_step + c * size, x + row * x_step + c * size
                _, _, results = sweep(
                    T, U, False, True, True, False, n, d, p, w + c * 4, results, 0, f, d + AHEAD, p + AHEAD, 0, 0, 0,
                    m, r,
                )  # fmt: skip
            end_run(U, results)

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
        dy, x, mean, rstd, w, dx, dw, db, totals, cols, piece = words(args, 11)
        stage = scratch(3 * 2048)
        dx_stage, dw_stage, db_stage = stage, stage + 2048, stage + 4096
        size = width(T)
        m, r = load_one(mean), load_one(rstd)
        f = factors(m, r, load_double(totals), load_double(totals + 8), 1.0 / cols)
        for c in range(task * piece, min(cols, task * piece + piece), ROW_BLOCK):
            n, e = min(ROW_BLOCK, cols - c), 0
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
    if not tiling.pieces:
        if wants_dx and cols <= SHORT:
            rows_kernel = short_rows(T, U, -(-cols // 16), cols % 16 > 0)
        elif (
            wants_dx and cols <= LONGEST_OF_PAIRS and cols % 16 == 0 and tiling.chunk_rows % 2 == 0 and tiling.streamed
        ):
            rows_kernel = pairs(T, U, bool(columns), cols <= LONGEST_BLOCK)
        else:
            rows_kernel = _whole_rows(T, U, bool(columns), wants_dx, cols <= LONGEST_BLOCK)
        program.job(
            rows_kernel, -(-tiling.chunks // tiling.task_chunks), elements, *inputs, dx, dx_step, tiling.streamed, sums,
            tiling.partial_step, rows, cols, tiling.chunk_rows, tiling.task_chunks,
            bool(columns),  # for short rows, which have one kernel with sums and without
        )  # fmt: skip
    else:
        single, pieces, shape = rows == 1, tiling.pieces, (rows, cols, tiling.blocks, tiling.pieces, tiling.piece)
        sums_kernel = _split_sums(T, bool(columns) and not single)
        sums_arguments = program.arguments(*inputs, sums, tiling.partial_step, totals, *shape)
        totals_arguments = program.arguments(totals, cols, tiling.blocks)
        dx_arguments = program.arguments(*inputs, dx, dx_step, tiling.streamed, totals, *shape)
        # A batch after the other, the end of which the caches have still when dx is made of it.
        for chunk in range(0, tiling.chunks, tiling.batch):
            end = min(tiling.chunks, chunk + tiling.batch)
            first, last = chunk * CHUNK_ROWS, min(rows, end * CHUNK_ROWS)
            tasks, size = (chunk * pieces, end * pieces), (last - first) * cols
            program.run(sums_kernel, sums_arguments, *tasks, size)
            program.run(_split_totals(), totals_arguments, first, last, tiling.blocks)
            if wants_dx and not single:
                program.run(_split_dx(T, U), dx_arguments, *tasks, size, backwards=True)
        if single:
            dw, db = results.get("gradWeightOut", 0), results.get("gradBiasOut", 0)
            W, B = (TAGS[values[name].dtype] if name in columns else T for name in ("gradWeightOut", "gradBiasOut"))
            program.job(
                _single_row(T, U, W, B), pieces, elements, inputs[0], inputs[2], mean, rstd, w, dx, dw, db, totals,
                cols, tiling.piece,
            )  # fmt: skip
    if not (tiling.pieces and rows == 1):
        apart = {"gradWeightOut": 0, "gradBiasOut": partial_bytes(cols) if tiling.wide else 64}
        outputs = [ColumnResult(values[name].dtype, sums + apart[name], 0, results[name]) for name in columns]
        add_up(program, outputs, tiling.wide, tiling.partial_step, tiling.sums, cols)
    for name in tiling.scattered:
        unpack(program, name, values[name], results[name])
    if "gradInputOut" in tiling.packed:
        unpack(program, "gradInputOut", call.gradInputOut, places["gradInputOut"])
