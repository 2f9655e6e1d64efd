"""Blocks and workspace of BatchNorm's backward reduce: pure integers."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from ...spec import Call


class Tiling(NamedTuple):
    samples: int
    channels: int
    image: int
    #: Samples of one block: about 64 Ki elements, so that a block's float32 temporaries stay in the L2 cache.
    block_samples: int
    #: float64 channel sums: sum_dy, then sum_dy_xmu.
    workspace_bytes: int


def tile(call: Call, writes: tuple[str, ...]) -> Tiling:
    samples, channels, *image = call.input.shape
    elements = channels * prod(image)
    return Tiling(samples, channels, prod(image), max(1, 65536 // elements), 2 * channels * 8)
