"""Chunks and workspace of LayerNorm backward: pure integers."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from ...datatypes import F32, NUMPY
from ...spec import Call
from .._views import CHUNK_ROWS, SPAN, Parts, row_step, worth_streaming

#: Rows longer than this are split over threads; a whole row is one span.
LONGEST_WHOLE_ROW = SPAN
#: Rows that take turns on a block of columns, whose sums then stay in the L1 cache; short rows leave them there anyhow.
#: Fewer columns at a time than this are no stream a prefetcher follows.
GROUP_ROWS, LONGEST_UNGROUPED = 4, 2048


class Tiling(NamedTuple):
    rows: int
    cols: int
    #: Elements from row to row of gradOut, input and gradInputOut.
    steps: tuple[int, int, int]
    #: Tensors that are copied into (inputs) or from (the output) rows of contiguous columns, and where.
    packed: dict[str, int]
    #: mean, rstd and weight as contiguous float32: where, if they are not already.
    converted: dict[str, int]
    split: bool
    chunk_rows: int
    group_rows: int
    chunks: int
    spans: int
    streamed: bool
    #: Places in the workspace: column sums of the chunks; row sums of the spans; column results to be scattered.
    partials: int
    row_sums: int
    scattered: dict[str, int]
    #: Outputs whose column sums need no second stage: one chunk, contiguous float32.
    direct: tuple[str, ...]
    workspace_bytes: int


def padded(cols: int) -> int:
    return (cols + 15) // 16 * 16


def tile(call: Call, writes: tuple[str, ...]) -> Tiling:
    cols = prod(call.normalizedShape)
    rows = call.input.numel // cols
    parts = Parts()
    packed, steps = {}, []
    for name in ("gradOut", "input", "gradInputOut"):
        step = row_step(call.values[name], rows, cols) if name in (*writes, "gradOut", "input") else 0
        if step is None:
            packed[name], step = parts.take(rows * cols * NUMPY[call.values[name].dtype].itemsize), cols
        steps.append(step)
    converted = {}
    for name, size in (("mean", rows), ("rstd", rows), ("weightOptional", cols)):
        desc = call.values[name]
        if desc is None or desc.dtype != F32 or row_step(desc, 1, size) is None:
            converted[name] = parts.take(size * 4)
    columns = [name for name in ("gradWeightOut", "gradBiasOut") if name in writes]
    split = cols > LONGEST_WHOLE_ROW
    # 64 chunks feed any machine's threads; less than 8 Ki elements are not worth a task.
    chunk_rows = CHUNK_ROWS if split else min(CHUNK_ROWS, max(-(-rows // 64), -(-8192 // cols)))
    group_rows = 1 if cols <= LONGEST_UNGROUPED else GROUP_ROWS
    chunks, spans = -(-rows // chunk_rows), -(-cols // SPAN)
    partials = parts.take(chunks * 2 * padded(cols) * 4 if columns else 0)
    row_sums = parts.take(rows * spans * 16)
    contiguous = [name for name in columns if row_step(call.values[name], 1, cols) is not None]
    direct = tuple(name for name in contiguous if chunks == 1 and call.values[name].dtype == F32)
    scattered: dict[str, int] = {
        name: parts.take(cols * NUMPY[call.values[name].dtype].itemsize) for name in columns if name not in contiguous
    }
    streamed = "gradInputOut" in writes and worth_streaming(
        rows * cols * NUMPY[call.gradInputOut.dtype].itemsize, cols * NUMPY[call.gradInputOut.dtype].itemsize
    )
    return Tiling(
        rows, cols, (steps[0], steps[1], steps[2]), packed, converted, split, chunk_rows, group_rows, chunks, spans,
        streamed, partials, row_sums, scattered, direct, parts.bytes,
    )  # fmt: skip
