"""Tiles and workspace of LayerNorm backward on a GPU: pure integers, none of them read off a device."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from ...datatypes import itemsize
from ...spec import Call
from .._tiles import (
    MULTIPROCESSORS,
    SHARED_MEMORY,
    TILES_OF_A_RUN,
    check_length,
    gathered_bytes,
    in_runs,
    power_of_two,
    slot_of_runs,
)
from .._views import Parts, row_step
from .tiling import lay_out_rows

#: Rows up to this stay in one program's registers.
LONGEST_WHOLE_ROW = 8192
#: Of rows up to this, no program adds up more than a run of tiles, where results show it.
LONGEST_IN_RUNS = 2048


class RowPrograms(NamedTuple):
    """Programs for rows of up to so many columns: how many on a multiprocessor, elements of a tile and warps of each,
    registers of a thread at most."""

    cols: int
    each: int
    tile: int
    num_warps: int
    registers: int | None = None


#: In vectors, one program a multiprocessor where a row fills it (204 against 219 microseconds at 16384 x 8192 in
#: bfloat16). Element by element, addresses take registers, and nothing is copied ahead: as many programs as can be wait
#: for memory in turns, with as many elements as do not spill, however many rows there are.
ROW_PROGRAMS = {
    True: (RowPrograms(2048, 2, 4096, 4), RowPrograms(4096, 2, 4096, 8), RowPrograms(8192, 1, 8192, 8)),
    False: (
        RowPrograms(256, 4, 1024, 4, 128), RowPrograms(2048, 3, 2048, 8, 80), RowPrograms(4096, 2, 4096, 8, 128),
        RowPrograms(8192, 2, 8192, 16),
    ),
}  # fmt: skip
#: Columns of a wide row's chunk, how many programs share the rows and chunks, and their warps: one program for each
#: multiprocessor, with as much as its registers hold. 121 microseconds at 4096 x 16384 in bfloat16; 153 with half
#: the columns, 126 with half the columns and two programs a multiprocessor. Element by element addresses take as many
#: again: 61 against 83 at 993 x 9895 with half the columns (before such rows were held).
CHUNK, WIDE_PROGRAMS, WIDE_WARPS = {True: 8192, False: 4096}, MULTIPROCESSORS, 8


class HeldPrograms(NamedTuple):
    """Programs for rows of up to so many columns that are held in shared memory: how many on a multiprocessor, their
    warps, rows of a tile if they lie one after the other, registers of a thread at most."""

    cols: int
    each: int
    num_warps: int
    rows: int
    registers: int


#: Where rows do not come in vectors. A thread has five numbers in registers for each of its columns, of which there are
#: up to 34 where they are to fit; programs are as many as there is room for. In bfloat16 (trials by hand, microseconds)
#: 60000 x 131 takes 26 (29 with a row at a time; 50 from memory), 30000 x 263 25 (35 with two warps; 47), 40000 x 1027
#: 80 (105 with 4 programs, 100 with 4 warps; 174), 16384 x 2137 67 (75 with 4 warps; 152), 4096 x 4275 39 (43 with 8
#: warps; 96), 4096 x 7001 60 (62 with 16; 120), 4096 x 12001 129 (152 with 16, though 8 spill; 216), 4096 x 15801 237
#: (281). Up to 32 columns fill no warp: 200000 x 31 takes 34, and 27 from memory.
SHORTEST_HELD_ROW = 33
HELD_ROWS = (
    HeldPrograms(192, 16, 1, 4, 128), HeldPrograms(448, 16, 1, 1, 128), HeldPrograms(1088, 8, 2, 1, 128),
    HeldPrograms(2176, 4, 2, 1, 255), HeldPrograms(4352, 2, 4, 1, 255), HeldPrograms(12288, 1, 8, 1, 255),
    HeldPrograms(15872, 1, 16, 1, 128),
)  # fmt: skip
#: Runs of rows that a program adds up. (Each has 6 of the 8 roundings that are allowed, if all go the same way.)
HELD_RUNS = 4
#: Rows are counted past their end, by some for each of the programs.
MOST_HELD_ROWS = 1 << 30


class HeldRows(NamedTuple):
    programs: int
    #: Rows of a tile; its elements in shared memory, a power of two, and how many tiles there are at a time.
    tile_rows: int
    slot: int
    slots: int
    #: Columns of a thread, in powers of two, and those in the ones before.
    blocks: tuple[tuple[int, int], ...]
    #: Whether a program has more rows than one run.
    long: bool
    num_warps: int
    registers: int
    shared_bytes: int


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
    #: Elements that every row is a multiple of, and begins at one: those of 16 bytes, or 1.
    vector: int
    num_warps: int
    num_stages: int
    registers: int | None
    #: How rows that do not come in vectors are held in shared memory, where that is there.
    held: HeldRows | None
    #: Places in the workspace: column sums of the programs [program][2][column], gathered ones, words of sums
    #: [row][chunk].
    partials: int
    gathered: int
    words: int
    workspace_bytes: int


def programs_of_rows(cols: int, in_vectors: bool) -> RowPrograms:
    return next(programs for programs in ROW_PROGRAMS[in_vectors] if cols <= programs.cols)


def programs_of_held_rows(cols: int) -> HeldPrograms | None:
    if cols < SHORTEST_HELD_ROW:
        return None
    return next((programs for programs in HELD_ROWS if cols <= programs.cols), None)


def hold(rows: int, cols: int, together: bool, sizes: tuple[int, int, int], shows: bool) -> HeldRows | None:
    """Together: rows lie one after the other. Sizes: bytes of an element of gradOut, input and gradInputOut."""
    programs = programs_of_held_rows(cols)
    if programs is None or rows > MOST_HELD_ROWS:
        return None
    _, each, num_warps, tile_rows, registers = programs
    if not together:
        tile_rows = 1
    blocks, slot = slot_of_runs((tile_rows - 1) * cols, cols, 32 * num_warps, 16 // min(sizes))
    for slots in (2, 1):
        # With what sums take on their way from warp to warp.
        shared_bytes = slot * (slots * (sizes[0] + sizes[1]) + sizes[2]) + 256
        if each * (shared_bytes + 1024) <= SHARED_MEMORY:
            count = each * MULTIPROCESSORS
            if shows:
                count = in_runs(rows, count, HELD_RUNS)
            count = min(count, -(-rows // tile_rows))
            long = shows and rows > count * TILES_OF_A_RUN
            return HeldRows(count, tile_rows, slot, slots, blocks, long, num_warps, registers, shared_bytes)
    return None


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
    size = max(itemsize(call.values[name].dtype) for name in ("gradOut", "input"))
    in_vectors = all(step % (16 // size) == 0 for step in (cols, *steps))
    vector = 16 // size if in_vectors else 1
    if wide:  # the compiler sees only whether they are multiples of 16 elements
        in_vectors = all(step % 16 == 0 for step in (cols, *steps))
    # Elements of 2 bytes cannot be copied ahead, and those of 4 fill the registers.
    num_stages = 3 if in_vectors else 1
    if wide:
        tile_rows, tile_cols, num_warps, registers = 1, CHUNK[in_vectors], WIDE_WARPS, None
        chunks = -(-cols // tile_cols)
        programs = max(1, min(rows, WIDE_PROGRAMS // chunks))
        runs = -(-rows // (programs * TILES_OF_A_RUN))
        long = shows and runs > 1
        partial_count = programs * runs if long else programs
    else:
        tile_cols = max(16, power_of_two(cols))
        _, each, elements, num_warps, registers = programs_of_rows(tile_cols, in_vectors)
        tile_rows, programs = elements // tile_cols, each * MULTIPROCESSORS
        tiles = -(-rows // tile_rows)
        if shows and tile_cols <= LONGEST_IN_RUNS:
            programs = in_runs(tiles, programs, 1)
        programs = min(tiles, programs)
        chunks, partial_count, long = 0, programs, False
    of_dx = "gradInputOut" if "gradInputOut" in writes else "input"
    dy_size, x_size, dx_size = (itemsize(call.values[name].dtype) for name in ("gradOut", "input", of_dx))
    together = all(step == cols for step in steps[: 3 if "gradInputOut" in writes else 2])
    held = None if in_vectors else hold(rows, cols, together, (dy_size, x_size, dx_size), shows)
    most = max(partial_count, held.programs if held else 0)
    partials = parts.take(most * 2 * cols * 4 if columns else 0)
    gathered = parts.take(gathered_bytes(most, 2 * cols) if columns else 0)
    words = parts.take(rows * chunks * 8)
    return Tiling(
        rows, cols, steps, packed, wide, tile_rows, tile_cols, programs, chunks, long, partial_count,
        vector, num_warps, num_stages, registers, held, partials, gathered, words, parts.bytes,
    )  # fmt: skip
