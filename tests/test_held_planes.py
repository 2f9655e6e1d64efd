"""GroupNorm's kernel in Gluon for planes, step by step on NumPy arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from .test_held import DTYPES, HELD, check, gluon_on_numpy  # first: it sets the environment

pytest.importorskip("triton")

from backnorm.ops.group_norm import gpu, gpu_held_planes, gpu_tiling

SOURCE = Path(gpu_held_planes.__file__).read_text(encoding="utf-8")
HOLD = gluon_on_numpy.load(SOURCE, gpu_held_planes.__package__, _held=HELD).hold_planes


def _check(*call: Any, kernel: Any = HOLD, **more: Any) -> gpu_tiling.HeldPlanes:
    held = check(kernel, False, *call, **more)
    assert isinstance(held, gpu_tiling.HeldPlanes)
    return held


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of which has several groups."""
    monkeypatch.setattr(gpu_tiling, "LARGEST_WHOLE_GROUP", 0)
    monkeypatch.setattr(gpu_tiling, "SHORTEST_ROW", 1 << 30)
    monkeypatch.setattr(gpu, "MULTIPROCESSORS", 1)


#: One channel and many, of several pieces down and across, with a rest and without.
CASES = [(3, 4, 1000, 4), (2, 24, 520, 2), (5, 3, 9000, 3), (2, 33, 264, 3), (1, 4, 2048, 1), (4, 160, 96, 2)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "c", "hw", "group"), CASES)
def test_all_pieces_make_the_references_sums(n: int, c: int, hw: int, group: int, dtype: str) -> None:
    gamma = torch.randn(c, generator=torch.Generator().manual_seed(6))
    _check(n, c, hw, group, dtype, gamma=gamma)
    gamma[c // 2] = float("inf")
    _check(n, c, hw, group, dtype, more=(8, 16, 24), gamma=gamma)


@pytest.fixture
def down_and_across(monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, int, int, str]:
    """A call whose groups are several pieces both ways, two of them for one of the programs."""
    monkeypatch.setattr(gpu_tiling, "HELD_PLANES_ROW", 512)
    return 4, 24, 600, 1, "bfloat16"


def test_the_right_kernel_is_right(down_and_across: tuple[int, int, int, int, str]) -> None:
    held = _check(*down_and_across, gamma=torch.linspace(-2, 3, 24))
    assert (held.down, held.across, held.each) == (3, 3, 3), held


@pytest.mark.parametrize("rstd", [float("inf"), 1e20])
def test_a_huge_rstd_is_the_first_groups_alone(rstd: float) -> None:
    """Where pieces end past the image, too: what is not there must not be 0 times infinity."""
    with np.errstate(all="ignore"):
        _check(2, 6, 1000, 3, "bfloat16", rstd_of_first=rstd)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("wait_group(PIECES - FIRST)", "wait_group(PIECES - FIRST + 1)"),
        ("if down == DOWN // 2:", "if down == DOWN // 2 + 1:"),
        ("piece, dy_ptr, x_ptr, then, count", "piece, dy_ptr, x_ptr, group, count"),
        ("c1 += gl.where(inner < WIDTH, s1", "c1 = gl.where(inner < WIDTH, s1"),
        ("inside = (inner < WIDTH)[:, None] & (col //", "inside = (inner < ROWS)[:, None] & (col //"),
        ("gl.where(group < count, WIDTH, 0)", "gl.where(group < count, ROWS, 0)"),
        ("gl.where(group < count, WIDTH, 0)", "gl.where(group < count + 1, WIDTH, 0)"),
        ("gammas.index(down).store(gamma)", "gammas.index(0).store(gamma)"),
    ],
)
def test_a_wrong_kernel_is_seen(right: str, wrong: str, down_and_across: tuple[int, int, int, int, str]) -> None:
    assert right in SOURCE
    kernel = gluon_on_numpy.load(SOURCE.replace(right, wrong), gpu_held_planes.__package__, _held=HELD).hold_planes
    with pytest.raises(AssertionError):
        _check(*down_and_across, gamma=torch.linspace(-2, 3, 24), kernel=kernel)
