"""Layout, splits and workspace of GroupNorm backward: pure integers."""

from __future__ import annotations

from typing import NamedTuple

from ...datatypes import F32, itemsize
from ...spec import Call
from .._images import Images, joined, lay_out
from .._views import (
    AHEAD,
    CACHED_BYTES,
    FOURS_BYTES,
    LARGEST_LANES,
    PAGE,
    SPAN,
    Parts,
    Places,
    row_step,
    task_elements,
    worth_streaming,
)

#: With fewer whole groups (planes) or samples (pixels) than this, those of more elements, or a single one, are split
#: over threads. Large groups are not for their size: 1x128x262144 in 32 groups takes two threads 7.2 instead of 7.7 ms
#: so, but 16 on a Xeon 16 instead of 9.
FEWEST_TASKS, LARGEST_WHOLE = 16, 16384
#: Split ones are taken in batches of at least so many bytes of each input, so that their second reading comes from the
#: cache (2 x 320 x 4096 pixels in float32 one by one take 1.20 instead of 1.26 ms, 8 x 320 x 4096 4.8 instead of 5.6);
#: more steps on little data cost more than that brings (4 x 256 x 1024: 0.37 instead of 0.34 ms).
BATCH_BYTES = 2 << 20
#: Of whole groups of small planes so many elements are summed before their dx is made, and at most so many sums of 8
#: channels: one need not wait for what the last one's are divided by. (64 x 64 x 49 in 8 groups in
#: float32 takes 25 instead of 26 microseconds.)
BATCH_ELEMENTS, MOST_SUMS = 1024, 32
#: Of small calls tasks are longer than others', up to so many elements, but as many as WANTED_TASKS: fewer places for
#: sums, and fewer times that threads take the next one. (Pixels of 64x64x49 in float32, whose sums a task adds up, take
#: 31 instead of 40 microseconds on a Zen 5; as 8 tasks 28, but then 16 threads of a Xeon 63 instead of 37.)
SMALL_TASK = 1 << 15
#: Rows of pixels that are summed in float32. Of 24 that are all alike, BatchNorm's number, one in 20000 makes a dx that
#: is off by more than its bound: that has other roundings too.
SUMMED_ROWS = 20
#: Pixels are joined to rows of so many elements.
ROW_ELEMENTS = 48
#: Elements of a block: chunks of so many rows, whose sums are added up in float64 where they are. When those of every
#: chunk were written down, reading them again took 6 % of the time in float32 and up to 20 in 16 bits. Of many channels
#: a block has at least so many chunks, or its sums would take more memory than those of the chunks.
BLOCK_ELEMENTS, FEWEST_CHUNKS = 65536, 4
#: While dx of a group or sample is made, the next one is asked for, if it is at most this long: two of both inputs fit
#: an L2 cache of 1 MiB then (32 x 256 x 3136 in float32 on a Xeon takes 15.2 instead of 17.8 ms, 162 x 144 x 324 pixels
#: 6.5 instead of 7.1; parts of longer ones gain nothing, 16 x 64 x 16384 in 4 groups loses). On Zen
#: larger samples did not gain. Of longer ones AHEAD bytes are asked for, which Zen 5 gains by.
LONGEST_AHEAD, LONGEST_AHEAD_ON_ZEN = 224 << 10, 32 << 10
#: Contiguous groups are rows where that is faster: planes with images of at most LARGEST_ROW_IMAGE elements, whose
#: fixed cost is higher than that of sums of each element, and groups of at most LONGEST_PLANES (2000 x 64 x 25 in 8
#: groups in bfloat16 takes 0.48 instead of 0.64 ms; but 100 x 512 x 64 in 32 groups 0.54 instead of 0.38, 1 x 512 x 49
#: 13 instead of 8 microseconds); samples of pixels that are one group of at most LONGEST_PIXELS (4000 x 33 x 25 in
#: float32: 1.1 instead of 1.9). Larger ones lose where there are few samples (2 x 128 x 64 pixels: 12 instead of 8
#: microseconds).
LARGEST_ROW_IMAGE, LONGEST_PLANES, LONGEST_PIXELS = 32, 32768, 4096
#: Of such groups as many at a time as have so many bytes of an input: the weights and sums of their elements should
#: stay in the caches, and large tensors like runs that are not short. (64 x 512 x 49 in 8 groups in float32 takes 0.49
#: ms with 12800 and 0.53 with 25600, 2000 x 64 x 25 in 8 groups in bfloat16 0.68, and 1.0 with 3200.)
TABLE_BYTES = 12800
#: Samples whose elements are summed in float32, a chunk: fewer than LayerNorm's rows, since a channel's elements are
#: then added. To begin and end a chunk costs about as much as a sample. So they have fewer only where there are too few
#: to fill WANTED_TASKS, and then at least CHUNK_ELEMENTS or, if that leaves work for two threads, FEWEST_SAMPLES.
CHUNK_SAMPLES, FEWEST_SAMPLES, CHUNK_ELEMENTS, WANTED_TASKS = 16, 2, 32768, 16
#: The same as LayerNorm's: bfloat16 of 4 MB would take 0.53 instead of 0.49 ms. (In float32, 120 x 120 x 144, 8.3 MB,
#: takes 0.54 instead of 0.88 ms.)
SIXTEEN_BITS_WORTH = 4


