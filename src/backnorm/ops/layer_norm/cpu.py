"""LayerNorm backward in NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .._blocks import load, store, sum64, take_sums
from .tiling import Tiling


def launch(tiling: Tiling, tensors: Mapping[str, Any], workspace: Any) -> None:
    rows, cols = tiling.rows, tiling.cols
    dy_rows, x_rows = tensors["gradOut"].reshape(rows, cols), tensors["input"].reshape(rows, cols)
    mean, rstd = load(tensors["mean"]).reshape(rows, 1), load(tensors["rstd"]).reshape(rows, 1)
    w = load(tensors["weightOptional"]).reshape(cols) if "weightOptional" in tensors else np.float32(1)
    wanted = [name for name in ("gradWeightOut", "gradBiasOut") if name in tensors]
    sums = dict(zip(wanted, take_sums(workspace, len(wanted), cols)))
    dx = np.empty((rows, cols), np.float32) if "gradInputOut" in tensors else None

    with np.errstate(all="ignore"):
        for row in range(0, rows, tiling.block_rows):
            block = slice(row, row + tiling.block_rows)
            dy = load(dy_rows[block])
            x_hat = (load(x_rows[block]) - mean[block]) * rstd[block]
            if "gradWeightOut" in sums:
                sums["gradWeightOut"] += sum64(dy * x_hat, axis=0)[0]
            if "gradBiasOut" in sums:
                sums["gradBiasOut"] += sum64(dy, axis=0)[0]
            if dx is not None:
                wdy = dy * w
                c1 = (sum64(wdy, axis=1) / cols).astype(np.float32)
                c2 = (sum64(wdy * x_hat, axis=1) / cols).astype(np.float32)
                dx[block] = rstd[block] * (wdy - c1 - x_hat * c2)
        # Stored last: an output may lie on gradOut or input.
        if dx is not None:
            store(tensors["gradInputOut"], dx)
        for name, total in sums.items():
            store(tensors[name], total)
