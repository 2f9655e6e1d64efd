"""Tiles and workspace of LayerNorm backward on a GPU: pure integers, none of them read off a device."""

from __future__ import annotations

from math import gcd, prod
from typing import NamedTuple

from ...datatypes import itemsize
from ...spec import Call
from .._tiles import MULTIPROCESSORS, TILES_OF_A_RUN, check_length, gathered_bytes, in_runs, power_of_two
from .._views import Parts, row_step
from .tiling import ROWS_OF, lay_out_rows

#: Rows up to this stay in one program's registers.
LONGEST_WHOLE_ROW = 8192
#: Elements of a tile of short rows.
TILE = 4096
#: Programs that share the rows: two for each multiprocessor, one where a row fills it (204 against 219
#: microseconds at 16384 x 8192 in bfloat16).
PROGRAMS, PROGRAMS_OF_LONG_ROWS, LONG_ROW = 2 * MULTIPROCESSORS, MULTIPROCESSORS, 8192
#: Registers of a thread with which two programs of 8 warps share a multiprocessor; for the ends of rows that do not
#: begin on 16 bytes the compiler would take 171, though it spills none of these (bfloat16) or two (float32).
HALF_OF_THEM = 128
#: Columns of a wide row's chunk, how many programs share the rows and chunks, and their warps: one program for each
#: multiprocessor, with as much as its registers hold. 121 microseconds at 4096 x 16384 in bfloat16; 153 with half
#: the columns, 126 with half the columns and two programs a multiprocessor.
CHUNK, WIDE_PROGRAMS, WIDE_WARPS = 8192, MULTIPROCESSORS, 8


class Tiling(NamedTuple):
    rows: int
    cols: int
    #: Elements from row to row of gradOut, input and gradInputOut.
    steps: tuple[int, int, int]
    #: Tensors that go through a contiguous copy in the workspace, and where.
    packed: dict[str, int]
    wide: bool
    #: Rows and columns of a tile, and programs that share the rows; chunks of a wide row's columns.
    tile_rows: int
    tile_cols: int
    programs: int
    chunks: int
    #: Whether a program has more wide rows than one run, and how many partials all write.
    long: bool
    partial_count: int
    #: Elements of a vector of 16 bytes, and after how many rows one begins as far from such a vector again. 1 and 1
    #: where rows do not step alike or are shared, and where the compiler sees for itself that all begin with one.
    vector: int
    period: int
    num_warps: int
    num_stages: int
    #: Of a thread at most, where the compiler would take more.
    registers: int | None
    #: Places in the workspace: column sums of the programs [program][2][column], gathered ones, words of sums
    #: [row][chunk].
    partials: int
    gathered: int
    words: int
    workspace_bytes: int


def _vectors(call: Call, writes: tuple[str, ...], rows: int, cols: int, steps: tuple[int, int, int]) -> tuple[int, int]:
    """`vector` and `period` of rows that stay in one program's registers."""
    used = {name: step for name, step in zip(ROWS_OF, steps) if name in writes or name != "gradInputOut"}
    sizes = {itemsize(call.values[name].dtype) for name in used}
    vector = 16 // max(sizes)
    whole = gcd(cols, vector)
    alike = len(sizes) == 1 and (rows == 1 or all((step - cols) % vector == 0 for step in used.values()))
    seen = all(step % 16 == 0 for step in (cols, *used.values()))
    if not alike or seen or power_of_two(cols + vector - whole) > LONGEST_WHOLE_ROW:
        return 1, 1
    return vector, vector // whole


def tile(call: Call, writes: tuple[str, ...]) -> Tiling:
    cols = prod(call.normalizedShape)
    rows = call.input.numel // cols
    check_length(call, max(rows, cols))
    parts = Parts()
    steps, packed = lay_out_rows(call, writes, rows, cols, parts)
    for name, size in (("mean", rows), ("rstd", rows), ("weightOptional", cols)):
        desc = call.values[name]
        if desc is not None and row_step(desc, 1, size) is None:
            packed[name] = parts.take(size * itemsize(desc.dtype))
    columns = [name for name in ("gradWeightOut", "gradBiasOut") if name in writes]
    for name in columns:
        if row_step(call.values[name], 1, cols) is None:
            packed[name] = parts.take(cols * itemsize(call.values[name].dtype))
    # Results of 16 bits do not show what runs gain; long rows' partials would take a tenth of the time.
    shows = any(itemsize(call.values[name].dtype) == 4 for name in columns)
    wide = cols > LONGEST_WHOLE_ROW
    vector, period = (1, 1) if wide else _vectors(call, writes, rows, cols, steps)
    # What is not read in vectors of 16 bytes cannot be copied ahead; element by element is slower than waiting.
    num_stages = 3 if vector > 1 or all(step % 16 == 0 for step in (cols, *steps)) else 1
    if wide:
        tile_rows, tile_cols, num_warps = 1, CHUNK, WIDE_WARPS
        chunks = -(-cols // CHUNK)
        programs = max(1, min(rows, WIDE_PROGRAMS // chunks))
        runs = -(-rows // (programs * TILES_OF_A_RUN))
        long = shows and runs > 1
        partial_count = programs * runs if long else programs
    else:
        tile_cols = max(16, power_of_two(cols + vector - vector // period))
        tile_rows = max(1, TILE // tile_cols)
        num_warps = 4 if tile_cols <= 2048 else 8
        programs = PROGRAMS_OF_LONG_ROWS if tile_cols >= LONG_ROW else PROGRAMS
        tiles = -(-rows // (period * tile_rows))
        programs //= period
        if shows and tile_rows > 1:
            programs = in_runs(tiles, programs, 1)
        programs = min(rows, period * min(programs, tiles))
        chunks, partial_count, long = 0, programs, False
    registers = HALF_OF_THEM if period > 1 and num_warps == 8 and tile_cols < LONG_ROW else None
    partials = parts.take(partial_count * 2 * cols * 4 if columns else 0)
    gathered = parts.take(gathered_bytes(partial_count, 2 * cols) if columns else 0)
    words = parts.take(rows * chunks * 8)
    return Tiling(
        rows, cols, steps, packed, wide, tile_rows, tile_cols, programs, chunks, long, partial_count,
        vector, period, num_warps, num_stages, registers, partials, gathered, words, parts.bytes,
    )  # fmt: skip
