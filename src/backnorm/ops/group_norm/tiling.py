"""Layout, splits and workspace of GroupNorm backward: pure integers."""

from __future__ import annotations

from typing import NamedTuple

from ...datatypes import F32, itemsize
from ...spec import Call
from .._images import Images, joined, lay_out
from .._views import PIXEL_ROWS, SPAN, Parts, row_step, task_elements, worth_streaming

#: With fewer whole groups (planes) or samples (pixels) than this, they are split over threads.
FEWEST_TASKS = 16
#: While dx of a group or sample is made, the next one is asked for, if it is at most this long.
LONGEST_AHEAD = 32 << 10


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
    chunks: int
    spans: int
    #: Groups, samples, chunks or spans of a task: whole ones, and split ones.
    per_task: int
    per_split_task: int
    #: Bytes ahead of dx that are asked for.
    ahead: int
    streamed: bool
    #: Places in the workspace: float64 sums [sample][2][channel]; float64 sums of the spans or float32 ones of the
    #: chunks; float64 group sums [sample][group][2]; float32 coefficients [sample][column / 16][5][16]; float64 totals
    #: of the columns [sample][2][column]; results to be scattered.
    channel_sums: int
    partials: int
    group_sums: int
    coefficients: int
    totals: int
    scattered: dict[str, int]
    workspace_bytes: int

    @property
    def channels(self) -> int:
        return self.groups * self.group_channels


def padded(count: int) -> int:
    return (count + 15) // 16 * 16


def tile(call: Call, writes: tuple[str, ...]) -> Tiling:
    n, channels, hw, groups = call.N, call.C, call.HxW, call.group
    parts = Parts()
    names = ["gradOut", "input", *(["gradInput"] if "gradInput" in writes else [])]
    images = lay_out({name: call.values[name] for name in names}, n, channels, hw, parts)
    together = joined(images, channels, hw) if images.pixels else 1
    cols, group_channels = together * channels, channels // groups
    converted = {}
    for name, count in (("mean", n * groups), ("rstd", n * groups), ("gamma", channels)):
        desc = call.values[name]
        if desc is None or desc.dtype != F32 or row_step(desc, 1, count) is None:
            converted[name] = parts.take(count * 4)
    whole, unit = (n, channels * hw) if images.pixels else (n * groups, group_channels * hw)
    split = whole < FEWEST_TASKS
    chunks, spans = -(-hw // (PIXEL_ROWS * together)), -(-hw // SPAN)
    channel_sums = parts.take(n * 2 * padded(channels) * 8)
    if images.pixels:
        partials = parts.take(n * chunks * padded(cols) * 8)
        group_sums, coefficients = 0, parts.take(n * padded(cols) * 20)
        totals = parts.take(n * (2 * padded(cols) + 16) * 8)
    else:
        partials, group_sums = parts.take(n * channels * spans * 16 if split else 0), parts.take(n * groups * 16)
        coefficients, totals = 0, 0
    scattered: dict[str, int] = {
        name: parts.take(channels * itemsize(call.values[name].dtype))
        for name in ("gradGammaOut", "gradBetaOut")
        if name in writes and row_step(call.values[name], 1, channels) is None
    }
    size, task = itemsize(call.input.dtype), task_elements(n * channels * hw)
    streamed = False
    if "gradInput" in writes:
        contiguous = images.steps["gradInput"] == (channels * hw, channels if images.pixels else hw)
        streamed = contiguous and worth_streaming(n * channels * hw * size)
    return Tiling(
        n, groups, group_channels, hw, images, together, converted, split, chunks, spans, max(1, task // unit),
        max(1, task // (PIXEL_ROWS * cols if images.pixels else min(SPAN, hw))),
        unit * size if unit * size <= LONGEST_AHEAD else 0, streamed, channel_sums, partials, group_sums,
        coefficients, totals, scattered, parts.bytes,
    )  # fmt: skip
