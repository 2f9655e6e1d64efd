"""Layout, splits and workspace of GroupNorm backward: pure integers."""

from __future__ import annotations

from typing import NamedTuple

from ...datatypes import F32, NUMPY
from ...spec import Call
from .._images import Images, lay_out
from .._views import CHUNK_ROWS, SPAN, Parts, row_step, worth_streaming

#: With fewer whole tasks than this, groups (or samples) are split over threads.
FEWEST_TASKS = 16


class Tiling(NamedTuple):
    samples: int
    groups: int
    group_channels: int
    image: int
    images: Images
    #: mean, rstd and gamma as contiguous float32: where, if they are not already.
    converted: dict[str, int]
    split: bool
    chunks: int
    spans: int
    streamed: bool
    #: Places in the workspace: float64 sums [sample][2][channel]; float64 sums of the spans or float32 ones of the
    #: chunks; float64 group sums [sample][group][2]; float32 coefficients [sample][5][channel]; float64 results.
    channel_sums: int
    partials: int
    group_sums: int
    coefficients: int
    totals: int
    workspace_bytes: int

    @property
    def channels(self) -> int:
        return self.groups * self.group_channels


def tile(call: Call, writes: tuple[str, ...]) -> Tiling:
    n, channels, hw, groups = call.N, call.C, call.HxW, call.group
    parts = Parts()
    names = ["gradOut", "input", *(["gradInput"] if "gradInput" in writes else [])]
    images = lay_out({name: call.values[name] for name in names}, n, channels, hw, parts)
    converted = {}
    for name, size in (("mean", n * groups), ("rstd", n * groups), ("gamma", channels)):
        desc = call.values[name]
        if desc is None or desc.dtype != F32 or row_step(desc, 1, size) is None:
            converted[name] = parts.take(size * 4)
    split = (n if images.pixels else n * groups) < FEWEST_TASKS
    chunks, spans = -(-hw // CHUNK_ROWS), -(-hw // SPAN)
    padded = (channels + 15) // 16 * 16
    channel_sums = parts.take(n * 2 * channels * 8)
    partials = parts.take(n * chunks * 2 * padded * 4 if images.pixels else n * channels * spans * 16 if split else 0)
    group_sums = parts.take(n * groups * 16)
    coefficients = parts.take(n * 5 * padded * 4 if images.pixels else 0)
    totals = parts.take(2 * channels * 8)
    size = NUMPY[call.input.dtype].itemsize
    run = (channels if images.pixels else hw) * size
    streamed = "gradInput" in writes and worth_streaming(call.input.numel * size, run)
    return Tiling(
        n, groups, channels // groups, hw, images, converted, split, chunks, spans, streamed,
        channel_sums, partials, group_sums, coefficients, totals, parts.bytes,
    )  # fmt: skip
