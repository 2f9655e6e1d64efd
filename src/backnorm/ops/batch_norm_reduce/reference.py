"""BatchNorm's backward reduce in float64: the truth, and the size of the terms its sums are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...accuracy import Float64, as_float64, magnitude


def _prepare(c: Mapping[str, Any]) -> tuple[Float64, Float64, Float64]:
    dy, x, mean, invstd = (as_float64(c[name]) for name in ("gradOut", "input", "mean", "invstd"))
    channels = x.shape[1]
    by_channel = tuple(channels if axis == 1 else 1 for axis in range(x.ndim))
    rows = (channels, x.size // channels)
    x_mu = np.moveaxis(x - mean.reshape(by_channel), 1, 0).reshape(rows)
    if x.size == 0:
        invstd = np.zeros(channels)  # an empty batch gives zeros, whatever its invstd
    return np.moveaxis(dy, 1, 0).reshape(rows), x_mu, invstd.reshape(channels)


@np.errstate(all="ignore")
def reference(c: Mapping[str, Any]) -> dict[str, Float64]:
    """The four outputs, whatever the switches say."""
    dy, x_mu, invstd = _prepare(c)
    sum_dy, sum_dy_xmu = dy.sum(axis=1), (dy * x_mu).sum(axis=1)
    return {"sumDy": sum_dy, "sumDyXmu": sum_dy_xmu, "gradWeight": invstd * sum_dy_xmu, "gradBias": sum_dy}


@np.errstate(all="ignore")
def terms(c: Mapping[str, Any]) -> dict[str, Float64]:
    """The same formulas with every term's magnitude: how large a sum was before anything cancelled."""
    dy, x_mu, invstd = (magnitude(a) for a in _prepare(c))
    sum_dy, sum_dy_xmu = dy.sum(axis=1), magnitude(dy * x_mu).sum(axis=1)
    return {"sumDy": sum_dy, "sumDyXmu": sum_dy_xmu, "gradWeight": invstd * sum_dy_xmu, "gradBias": sum_dy}
