"""LayerNorm's kernel in Gluon for rows that do not begin on 16 bytes, step by step on NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from .test_held import describe, make_plan  # first: it sets the environment

pytest.importorskip("triton")

from backnorm.backends import _Cuda
from backnorm.ops import OPS
from backnorm.ops._tiles import TILES_OF_A_RUN
from backnorm.ops.layer_norm import gpu, gpu_held_rows, gpu_tiling
from backnorm.ops.layer_norm import reference as ln
from backnorm.spec import ARRAYS

from . import gluon_on_numpy
from .held_memory import WAYS, Large, judge_sums, load

OP = OPS["layer_norm_backward"]
KERNELS = {way: load(gpu_held_rows, way).hold_rows for way in WAYS}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of which has several tiles."""
    monkeypatch.setattr(gpu_tiling, "MULTIPROCESSORS", 1)


def _check(
    kernel: Any, rows: int, cols: int, dtype: str, gaps: tuple[int, int, int] = (0, 0, 0),
    pasts: tuple[int, int, int] = (0, 0, 0), mask: tuple[bool, bool, bool] = (True, True, True), weight: bool = True,
) -> gpu_tiling.HeldRows:  # fmt: skip
    """dx and the sums are the reference's, nothing else is written, and nothing around a tensor counts."""
    large = Large("gradInputOut", rows, cols, dtype, gaps, pasts)
    mean, rstd, w = (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        for seed, shape in enumerate([(rows, 1), (rows, 1), (cols,)])
    )
    small = {"mean": mean, "rstd": rstd, **({"weightOptional": w} if weight else {})}
    outputs = {"gradWeightOut": torch.empty(cols), "gradBiasOut": torch.empty(cols)}
    tensors = {**large.views, **small, **outputs}
    values: dict[str, Any] = {name: describe(tensor, OP.name, name).desc for name, tensor in tensors.items()}
    values.setdefault("weightOptional", None)
    values |= {"normalizedShape": (cols,), "biasOptional": None, "outputMask": mask}
    plan = make_plan(OP, {**values, "workspaceSize": True, "executor": True}, "Any", ARRAYS)
    tiling = _Cuda(OP.folder).tile(plan.call, plan.writes)
    (launch,) = (one for one in gpu.launches(tiling, plan.call, plan.writes) if one.kernel is gpu_held_rows.hold_rows)
    held = tiling.held
    assert held is not None
    partials = np.full(held.programs * 2 * cols, np.nan, np.float32)
    large.launch(kernel, launch, small, partials)
    given = {name: tensor.double().numpy() for name, tensor in tensors.items() if name not in outputs}
    given = {"weightOptional": None, "normalizedShape": (cols,), "outputMask": mask, **given}
    golden, terms = ln.reference(given), ln.terms(given)
    large.judge(golden["gradInputOut"], terms["gradInputOut"], mask[0])
    if mask[1] or mask[2]:  # then both are made
        judge_sums(partials.reshape(-1, 2, cols), ("gradWeightOut", "gradBiasOut"), golden, terms)
    else:
        assert np.isnan(partials).all()
    return held


#: In tiles of four rows, with and without a rest, and of one; of one block of columns, and of several.
CASES = [(1, 33), (70, 45), (203, 64), (41, 97), (19, 131), (37, 201), (40, 321), (20, 525), (11, 1027), (6, 2137)]
CASES += [(5, 4275), (3, 9895), (2, 15871)]


@pytest.mark.parametrize("way", KERNELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("rows", "cols"), CASES)
def test_all_rows_are_the_references(rows: int, cols: int, dtype: str, way: str) -> None:
    kernel = KERNELS[way]
    if cols % 8:
        _check(kernel, rows, cols, dtype, pasts=(1, 3, 2))
    held = _check(kernel, rows, cols, dtype, (1, 3, 5), (0, 2, 1), weight=False)
    assert held.tile_rows == 1 or rows == 1


@pytest.mark.parametrize("mask", [(True, False, False), (False, True, True), (False, True, False), (True, False, True)])
@pytest.mark.parametrize(("rows", "cols"), [(70, 45), (20, 525)])
def test_what_is_not_wanted_is_not_written(rows: int, cols: int, mask: tuple[bool, bool, bool]) -> None:
    held = _check(KERNELS["views"], rows, cols, "bfloat16", mask=mask)
    assert held.tile_rows == (4 if cols == 45 else 1)


@pytest.mark.parametrize("rows", [16 * 24, 16 * 24 + 1, 16 * 96, 16 * 96 + 1])
@pytest.mark.parametrize("cols", [45, 201])
def test_runs_of_rows(rows: int, cols: int) -> None:
    held = _check(KERNELS["views"], rows, cols, "float32")
    assert held.long == (rows > 16 * 24)
    assert held.programs == (32 if rows > 16 * 96 else 16)
    assert rows <= held.programs * gpu_tiling.HELD_RUNS * TILES_OF_A_RUN


def test_rows_far_past_the_end_are_not_fetched() -> None:
    """Of 800000000 rows of 33 columns, the last programs ask for tiles 66 million rows past the end."""
    held = gpu_tiling.hold(800_000_000, 33, True, (2, 2, 2), True)
    assert held is not None
    past = held.slots * held.programs * held.tile_rows
    assert past * 33 > 2**31  # so that their number is no 32-bit number of elements
    asked: list[Any] = []
    functions = load(gpu_held_rows).__dict__
    functions["fetch_run"] = lambda slots, slot, ptr, at, count: asked.append((int(at), int(count)))
    row, rows = gluon_on_numpy.Tensor(np.int32(800_000_000 + past)), np.int32(800_000_000)
    arguments = ((None, None), 0, None, None, row, rows, 33, 33, np.int32(33), held.tile_rows)
    with np.errstate(all="ignore"):
        gluon_on_numpy.launch(functions["_fetch_tile"], 1, arguments, {}, 1)
    assert asked == [((800_000_000 + past) * 33, 0)] * 2


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("wait_group(SLOTS - 1)", "wait_group(SLOTS)"),
        ("row + SLOTS * step, rows, dy_step", "row + step, rows, dy_step"),
        ("gl.where(row + i < rows, cols, 0)", "cols"),
        ("gl.where(columns[block] < inside, dy, 0.0)", "dy"),
        ("(first >= shift) & (first + VECTOR <= end)", "(first >= shift) & (first < end)"),
        ("(first >= shift) & (first + VECTOR <= end)", "first + VECTOR <= end"),
        ("lane < gl.where(shift > 0, gl.minimum(VECTOR, end), 0)", "lane < 0"),
        ("behind < gl.where(last + VECTOR > end, end, 0)", "behind < 0"),
        ("behind >= gl.maximum(last, shift)", "behind >= last + 1"),
        ("gl.load(place, mask=keep & adds, other=0.0)", "gl.load(place, mask=keep, other=0.0)"),
        ("dw, db = _zeros_like(dw), _zeros_like(db)", "pass"),
        ("slot, x_from + before", "slot, dy_from + before"),
    ],
)
def test_a_wrong_kernel_is_seen(right: str, wrong: str) -> None:
    """By one call or the other: the second has no other rows after a row's end."""
    kernel = load(gpu_held_rows, right=right, wrong=wrong).hold_rows
    with pytest.raises(AssertionError):  # noqa: PT012
        _check(kernel, 1001, 45, "bfloat16", pasts=(0, 1, 0))
        _check(kernel, 25, 331, "bfloat16", (2, 1, 3), (3, 1, 2))
