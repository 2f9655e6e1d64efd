"""Chunks and workspace of LayerNorm backward: pure integers."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from ...datatypes import F32, itemsize
from ...spec import Call
from .._views import CHUNK_ROWS, LONGEST_BLOCK, ROW_BLOCK, ROW_SPAN, Parts, row_step, task_elements, worth_streaming

#: Longer rows are split over threads, by columns; and where there are few rows, those of more than LONGEST_OF_FEW
#: columns: of as many chunks as threads want, of a row or three each, the column sums that are written and read again
#: are more than the data (on a Zen 5 24x16384 in float32 takes 60 instead of 84 microseconds, 10x30389 in bfloat16 46
#: instead of 64). Others are read once: on a Xeon 600x40001 in float32 takes 23 instead of 31 ms, 300x100003 32
#: instead of 34. At 131072 columns both ways take as long.
LONGEST_WHOLE_ROW, LONGEST_OF_FEW, FEW_ROWS = 131072, 1536, 2 * CHUNK_ROWS
#: Few rows are cut into so many tasks (chunks of whole rows, pieces of a batch of split ones), since each writes column
#: sums that are read again; and into fewer of so many elements.
WANTED_TASKS, TASK_ELEMENTS = 16, 8192
#: Split rows are taken in batches of so many bytes of an input, in which dx's second reading finds them in the caches.
BATCH_BYTES = 4 << 20
#: Results in 16 bits go past the caches from so many times as many bytes on: of 2 to 3 MiB they lose 2 to 4 % by it.
SIXTEEN_BITS_WORTH = 2


class Tiling(NamedTuple):
    rows: int
    cols: int
    #: Elements from row to row of gradOut, input and gradInputOut.
    steps: tuple[int, int, int]
    #: Tensors that are copied into (inputs) or from (the output) rows of contiguous columns, and where.
    packed: dict[str, int]
    #: mean, rstd and weight as contiguous float32: where, if they are not already.
    converted: dict[str, int]
    chunk_rows: int
    chunks: int
    task_chunks: int
    #: Split rows: how many pieces (0: they are whole), columns of one, blocks of a row; and how many chunks are summed
    #: before their dx is made.
    pieces: int
    piece: int
    blocks: int
    batch: int
    streamed: bool
    #: Column sums: whether they are float64 sums of a task's chunks or float32 ones of each chunk, how many there are,
    #: and bytes from one to the next.
    wide: bool
    sums: int
    partial_step: int
    #: Places in the workspace: the column sums; row sums of the blocks; column results to be scattered.
    partials: int
    totals: int
    scattered: dict[str, int]
    workspace_bytes: int


def partial_bytes(cols: int) -> int:
    """A chunk's column sums: for every 16 columns, those of grad_weight and of grad_bias; or one of both in float64."""
    return (cols + 15) // 16 * 128


#: The tensors of rows.
ROWS_OF = ("gradOut", "input", "gradInputOut")


def lay_out_rows(
    call: Call, writes: tuple[str, ...], rows: int, cols: int, parts: Parts
) -> tuple[tuple[int, int, int], dict[str, int]]:
    """Elements from row to row of gradOut, input and gradInputOut; and the places of those that must be packed."""
    steps, packed = [0, 0, 0], {}
    for i, name in enumerate(ROWS_OF):
        if name == "gradInputOut" and name not in writes:
            continue
        step = row_step(call.values[name], rows, cols)
        if step is None:
            packed[name], step = parts.take(rows * cols * itemsize(call.values[name].dtype)), cols
        steps[i] = step if rows > 1 else cols  # one row is read as many are
    return (steps[0], steps[1], steps[2]), packed


def tile(call: Call, writes: tuple[str, ...]) -> Tiling:
    cols = prod(call.normalizedShape)
    rows = call.input.numel // cols
    parts = Parts()
    steps, packed = lay_out_rows(call, writes, rows, cols, parts)
    converted = {}
    for name, size in (("mean", rows), ("rstd", rows), ("weightOptional", cols)):
        desc = call.values[name]
        if desc is None or desc.dtype != F32 or row_step(desc, 1, size) is None:
            converted[name] = parts.take(size * 4)
    columns = [name for name in ("gradWeightOut", "gradBiasOut") if name in writes]
    split = cols > LONGEST_WHOLE_ROW or (cols > LONGEST_OF_FEW and rows < FEW_ROWS)
    chunk_rows = CHUNK_ROWS if split else min(CHUNK_ROWS, max(-(-rows // WANTED_TASKS), -(-TASK_ELEMENTS // cols)))
    chunks = -(-rows // chunk_rows)
    task_chunks = max(1, max(task_elements(rows * cols), min(1 << 20, rows * cols // 32)) // (chunk_rows * cols))
    batch = max(1, BATCH_BYTES // (CHUNK_ROWS * cols * itemsize(call.input.dtype)))
    pieces, piece, blocks = 0, 0, 0
    if split:
        blocks = -(-cols // ROW_BLOCK)
        least = -(-TASK_ELEMENTS // (min(rows, CHUNK_ROWS) * ROW_BLOCK))
        piece = min(ROW_SPAN, max(least, blocks * min(chunks, batch) // WANTED_TASKS) * ROW_BLOCK)
        pieces = -(-cols // piece)
    # A task keeps its chunks' column sums in the cache and adds them up: to write down those of every chunk and read
    # them again is 3 % (float32) or 6 % (16 bits) of all that is moved, and as much again to bring that memory in.
    wide = task_chunks > 1 and not split
    sums = -(-chunks // task_chunks) if wide else chunks
    partial_step = partial_bytes(cols) * (3 if wide else 1)
    partials = parts.take(sums * partial_step if columns else 0)
    totals = parts.take(rows * blocks * 16)
    scattered: dict[str, int] = {
        name: parts.take(cols * itemsize(call.values[name].dtype))
        for name in columns
        if row_step(call.values[name], 1, cols) is None
    }
    streamed = False
    if "gradInputOut" in writes:
        contiguous = steps[2] == cols or cols > LONGEST_BLOCK  # else too many lines would be written in two parts
        streamed = contiguous and worth_streaming(rows * cols, itemsize(call.gradInputOut.dtype), SIXTEEN_BITS_WORTH)
    return Tiling(
        rows, cols, steps, packed, converted, chunk_rows, chunks, task_chunks, pieces, piece, blocks, batch, streamed,
        wide, sums, partial_step, partials, totals, scattered, parts.bytes,
    )  # fmt: skip
