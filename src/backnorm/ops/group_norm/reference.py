"""GroupNorm backward in float64: the truth, and the size of the terms its sums are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...accuracy import Float64, as_float64, magnitude


def _prepare(c: Mapping[str, Any]) -> tuple[Float64, Float64, Float64, Float64]:
    n, channels, hw, group = (int(c[name]) for name in ("N", "C", "HxW", "group"))
    dy, x, mean, rstd = (as_float64(c[name]) for name in ("gradOut", "input", "mean", "rstd"))
    shape = (n, group, channels // group, hw)
    weight = c.get("gamma")
    gamma = np.ones(channels) if weight is None else as_float64(weight)
    x_mu = x.reshape(shape) - mean.reshape(n, group, 1, 1)
    return dy.reshape(shape), x_mu, rstd.reshape(n, group, 1, 1), gamma.reshape(group, channels // group, 1)


def _outputs(c: Mapping[str, Any], dx: Float64, dgamma: Float64, dbeta: Float64) -> dict[str, Float64]:
    gamma = c.get("gamma")
    shape = (int(c["C"]),) if gamma is None else np.shape(gamma)
    return {
        "gradInput": dx.reshape(np.shape(c["input"])),
        "gradGammaOut": dgamma.reshape(shape),
        "gradBetaOut": dbeta.reshape(shape),
    }


@np.errstate(all="ignore")
def reference(c: Mapping[str, Any]) -> dict[str, Float64]:
    """The three outputs, whatever the mask says."""
    dy, x_mu, rstd, gamma = _prepare(c)
    x_hat = x_mu * rstd
    wdy = dy * gamma
    size = max(dy.shape[2] * dy.shape[3], 1)
    c1 = wdy.sum(axis=(2, 3), keepdims=True)
    c2 = (wdy * x_hat).sum(axis=(2, 3), keepdims=True)
    dx = rstd * (wdy - (c1 + x_hat * c2) / size)
    return _outputs(c, dx, (dy * x_hat).sum(axis=(0, 3)), dy.sum(axis=(0, 3)))


@np.errstate(all="ignore")
def terms(c: Mapping[str, Any]) -> dict[str, Float64]:
    """The same formulas with every term's magnitude: how large a sum was before anything cancelled."""
    dy, x_mu, rstd, gamma = (magnitude(a) for a in _prepare(c))
    x_hat = magnitude(x_mu * rstd)
    wdy = magnitude(dy * gamma)
    size = max(dy.shape[2] * dy.shape[3], 1)
    c1 = wdy.sum(axis=(2, 3), keepdims=True)
    c2 = magnitude(wdy * x_hat).sum(axis=(2, 3), keepdims=True)
    dx = rstd * (wdy + (c1 + x_hat * c2) / size)
    return _outputs(c, dx, magnitude(dy * x_hat).sum(axis=(0, 3)), dy.sum(axis=(0, 3)))
