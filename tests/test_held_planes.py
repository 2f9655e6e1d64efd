"""GroupNorm's kernel in Gluon for planes, step by step on NumPy arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from .test_held import DTYPES, HELD, OP, UNTOUCHED, array_of, gluon_on_numpy, run  # first: it sets the environment

pytest.importorskip("triton")

from backnorm.accuracy import excess
from backnorm.arrays import describe
from backnorm.backends import _Cuda
from backnorm.ops.group_norm import gpu, gpu_held_planes, gpu_tiling
from backnorm.ops.group_norm import reference as gn
from backnorm.plan import make_plan
from backnorm.spec import ARRAYS

SOURCE = Path(gpu_held_planes.__file__).read_text(encoding="utf-8")
HOLD = gluon_on_numpy.load(SOURCE, gpu_held_planes.__package__, _held=HELD).hold_planes


def _check(
    n: int, c: int, hw: int, group: int, dtype: str, more: tuple[int, int, int] = (0, 0, 0), gamma: Any = None,
    rstd_of_first: float | None = None, kernel: Any = HOLD,
) -> gpu_tiling.HeldPlanes:  # fmt: skip
    """dx and the sums are the reference's, and nothing else is written. `more`: elements behind each image."""
    kind = DTYPES[dtype]
    dy, x, dx = (
        torch.randn(n, c, hw + gap, generator=torch.Generator().manual_seed(seed)).to(kind)
        for seed, gap in enumerate(more)
    )
    mean, rstd = (torch.randn(n, group, generator=torch.Generator().manual_seed(seed)) for seed in (4, 5))
    if rstd_of_first is not None:
        rstd[0, 0] = rstd_of_first
    small = {"mean": mean, "rstd": rstd, **({} if gamma is None else {"gamma": gamma})}
    outputs = {"gradGammaOut": torch.empty(c), "gradBetaOut": torch.empty(c)}
    large = {"gradOut": dy[:, :, :hw], "input": x[:, :, :hw], "gradInput": dx[:, :, :hw]}
    tensors = {**large, **small, **outputs}
    numbers = {"N": n, "C": c, "HxW": hw, "group": group, "outputMask": (True, True, True)}
    values: dict[str, Any] = {name: describe(tensor, OP.name, name).desc for name, tensor in tensors.items()}
    values |= {"gamma": values.get("gamma"), "workspaceSize": True, "executor": True, **numbers}
    plan = make_plan(OP, values, "Any", ARRAYS)
    tiling = _Cuda(OP.folder).tile(plan.call, plan.writes)
    (launch,) = (
        one for one in gpu.launches(tiling, plan.call, plan.writes) if one.kernel is gpu_held_planes.hold_planes
    )
    given = {**{k: v.double().numpy() for k, v in tensors.items() if k in (*small, "gradOut", "input")}, **numbers}
    given.setdefault("gamma", None)
    golden, terms = gn.reference(given), gn.terms(given)
    workspace = np.full(tiling.workspace_bytes + 8, 0xFF, np.uint8)  # as float32: NaN
    workspace = workspace[-workspace.ctypes.data % 8 :]
    memory = {"gradOut": array_of(dy), "input": array_of(x), "gradInput": array_of(dx)}
    memory["gradInput"][:] = UNTOUCHED
    memory |= {name: array_of(tensor) for name, tensor in small.items()}
    run(kernel, launch, memory, workspace, dtype)
    written = memory["gradInput"].reshape(n, c, hw + more[2])
    assert (written[:, :, hw:] == UNTOUCHED).all()
    array = written[:, :, :hw]
    array = array.astype(ml_dtypes.bfloat16) if dtype == "bfloat16" else array
    assert excess(array, golden["gradInput"].reshape(n, c, hw), terms["gradInput"].reshape(n, c, hw)) <= 1
    partials = workspace[tiling.partials :][: n * 2 * c * 4].view(np.float32).reshape(-1, 2, c)
    for i, name in enumerate(("gradBetaOut", "gradGammaOut")):
        total = partials[:, i].sum(0, dtype=np.float64).astype(np.float32)
        assert excess(total, golden[name].reshape(c), terms[name].reshape(c)) <= 1, name
    held = tiling.held
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
        ("piece, dy_ptr, x_ptr, group + step, count", "piece, dy_ptr, x_ptr, group, count"),
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
