"""GroupNorm's kernel in Gluon for planes that do not begin on 16 bytes, step by step on NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from .test_held import OP, describe, make_plan  # first: it sets the environment

pytest.importorskip("triton")

from backnorm.backends import _Cuda
from backnorm.ops.group_norm import gpu, gpu_held_runs, gpu_tiling
from backnorm.ops.group_norm import reference as gn
from backnorm.spec import ARRAYS

from .held_memory import WAYS, Large, judge_sums, load

KERNELS = {way: load(gpu_held_runs, way).hold_runs for way in WAYS}


def _check(
    kernel: Any, n: int, c: int, hw: int, group: int, dtype: str, gaps: tuple[int, int, int] = (0, 0, 0),
    pasts: tuple[int, int, int] = (0, 0, 0), gamma: Any = None,
) -> gpu_tiling.HeldRuns:  # fmt: skip
    """dx and the sums are the reference's, nothing else is written, and nothing around a sample counts. `gaps` elements
    are between samples, and tensors begin `pasts` elements past a multiple of 16 bytes."""
    large = Large("gradInput", n, c * hw, dtype, gaps, pasts)
    mean, rstd = (torch.randn(n, group, generator=torch.Generator().manual_seed(seed)) for seed in (4, 5))
    small = {"mean": mean, "rstd": rstd, **({} if gamma is None else {"gamma": gamma})}
    outputs = {"gradGammaOut": torch.empty(c), "gradBetaOut": torch.empty(c)}
    images = {
        name: view.as_strided((n, c, hw), (view.stride(0), hw, 1), view.storage_offset())
        for name, view in large.views.items()
    }
    tensors = {**images, **small, **outputs}
    numbers = {"N": n, "C": c, "HxW": hw, "group": group, "outputMask": (True, True, True)}
    values: dict[str, Any] = {name: describe(tensor, OP.name, name).desc for name, tensor in tensors.items()}
    values |= {"gamma": values.get("gamma"), "workspaceSize": True, "executor": True, **numbers}
    plan = make_plan(OP, values, "Any", ARRAYS)
    tiling = _Cuda(OP.folder).tile(plan.call, plan.writes)
    (launch,) = (one for one in gpu.launches(tiling, plan.call, plan.writes) if one.kernel is gpu_held_runs.hold_runs)
    held = tiling.held
    assert isinstance(held, gpu_tiling.HeldRuns)
    partials = np.full(n * 2 * c, np.nan, np.float32)
    large.launch(kernel, launch, small, partials)
    given = {**{k: v.double().numpy() for k, v in tensors.items() if k not in outputs}, **numbers}
    given.setdefault("gamma", None)
    golden, terms = gn.reference(given), gn.terms(given)
    large.judge(golden["gradInput"], terms["gradInput"])
    judge_sums(partials.reshape(n, 2, c), ("gradBetaOut", "gradGammaOut"), golden, terms)
    return held


@pytest.mark.parametrize("way", KERNELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("n", "c", "hw", "group"), [(3, 8, 65, 2), (2, 6, 81, 1), (2, 44, 131, 4), (1, 15, 625, 3), (2, 3, 1369, 3)]
)
def test_all_groups_are_the_references(n: int, c: int, hw: int, group: int, dtype: str, way: str) -> None:
    kernel = KERNELS[way]
    gamma = torch.randn(c, generator=torch.Generator().manual_seed(6))
    held = _check(kernel, n, c, hw, group, dtype, pasts=(1, 3, 1), gamma=gamma)
    assert held.num_warps == (1 if hw <= 512 else 4)
    _check(kernel, n, c, hw, group, dtype, (1, 5, 3), (0, 1, 2))
    gamma[c // 2] = float("inf")
    with np.errstate(all="ignore"):
        _check(kernel, n, c, hw, group, dtype, gamma=gamma)


def test_a_group_of_14_times_14_begins_on_16_bytes_and_its_planes_do_not() -> None:
    held = _check(KERNELS["views"], 1, 64, 196, 2, "bfloat16", gamma=torch.linspace(-2, 3, 64))
    assert held == gpu_tiling.HeldRuns(8192, ((4, 0), (2, 4), (1, 6)), 4, 1, 2 * 8192 * 2 + 256)


@pytest.mark.parametrize("group", [1, 3])
def test_planes_with_gaps_between_them_are_no_runs(group: int) -> None:
    image = torch.empty(2, 3, 140)[:, :, :131]
    tensors = {"gradOut": image, "input": image, "gradInput": image, "mean": torch.empty(2, group)}
    tensors |= {"rstd": tensors["mean"], "gradGammaOut": torch.empty(3), "gradBetaOut": torch.empty(3)}
    values: dict[str, Any] = {name: describe(tensor, OP.name, name).desc for name, tensor in tensors.items()}
    values |= {"gamma": None, "N": 2, "C": 3, "HxW": 131, "group": group, "outputMask": (True, True, True)}
    plan = make_plan(OP, {**values, "workspaceSize": True, "executor": True}, "Any", ARRAYS)
    assert _Cuda(OP.folder).tile(plan.call, plan.writes).held is None


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("async_copy.wait_group(0)", "async_copy.wait_group(1)"),
        ("dx = gl.where(inside, dx, dy)", "pass"),
        ("gl.where(before + places[block] < image, dy, 0.0)", "dy"),
        ("gl.where(inner == start + i, a, s1)", "gl.where(inner == start, a, s1)"),
        ("x_from + at, mean, rstd, 1.0", "dy_from + at, mean, rstd, 1.0"),
        ("if dx_from == dy_from:", "if dx_from == dx_from:"),
        ("if gl.sum((gammas - gammas != 0).to(gl.int32), 0) > 0:", "if False:"),
        ("gl.store(to_sums, s1, mask=inner < WIDTH)", "gl.store(to_sums, s1 * 0, mask=inner < WIDTH)"),
    ],
)
def test_a_wrong_kernel_is_seen(right: str, wrong: str) -> None:
    """By one call or the other: dx begins as dy does in one of them alone."""
    kernel = load(gpu_held_runs, right=right, wrong=wrong).hold_runs
    gamma = torch.linspace(-2, 3, 12)
    gamma[3] = float("inf")
    with pytest.raises(AssertionError), np.errstate(all="ignore"):  # noqa: PT012
        _check(kernel, 2, 12, 131, 2, "bfloat16", pasts=(3, 1, 2), gamma=torch.linspace(-2, 3, 12))
        _check(kernel, 2, 12, 131, 2, "bfloat16", pasts=(0, 1, 0), gamma=gamma)
