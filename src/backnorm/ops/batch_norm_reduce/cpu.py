"""BatchNorm's backward reduce in NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .._blocks import load, store, sum64, take_sums
from .tiling import Tiling


def launch(tiling: Tiling, tensors: Mapping[str, Any], workspace: Any) -> None:
    shape = (tiling.samples, tiling.channels, tiling.image)
    dy_samples, x_samples = tensors["gradOut"].reshape(shape), tensors["input"].reshape(shape)
    mean = load(tensors["mean"]).reshape(tiling.channels, 1)
    sum_dy, sum_dy_xmu = take_sums(workspace, 2, tiling.channels)

    with np.errstate(all="ignore"):
        for n in range(0, tiling.samples, tiling.block_samples):
            block = slice(n, n + tiling.block_samples)
            dy = load(dy_samples[block])
            sum_dy += sum64(dy, axis=(0, 2)).reshape(tiling.channels)
            sum_dy_xmu += sum64(dy * (load(x_samples[block]) - mean), axis=(0, 2)).reshape(tiling.channels)
        grad_weight = sum_dy_xmu * load(tensors["invstd"])
        results = {"sumDy": sum_dy, "sumDyXmu": sum_dy_xmu, "gradWeight": grad_weight, "gradBias": sum_dy}
        for name in results.keys() & tensors.keys():
            store(tensors[name], results[name])