class Tiling(NamedTuple):
    samples: int
    groups: int
    group_channels: int
    image: int
    images: Images
    #: Pixels: elements of an image that are one row.
    together: int
    #: mean, rstd and gamma as contiguous float32: where, if they are not already.
    converted: dict[str, int]
    split: bool
    #: Planes that are small, without gaps.
    joined_planes: bool
    #: Groups that are rows: so many at a time (0: they are none), so many a task, in chunks of so many samples.
    row_groups: int
    task_groups: int
    row_tasks: int
    chunk_samples: int
    chunks: int
    #: Samples whose channel sums a task adds up, all of them its own. (Where threads share no cache, who adds
    #: those of all waits for the others': 64 x 64 x 49 in float32 takes 35 instead of 42 microseconds.)
    samples_together: int
    spans: int
    #: Pixels: blocks of a sample, and rows of a block.
    blocks: int
    block_rows: int
    #: Groups, samples, blocks or spans of a task: whole ones, and split ones.
    per_task: int
    per_split_task: int
    #: Split ones: tasks of each.
    split_tasks: int
    #: Split ones, and whole groups of small planes: how many are summed before their dx is made; of the latter those of
    #: 8 channels at once.
    batch: int
    at_once: int
    #: Bytes of an input in a group of planes or a sample of pixels, and ahead of planes' sums that are asked for.
    unit_bytes: int
    sums_ahead: int
    #: Pixels: whether four rows at a time are summed and made dx of.
    fours: bool
    streamed: bool
    #: Places in the workspace: float64 sums [sample][2][channel], of rows [chunk][2][channel], of samples together the
    #: last one's and those of all; float64 sums of the spans, or of the blocks with float32 ones behind them; float64
    #: group sums [sample][group][2]; float32 coefficients [5][column], `row_of_table` bytes each, and float64 totals of
    #: the columns [2][column], of a sample, or of a task if samples are not split; results to be scattered; weights and
    #: sums of the elements of groups that are rows.
    channel_sums: int
    partials: int
    group_sums: int
    coefficients: int
    row_of_table: int
    totals: int
    scattered: dict[str, int]
    tables: Places
    workspace_bytes: int

    @property
    def channels(self) -> int:
        return self.groups * self.group_channels

    @property
    def as_rows(self) -> bool:
        return self.row_groups > 0

    @property
    def small_planes(self) -> bool:
        return not (self.images.pixels or self.as_rows or self.split) and self.image <= LARGEST_LANES


def padded(count: int) -> int:
    return (count + 15) // 16 * 16


def sums_bytes(channels: int, samples_together: int) -> int:
    """A set of channel sums: a sample's, and those of all if some are together, with what is written behind them."""
    own = 2 * padded(channels) * 8
    return own if samples_together == 1 else 2 * own + 128


def _are_rows(images: Images, groups: int, group_channels: int, hw: int) -> bool:
    own = group_channels if images.pixels else hw
    contiguous = all(inner == own for _, inner in images.steps.values())
    if images.pixels:
        return groups == 1 and contiguous and group_channels * hw <= LONGEST_PIXELS
    small = hw <= LARGEST_ROW_IMAGE and group_channels * hw <= LONGEST_PLANES
    return small and (group_channels == 1 or contiguous)


