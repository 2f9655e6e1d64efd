"""Blocks and workspace of LayerNorm backward: pure integers."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from ...spec import Call


class Tiling(NamedTuple):
    rows: int
    cols: int
    #: Rows of one block: about 64 Ki elements, so that a block's float32 temporaries stay in the L2 cache.
    block_rows: int
    #: float64 column sums: grad_weight, then grad_bias.
    workspace_bytes: int


def tile(call: Call, writes: tuple[str, ...]) -> Tiling:
    cols = prod(call.normalizedShape)
    rows = call.input.numel // cols
    column_sums = sum(name in writes for name in ("gradWeightOut", "gradBiasOut"))
    return Tiling(rows, cols, max(1, 65536 // cols), column_sums * cols * 8)
