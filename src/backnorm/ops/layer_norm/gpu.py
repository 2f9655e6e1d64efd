"""LayerNorm backward on a GPU.

Rows that fit one program's registers are read once: programs share the rows, keep the column sums in registers, and
write one partial each. So are wider rows, which programs share too: each has a chunk of columns.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ...datatypes import F32, DataType
from ...spec import Call
from .._exchange import add_pairs, both, pack, unpack, wait
from .._gpu import RUN, ends_a_run, exchange, finish_sums
from .._gpu import pack as copy_in
from .._gpu import unpack as copy_out
from .._launch import Launch, Pointer, or_else, pointer_to
from .._program import WORKSPACE
from .._tiles import power_of_two
from .gpu_held_rows import hold_rows
from .gpu_tiling import Tiling


@triton.jit
def rows_of_groups(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, w_ptr, dx_ptr, partials_ptr, rows, cols, dy_step, x_step, dx_step, groups, inner,
    HAS_W: tl.constexpr, WANTS_DX: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    PROGRAMS: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Some tiles of rows: dx, and the sums of dy * x_hat and dy of their columns. EVEN: tiles cover the rows without a
    rest, and no mask is looked at. In GroupNorm `groups` of these rows are side by side, with a weight for `inner`
    elements each; in LayerNorm both are 1. Rows begin and end on multiples of VECTOR elements."""
    program, group, lane = tl.program_id(0), tl.program_id(1), tl.arange(0, COLS)
    # Divided and multiplied, where there is no rest, for the compiler to see that there is none.
    beside, keep = group * cols // VECTOR * VECTOR, lane // VECTOR * VECTOR < cols
    w = tl.full([COLS], 1.0, tl.float32)
    if HAS_W:
        w = tl.load(w_ptr + (beside + lane) // inner, mask=keep, other=0.0).to(tl.float32)
    dw, db = tl.zeros([ROWS, COLS], tl.float32), tl.zeros([ROWS, COLS], tl.float32)
    i, at = tl.arange(0, ROWS).to(tl.int64)[:, None], beside + lane[None, :]
    dy_at, x_at = i * dy_step // VECTOR * VECTOR + at, i * x_step // VECTOR * VECTOR + at
    dx_at = i * dx_step // VECTOR * VECTOR + at
    for tile in tl.range(program, tl.cdiv(rows, ROWS), PROGRAMS, num_stages=STAGES):
        first = tl.cast(tile, tl.int64) * ROWS
        row = first + tl.arange(0, ROWS)
        inside = row < rows
        mask = inside[:, None] & keep[None, :]
        dy_tile, x_tile = dy_ptr + first * dy_step // VECTOR * VECTOR, x_ptr + first * x_step // VECTOR * VECTOR
        mean = tl.load(mean_ptr + row * groups + group, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row * groups + group, mask=inside, other=0.0).to(tl.float32)
        if EVEN:
            dy, x = tl.load(dy_tile + dy_at).to(tl.float32), tl.load(x_tile + x_at).to(tl.float32)
            x_hat = (x - mean[:, None]) * rstd[:, None]
        else:
            dy = tl.load(dy_tile + dy_at, mask=mask, other=0.0).to(tl.float32)
            x = tl.load(x_tile + x_at, mask=mask, other=0.0).to(tl.float32)
            # A row that is not inside has a mean and an rstd of 0.
            x_hat = tl.where(keep[None, :], (x - mean[:, None]) * rstd[:, None], 0.0)
        if WANTS_DX:
            wdy = dy * w[None, :]
            c1, c2 = tl.sum(wdy, axis=1) / cols, tl.sum(wdy * x_hat, axis=1) / cols
            dx = (rstd[:, None] * (wdy - c1[:, None] - x_hat * c2[:, None])).to(dx_ptr.dtype.element_ty)
            place = dx_ptr + first * dx_step // VECTOR * VECTOR + dx_at
            if EVEN:
                tl.store(place, dx)
            else:
                tl.store(place, dx, mask=mask)
        if COLUMNS:
            dw += dy * x_hat
            db += dy
    if COLUMNS:
        place = partials_ptr + program.to(tl.int64) * 2 * cols * groups + beside + lane
        tl.store(place, tl.sum(dw, axis=0), mask=keep)
        tl.store(place + cols * groups, tl.sum(db, axis=0), mask=keep)


@triton.jit
def _write_run(partials_ptr, dw, db, run, groups, group, cols, col, keep):
    place = partials_ptr + (run * groups + group) * 2 * cols + col
    tl.store(place, dw, mask=keep)
    tl.store(place + cols, db, mask=keep)


@triton.jit
def _wide(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, w_ptr, dx_ptr, words_ptr, partials_ptr, rows, cols, dy_step, x_step, dx_step,
    groups, chunks, HAS_W: tl.constexpr, SUMS: tl.constexpr, DX: tl.constexpr, COLUMNS: tl.constexpr,
    COLS: tl.constexpr, CHUNKS: tl.constexpr, EVEN: tl.constexpr, LONG: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A chunk of columns of every groups-th row. SUMS: its sums of wdy and wdy * x_hat, as a word; DX: with the words
    of the row's other chunks dx; COLUMNS: the sums of dy * x_hat and dy of each column. Where there are SUMS and DX, dx
    is made a turn later, of what stayed in registers. EVEN: chunks cover the columns without a rest. LONG: a
    program has more rows than one run, and writes partials of each."""
    LAGS: tl.constexpr = SUMS and DX
    chunk, group = tl.program_id(0) % chunks, tl.program_id(0) // chunks
    lag = groups if LAGS else 0
    col, every = chunk * COLS + tl.arange(0, COLS), tl.arange(0, CHUNKS)
    keep = tl.full([COLS], 1, tl.int32) > 0 if EVEN else col < cols
    w = tl.full([COLS], 1.0, tl.float32)
    if HAS_W:
        w = tl.load(w_ptr + col, mask=keep, other=0.0).to(tl.float32)
    dw, db = tl.zeros([COLS], tl.float32), tl.zeros([COLS], tl.float32)
    dy_before, x_before = tl.zeros([COLS], dy_ptr.dtype.element_ty), tl.zeros([COLS], x_ptr.dtype.element_ty)
    mean_before, rstd_before = 0.0, 0.0
    for turn in tl.range(group, rows + lag, groups, num_stages=STAGES):
        row = tl.cast(turn, tl.int64)
        done = row - lag
        inside, finishes = row < rows, done >= 0
        dy = tl.load(dy_ptr + row * dy_step + col, mask=both(keep, inside), other=0.0)
        x = tl.load(x_ptr + row * x_step + col, mask=both(keep, inside), other=0.0)
        mean = tl.load(mean_ptr + row, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=inside, other=0.0).to(tl.float32)
        if SUMS:
            wdy = dy.to(tl.float32) * w
            x_hat = tl.where(keep, (x.to(tl.float32) - mean) * rstd, 0.0)
            s1, s2 = tl.reduce((wdy, wdy * x_hat), 0, add_pairs)
            tl.store(words_ptr + row * chunks + chunk, pack(s1, s2), mask=inside)
        if not LAGS:
            dy_before, x_before, mean_before, rstd_before = dy, x, mean, rstd
        g = dy_before.to(tl.float32)
        h = tl.where(keep, (x_before.to(tl.float32) - mean_before) * rstd_before, 0.0)
        if DX:
            there = both(every < chunks, finishes)
            place = tl.where(there, done * chunks + every, group * chunks + chunk)
            a, b = unpack(wait(words_ptr, place, LAGS))
            a, b = tl.reduce((tl.where(there, a, 0.0), tl.where(there, b, 0.0)), 0, add_pairs)
            dx = rstd_before * (g * w - a / cols - h * (b / cols))
            tl.store(dx_ptr + done * dx_step + col, dx.to(dx_ptr.dtype.element_ty), mask=both(keep, finishes))
        if COLUMNS:
            dw += g * h
            db += g
            if LONG:
                run, last = done // (RUN * groups), (rows - 1) // (RUN * groups)
                ends = ends_a_run(done // groups) & (done >= 0) & (run < last)
                _write_run(partials_ptr, dw, db, run, groups, group, cols, col, both(keep, ends))
                dw, db = tl.where(ends, 0.0, dw), tl.where(ends, 0.0, db)
        if LAGS:
            dy_before, x_before, mean_before, rstd_before = dy, x, mean, rstd
    if COLUMNS:
        last = (rows - 1) // (RUN * groups) if LONG else 0  # it may be empty
        _write_run(partials_ptr, dw, db, tl.cast(last, tl.int64), groups, group, cols, col, keep)


def launches(tiling: Tiling, call: Call, writes: tuple[str, ...]) -> list[Launch]:
    rows, cols, values = tiling.rows, tiling.cols, call.values

    def pointer(name: str) -> Pointer:
        return pointer_to(name, values[name], tiling.packed)

    steps: list[Launch] = []
    for name in ("gradOut", "input", "mean", "rstd", "weightOptional"):
        if name in tiling.packed:
            steps += copy_in(name, values[name], tiling.packed[name])
    has_w, wants_dx = values["weightOptional"] is not None, "gradInputOut" in writes
    dy, x, mean, rstd = (pointer(name) for name in ("gradOut", "input", "mean", "rstd"))
    w = pointer("weightOptional") if has_w else mean
    dx = pointer("gradInputOut") if wants_dx else x
    columns = [name for name in ("gradWeightOut", "gradBiasOut") if name in writes]
    partials = Pointer(WORKSPACE, tiling.partials, F32) if columns else mean
    tensors, switches = (dy, x, mean, rstd, w, dx), {"HAS_W": has_w, "WANTS_DX": wants_dx, "COLUMNS": bool(columns)}

    def finish(count: int) -> list[Launch]:
        if not columns:
            return []
        dw, db = (pointer(name) if name in writes else None for name in ("gradWeightOut", "gradBiasOut"))
        gathered = Pointer(WORKSPACE, tiling.gathered, F32)
        return finish_sums(partials, gathered, count, 2 * cols, cols, cols, dw, None, db)

    if not tiling.wide:
        constants: dict[str, Any] = {
            **switches, "ROWS": tiling.tile_rows, "COLS": tiling.tile_cols, "PROGRAMS": tiling.programs,
            "STAGES": tiling.num_stages, "EVEN": rows % tiling.tile_rows == 0 and cols == tiling.tile_cols,
            "VECTOR": tiling.vector,
        }  # fmt: skip
        arguments: tuple[Any, ...] = (*tensors, partials, rows, cols, *tiling.steps, 1, 1)
        grid, warps, registers = (tiling.programs,), tiling.num_warps, tiling.registers
        kernels = [Launch(rows_of_groups, grid, arguments, constants, warps, registers=registers)]
    else:
        words, chunks = Pointer(WORKSPACE, tiling.words, DataType.INT64), tiling.chunks
        arguments = (*tensors, words, partials, rows, cols, *tiling.steps, tiling.programs, chunks)

        def wide(SUMS: bool = False, DX: bool = False, COLUMNS: bool = False) -> Launch:
            constants = {
                "HAS_W": has_w, "SUMS": SUMS, "DX": DX, "COLUMNS": COLUMNS, "COLS": tiling.tile_cols,
                "CHUNKS": power_of_two(chunks), "EVEN": cols % tiling.tile_cols == 0, "LONG": tiling.long,
                "STAGES": tiling.num_stages,
            }  # fmt: skip
            return Launch(_wide, (tiling.programs * chunks,), arguments, constants, tiling.num_warps)

        if wants_dx:
            together, apart = wide(True, True, bool(columns)), [wide(SUMS=True), wide(DX=True, COLUMNS=bool(columns))]
            kernels = exchange(words, rows * chunks, together, apart)
        else:
            kernels = [wide(COLUMNS=True)]
    kernels += finish(tiling.partial_count)
    if held := tiling.held:
        constants = {
            **switches, "PROGRAMS": held.programs, "ROWS": held.tile_rows, "BLOCKS": held.blocks, "SLOT": held.slot,
            "SLOTS": held.slots, "LONG": held.long,
        }  # fmt: skip
        arguments = (*tensors, partials, rows, cols, 1 / cols, *tiling.steps)
        launch = Launch(hold_rows, (held.programs,), arguments, constants, held.num_warps, registers=held.registers)
        launch = launch._replace(shared_bytes=held.shared_bytes, anywhere=True)
        kernels = or_else([launch, *finish(held.programs)], kernels)
    steps += kernels
    for name in writes:
        if name in tiling.packed:
            steps += copy_out(name, values[name], tiling.packed[name])
    return steps
