"""LayerNorm backward of rows that do not begin on 16 bytes, as those of an odd number of columns.

They are copied to shared memory in whole vectors, with what these hold of other rows, and read from there element by
element, wherever a row begins: its sums have the same order. dx goes the same way back. In bfloat16, 40000 x 1027 took
174 microseconds element by element from memory, and takes 80.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from .._held import (
    RUN,
    add_pairs,
    columns_layout,
    each_in_float32,
    fetch_run,
    places_of,
    read_at,
    shift_of,
    statistics,
    write_at,
    write_run,
)


@gluon.jit
def _fetch_tile(slots, slot, dy_ptr, x_ptr, row, rows, dy_step, x_step, cols, ROWS: gl.constexpr):
    at, count = row.to(gl.int64), gl.minimum(gl.maximum(rows - row, 0), ROWS) * cols  # rows - row may be far below 0
    fetch_run(slots[0], slot, dy_ptr, at * dy_step, count)
    fetch_run(slots[1], slot, x_ptr, at * x_step, count)
    async_copy.commit_group()


@gluon.jit
def _statistics_of(mean_ptr, rstd_ptr, row, rows, ROWS: gl.constexpr):
    of = ()
    for i in gl.static_range(ROWS):
        of = of + (statistics(mean_ptr, rstd_ptr, row + i, row + i < rows),)  # noqa: RUF005 (Gluon's tuples)
    return of


@gluon.jit
def _write_sums(partials_ptr, dw, db, columns, cols, adds, LONG: gl.constexpr):
    """This program's sums of its columns; if it `adds`, beside those it has written before."""
    for block in gl.static_range(len(columns)):
        keep = columns[block] < cols
        place = partials_ptr + gl.program_id(0).to(gl.int64) * 2 * cols + columns[block]
        a, b = dw[block], db[block]
        if LONG:
            a += gl.load(place, mask=keep & adds, other=0.0)
            b += gl.load(place + cols, mask=keep & adds, other=0.0)
        gl.store(place, a, mask=keep)
        gl.store(place + cols, b, mask=keep)


@gluon.jit
def _zeros_like(sums):
    zeros = ()
    for block in gl.static_range(len(sums)):
        zeros = zeros + (gl.zeros_like(sums[block]),)  # noqa: RUF005
    return zeros