def _chunk_samples(samples: int, elements: int, sets: int) -> int:
    """Samples in a chunk, where a task has a chunk of one of so many sets of groups, with so many elements a sample."""
    worth = max(-(-CHUNK_ELEMENTS // elements), min(FEWEST_SAMPLES, -(-samples * sets // 2)))
    most = min(CHUNK_SAMPLES, max(-(-samples * sets // WANTED_TASKS), worth))
    return -(-samples // -(-samples // most))  # chunks of about the same length


def tile(call: Call, writes: tuple[str, ...]) -> Tiling:
    n, channels, hw, groups = call.N, call.C, call.HxW, call.group
    parts = Parts()
    names = ["gradOut", "input", *(["gradInput"] if "gradInput" in writes else [])]
    images = lay_out({name: call.values[name] for name in names}, n, channels, hw, parts)
    dense = all(inner == channels for _, inner in images.steps.values())
    together = joined(dense, channels, hw, ROW_ELEMENTS) if images.pixels else 1
    cols, group_channels = together * channels, channels // groups
    converted = {}
    for name, count in (("mean", n * groups), ("rstd", n * groups), ("gamma", channels)):
        desc = call.values[name]
        if desc is None or desc.dtype != F32 or row_step(desc, 1, count) is None:
            converted[name] = parts.take(count * 4)
    whole, unit = (n, channels * hw) if images.pixels else (n * groups, group_channels * hw)
    total = n * channels * hw
    size, task = itemsize(call.input.dtype), max(task_elements(total), min(SMALL_TASK, total // WANTED_TASKS))
    split = whole == 1 or (whole < FEWEST_TASKS and unit > LARGEST_WHOLE)
    streamed = False
    if "gradInput" in writes:
        outer, inner = images.steps["gradInput"]
        count, own = (hw, channels) if images.pixels else (channels, hw)
        contiguous = (n == 1 or outer == channels * hw) and (count == 1 or inner == own)
        if images.pixels and channels * size % 64 != 0:  # else pixels that are read one by one would share cache lines
            contiguous = contiguous and all(step == channels for _, step in images.steps.values())
        streamed = contiguous and worth_streaming(total, size, SIXTEEN_BITS_WORTH)
    block_rows = max(FEWEST_CHUNKS, BLOCK_ELEMENTS // (SUMMED_ROWS * cols)) * SUMMED_ROWS
    chunks, blocks, spans = 0, -(-hw // (block_rows * together)), -(-hw // SPAN)
    per_task, row_groups, task_groups, chunk_samples, row_tasks = max(1, task // unit), 0, 0, 0, 0
    tables = Places(0, 0, 0)
    if _are_rows(images, groups, group_channels, hw):
        sets = -(-groups // max(1, TABLE_BYTES // (padded(unit) * size)))
        row_groups = -(-groups // sets)
        chunk_samples = _chunk_samples(n, row_groups * unit, sets)
        chunks, per_task = -(-n // chunk_samples), max(1, task // (chunk_samples * channels * hw))
        # Few large tasks rather than many small ones where there are four: 64 x 64 x 49 takes 50 instead of 53 us.
        elements = task if chunks < 4 else max(task, 1 << 16)
        task_groups = min(groups, max(1, elements // (chunk_samples * unit * row_groups)) * row_groups)
        row_tasks = -(-chunks // per_task) * -(-groups // task_groups)
        tables = parts.take_places(row_groups * padded(unit) * 12 + 192, row_tasks)
    samples_together = 1
    if not (row_groups or split):
        samples_together = max(1, task // (channels * hw))
        if images.pixels:
            per_task = samples_together
        elif samples_together > 1:
            per_task = samples_together * groups
    sets = chunks if row_groups else -(-n // samples_together)
    channel_sums = parts.take(sets * sums_bytes(channels, samples_together))
    row_of_table = padded(cols + 32) * 4
    partials, group_sums, coefficients, totals = 0, 0, 0, 0
    if images.pixels and not row_groups:
        owners = n if split else -(-n // per_task)
        partials = parts.take(owners * blocks * padded(cols) * 24)
        coefficients, totals = parts.take(owners * 5 * row_of_table), parts.take(owners * (2 * padded(cols) + 16) * 8)
    elif split and not row_groups:
        partials, group_sums = parts.take(n * channels * spans * 16), parts.take(n * groups * 16)
    scattered: dict[str, int] = {
        name: parts.take(channels * itemsize(call.values[name].dtype))
        for name in ("gradGammaOut", "gradBetaOut")
        if name in writes and row_step(call.values[name], 1, channels) is None
    }
    apart = all(step * together * size % PAGE for _, step in images.steps.values())
    inputs = 2 * total * size
    fours = images.pixels and apart and inputs <= FOURS_BYTES[size] and not streamed
    # On a Xeon 32 x 256 x 3136 in bfloat16 takes 5.9 instead of 6.7 ms by it; smaller ones lose up to 3 %.
    sums_ahead = AHEAD if inputs > CACHED_BYTES else 0
    items, item = (blocks, block_rows * cols) if images.pixels else (group_channels * spans, min(SPAN, hw))
    per_split_task = max(1, task // item)
    joined_planes = (
        not images.pixels and 16 <= hw <= LARGEST_LANES and all(inner == hw for _, inner in images.steps.values())
    )
    at_once = 8 // group_channels if 8 % group_channels == 0 else 1
    batch = -(-BATCH_BYTES // (unit * size))
    if not split and not images.pixels:
        batch = min(max(1, BATCH_ELEMENTS // (at_once * unit)), MOST_SUMS) * at_once
    return Tiling(
        n, groups, group_channels, hw, images, together, converted, split, joined_planes, row_groups, task_groups,
        row_tasks, chunk_samples, chunks, samples_together, spans, blocks, block_rows, per_task, per_split_task,
        -(-items // per_split_task), batch, at_once, unit * size, sums_ahead, fours, streamed,
        channel_sums, partials, group_sums, coefficients, row_of_table, totals, scattered, tables, parts.bytes,
    )  # fmt: skip
