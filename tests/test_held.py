"""GroupNorm's kernel in Gluon for pixels, step by step on NumPy arrays: what can be seen of it without a GPU."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # as test_gpu.py has it

pytest.importorskip("triton")

from backnorm.accuracy import excess
from backnorm.arrays import describe
from backnorm.backends import _Cuda
from backnorm.datatypes import DataType
from backnorm.ops import OPS, _held
from backnorm.ops._launch import Launch, Pointer
from backnorm.ops.group_norm import gpu, gpu_held, gpu_held_planes, gpu_tiling
from backnorm.ops.group_norm import reference as gn
from backnorm.plan import make_plan
from backnorm.spec import ARRAYS

from . import gluon_on_numpy

OP = OPS["group_norm_backward"]
SOURCE = Path(gpu_held.__file__).read_text(encoding="utf-8")
HELD = gluon_on_numpy.load(Path(_held.__file__).read_text(encoding="utf-8"), _held.__package__)
HOLD = gluon_on_numpy.load(SOURCE, gpu_held.__package__, _held=HELD).hold
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
UNTOUCHED = 7.0


def array_of(tensor: torch.Tensor) -> Any:
    flat = tensor.reshape(-1)
    return (flat.float() if tensor.dtype == torch.bfloat16 else flat).numpy().copy()


def _images(n: int, c: int, hw: int, more: int, pixels: bool, kind: torch.dtype, seed: int) -> tuple[Any, Any]:
    """(n, c, hw) with `more` elements behind each pixel or plane, and the memory it is in."""
    shape = (n, hw, c + more) if pixels else (n, c, hw + more)
    memory = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(kind)
    return memory[:, :, :c].transpose(1, 2) if pixels else memory[:, :, :hw], memory


def check(
    kernel: Any, pixels: bool, n: int, c: int, hw: int, group: int, dtype: str,
    more: tuple[int, int, int] = (0, 0, 0), gamma: Any = None, rstd_of_first: float | None = None,
) -> Any:  # fmt: skip
    """In all ways to launch it, dx and the sums are the reference's, and nothing else is written."""
    images = [_images(n, c, hw, gap, pixels, DTYPES[dtype], seed) for seed, gap in enumerate(more)]
    large = dict(zip(("gradOut", "input", "gradInput"), images))
    mean, rstd = (torch.randn(n, group, generator=torch.Generator().manual_seed(seed)) for seed in (4, 5))
    if rstd_of_first is not None:
        rstd[0, 0] = rstd_of_first
    small = {"mean": mean, "rstd": rstd, **({} if gamma is None else {"gamma": gamma})}
    outputs = {"gradGammaOut": torch.empty(c), "gradBetaOut": torch.empty(c)}
    tensors = {**{name: view for name, (view, _) in large.items()}, **small, **outputs}
    numbers = {"N": n, "C": c, "HxW": hw, "group": group, "outputMask": (True, True, True)}
    values: dict[str, Any] = {name: describe(tensor, OP.name, name).desc for name, tensor in tensors.items()}
    values |= {"gamma": values.get("gamma"), "workspaceSize": True, "executor": True, **numbers}
    plan = make_plan(OP, values, "Any", ARRAYS)
    tiling = _Cuda(OP.folder).tile(plan.call, plan.writes)
    held_by = gpu_held.hold if pixels else gpu_held_planes.hold_planes
    (together,) = (one for one in gpu.launches(tiling, plan.call, plan.writes) if one.kernel is held_by)
    held = tiling.held
    count = held.partials if pixels else n
    given = {**{k: v.double().numpy() for k, v in tensors.items() if k in (*small, "gradOut", "input")}, **numbers}
    given.setdefault("gamma", None)
    golden, terms = gn.reference(given), gn.terms(given)
    results = set()
    for launches in ([together], *([together.apart] if together.apart else [])):
        workspace = np.full(tiling.workspace_bytes + 8, 0xFF, np.uint8)  # as float32: NaN; as words: empty
        workspace = workspace[-workspace.ctypes.data % 8 :]  # words lie at multiples of 8 bytes
        memory = {name: array_of(whole) for name, (_, whole) in large.items()}
        memory["gradInput"][:] = UNTOUCHED
        memory |= {name: array_of(tensor) for name, tensor in small.items()}
        for launch in launches:
            run(kernel, launch, memory, workspace, dtype)
        written = memory["gradInput"].reshape(large["gradInput"][1].shape)
        length = c if pixels else hw
        assert (written[:, :, length:] == UNTOUCHED).all()
        array = written[:, :, :length].transpose(0, 2, 1) if pixels else written[:, :, :length]
        array = array.astype(ml_dtypes.bfloat16) if dtype == "bfloat16" else array
        assert excess(array, golden["gradInput"].reshape(n, c, hw), terms["gradInput"].reshape(n, c, hw)) <= 1
        partials = workspace[tiling.partials :][: count * 2 * c * 4].view(np.float32).reshape(-1, 2, c)
        for i, name in enumerate(("gradBetaOut", "gradGammaOut")):
            total = partials[:, i].sum(0, dtype=np.float64).astype(np.float32)
            assert excess(total, golden[name].reshape(c), terms[name].reshape(c)) <= 1, name
        results.add((array.tobytes(), partials.tobytes()))
    assert len(results) == 1
    return held


def _check(*call: Any, kernel: Any = HOLD, **more: Any) -> gpu_tiling.Held:
    held = check(kernel, True, *call, **more)
    assert isinstance(held, gpu_tiling.Held)
    return held


