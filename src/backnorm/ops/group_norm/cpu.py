"""GroupNorm backward in NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .._blocks import load, store, sum64, take_sums
from .tiling import Tiling


def launch(tiling: Tiling, tensors: Mapping[str, Any], workspace: Any) -> None:
    shape = (tiling.samples, tiling.groups, tiling.group_channels, tiling.image)
    channels, size = tiling.groups * tiling.group_channels, tiling.group_channels * tiling.image
    dy_samples, x_samples = tensors["gradOut"].reshape(shape), tensors["input"].reshape(shape)
    mean = load(tensors["mean"]).reshape(tiling.samples, tiling.groups, 1, 1)
    rstd = load(tensors["rstd"]).reshape(tiling.samples, tiling.groups, 1, 1)
    gamma = load(tensors["gamma"]).reshape(*shape[1:3], 1) if "gamma" in tensors else np.float32(1)
    wanted = [name for name in ("gradGammaOut", "gradBetaOut") if name in tensors]
    sums = dict(zip(wanted, take_sums(workspace, len(wanted), channels)))
    dx = np.empty(shape, np.float32) if "gradInput" in tensors else None

    with np.errstate(all="ignore"):
        for n in range(tiling.samples):
            dy = load(dy_samples[n])
            x_hat = (load(x_samples[n]) - mean[n]) * rstd[n]
            if "gradGammaOut" in sums:
                sums["gradGammaOut"] += sum64(dy * x_hat, axis=2).reshape(channels)
            if "gradBetaOut" in sums:
                sums["gradBetaOut"] += sum64(dy, axis=2).reshape(channels)
            if dx is not None:
                wdy = dy * gamma
                c1 = (sum64(wdy, axis=(1, 2)) / size).astype(np.float32)
                c2 = (sum64(wdy * x_hat, axis=(1, 2)) / size).astype(np.float32)
                dx[n] = rstd[n] * (wdy - (c1 + x_hat * c2))
        # Stored last: an output may lie on gradOut or input.
        if dx is not None:
            store(tensors["gradInput"], dx)
        for name, total in sums.items():
            store(tensors[name], total)
