"""LayerNorm backward on a GPU.

Rows that fit one program's registers are read once: programs share the rows, keep the column sums in registers, and
write one partial each. Wider rows are read twice: a chunk of columns of some rows for the sums, then for dx.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ...datatypes import F32
from ...spec import Call
from .._gpu import Launch, Pointer, finish_sums, pack, pointer_to, unpack
from .._program import WORKSPACE
from .._tiles import power_of_two
from .gpu_tiling import PIECE, PIECE_WARPS, Tiling


@triton.jit
def _rows(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, w_ptr, dx_ptr, partials_ptr, rows, cols, dy_step, x_step, dx_step,
    HAS_W: tl.constexpr, WANTS_DX: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    PROGRAMS: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Every PROGRAMS-th tile of rows: dx, and the sums of dy * x_hat and dy of their columns. EVEN: tiles cover the
    rows without a rest, and no mask is looked at."""
    program = tl.program_id(0)
    col = tl.arange(0, COLS)
    keep = col < cols
    w = tl.full([COLS], 1.0, tl.float32)
    if HAS_W:
        w = tl.load(w_ptr + col, mask=keep, other=0.0).to(tl.float32)
    dw, db = tl.zeros([ROWS, COLS], tl.float32), tl.zeros([ROWS, COLS], tl.float32)
    for tile in tl.range(program, tl.cdiv(rows, ROWS), PROGRAMS, num_stages=STAGES):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = row < rows
        mask = inside[:, None] & keep[None, :]
        dy_at, x_at = dy_ptr + row[:, None] * dy_step + col[None, :], x_ptr + row[:, None] * x_step + col[None, :]
        mean = tl.load(mean_ptr + row, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=inside, other=0.0).to(tl.float32)
        if EVEN:
            dy, x = tl.load(dy_at).to(tl.float32), tl.load(x_at).to(tl.float32)
            x_hat = (x - mean[:, None]) * rstd[:, None]
        else:
            dy = tl.load(dy_at, mask=mask, other=0.0).to(tl.float32)
            x = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
            x_hat = tl.where(mask, (x - mean[:, None]) * rstd[:, None], 0.0)
        if WANTS_DX:
            wdy = dy * w[None, :]
            c1 = tl.sum(wdy, axis=1) / cols
            c2 = tl.sum(wdy * x_hat, axis=1) / cols
            dx = (rstd[:, None] * (wdy - c1[:, None] - x_hat * c2[:, None])).to(dx_ptr.dtype.element_ty)
            if EVEN:
                tl.store(dx_ptr + row[:, None] * dx_step + col[None, :], dx)
            else:
                tl.store(dx_ptr + row[:, None] * dx_step + col[None, :], dx, mask=mask)
        if COLUMNS:
            dw += dy * x_hat
            db += dy
    if COLUMNS:
        place = partials_ptr + program.to(tl.int64) * 2 * cols + col
        tl.store(place, tl.sum(dw, axis=0), mask=keep)
        tl.store(place + cols, tl.sum(db, axis=0), mask=keep)


