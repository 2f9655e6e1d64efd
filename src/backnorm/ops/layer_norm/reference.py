"""LayerNorm backward in float64: the truth, and the size of the terms its sums are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...accuracy import Float64, as_float64, magnitude


def _prepare(c: Mapping[str, Any]) -> tuple[Float64, Float64, Float64, Float64]:
    cols = int(np.prod(c["normalizedShape"], dtype=np.int64))
    dy, x, mean, rstd = (as_float64(c[name]) for name in ("gradOut", "input", "mean", "rstd"))
    rows = mean.size
    weight = c.get("weightOptional")
    w = np.ones(cols) if weight is None else as_float64(weight).reshape(cols)
    return dy.reshape(rows, cols), (x.reshape(rows, cols) - mean.reshape(rows, 1)), rstd.reshape(rows, 1), w


@np.errstate(all="ignore")
def reference(c: Mapping[str, Any]) -> dict[str, Float64]:
    """The three outputs, whatever the mask says."""
    dy, x_mu, rstd, w = _prepare(c)
    x_hat = x_mu * rstd
    wdy = dy * w
    c1 = wdy.sum(axis=1, keepdims=True) / max(w.size, 1)
    c2 = (wdy * x_hat).sum(axis=1, keepdims=True) / max(w.size, 1)
    shape = tuple(c["normalizedShape"])
    return {
        "gradInputOut": (rstd * (wdy - c1 - x_hat * c2)).reshape(np.shape(c["input"])),
        "gradWeightOut": (dy * x_hat).sum(axis=0).reshape(shape),
        "gradBiasOut": dy.sum(axis=0).reshape(shape),
    }


@np.errstate(all="ignore")
def terms(c: Mapping[str, Any]) -> dict[str, Float64]:
    """The same formulas with every term's magnitude: how large a sum was before anything cancelled."""
    dy, x_mu, rstd, w = (magnitude(a) for a in _prepare(c))
    x_hat = magnitude(x_mu * rstd)
    wdy = magnitude(dy * w)
    c1 = wdy.sum(axis=1, keepdims=True) / max(w.size, 1)
    c2 = magnitude(wdy * x_hat).sum(axis=1, keepdims=True) / max(w.size, 1)
    shape = tuple(c["normalizedShape"])
    return {
        "gradInputOut": (rstd * (wdy + c1 + x_hat * c2)).reshape(np.shape(c["input"])),
        "gradWeightOut": magnitude(dy * x_hat).sum(axis=0).reshape(shape),
        "gradBiasOut": dy.sum(axis=0).reshape(shape),
    }
