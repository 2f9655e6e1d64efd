"""How close is right: error measures, the bound our results meet, and the field's precision standards.

The golden value is always the float64 reference. A NaN must meet a NaN, an Inf an Inf of the same sign.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

#: Unit roundoff of float32, in which terms are formed.
EPS = 2.0**-24
#: The smallest normal float32: below it a product keeps an absolute, not a relative precision.
TINY = 2.0**-126


def as_float64(array: Any) -> Float64:
    return np.asarray(array).astype(np.float64)


def magnitude(array: Float64) -> Float64:
    """|array|, never below the smallest normal float32."""
    return np.maximum(np.abs(array), TINY)


@dataclass(frozen=True)
class FloatFormat:
    """A type's largest finite value, its precision in bits and its smallest exponent."""

    name: str
    largest: float
    bits: int
    lowest_exponent: int


_FORMATS = {
    form.name: form
    for form in (
        FloatFormat("float32", (2 - 2.0**-23) * 2.0**127, 24, -126),
        FloatFormat("float16", 65504.0, 11, -14),
        FloatFormat("bfloat16", (2 - 2.0**-7) * 2.0**127, 8, -126),
    )
}


def float_format(dtype: Any) -> FloatFormat:
    return _FORMATS[np.dtype(dtype).name]


def ulp(value: Any, dtype: Any) -> Float64:
    """The distance between neighbours of the type at each value."""
    form = float_format(dtype)
    smallest_normal = 2.0**form.lowest_exponent  # zero and subnormals have its spacing
    _, exponent = np.frexp(np.maximum(np.abs(as_float64(value)), smallest_normal))
    return np.asarray(np.ldexp(1.0, exponent - form.bits))


def bound(golden: Float64, terms: Float64, dtype: Any) -> Float64:
    """The error each element may have: 1 ulp of the output, and 8 roundings of the terms summed."""
    return ulp(np.clip(golden, -_overflow(dtype), _overflow(dtype)), dtype) + 8 * EPS * terms


def _overflow(dtype: Any) -> float:
    """The first value past the largest finite one: what Inf counts as where the golden value is finite."""
    form = float_format(dtype)
    return form.largest + float(ulp(form.largest, dtype))


def errors(actual: Any, golden: Float64, dtype: Any) -> Float64:
    """|actual - golden| for each element: 0 where NaN or Inf coincide, Inf where only one side has them.

    A result that overflowed its type counts as the first value past it, and so does a golden value beyond.
    """
    got = as_float64(actual)
    edge = _overflow(dtype)
    with np.errstate(invalid="ignore"):
        off = np.abs(np.clip(got, -edge, edge) - np.clip(golden, -edge, edge))
    off = np.where(np.isnan(got) & np.isnan(golden), 0.0, off)
    off = np.where(np.isinf(golden) & (got != golden), np.inf, off)
    return np.where(np.isnan(off), np.inf, off)


def excess(actual: Any, golden: Float64, terms: Float64) -> float:
    """The largest error over its bound; at most 1 for a right result."""
    dtype = np.asarray(actual).dtype
    off = errors(actual, golden, dtype)
    if off.size == 0:
        return 0.0
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.where(off == 0, 0.0, off / bound(golden, terms, dtype))
    return float(np.max(np.where(np.isnan(ratio), np.inf, ratio)))


def relative_error(actual: Any, golden: Float64) -> float:
    """The largest error over the largest golden magnitude."""
    off = errors(actual, golden, np.asarray(actual).dtype)
    largest = float(np.max(np.abs(golden), initial=0.0))
    return float(np.max(off, initial=0.0)) / largest if largest else float(np.max(off, initial=0.0))


def share_within_half_ulp(actual: Any, golden: Float64) -> float:
    """The share of elements within 0.501 ulp: rounded as well as one rounding can."""
    dtype = np.asarray(actual).dtype
    off = errors(actual, golden, dtype)
    edge = _overflow(dtype)
    return float(np.mean(off <= 0.501 * ulp(np.clip(golden, -edge, edge), dtype))) if off.size else 1.0


# --- the precision standards in use in this field ---------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """Whether a result passes a standard, and the numbers it was judged by."""

    passed: bool
    numbers: dict[str, float]


_MIXED = {
    "float32": (2.0**-10, 2.0**-16, 1e-2),
    "float16": (2.0**-9, 2.0**-9, 1e-1),
    "bfloat16": (2.0**-6, 2.0**-6, 1.0),
}
_SINGLE = {"float32": 2.0**-13, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_DOUBLE = {"L0": (10.0, 2.0, 2.0), "L1": (5.0, 1.5, 1.5), "L2": (2.0, 1.2, 1.2)}


def mixed_standard(actual: Any, golden: Float64) -> Verdict:
    """(a) |a - g| <= atol + rtol |g| for 99 % of the elements, and none above the cap."""
    dtype = np.asarray(actual).dtype
    rtol, atol, cap = _MIXED[dtype.name]
    off = errors(actual, golden, dtype)
    finite = np.where(np.isfinite(golden), golden, 0.0)
    within = float(np.mean(off <= atol + rtol * np.abs(finite))) if off.size else 1.0
    over_cap = float(np.max(off / np.maximum(cap, 32 * ulp(finite, dtype)), initial=0.0))
    return Verdict(within >= 0.99 and over_cap <= 1, {"share within": within, "largest error over cap": over_cap})


def single_benchmark(actual: Any, golden: Float64) -> Verdict:
    """(b) mean relative error < t and largest < 10 t, relative to |g| + 1e-7."""
    dtype = np.asarray(actual).dtype
    off = errors(actual, golden, dtype)
    relative = off / (np.abs(np.where(np.isfinite(golden), golden, 0.0)) + 1e-7)
    mean, largest = (float(np.mean(relative)), float(np.max(relative))) if off.size else (0.0, 0.0)
    limit = _SINGLE[dtype.name]
    return Verdict(mean < limit and largest < 10 * limit, {"mean": mean, "max": largest, "limit": limit})


def double_benchmark(actual: Any, peer: Any, golden: Float64, level: str = "L1") -> Verdict:
    """(c) our error over a peer's, both against the golden value: max, mean and rms of the relative errors."""
    dtype = np.asarray(actual).dtype
    scale = np.abs(np.where(np.isfinite(golden), golden, 0.0)) + 1e-7
    ours, theirs = errors(actual, golden, dtype) / scale, errors(peer, golden, np.asarray(peer).dtype) / scale
    ratios = {}
    for name, measure in (("max", np.max), ("mean", np.mean), ("rms", lambda e: np.sqrt(np.mean(e * e)))):
        mine, other = (float(measure(e)) if e.size else 0.0 for e in (ours, theirs))
        ratios[name] = 1.0 if mine == other else float("inf") if other == 0 else mine / other
    limits = dict(zip(("max", "mean", "rms"), _DOUBLE[level]))
    return Verdict(all(ratios[name] <= limits[name] for name in limits), ratios)
