"""Layout, tasks and workspace of BatchNorm's backward reduce: pure integers."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from ...datatypes import F32
from ...spec import Call
from .._images import Images, lay_out
from .._views import CHUNK_ROWS, Parts, row_step

#: Elements of a task of planes: as many channels, then samples, as reach this.
TASK_CHANNELS_ELEMENTS, TASK_ELEMENTS = 16384, 131072


class Tiling(NamedTuple):
    samples: int
    channels: int
    image: int
    images: Images
    #: mean as contiguous float32: where, if it is not already.
    converted: dict[str, int]
    #: Planes: samples and channels of a task. Pixels: chunks of a sample.
    task_samples: int
    task_channels: int
    chunks: int
    #: Places in the workspace: sums of the tasks, [task][2][channel], float64 (planes) or float32 (pixels); ones;
    #: results.
    partials: int
    ones: int
    totals: int
    workspace_bytes: int


def tile(call: Call, writes: tuple[str, ...]) -> Tiling:
    samples, channels, *rest = call.input.shape
    image = prod(rest)
    parts = Parts()
    images = lay_out({name: call.values[name] for name in ("gradOut", "input")}, samples, channels, image, parts)
    if images.pixels and image == 1:
        images = images._replace(steps={name: (0, outer) for name, (outer, _) in images.steps.items()})
        samples, image = 1, samples
    elif images.pixels and all(outer == image * inner for outer, inner in images.steps.values()):
        # One sample after the other without a gap: one long column of rows.
        images = images._replace(steps={name: (0, inner) for name, (_, inner) in images.steps.items()})
        samples, image = 1, samples * image
    converted = {}
    if call.mean.dtype != F32 or row_step(call.mean, 1, channels) is None:
        converted["mean"] = parts.take(channels * 4)
    task_channels = max(1, min(channels, TASK_CHANNELS_ELEMENTS // image))
    task_samples = max(1, min(16, TASK_ELEMENTS // (task_channels * image)))
    chunks = -(-image // CHUNK_ROWS)
    padded = (channels + 15) // 16 * 16
    if images.pixels:
        partials = parts.take(samples * chunks * 2 * padded * 4)
    else:
        partials = parts.take(-(-samples // task_samples) * 2 * channels * 8)
    ones, totals = parts.take(padded * 4), parts.take(2 * padded * 8)
    return Tiling(
        samples, channels, image, images, converted, task_samples, task_channels, chunks, partials, ones, totals,
        parts.bytes,
    )  # fmt: skip
