"""Layout, tasks and workspace of BatchNorm's backward reduce: pure integers."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from ...datatypes import F32, itemsize
from ...spec import Call
from .._images import joined
from .._views import AHEAD, CACHED_BYTES, FOURS_BYTES, PAGE, PIXEL_ROWS, Parts, Places, row_step, task_elements
from .layout import Layout, lay_out

#: Planes of no more elements have 8 sums of each kind that go on from sample to sample: 512x128x121 in float32 takes
#: 1.2 instead of 1.5 ms, 16x128x100 13 instead of 15 microseconds. (With 16 sums of each kind 128x1024x49 in bfloat16
#: takes 0.47 instead of 0.40 ms.)
LARGEST_SMALL_PLANE = 256
#: So many vectors of a plane and samples are summed in float32, together; of few samples fewer, so that there are
#: WANTED_TASKS.
SUMMED, WANTED_TASKS = 20, 16
#: Channels that have such sums at a time, 64 KiB in the L2 cache. With 512, memory is read in pieces too short for the
#: prefetchers: 0.95 of the speed, and of 2x2 images 0.5.
TABLE_CHANNELS = 1024

#: Pixels that may in part be in the L3 cache are asked for further ahead: 2x128x3364 in float32 takes 79 instead of 87
#: microseconds, 8x256x784 214 instead of 250. Larger ones lose 1 to 3 % by it. Planes are not asked for there: 3 to 5 %
#: faster on a Xeon.
AHEAD_IN_CACHE = 8192
#: Rows of so many bytes or more are summed by fours too: their sums fit no L1 cache (5000x4000 takes 5.0 instead of 6.0
#: ms, in bfloat16 2.8 instead of 3.4). Shorter ones are no streams then (20000x1000 in bfloat16: 2.5 instead of 1.7).
WIDE_ROW_BYTES = 5 << 10
#: Of what no cache holds, the sums of some columns are added up in float64 with every row: where those of all are after
#: PIXEL_ROWS rows, memory waits. 65536x512 in float32 takes 8.1 instead of 8.5 ms while the host's memory is busy, 4.9
#: instead of 5.4 while it is not. Rows that have fewer bytes than this lose 3 to 10 %.
GRADUAL_ROW_BYTES = 1024
#: Pixels of few channels are joined to rows of so many elements (32 x 64 x 12544 in bfloat16: 1.4 instead of 1.9 ms).
ROW_ELEMENTS = 192
#: Planes with gaps inside are divided until there are so many, to be work for many threads.
FEWEST_PLANES = 64
#: Runs are summed in pieces of so many elements, so that a few long ones are work for many threads.
PIECE = 1 << 16


class Tiling(NamedTuple):
    channels: int
    layout: Layout
    #: How often the channels are gone through: times around them, and for planes also pieces of a run.
    samples: int
    pieces: int
    #: Pixels: how many make a row of the kernel.
    together: int
    #: mean, and invstd if it is asked for, as contiguous float32: where, if they are not already.
    converted: dict[str, int]
    #: Planes: samples and channels of a task. Pixels: samples, of which a task has several if it has all their chunks.
    task_samples: int
    task_channels: int
    #: Small planes: samples summed in float32, lane by lane; else 0.
    samples_together: int
    #: Bytes ahead that are asked for.
    ahead: int
    #: Pixels: chunks of a sample, and of a task; whether rows are summed by fours.
    chunks: int
    task_chunks: int
    fours: bool
    #: And whether sums are added up in float64 gradually.
    gradually: bool
    #: Places in the workspace: sums of the tasks, float64, [task][2][channel or column], for pixels after float32 ones
    #: of the chunk at hand; means of a row; totals of its columns; results to be scattered; small planes' sums.
    partials: int
    table: int
    totals: int
    scattered: dict[str, int]
    tables: Places
    workspace_bytes: int

    @property
    def cols(self) -> int:
        return self.together * self.channels

    @property
    def sample_tasks(self) -> int:
        """Blocks of samples that tasks have."""
        return -(-self.samples // self.task_samples)

    @property
    def pixel_tasks(self) -> int:
        return self.sample_tasks * -(-self.chunks // self.task_chunks)


def padded(channels: int) -> int:
    return (channels + 15) // 16 * 16


def tile(call: Call, writes: tuple[str, ...]) -> Tiling:
    channels, width = call.input.shape[1], itemsize(call.input.dtype)
    parts = Parts()
    layout = lay_out(call.gradOut, call.input, parts)
    while layout.inner and channels * prod(axis.size for axis in layout.outer) < FEWEST_PLANES:
        first, *inner = layout.inner
        layout = layout._replace(outer=[*layout.outer, first], inner=inner)
    run, samples, rows = layout.run, prod(axis.size for axis in layout.outer), prod(axis.size for axis in layout.inner)
    converted = {}
    for name in ("mean", *(["invstd"] if "gradWeight" in writes else [])):
        desc = call.values[name]
        if desc.dtype != F32 or row_step(desc, 1, channels) is None:
            converted[name] = parts.take(channels * 4)
    size, inputs = task_elements(call.input.numel), 2 * call.input.numel * width
    pieces, together, tables = 1, 1, Places(0, 0, 0)
    task_channels, samples_together, chunks, task_chunks, fours, gradually = 0, 0, 0, 0, False, False
    if layout.pixels:
        together = joined(run.dy == run.x == channels, channels, run.size, ROW_ELEMENTS)
        cols = together * channels
        chunks = -(-run.size // (PIXEL_ROWS * together))
        # Longer than other tasks: 65536x512 in float32 comes at 0.97 instead of 0.94 of the probe's speed. Of small
        # calls still longer, since a task writes sums as large as some rows (1x576x1024 in float32: 38 instead of 44
        # microseconds, or instead of 58 where the two cores are far apart; but half as many tasks make 16 threads 1.3
        # times as slow). And of PIXEL_ROWS or more: the sums of fewer would be larger than what they are of.
        rows_of_chunk = min(PIXEL_ROWS, -(-run.size // together))
        elements = max(size, min(1 << 16, call.input.numel // 8), min(1 << 20, call.input.numel // 32))
        most = max(-(-PIXEL_ROWS // rows_of_chunk), elements // (rows_of_chunk * cols))
        task_chunks, task_samples = min(chunks, most), max(1, most // chunks)
        ahead = AHEAD if inputs > CACHED_BYTES else AHEAD_IN_CACHE
        apart = run.dy * together * width % PAGE and run.x * together * width % PAGE
        wide = cols * width >= WIDE_ROW_BYTES
        fours = bool(apart) and (inputs <= FOURS_BYTES[width] or wide)
        gradually = (
            cols * width >= GRADUAL_ROW_BYTES and not wide and inputs > CACHED_BYTES and run.size % together == 0
        )
        tasks = -(-samples // task_samples) * -(-chunks // task_chunks)
        partials = parts.take(tasks * padded(cols) * 24)
        table, totals = parts.take(padded(cols) * 4), parts.take((2 * padded(cols) + 16) * 8)
    else:
        ahead = AHEAD if inputs > CACHED_BYTES else 0
        image = rows * min(PIECE, run.size)
        pieces = -(-run.size // PIECE)
        samples *= pieces
        task_channels = max(1, min(channels, size // image))
        task_samples = max(1, min(16, size // (task_channels * image)))
        if image <= LARGEST_SMALL_PLANE and rows == 1:
            task_channels = min(task_channels, TABLE_CHANNELS)
            worth = samples * -(-channels // task_channels) // WANTED_TASKS
            samples_together = max(1, min(SUMMED - -(-image // 16), worth))
            task_samples = max(1, size // (task_channels * image * samples_together)) * samples_together
        blocks = -(-samples // task_samples)
        partials, table, totals = parts.take(blocks * 2 * padded(channels) * 8), 0, 0
        if samples_together:
            tables = parts.take_places(-(-task_channels // 8) * 512, blocks * -(-channels // task_channels))
    scattered = {
        name: parts.take(channels * itemsize(call.values[name].dtype))
        for name in writes
        if row_step(call.values[name], 1, channels) is None
    }
    return Tiling(
        channels, layout, samples, pieces, together, converted, task_samples, task_channels, samples_together, ahead,
        chunks, task_chunks, fours, gradually, partials, table, totals, scattered, tables, parts.bytes,
    )  # fmt: skip
