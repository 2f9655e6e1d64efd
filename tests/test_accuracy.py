"""The measures by which everything else is judged."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from backnorm.accuracy import (
    bound,
    double_benchmark,
    errors,
    excess,
    mixed_standard,
    relative_error,
    share_within_half_ulp,
    single_benchmark,
    ulp,
)

TYPES = [np.float32, np.float16, ml_dtypes.bfloat16]


@pytest.mark.parametrize("dtype", TYPES)
def test_an_ulp_is_the_distance_to_the_next_value(dtype: type) -> None:
    info = ml_dtypes.finfo(dtype)
    for value in (1.0, 1.5, 1.99, 3.0, 0.1, 1000.0, float(info.smallest_normal), float(info.smallest_subnormal)):
        exact = np.array(value).astype(dtype)
        bits = exact.view(f"u{exact.itemsize}")
        following = (bits + np.array(1, bits.dtype)).view(exact.dtype).astype(np.float64)
        assert ulp(exact, dtype) == following - exact.astype(np.float64)
    assert ulp(0.0, dtype) == float(info.smallest_subnormal)


@pytest.mark.parametrize("dtype", TYPES)
def test_rounding_once_is_within_the_bound_and_two_ulps_are_not(dtype: type) -> None:
    golden = np.random.default_rng(0).standard_normal(1000)
    rounded = golden.astype(dtype)
    nothing = np.zeros_like(golden)
    assert excess(rounded, golden, nothing) <= 0.51
    assert share_within_half_ulp(rounded, golden) == 1
    off = (golden + 2.5 * ulp(golden, dtype)).astype(dtype)
    assert excess(off, golden, nothing) > 1
    assert share_within_half_ulp(off, golden) < 0.01
    assert excess(off, golden, np.ones_like(golden)) <= excess(off, golden, nothing)


@pytest.mark.parametrize("dtype", TYPES)
def test_nan_and_inf_must_coincide(dtype: type) -> None:
    golden = np.array([np.nan, np.inf, -np.inf, 1.0])
    one = np.ones(4)
    assert excess(golden.astype(dtype), golden, one) == 0
    for i, wrong in ((0, 1.0), (1, -np.inf), (1, 5.0), (1, np.nan), (2, np.inf), (3, np.nan), (3, np.inf)):
        bad = golden.copy()
        bad[i] = wrong
        assert excess(bad.astype(dtype), golden, one) > 1, (i, wrong)


def test_overflow_of_the_output_type_is_judged_at_its_edge() -> None:
    one = np.zeros(1)
    assert excess(np.array([np.inf], np.float16), np.array([1e6]), one) == 0
    assert excess(np.array([np.inf], np.float16), np.array([65519.0]), one) <= 1
    assert excess(np.array([65504], np.float16), np.array([65521.0]), one) <= 1
    assert excess(np.array([np.inf], np.float16), np.array([60000.0]), one) > 1
    assert excess(np.array([1.0], np.float16), np.array([1e6]), one) > 1
    assert excess(np.array([-np.inf], np.float16), np.array([1e6]), one) > 1


def test_measures_on_hand_made_numbers() -> None:
    golden = np.array([2.0, -4.0])
    assert relative_error(np.array([2.0, -3.0], np.float32), golden) == 0.25
    assert errors(np.array([2.0, -3.0], np.float32), golden, np.float32).tolist() == [0, 1]
    assert bound(np.array([1.0]), np.array([2.0**24]), np.float32)[0] == pytest.approx(8 + 2.0**-23)
    empty = np.zeros(0)
    assert excess(np.zeros(0, np.float32), empty, empty) == 0
    assert share_within_half_ulp(np.zeros(0, np.float32), empty) == 1


@pytest.mark.parametrize("dtype", TYPES)
def test_mixed_standard(dtype: type) -> None:
    rtol, atol, cap = {
        "float32": (2**-10, 2**-16, 1e-2), "float16": (2**-9, 2**-9, 1e-1), "bfloat16": (2**-6, 2**-6, 1.0)
    }[np.dtype(dtype).name]  # fmt: skip
    golden = np.zeros(1000)
    actual = golden.copy()
    actual[:10] = min(2 * atol, cap / 2)  # 1 % beyond, below the cap
    assert mixed_standard(actual.astype(dtype), golden).passed
    actual[:11] = min(2 * atol, cap / 2)
    assert not mixed_standard(actual.astype(dtype), golden).passed
    actual[:] = 0
    actual[0] = 2 * cap
    assert not mixed_standard(actual.astype(dtype), golden).passed
    golden[:] = 1
    assert mixed_standard((golden * (1 + rtol)).astype(dtype), golden).passed
    golden[0] = np.nan
    assert not mixed_standard(np.ones(1000).astype(dtype), golden).passed


@pytest.mark.parametrize("dtype", TYPES)
def test_single_benchmark(dtype: type) -> None:
    limit = {"float32": 2**-13, "float16": 2**-10, "bfloat16": 2**-7}[np.dtype(dtype).name]
    golden = np.ones(1000)
    assert single_benchmark(golden.astype(dtype), golden).passed
    assert not single_benchmark((golden * (1 + 2 * limit)).astype(dtype), golden).passed
    one_off = golden.copy()
    one_off[0] += 9 * limit
    assert single_benchmark(one_off.astype(dtype), golden).passed
    one_off[0] = 1 + 16 * limit
    assert not single_benchmark(one_off.astype(dtype), golden).passed


def test_double_benchmark_levels() -> None:
    golden = np.ones(1000)
    peer = (golden + 1e-4).astype(np.float32)
    assert double_benchmark(peer, peer, golden, "L2").passed
    worse = (golden + 1.4e-4).astype(np.float32)
    assert double_benchmark(worse, peer, golden, "L1").passed
    assert not double_benchmark(worse, peer, golden, "L2").passed
    assert not double_benchmark(worse, golden.astype(np.float32), golden, "L0").passed
    assert double_benchmark(golden.astype(np.float32), peer, golden, "L2").passed