def run(kernel: Any, launch: Launch, memory: dict[str, Any], workspace: Any, name: str) -> None:
    large = ("gradOut", "input", "gradInput")
    arguments = []
    for argument in launch.arguments:
        if isinstance(argument, Pointer) and argument.name in memory:
            array = gluon_on_numpy.Memory(memory[argument.name], name if argument.name in large else "float32")
        elif isinstance(argument, Pointer):
            words = argument.dtype == DataType.INT64
            rest = workspace[argument.offset :]
            rest = rest[: rest.size // 8 * 8].view(np.int64 if words else np.float32)
            array = gluon_on_numpy.Memory(rest, "int64" if words else "float32")
        else:
            array = argument
        arguments.append(array)
    gluon_on_numpy.launch(kernel, launch.grid[0], arguments, launch.constants, launch.num_warps)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tiling, "LARGEST_WHOLE_GROUP", 0)
    monkeypatch.setattr(gpu_tiling, "HELD_PROGRAMS", 12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("n", "c", "hw", "group"), [(3, 64, 131, 8), (2, 48, 100, 2), (1, 512, 70, 1), (5, 160, 65, 8)]
)
def test_all_parts_make_the_references_sums(n: int, c: int, hw: int, group: int, dtype: str) -> None:
    gamma = torch.randn(c, generator=torch.Generator().manual_seed(6))
    _check(n, c, hw, group, dtype, gamma=gamma)
    gamma[c // 2] = float("inf")
    _check(n, c, hw, group, dtype, gamma=gamma)


@pytest.mark.parametrize("turns", gpu_tiling.HELD_TURNS)
def test_turns_of_all_lengths(turns: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tiling, "HELD_TURNS", (turns,))
    held = _check(4, 64, 230, 4, "bfloat16", more=(16, 32, 64))
    assert (held.tiles, held.lag) == turns


@pytest.mark.parametrize("n", [1, 16, 17, 18, 33])
def test_runs_of_samples(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which some programs have one more than others."""
    monkeypatch.setattr(gpu_tiling, "HELD_TURNS", ((1, 1),))
    monkeypatch.setattr(gpu_tiling, "HELD_PROGRAMS", 4)
    held = _check(n, 64, 60, 8, "float16")
    assert (held.parts, held.stride) == (2, min(n, 2))
    assert held.runs == -(-n // (held.stride * gpu_tiling.HELD_RUN))


def test_blocks_that_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tiling, "HELD_TURNS", ((2, 1),))
    held = _check(3, 320, 140, 40, "bfloat16", gamma=torch.randn(320))
    assert (held.blocks, held.lanes) == (5, 4)


def _copies(nodes: Iterable[ast.AST]) -> set[tuple[str, str]]:
    """(a, b) of every a = b."""
    pairs: list[tuple[ast.expr, ast.expr]] = []
    for node in nodes:
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            several = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            pairs += zip(target.elts, value.elts) if several else [(target, value)]  # type: ignore[attr-defined]
    return {(a.id, b.id) for a, b in pairs if isinstance(a, ast.Name) and isinstance(b, ast.Name)}


@pytest.mark.parametrize(
    "path", sorted(Path(gpu.__file__).parents[1].rglob("*gpu*.py")), ids=lambda path: "-".join(path.parts[-2:])
)
def test_no_variable_of_a_loop_begins_as_the_one_it_takes_after(path: Path) -> None:
    """Of x = y before a loop and again in it, Triton believes that x does not change."""
    for function in (f for f in ast.walk(ast.parse(path.read_text())) if isinstance(f, ast.FunctionDef)):
        for loop in (node for node in ast.walk(function) if isinstance(node, ast.For)):
            before = [node for node in ast.walk(function) if isinstance(node, ast.Assign) and node.lineno < loop.lineno]
            assert not _copies(ast.walk(loop)) & _copies(before), (function.name, loop.lineno)


@pytest.fixture
def two_runs(monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, int, int, str]:
    """A call of which some programs have a run more than others, and none is done in one turn."""
    monkeypatch.setattr(gpu_tiling, "HELD_TURNS", ((2, 1),))
    monkeypatch.setattr(gpu_tiling, "HELD_PROGRAMS", 4)
    return 17, 64, 100, 8, "bfloat16"


def test_the_right_kernel_is_right(two_runs: tuple[int, int, int, int, str]) -> None:
    held = _check(*two_runs)
    assert (held.parts, held.stride, held.runs) == (2, 2, 2)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("wait_group(SLOTS - (LAGS + 1) * TILES)", "wait_group(SLOTS)"),
        ("wait_group(SLOTS - (LAGS + 1) * TILES)", "wait_group(SLOTS - LAGS * TILES)"),
        ("slot = (done * TILES + tile) % SLOTS", "slot = (turn * TILES + tile) % SLOTS"),
        ("first + done * stride, samples, stride", "first + turn * stride, samples, stride"),
        ("mask = _inside(at < left - place, here, dx_at, FULL)", "mask = _inside(at < left, here, dx_at, FULL)"),
        ("if turns == (runs - 1) * RUN:", "if turns < 0:"),
        ("places = words_at + gl.where(there, p * GROUPS + g,", "places = words_at + gl.where(there, p * GROUPS,"),
    ],
)
def test_a_wrong_kernel_is_seen(right: str, wrong: str, two_runs: tuple[int, int, int, int, str]) -> None:
    assert right in SOURCE
    kernel = gluon_on_numpy.load(SOURCE.replace(right, wrong), gpu_held.__package__, _held=HELD).hold
    with pytest.raises(AssertionError):
        _check(*two_runs, kernel=kernel)