@triton.jit
def _wide_sums(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, w_ptr, sums_ptr, partials_ptr, rows, cols, dy_step, x_step, groups, chunks,
    HAS_W: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A chunk of columns of every groups-th tile of rows: sums of wdy and wdy * x_hat of each row, of dy * x_hat and dy
    of each column."""
    chunk, group = tl.program_id(0), tl.program_id(1)
    col = chunk * COLS + tl.arange(0, COLS)
    keep = col < cols
    w = tl.full([COLS], 1.0, tl.float32)
    if HAS_W:
        w = tl.load(w_ptr + col, mask=keep, other=0.0).to(tl.float32)
    dw, db = tl.zeros([ROWS, COLS], tl.float32), tl.zeros([ROWS, COLS], tl.float32)
    for tile in tl.range(group, tl.cdiv(rows, ROWS), groups, num_stages=STAGES):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = row < rows
        mask = inside[:, None] & keep[None, :]
        dy = tl.load(dy_ptr + row[:, None] * dy_step + col[None, :], mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row[:, None] * x_step + col[None, :], mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + row, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=inside, other=0.0).to(tl.float32)
        x_hat = tl.where(mask, (x - mean[:, None]) * rstd[:, None], 0.0)
        wdy = dy * w[None, :]
        place = sums_ptr + row * 2 * chunks + chunk
        tl.store(place, tl.sum(wdy, axis=1), mask=inside)
        tl.store(place + chunks, tl.sum(wdy * x_hat, axis=1), mask=inside)
        if COLUMNS:
            dw += dy * x_hat
            db += dy
    if COLUMNS:
        place = partials_ptr + group.to(tl.int64) * 2 * cols + col
        tl.store(place, tl.sum(dw, axis=0), mask=keep)
        tl.store(place + cols, tl.sum(db, axis=0), mask=keep)


@triton.jit
def _wide_dx(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, w_ptr, dx_ptr, sums_ptr, cols, dy_step, x_step, dx_step, chunks, pieces,
    HAS_W: tl.constexpr, CHUNKS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """A piece of a row. Those that were summed last come first: the L2 cache still has them."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    row = (program // pieces).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    place = sums_ptr + row * 2 * chunks + chunk
    c1 = tl.sum(tl.load(place, mask=chunk < chunks, other=0.0)) / cols
    c2 = tl.sum(tl.load(place + chunks, mask=chunk < chunks, other=0.0)) / cols
    mean, rstd = tl.load(mean_ptr + row).to(tl.float32), tl.load(rstd_ptr + row).to(tl.float32)
    col = program % pieces * COLS + tl.arange(0, COLS)
    keep = col < cols
    wdy = tl.load(dy_ptr + row * dy_step + col, mask=keep, other=0.0, eviction_policy="evict_first").to(tl.float32)
    if HAS_W:
        wdy *= tl.load(w_ptr + col, mask=keep, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_step + col, mask=keep, other=0.0, eviction_policy="evict_first").to(tl.float32)
    dx = rstd * (wdy - c1 - (x - mean) * rstd * c2)
    place = dx_ptr + row * dx_step + col
    tl.store(place, dx.to(dx_ptr.dtype.element_ty), mask=keep, eviction_policy="evict_first")


def launches(tiling: Tiling, call: Call, writes: tuple[str, ...]) -> list[Launch]:
    rows, cols, values = tiling.rows, tiling.cols, call.values

    def pointer(name: str) -> Pointer:
        return pointer_to(name, values[name], tiling.packed)

    steps: list[Launch] = []
    for name in ("gradOut", "input", "mean", "rstd", "weightOptional"):
        if name in tiling.packed:
            steps += pack(name, values[name], tiling.packed[name])
    has_w, wants_dx = values["weightOptional"] is not None, "gradInputOut" in writes
    dy, x, mean, rstd = (pointer(name) for name in ("gradOut", "input", "mean", "rstd"))
    w = pointer("weightOptional") if has_w else mean
    dx = pointer("gradInputOut") if wants_dx else x
    columns = [name for name in ("gradWeightOut", "gradBiasOut") if name in writes]
    partials, row_sums = Pointer(WORKSPACE, tiling.partials, F32), Pointer(WORKSPACE, tiling.row_sums, F32)
    inputs, dy_step, x_step, dx_step = (dy, x, mean, rstd, w), *tiling.steps
    if not tiling.wide:
        constants: dict[str, Any] = {
            "HAS_W": has_w, "WANTS_DX": wants_dx, "COLUMNS": bool(columns), "ROWS": tiling.tile_rows,
            "COLS": tiling.tile_cols, "PROGRAMS": tiling.programs, "STAGES": tiling.num_stages,
            "EVEN": rows % tiling.tile_rows == 0 and cols == tiling.tile_cols,
        }  # fmt: skip
        arguments: tuple[Any, ...] = (*inputs, dx, partials, rows, cols, dy_step, x_step, dx_step)
        steps.append(Launch(_rows, (tiling.programs,), arguments, constants, tiling.num_warps))
    else:
        constants = {
            "HAS_W": has_w, "COLUMNS": bool(columns), "ROWS": tiling.tile_rows, "COLS": tiling.tile_cols,
            "STAGES": tiling.num_stages,
        }  # fmt: skip
        pieces = -(-cols // PIECE)
        arguments = (*inputs, row_sums, partials, rows, cols, dy_step, x_step, tiling.programs, tiling.chunks)
        steps.append(Launch(_wide_sums, (tiling.chunks, tiling.programs), arguments, constants, tiling.num_warps))
        if wants_dx:
            constants = {"HAS_W": has_w, "CHUNKS": power_of_two(tiling.chunks), "COLS": PIECE}
            arguments = (*inputs, dx, row_sums, cols, dy_step, x_step, dx_step, tiling.chunks, pieces)
            steps.append(Launch(_wide_dx, (rows * pieces,), arguments, constants, PIECE_WARPS))
    if columns:
        dw, db = (pointer(name) if name in writes else None for name in ("gradWeightOut", "gradBiasOut"))
        gathered = Pointer(WORKSPACE, tiling.gathered, F32)
        steps += finish_sums(partials, gathered, tiling.programs, 2 * cols, cols, cols, dw, None, db)
    for name in writes:
        if name in tiling.packed:
            steps += unpack(name, values[name], tiling.packed[name])
    return steps