@gluon.jit
def hold_rows(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, w_ptr, dx_ptr, partials_ptr, rows, cols, share, dy_step, x_step, dx_step,
    HAS_W: gl.constexpr, WANTS_DX: gl.constexpr, COLUMNS: gl.constexpr, PROGRAMS: gl.constexpr, ROWS: gl.constexpr,
    BLOCKS: gl.constexpr, SLOT: gl.constexpr, SLOTS: gl.constexpr, LONG: gl.constexpr,
):  # fmt: skip
    """Some tiles of ROWS rows: dx, and the sums of dy * x_hat and dy of their columns. Several rows of a tile lie one
    after the other. Columns are in BLOCKS: how many for each thread, and in the blocks before. LONG: more rows than
    one run."""
    WARPS: gl.constexpr = gl.num_warps()
    THREADS: gl.constexpr = 32 * WARPS
    COUNT: gl.constexpr = len(BLOCKS)
    TURNS: gl.constexpr = RUN // ROWS
    OF_COLS: gl.constexpr = gl.SliceLayout(0, columns_layout(1, WARPS))
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dys = gl.allocate_shared_memory(dy_ptr.dtype.element_ty, [SLOTS, SLOT], FLAT)
    xs = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [SLOTS, SLOT], FLAT)
    outs = gl.allocate_shared_memory(dx_ptr.dtype.element_ty, [1, SLOT], FLAT)
    slots, first, step = (dys, xs), gl.program_id(0) * ROWS, PROGRAMS * ROWS
    for i in gl.static_range(SLOTS):
        _fetch_tile(slots, i, dy_ptr, x_ptr, first + i * step, rows, dy_step, x_step, cols, ROWS)
    places, columns, w, dw, db = places_of(BLOCKS), (), (), (), ()
    for block in gl.static_range(COUNT):
        col = BLOCKS[block][1] * THREADS + places[block]
        weight = gl.full([BLOCKS[block][0], THREADS], 1.0, gl.float32, col.type.layout)
        if HAS_W:
            weight = gl.load(w_ptr + col, mask=col < cols, other=0.0).to(gl.float32)
        zeros = gl.full([BLOCKS[block][0], THREADS], 0.0, gl.float32, col.type.layout)
        columns, w, dw, db = columns + (col,), w + (weight,), dw + (zeros,), db + (zeros,)  # noqa: RUF005
    slot, turn = 0, 0
    then = _statistics_of(mean_ptr, rstd_ptr, first, rows, ROWS)
    for row in range(first, rows, step):
        now = then
        then = _statistics_of(mean_ptr, rstd_ptr, row + step, rows, ROWS)
        at = row.to(gl.int64)
        dy_from, x_from = shift_of(dy_ptr, at * dy_step), shift_of(x_ptr, at * x_step)
        dx_from = shift_of(dx_ptr, at * dx_step)
        async_copy.wait_group(SLOTS - 1)
        wdys, x_hats, sums = (), (), ()
        for i in gl.static_range(ROWS):
            mean, rstd = now[i]
            inside = gl.where(row + i < rows, cols, 0)
            c1, c2 = gl.zeros([THREADS], gl.float32, OF_COLS), gl.zeros([THREADS], gl.float32, OF_COLS)
            dw_then, db_then = (), ()
            for block in gl.static_range(COUNT):
                before = i * cols + BLOCKS[block][1] * THREADS
                dy = each_in_float32(read_at(dys, slot, dy_from + before, places[block]))
                x_hat = (each_in_float32(read_at(xs, slot, x_from + before, places[block])) - mean) * rstd
                if ROWS > 1 or block == COUNT - 1:
                    dy = gl.where(columns[block] < inside, dy, 0.0)
                    x_hat = gl.where(columns[block] < inside, x_hat, 0.0)
                if COLUMNS:
                    dw_then, db_then = dw_then + (dw[block] + dy * x_hat,), db_then + (db[block] + dy,)  # noqa: RUF005
                if WANTS_DX:
                    wdy = dy * w[block]
                    s1, s2 = gl.reduce((wdy, wdy * x_hat), 0, add_pairs)
                    c1 += gl.convert_layout(s1, OF_COLS)
                    c2 += gl.convert_layout(s2, OF_COLS)
                    wdys, x_hats = wdys + (wdy,), x_hats + (x_hat,)  # noqa: RUF005
            if COLUMNS:
                dw, db = dw_then, db_then
            if WANTS_DX:
                sums = sums + (gl.reduce((c1, c2), 0, add_pairs),)  # noqa: RUF005
        _fetch_tile(slots, slot, dy_ptr, x_ptr, row + SLOTS * step, rows, dy_step, x_step, cols, ROWS)
        if WANTS_DX:
            for i in gl.static_range(ROWS):  # in this order: a row's last block ends in the next row
                rstd = now[i][1]
                m1, m2 = sums[i][0] * share, sums[i][1] * share
                for block in gl.static_range(COUNT):
                    wdy, x_hat = wdys[i * COUNT + block], x_hats[i * COUNT + block]
                    dx = rstd * (wdy - m1 - x_hat * m2)
                    before = i * cols + BLOCKS[block][1] * THREADS
                    write_at(outs, 0, dx_from + before, places[block], dx.to(dx_ptr.dtype.element_ty))
            write_run(outs, 0, dx_ptr, at * dx_step, gl.minimum(rows - row, ROWS) * cols)
        if COLUMNS and LONG:  # noqa: SIM102 (the compiler knows it)
            if turn % TURNS == TURNS - 1:
                _write_sums(partials_ptr, dw, db, columns, cols, turn >= TURNS, LONG)
                dw, db = _zeros_like(dw), _zeros_like(db)
        slot, turn = gl.where(slot == SLOTS - 1, 0, slot + 1), turn + 1
    async_copy.wait_group(0)
    if COLUMNS:
        _write_sums(partials_ptr, dw, db, columns, cols, turn >= TURNS, LONG)
