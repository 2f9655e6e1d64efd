"""The GPU kernels: on a GPU if there is one, else step by step in Triton's interpreter, small and ragged."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton")

# ruff: noqa: E402 (Triton must see the environment)
import backnorm
from backnorm import backends
from backnorm.accuracy import excess
from backnorm.arrays import describe
from backnorm.datatypes import F32
from backnorm.ops import OPS, _launch
from backnorm.ops._images import Images
from backnorm.ops._tiles import SHARED_MEMORY, TILES_OF_A_RUN
from backnorm.ops.batch_norm_reduce import gpu_tiling as bn_tiling
from backnorm.ops.batch_norm_reduce import reference as bn
from backnorm.ops.group_norm import gpu_tiling as gn_tiling
from backnorm.ops.group_norm import reference as gn
from backnorm.ops.layer_norm import gpu_tiling as ln_tiling
from backnorm.ops.layer_norm import reference as ln
from backnorm.plan import make_plan
from backnorm.products import PRODUCTS
from backnorm.spec import ARRAYS, Call, TensorDesc
from backnorm.status import AclnnError

from .conftest import forget_plans

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
#: float16 lies in memory as bfloat16 does; the interpreter, which takes its time, is spared it where layouts are meant.
SIZES = DTYPES if ON_GPU else ["float32", "bfloat16"]
DEVICE = "cuda" if ON_GPU else "cpu"


def _random(shape: Any, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE).to(dtype)


def _poisoned(like: torch.Tensor, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=like.device)


def _run(name: str, values: dict[str, Any], outputs: dict[str, torch.Tensor]) -> None:
    """The plan of a call with the GPU's backend, whatever the device its tensors are on."""
    op = OPS[name]
    tensors = {**{k: v for k, v in values.items() if isinstance(v, torch.Tensor)}, **outputs}
    call = {param.name: values.get(param.name) for param in op.params}
    call.update({k: describe(v, name, k).desc for k, v in tensors.items()})
    call.update({"workspaceSize": True, "executor": True})
    plan = make_plan(op, call, "Any", ARRAYS)
    backend = backends._Cuda(op.folder)
    tiling = None if plan.tiling is None else backend.tile(plan.call, plan.writes)
    size = 0 if tiling is None else tiling.workspace_bytes
    plan = replace(plan, backend=backend, tiling=tiling, workspace_bytes=size)
    workspace = torch.full((size + 16,), 0xA5, dtype=torch.uint8, device=DEVICE)
    plan.execute(-(-workspace.data_ptr() // 16) * 16, [tensors[name].data_ptr() for name in plan.tensors])
    if ON_GPU:
        torch.cuda.synchronize()


def _numpy(values: dict[str, Any]) -> dict[str, Any]:
    return {k: v.double().cpu().numpy() if isinstance(v, torch.Tensor) else v for k, v in values.items()}


def _judge(reference: Any, values: dict[str, Any], outputs: dict[str, torch.Tensor]) -> None:
    golden, terms = reference.reference(_numpy(values)), reference.terms(_numpy(values))
    for name, result in outputs.items():
        bits = result.cpu()
        if bits.dtype == torch.bfloat16:
            array: Any = bits.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        else:
            array = bits.numpy()
        assert excess(array, golden[name].reshape(array.shape), terms[name].reshape(array.shape)) <= 1, name


LN = [(1, 1), (3, 7), (5, 64), (128, 64), (70, 33), (2, 769), (2, 4096), (3, 4097), (1, 20001)]
LN += [(9, 17000), (6, 40000)] if ON_GPU else [(3, 17000), (2, 40000)]  # the interpreter takes 2 seconds a row


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "cols"), LN)
def test_layer_norm(rows: int, cols: int, dtype: str) -> None:
    kind = DTYPES[dtype]
    values = {
        "gradOut": _random((rows, cols), kind, 1), "input": _random((rows, cols), kind, 2), "normalizedShape": (cols,),
        "mean": _random((rows, 1), torch.float32, 3), "rstd": _random((rows, 1), torch.float32, 4),
        "weightOptional": _random((cols,), kind, 5) if cols != 64 else None, "outputMask": (True, True, True),
    }  # fmt: skip
    shapes = {"gradInputOut": (rows, cols), "gradWeightOut": (cols,), "gradBiasOut": (cols,)}
    outputs = {name: _poisoned(values["input"], shape, kind) for name, shape in shapes.items()}
    _run("layer_norm_backward", values, outputs)
    _judge(ln, values, outputs)


def test_a_wide_row_of_nan_of_all_bits_is_no_word_that_others_wait_for() -> None:
    x = _random((3, 9000), torch.float32, 1)
    x[1] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)
    mean, rstd = _random((3, 1), torch.float32, 2), _random((3, 1), torch.float32, 3)
    dx = torch.zeros_like(x)
    values = {
        "gradOut": x, "input": x, "mean": mean, "rstd": rstd, "normalizedShape": (9000,),
        "outputMask": (True, False, False),
    }  # fmt: skip
    _run("layer_norm_backward", values, {"gradInputOut": dx})
    assert [bool(row.isnan().any()) for row in dx] == [False, True, False]


GUARD, UNTOUCHED = 64, 7.0


def _within(tensor: torch.Tensor, gap: int, past: int, around: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The same rows, `gap` elements apart, `past` elements past a multiple of 16 bytes, and the memory they are in."""
    rows, cols = tensor.shape
    memory = torch.full((GUARD + past + rows * (cols + gap) + GUARD,), around, dtype=tensor.dtype, device=DEVICE)
    view = memory[GUARD + past :].as_strided((rows, cols), (cols + gap, 1))
    return view.copy_(tensor), memory


def _others(memory: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """What the memory around a view holds."""
    taken = torch.zeros_like(memory, dtype=torch.bool)
    taken.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
    return memory[~taken]


# Rows, columns, elements between rows of gradOut and of the other two, elements past a multiple of 16 bytes, and which
# row is not finite.
UNALIGNED = [
    (1, 3, 0, 0, 0, None), (5, 3, 0, 0, 0, 2), (300, 7, 0, 0, 0, 100), (41, 97, 0, 0, 0, 17), (20, 97, 8, 16, 0, 3),
    (9, 97, 3, 0, 0, 4), (70, 131, 0, 0, 0, 69), (19, 131, 0, 0, 1, 0), (3, 525, 0, 0, 0, 1), (37, 525, 0, 0, 0, 9),
    (9, 525, 0, 0, 3, 4), (1, 769, 0, 0, 0, None), (35, 769, 0, 0, 0, 8), (35, 770, 0, 0, 0, 8), (18, 772, 0, 0, 0, 8),
    (18, 1000, 0, 0, 0, 8), (10, 127, 0, 0, 0, 8), (3, 4275, 0, 0, 0, 1), (17, 257, 0, 0, 0, 5),
    (21, 329, 0, 0, 1, 2), (7, 1025, 0, 0, 0, 3), (5, 1537, 2, 0, 0, 4), (4, 2049, 0, 0, 0, 0), (3, 3553, 0, 0, 0, 2),
]  # fmt: skip
if ON_GPU:  # as in test_held_rows.py, where there is none
    UNALIGNED += [
        (203, 45, 0, 0, 5, 77), (37, 201, 0, 0, 1, 36), (40, 321, 1, 3, 2, 0), (11, 1089, 0, 0, 1, 10),
        (2, 8191, 0, 0, 0, 1), (5, 9895, 0, 0, 3, 2), (4, 12287, 1, 0, 0, 3), (3, 15871, 0, 0, 1, 0),
        (3, 15873, 0, 0, 0, 1),
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize(("rows", "cols", "dy_gap", "gap", "past", "bad"), UNALIGNED)
def test_rows_that_do_not_begin_on_16_bytes(
    rows: int, cols: int, dy_gap: int, gap: int, past: int, bad: int | None, dtype: str, monkeypatch: Any
) -> None:
    """Elements of other rows and of what lies around a tensor: none of them counts, and none is written."""
    monkeypatch.setattr(ln_tiling, "MULTIPROCESSORS", 1)  # so that they have several tiles
    kind = DTYPES[dtype]
    dy, x = _random((rows, cols), kind, 1), _random((rows, cols), kind, 2)
    values = {
        "gradOut": _within(dy, dy_gap, past, float("nan"))[0], "input": _within(x, gap, past, float("inf"))[0],
        "normalizedShape": (cols,), "mean": _random((rows, 1), torch.float32, 3),
        "rstd": _random((rows, 1), torch.float32, 4), "weightOptional": _random((cols,), kind, 5),
        "outputMask": (True, True, True),
    }  # fmt: skip

    def poisoned() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        dx, memory = _within(_poisoned(x, (rows, cols), kind), gap, past, UNTOUCHED)
        return {
            "gradInputOut": dx,
            **{n: _poisoned(x, (cols,), kind) for n in ("gradWeightOut", "gradBiasOut")},
        }, memory

    outputs, memory = poisoned()
    _run("layer_norm_backward", values, outputs)
    _judge(ln, values, {**outputs, "gradInputOut": outputs["gradInputOut"].contiguous()})
    assert (_others(memory, outputs["gradInputOut"]) == UNTOUCHED).all()
    if bad is not None:
        for name, value in (("gradOut", float("nan")), ("input", float("-inf"))):
            values[name][bad] = value
        again, memory = poisoned()
        _run("layer_norm_backward", values, again)
        same = (again["gradInputOut"] == outputs["gradInputOut"]).all(dim=1)
        assert same.tolist() == [row != bad for row in range(rows)]
        assert (_others(memory, again["gradInputOut"]) == UNTOUCHED).all()


@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize("cols", [7, 97, 770, *([45, 257, 1027, 2137, 4275, 9895, 13001] if ON_GPU else [])])
def test_a_row_has_the_same_bits_wherever_it_lies(cols: int, dtype: str) -> None:
    kind, rows = DTYPES[dtype], 19
    dy, x = _random((rows, cols), kind, 1), _random((rows, cols), kind, 2)
    mean, rstd = _random((rows, 1), torch.float32, 3), _random((rows, 1), torch.float32, 4)
    weight = _random((cols,), kind, 5)

    def dx(first: int, past: int = 0) -> torch.Tensor:
        """Of some rows, in tensors that begin with them, `past` elements past a multiple of 16 bytes."""
        tensors = [_within(t[first:], 0, past, 0.0)[0] for t in (dy, x)]
        tensors += [t[first:].clone() for t in (mean, rstd)]
        result = _within(_poisoned(x, (rows - first, cols), kind), 0, past, 0.0)[0]
        values = {
            **dict(zip(("gradOut", "input", "mean", "rstd"), tensors)), "normalizedShape": (cols,),
            "weightOptional": weight, "outputMask": (True, False, False),
        }  # fmt: skip
        _run("layer_norm_backward", values, {"gradInputOut": result})
        return result

    whole = dx(0)
    for first in range(1, 9) if ON_GPU else (1, 3, 6):
        assert torch.equal(dx(first), whole[first:]), first
        if cols % 2:
            assert torch.equal(dx(first, 1), whole[first:]), first


def _image(n: int, c: int, hw: int, pixels: bool, kind: torch.dtype, seed: int) -> torch.Tensor:
    return _random((n, hw, c), kind, seed).transpose(1, 2) if pixels else _random((n, c, hw), kind, seed)


def _group_norm_values(dy: torch.Tensor, x: torch.Tensor, group: int) -> dict[str, Any]:
    n, c, hw = x.shape
    return {
        "gradOut": dy, "input": x, "mean": _random((n, group), torch.float32, 3),
        "rstd": _random((n, group), torch.float32, 4), "gamma": _random((c,), torch.float32, 5), "N": n, "C": c,
        "HxW": hw, "group": group, "outputMask": (True, True, True),
    }  # fmt: skip


GN = [
    (2, 6, 5, 3), (3, 8, 49, 2), (1, 3, 1, 1), (2, 12, 700, 2), (1, 4, 9000, 2), (2, 40, 131, 4), (4, 2, 3, 2),
    (1, 64, 2048 if ON_GPU else 640, 4),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pixels", [False, True])
@pytest.mark.parametrize(("n", "c", "hw", "group"), GN)
def test_group_norm(n: int, c: int, hw: int, group: int, pixels: bool, dtype: str) -> None:
    _group_norm(n, c, hw, group, pixels, DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "c", "hw", "group"), [(3, 8, 64, 2), (2, 12, 144, 4), (2, 6, 16, 3), (1, 5, 688, 1)])
def test_groups_that_one_program_reads_twice(
    n: int, c: int, hw: int, group: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {
        "LARGEST_SMALL_IMAGE": 0, "LARGEST_WHOLE_GROUP": 0, "HELD_PLANES": (), "SHARING": 0, "TWICE_TILE": 256,
    }  # fmt: skip
    for name, value in sizes.items():
        monkeypatch.setattr(gn_tiling, name, value)
    _group_norm(n, c, hw, group, False, DTYPES[dtype])
    _group_norm(n, c, hw, group, False, DTYPES[dtype], infinite=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("n", "c", "hw", "group"), [(4, 16, 49, 2), (9, 48, 36, 3), (2, 40, 196, 1), (130, 8, 2, 1), (1, 16, 256, 16)]
)
def test_groups_of_small_images(
    n: int, c: int, hw: int, group: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gn_tiling, "SHORTEST_ROW", 1)
    monkeypatch.setattr(gn_tiling, "LARGEST_TINY_IMAGE", 1 << 30)
    _group_norm(n, c, hw, group, False, DTYPES[dtype])
    _group_norm(n, c, hw, group, False, DTYPES[dtype], infinite=True)


SHARED = [(3, 8, 64, 2), (5, 12, 144, 4), (2, 6, 16, 3), (1, 5, 704, 1), (7, 3, 336, 1)]
SHARED += [(2, 32, 3136, 4)] if ON_GPU else []


def _share_small_groups(monkeypatch: pytest.MonkeyPatch, hw: int) -> None:
    """Parts of 128 or 256 elements for small images."""
    part_bytes = 512 if hw < 3000 else gn_tiling.PART_BYTES
    sizes = {
        "LARGEST_SMALL_IMAGE": 0, "LARGEST_WHOLE_GROUP": 0, "HELD_PLANES": (), "PART_BYTES": part_bytes,
        "FEWEST_PARTS": {2: 1, 4: 1},
    }  # fmt: skip
    for name, value in sizes.items():
        monkeypatch.setattr(gn_tiling, name, value)


@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize(("n", "c", "hw", "group"), SHARED)
def test_groups_that_some_programs_share(
    n: int, c: int, hw: int, group: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _share_small_groups(monkeypatch, hw)
    _group_norm(n, c, hw, group, False, DTYPES[dtype])
    _group_norm(n, c, hw, group, False, DTYPES[dtype], infinite=True)


on_gpu_alone = pytest.mark.skipif(not ON_GPU, reason="written in Gluon, which has no interpreter")
#: Groups of one to sixteen of a block, wider than a tile's first choice, of half a vector; a part or many; few samples
#: and several runs of them; blocks that take turns. Groups of 2048 bytes, and vectors of two groups, in one size alone.
HELD = [
    (3, 64, 300, 8), (2, 64, 131, 4), (5, 48, 900, 2), (2, 160, 1000, 8), (3, 512, 70, 1), (9, 24, 3000, 1),
    (130, 64, 520, 8), (3, 1024, 3136, 128), (2, 128, 16384, 32), (1, 32, 20000, 1), (2, 1024, 64, 2),
]  # fmt: skip
HELD_CASES = [(*shape, dtype) for shape in HELD for dtype in DTYPES]
HELD_CASES += [(2, 2048, 64, 2, "bfloat16"), (3, 80, 600, 8, "float32")]


@on_gpu_alone
@pytest.mark.parametrize(("n", "c", "hw", "group", "dtype"), HELD_CASES)
def test_pixels_that_programs_hold(
    n: int, c: int, hw: int, group: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gn_tiling, "LARGEST_WHOLE_GROUP", 0)
    held = _count_held(monkeypatch)
    _group_norm(n, c, hw, group, True, DTYPES[dtype])
    _group_norm(n, c, hw, group, True, DTYPES[dtype], infinite=True)
    assert held


#: A channel and many; one program of a multiprocessor and several; one piece and many, with a rest and without; fewer
#: groups than programs, and more.
HELD_PLANES = [
    (3, 8, 520, 2), (2, 24, 1000, 2), (300, 6, 904, 3), (2, 8, 3136, 1), (5, 20, 4096, 4), (9, 64, 3136, 8),
    (2, 3, 8192, 3), (70, 28, 2000, 4), (1, 160, 96, 2), (40, 512, 784, 32), (150, 16, 3136, 2),
]  # fmt: skip


@on_gpu_alone
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "c", "hw", "group"), HELD_PLANES)
def test_planes_that_programs_hold(
    n: int, c: int, hw: int, group: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gn_tiling, "LARGEST_WHOLE_GROUP", 0)
    monkeypatch.setattr(gn_tiling, "LARGEST_SMALL_IMAGE", 0)
    held = _count_held(monkeypatch)
    _group_norm(n, c, hw, group, False, DTYPES[dtype])
    _group_norm(n, c, hw, group, False, DTYPES[dtype], infinite=True)
    assert held


HELD_RUNS = [
    (2, 13, 225, 1), (5, 36, 196, 4), (3, 33, 81, 3), (2, 6, 1225, 2), (1, 15, 625, 5), (40, 7, 65, 1), (9, 1, 4001, 1),
]  # fmt: skip


@on_gpu_alone
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "c", "hw", "group"), HELD_RUNS)
def test_planes_that_programs_hold_as_runs(
    n: int, c: int, hw: int, group: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = _count_held(monkeypatch)
    _group_norm(n, c, hw, group, False, DTYPES[dtype])
    _group_norm(n, c, hw, group, False, DTYPES[dtype], infinite=True)
    assert held or hw * DTYPES[dtype].itemsize % 16 == 0


@on_gpu_alone
@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize(("n", "c", "hw", "group"), HELD_RUNS)
def test_a_sample_of_runs_has_the_same_bits_wherever_it_lies(n: int, c: int, hw: int, group: int, dtype: str) -> None:
    """`past` elements past a multiple of 16 bytes, in tensors that are alike in that and not."""
    kind, results = DTYPES[dtype], []
    dy, x = (_random((n, c * hw), kind, seed) for seed in (1, 2))
    for dy_past, x_past, dx_past in ((0, 0, 0), (1, 1, 1), (3, 0, 1), (0, 2, 0)):
        around, infinite = float("nan"), float("inf")
        views = [_within(dy, 3, dy_past, around)[0], _within(x, 1, x_past, infinite)[0]]
        result, memory = _within(_poisoned(x, (n, c * hw), kind), 3, dx_past, UNTOUCHED)
        shaped = [t.as_strided((n, c, hw), (t.stride(0), hw, 1), t.storage_offset()) for t in (*views, result)]
        values = _group_norm_values(shaped[0], shaped[1], group)
        outputs = {"gradInput": shaped[2]}
        outputs |= {name: _poisoned(x, (c,), torch.float32) for name in ("gradGammaOut", "gradBetaOut")}
        _run("group_norm_backward", values, outputs)
        assert (_others(memory, result) == UNTOUCHED).all()
        results.append([t.clone() for t in outputs.values()])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))


@pytest.mark.parametrize(("n", "c", "hw", "group", "dtype"), HELD_CASES)
def test_all_of_them_are_held(n: int, c: int, hw: int, group: int, dtype: str) -> None:
    images = Images(True, {"input": (c * hw, c)}, {})
    assert gn_tiling._hold(n, group, c // group, hw, DTYPES[dtype].itemsize, images)


@pytest.mark.parametrize("pixels", [False, True])
def test_an_infinite_rstd_makes_infinities_of_its_group_alone(pixels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gn_tiling, "LARGEST_WHOLE_GROUP", 0)  # so that a GPU holds the pixels
    n, c, hw, group = 2, 32, 100, 2
    x = _image(n, c, hw, pixels, torch.float32, 1)
    rstd = torch.ones(n, group, device=DEVICE)
    rstd[1, 0] = float("inf")
    values = {
        "gradOut": x, "input": x, "mean": torch.zeros(n, group, device=DEVICE), "rstd": rstd, "gamma": None, "N": n,
        "C": c, "HxW": hw, "group": group, "outputMask": (True, False, False),
    }  # fmt: skip
    dx = torch.full_like(x, float("nan"))
    _run("group_norm_backward", values, {"gradInput": dx})
    golden = torch.from_numpy(gn.reference(_numpy(values))["gradInput"]).reshape(n, c, hw)
    assert torch.equal(dx.cpu().isnan(), golden.isnan())
    assert torch.equal(dx.cpu().isinf(), golden.isinf())
    assert golden[1, : c // 2].isfinite().sum() == 0
    assert dx[0].isfinite().all()


@on_gpu_alone
@pytest.mark.parametrize("n", [1, 15, 16, 17, 33])
@pytest.mark.parametrize("dtype", SIZES)
def test_held_pixels_of_strided_views_in_many_turns(n: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor with steps of its own, few programs, parts of all lengths."""
    held = _count_held(monkeypatch)
    c, hw, group, kind = 64, 230, 4, DTYPES[dtype]
    few = ((1, 1),)
    for programs, turns in ((10, gn_tiling.HELD_TURNS), (24, ((2, 1),)), (40, few), (16, few), (7, ((5, 0),))):
        held.clear()
        monkeypatch.setattr(gn_tiling, "HELD_PROGRAMS", programs)
        monkeypatch.setattr(gn_tiling, "HELD_TURNS", turns)
        monkeypatch.setattr(gn_tiling, "LARGEST_WHOLE_GROUP", 0)
        dy, x, dx = (_random((n, hw, wider), kind, wider)[:, :, :c].transpose(1, 2) for wider in (80, 96, 128))
        values = _group_norm_values(dy, x, group)
        beside = dx.transpose(1, 2)._base[:, :, c:].clone()
        outputs = {"gradInput": dx.fill_(float("nan"))}
        outputs |= {name: _poisoned(x, (c,), torch.float32) for name in ("gradGammaOut", "gradBetaOut")}
        _run("group_norm_backward", values, outputs)
        _judge(gn, values, outputs)
        assert torch.equal(dx.transpose(1, 2)._base[:, :, c:], beside)
        assert held


@on_gpu_alone
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 700])
def test_held_planes_of_strided_views(n: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With gaps behind images and samples, others for each tensor, which stay as they are."""
    monkeypatch.setattr(gn_tiling, "LARGEST_WHOLE_GROUP", 0)
    held = _count_held(monkeypatch)
    c, hw, group, kind = 24, 520, 3, DTYPES[dtype]
    whole = [_random((n, c + more, hw + 8 * more), kind, more) for more in (1, 2, 3)]
    dy, x, dx = (t[:, :c, :hw] for t in whole)
    beside = whole[2].clone()
    values = _group_norm_values(dy, x, group)
    outputs = {"gradInput": dx.fill_(float("nan"))}
    outputs |= {name: _poisoned(x, (c,), torch.float32) for name in ("gradGammaOut", "gradBetaOut")}
    _run("group_norm_backward", values, outputs)
    _judge(gn, values, {**outputs, "gradInput": dx.contiguous()})
    whole[2][:, :c, :hw] = beside[:, :c, :hw]
    assert torch.equal(whole[2], beside)
    assert held


@on_gpu_alone
@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize("pixels", [False, True])
def test_images_that_do_not_begin_on_16_bytes_are_not_held(
    pixels: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, c, hw, group, kind = 3, 64, 904, 4, DTYPES[dtype]
    held = _count_held(monkeypatch)
    flat = [_random((n * hw * c + 1,), kind, i)[1:] for i in (1, 2, 3)]
    dy, x, dx = (t.view(n, hw, c).transpose(1, 2) if pixels else t.view(n, c, hw) for t in flat)
    values = _group_norm_values(dy, x, group)
    outputs = {"gradInput": dx.fill_(float("nan"))}
    outputs |= {name: _poisoned(x, (c,), torch.float32) for name in ("gradGammaOut", "gradBetaOut")}
    _run("group_norm_backward", values, outputs)
    _judge(gn, values, outputs)
    assert held  # as a plan, which knows no addresses


def test_what_is_held_is_compiled_for_gpus_without_one() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_held.py")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


HELD_SHAPES = st.tuples(
    st.sampled_from([1, 2, 3, 4, 8, 32]), st.sampled_from([1, 4, 6, 8, 10, 16, 20, 28, 64, 200, 512]),
    st.integers(1, 90000), st.sampled_from([2, 4]),
)  # fmt: skip


@given(HELD_SHAPES)
def test_what_is_held_covers_all_once_and_is_the_same_in_any_batch(shape: tuple[int, int, int, int]) -> None:
    groups, width, image, size = shape
    images = Images(True, {"input": (groups * width * image, groups * width)}, {})
    one, *more = (gn_tiling._hold(n, groups, width, image, size, images) for n in (1, 7, 1000))
    if one is None:
        assert more == [None, None]
        return
    length = one.tiles * gn_tiling.HELD_PIECES * one.rows
    assert (one.blocks - 1) * one.groups < groups <= one.blocks * one.groups
    assert one.groups * width <= one.cols
    assert (one.parts - 1) * length < image <= one.parts * length
    assert one.rows * one.cols * size == 16 * 32 * gn_tiling.HELD_WARPS
    assert (one.lag + 1) * one.tiles < gn_tiling.HELD_SLOTS
    for n, held in zip((1, 7, 1000), (one, *more)):
        assert held._replace(stride=0, runs=0) == one._replace(stride=0, runs=0)
        assert held.stride * held.lanes * held.parts <= gn_tiling.HELD_PROGRAMS
        assert (held.runs - 1) * held.stride * gn_tiling.HELD_RUN < n <= held.runs * held.stride * gn_tiling.HELD_RUN


def test_what_is_launched_depends_on_addresses_and_on_what_runs_at_a_time() -> None:
    def launch(name: str, programs: int = 1, each: int = 1, apart: Any = None) -> Any:
        return _launch.Launch(name, (programs,), (), {}, each=each, apart=apart, shared_bytes=50000 * (each > 1))

    vectors = launch("held", 30, 3, (launch("sums"), launch("dx")))
    launches = [launch("before"), *_launch.or_else([vectors, launch("last")], [launch("split"), launch("its last")])]

    def names(aligned: bool, multiprocessors: int, shared_memory: int, of_program: int = 50000) -> list[str]:
        chosen = _launch._on(launches, aligned, of_program)
        return [one.kernel for one in _launch._fitting(chosen, multiprocessors, shared_memory)]

    assert names(True, 10, 228 * 1024) == ["before", "held", "last"]
    assert names(True, 9, 228 * 1024) == names(True, 29, 100 * 1024) == ["before", "sums", "dx", "last"]
    assert names(True, 30, 100 * 1024) == ["before", "held", "last"]
    assert names(False, 132, 228 * 1024) == ["before", "split", "its last"]
    assert names(True, 132, 228 * 1024, 49999) == ["before", "split", "its last"]
    launches[1] = launches[1]._replace(anywhere=True)
    assert names(False, 10, 228 * 1024) == ["before", "held", "last"]
    assert names(False, 10, 228 * 1024, -1) == ["before", "split", "its last"]


@given(st.integers(1, 1 << 24), st.integers(1, 20000), st.sampled_from([2, 4]), st.booleans(), st.booleans())
def test_held_rows_fit_their_slots_and_those_a_multiprocessor(
    rows: int, cols: int, size: int, together: bool, shows: bool
) -> None:
    held = ln_tiling.hold(rows, cols, together, (size, size, size), shows)
    if held is None:
        assert cols < ln_tiling.SHORTEST_HELD_ROW or cols > 12288
        return
    threads = 32 * held.num_warps
    before = 0
    for count, start in held.blocks:
        assert start == before
        before += count
    assert (before - 1) * threads < cols <= before * threads
    assert 16 // size - 1 + (held.tile_rows - 1) * cols + before * threads <= held.slot
    assert TILES_OF_A_RUN % held.tile_rows == 0
    assert together or held.tile_rows == 1
    programs = ln_tiling.programs_of_held_rows(cols)
    assert programs is not None
    assert programs.each * threads * held.registers <= 65536
    assert held.slot * size * (2 * held.slots + 1) < held.shared_bytes <= SHARED_MEMORY // programs.each - 1024
    assert (held.programs - 1) * held.tile_rows < rows  # none is idle
    if shows:
        turns = -(-rows // (held.programs * held.tile_rows))
        assert turns * held.tile_rows <= ln_tiling.HELD_RUNS * TILES_OF_A_RUN
        assert held.long or turns * held.tile_rows <= TILES_OF_A_RUN


@given(st.integers(1, 300), st.integers(1, 9000), st.sampled_from([2, 4]))
def test_held_runs_fit_shared_memory(channels: int, image: int, size: int) -> None:
    held = gn_tiling._hold_runs(channels, image, size, Images(False, {"input": (channels * image, image)}, {}))
    if held:
        threads = 32 * held.num_warps
        elements = sum(count for count, _ in held.blocks) * threads
        assert elements - threads < image <= elements
        assert 16 // size - 1 + (channels - 1) * image + elements <= held.slot
        assert channels % held.together == 0
        assert 2 * held.slot * size < held.shared_bytes <= SHARED_MEMORY // gn_tiling.RUN_EACH - 1024
    else:
        tiny, in_vectors = image <= gn_tiling.LARGEST_TINY_IMAGE, image * size % 16 == 0
        assert tiny or in_vectors or 4 * channels * (image + 128) * size > SHARED_MEMORY // gn_tiling.RUN_EACH - 1024
    apart = Images(False, {"input": (channels * (image + 1), image + 1)}, {})
    assert gn_tiling._hold_runs(channels, image, size, apart) is None


@given(st.integers(1, 300), st.integers(1, 2000), st.sampled_from([2, 4]))
def test_pieces_cover_a_group_and_fit_shared_memory(channels: int, vectors: int, size: int) -> None:
    image = vectors * 16 // size
    held = gn_tiling._hold_planes(channels, image, size, Images(False, {"input": (channels * image, image)}, {}))
    if held:
        assert (held.down - 1) * held.rows < channels <= held.down * held.rows
        assert (held.across - 1) * held.cols < image <= held.across * held.cols
        assert held.rows * held.cols * size == 16 * 32 * held.num_warps * gn_tiling.HELD_PLANES_VECTORS
        inputs = 2 * held.down * held.rows * held.across * held.cols * size
        assert inputs < held.shared_bytes <= SHARED_MEMORY // held.each - 1024
        assert held.each * held.num_warps * 32 * held.registers <= 65536
    else:
        assert 2 * channels * image * size > SHARED_MEMORY // 4
    odd = Images(False, {"input": (channels * image, image + 1)}, {})
    assert gn_tiling._hold_planes(channels, image, size, odd) is None


def _count_held(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the tilings from now on hold in shared memory."""
    held: list[Any] = []

    def noting(hold: Any) -> Any:
        def note(*arguments: Any) -> Any:
            result = hold(*arguments)
            held.extend([result] if result else [])
            return result

        return note

    for name in ("_hold", "_hold_planes", "_hold_runs"):
        monkeypatch.setattr(gn_tiling, name, noting(getattr(gn_tiling, name)))
    return held


@pytest.mark.parametrize("pixels", [False, True])
def test_an_infinite_gamma_of_groups_that_all_programs_share(pixels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gn_tiling, "HELD_PLANES", ())
    _group_norm(2, 12, 3000, 2, pixels, torch.float32, infinite=True)


def _group_norm(n: int, c: int, hw: int, group: int, pixels: bool, kind: torch.dtype, infinite: bool = False) -> None:
    values = _group_norm_values(*(_image(n, c, hw, pixels, kind, seed) for seed in (1, 2)), group)
    if hw == 49:
        values["gamma"] = None
    if infinite and values["gamma"] is not None:
        values["gamma"][c // 2] = float("inf")
    outputs = {
        "gradInput": torch.full_like(values["input"], float("nan")), "gradGammaOut": torch.full((c,), float("nan")),
        "gradBetaOut": torch.full((c,), float("nan")),
    }  # fmt: skip
    outputs = {name: tensor.to(DEVICE) for name, tensor in outputs.items()}
    _run("group_norm_backward", values, outputs)
    _judge(gn, values, outputs)


def test_one_sample_of_one_channel_is_read_as_two_are() -> None:
    n, hw = 2, 30001  # four parts, were it read in vectors
    dy, x = (_random((n, 1, hw), torch.float32, seed) for seed in (1, 2))
    mean, rstd, gamma = (_random((size, 1), torch.float32, 3) for size in (n, n, 1))

    def dx(count: int) -> torch.Tensor:
        tensors = {"gradOut": dy, "input": x, "mean": mean, "rstd": rstd}
        values = {name: tensor[:count] for name, tensor in tensors.items()}
        values |= {"gamma": gamma[0], "N": count, "C": 1, "HxW": hw, "group": 1, "outputMask": (True, False, False)}
        result = torch.full_like(values["input"], float("nan"))
        _run("group_norm_backward", values, {"gradInput": result})
        return result

    assert torch.equal(dx(2)[:1], dx(1))


def test_zeros_in_a_view_of_five_axes() -> None:
    memory = torch.full((3,) * 5, 7.0, device=DEVICE)
    view = memory[:2, :2, :2, :2, :2]
    nothing = torch.zeros(0, *view.shape, device=DEVICE)
    values = {
        "gradOut": nothing, "input": nothing, "normalizedShape": tuple(view.shape),
        "mean": torch.zeros(0, *[1] * 5, device=DEVICE), "rstd": torch.zeros(0, *[1] * 5, device=DEVICE),
        "weightOptional": torch.ones(view.shape, device=DEVICE), "outputMask": (False, True, False),
    }  # fmt: skip
    _run("layer_norm_backward", values, {"gradWeightOut": view})
    assert not view.any()
    assert memory.count_nonzero() == 3**5 - 2**5


def _patch(monkeypatch: pytest.MonkeyPatch, module: Any, **sizes: Any) -> None:
    for name, value in sizes.items():
        monkeypatch.setattr(module, name, value)


@pytest.mark.parametrize("rows", [24, 25, 48, 49, 50, 96, 97, 145])
def test_runs_of_wide_rows(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _patch(monkeypatch, ln_tiling, WIDE_PROGRAMS=4, CHUNK={True: 32, False: 32}, LONGEST_WHOLE_ROW=32, HELD_ROWS=())
    test_layer_norm(rows, 50, "float32")


@pytest.mark.parametrize("hw", [384, 400, 784, 789])
def test_runs_of_groups(hw: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _patch(monkeypatch, gn_tiling, LARGEST_SMALL_IMAGE=0, LARGEST_WHOLE_GROUP=0, HELD_PLANES=(), SHARING=0)
    _patch(monkeypatch, gn_tiling, TWICE_TILE=32, TWICE_RUN=16, LARGEST_TINY_IMAGE=1 << 30)
    _group_norm(2, 4, hw, 2, False, torch.float32, infinite=True)
    _patch(monkeypatch, gn_tiling, LARGEST_TWICE=0, TILE=32, LONGEST_RUN=16, MOST_TILES=200)
    _group_norm(2, 3, hw, 1, False, torch.float32)
    _patch(monkeypatch, gn_tiling, PIXEL_TILE=64, ELEMENTWISE_PIXELS=64, FEWEST_PIXEL_TILES=200)
    _group_norm(1, 6, hw // 4, 2, True, torch.float32)


@pytest.mark.parametrize("pixels", [False, True])
@pytest.mark.parametrize("hw", [700, 1600])
def test_runs_of_channels(hw: int, pixels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _patch(monkeypatch, bn_tiling, TILE=32, LONGEST_RUN=16, PROGRAMS=1, WIDEST_PIXELS=16, JOINED=16)
    test_batch_norm(2, 2, hw, pixels, "float32")


def test_many_rows_of_one_channel_fit_the_grid() -> None:
    desc, one = TensorDesc((6_400_000, 1), F32, (1, 1)), TensorDesc((1,), F32, (1,))
    values = {"gradOut": desc, "input": desc, "mean": one, "invstd": one, "weight": None, "sumDy": one}
    values |= {"inputG": True, "weightG": False, "biasG": False}
    call = Call(OPS["batch_norm_backward_reduce"], values, PRODUCTS["Any"])
    assert bn_tiling.tile(call, ("sumDy",)).splits <= 65535


def test_an_image_of_more_than_32_bits_is_refused() -> None:
    big, one = TensorDesc((1, 1, 2**31), F32, (0, 0, 1)), TensorDesc((1, 1), F32, (1, 1))
    values = {"gradOut": big, "input": big, "mean": one, "rstd": one, "gamma": None, "gradInput": big, "N": 1, "C": 1}
    call = Call(OPS["group_norm_backward"], {**values, "HxW": 2**31, "group": 1}, PRODUCTS["Any"])
    with pytest.raises(AclnnError, match="at most 2147418112 on a GPU; got 2147483648"):
        gn_tiling.tile(call, ("gradInput",))


def test_structures_are_those_of_the_drivers_header() -> None:
    config, attribute = _launch._Config, _launch._Attribute
    assert (ctypes.sizeof(config), ctypes.sizeof(attribute)) == (56, 72)
    assert (config.shared_bytes.offset, config.stream.offset, config.attributes.offset) == (24, 32, 40)
    assert (config.attribute_count.offset, attribute.value.offset) == (48, 8)


def test_only_addresses_that_are_multiples_of_16_are_taken_for_such() -> None:
    assert _launch.Pointer("input", 32, F32).may_be_aligned
    assert not _launch.Pointer("input", 3460, F32).may_be_aligned
    assert not _launch.Pointer("mean", 0, F32).may_be_aligned


BN = [
    (2, 3, 5), (5, 7, 49), (70, 33, 1), (2, 3, 5000), (3, 300, 16), (1, 1, 1), (7, 12, 100), (301, 3, 7), (7, 26, 17),
    (5, 13, 33), (2, 3, 5003),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pixels", [False, True])
@pytest.mark.parametrize(("n", "c", "hw"), BN)
def test_batch_norm(n: int, c: int, hw: int, pixels: bool, dtype: str) -> None:
    kind = DTYPES[dtype]
    values = {
        "gradOut": _image(n, c, hw, pixels, kind, 1), "input": _image(n, c, hw, pixels, kind, 2),
        "mean": _random((c,), torch.float32, 3), "invstd": _random((c,), torch.float32, 4),
        "weight": None, "inputG": True, "weightG": True, "biasG": True,
    }  # fmt: skip
    names = ("sumDy", "sumDyXmu", "gradWeight", "gradBias")
    outputs = {name: torch.full((c,), float("nan"), device=DEVICE) for name in names}
    _run("batch_norm_backward_reduce", values, outputs)
    _judge(bn, values, outputs)


# Samples, channels, elements of an image, elements between images of gradOut and of input, and past 16 bytes.
PLANES = [
    (2, 5, 601, 0, 0, 0), (3, 3, 2047, 0, 0, 0), (2, 2, 4098, 0, 0, 0), (1, 3, 4099, 0, 0, 1), (2, 4, 97, 8, 16, 0),
    (2, 4, 97, 5, 0, 0), (2, 3, 520, 0, 1, 0),
]  # fmt: skip


@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize(("n", "c", "hw", "dy_gap", "gap", "past"), PLANES)
def test_planes_that_do_not_begin_on_16_bytes(
    n: int, c: int, hw: int, dy_gap: int, gap: int, past: int, dtype: str
) -> None:
    kind = DTYPES[dtype]
    dy = _within(_random((n * c, hw), kind, 1), dy_gap, past, float("nan"))[0].unflatten(0, (n, c))
    x = _within(_random((n * c, hw), kind, 2), gap, past, float("inf"))[0].unflatten(0, (n, c))
    values = {
        "gradOut": dy, "input": x, "mean": _random((c,), torch.float32, 3), "invstd": _random((c,), torch.float32, 4),
        "weight": None, "inputG": True, "weightG": True, "biasG": True,
    }  # fmt: skip
    names = ("sumDy", "sumDyXmu", "gradWeight", "gradBias")
    outputs = {name: torch.full((c,), float("nan"), device=DEVICE) for name in names}
    _run("batch_norm_backward_reduce", values, outputs)
    _judge(bn, values, outputs)
    dy[:, 1], x[:, 1] = float("nan"), float("-inf")  # another channel's
    again = {name: torch.full((c,), float("nan"), device=DEVICE) for name in names}
    _run("batch_norm_backward_reduce", values, again)
    for name in names:
        assert (again[name] == outputs[name]).tolist() == [channel != 1 for channel in range(c)], name


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_of_all_kinds(dtype: str) -> None:
    """Rows with gaps are read in place, transposed ones through a copy; statistics and outputs may be strided too."""
    kind, rows, cols = DTYPES[dtype], 6, 20
    values = {
        "gradOut": _random((rows, cols + 5), kind, 1)[:, :cols], "input": _random((cols, rows), kind, 2).t(),
        "normalizedShape": (cols,), "mean": _random((rows, 2), torch.float32, 3)[:, :1],
        "rstd": _random((rows, 1), torch.float32, 4), "weightOptional": _random((2 * cols,), kind, 5)[::2],
        "outputMask": (True, True, True),
    }  # fmt: skip
    outputs = {
        "gradInputOut": torch.full((cols, rows), float("nan"), dtype=kind, device=DEVICE).t(),
        "gradWeightOut": torch.full((3 * cols,), float("nan"), dtype=kind, device=DEVICE)[::3],
        "gradBiasOut": torch.full((cols,), float("nan"), dtype=kind, device=DEVICE),
    }  # fmt: skip
    _run("layer_norm_backward", values, outputs)
    _judge(ln, values, outputs)


@pytest.mark.skipif(ON_GPU, reason="the interpreter is off where there is a GPU")
def test_the_interpreter_refuses_memory_it_cannot_reach() -> None:
    with pytest.raises(AclnnError, match=r"must be off for tensors on a GPU; got cuda:0"):
        _launch.prepare([], (), "cuda:0")


# --- through the array functions, on a GPU ---


def _layer_norm_call(rows: int, cols: int) -> tuple[Any, ...]:
    statistics = [_random((rows, 1), torch.float32, seed) for seed in (3, 4)]
    kind = torch.bfloat16
    return (
        _random((rows, cols), kind, 1),
        _random((rows, cols), kind, 2),
        (cols,),
        *statistics,
        _random((cols,), kind, 5),
    )


CALLS = {
    "layer_norm_backward": lambda: _layer_norm_call(3001, 700),
    "layer_norm_backward, held rows": lambda: _layer_norm_call(3001, 701),
    "layer_norm_backward, short held rows": lambda: _layer_norm_call(3001, 67),
    "layer_norm_backward of wide rows": lambda: _layer_norm_call(301, 20000),
    "group_norm_backward of shared groups": lambda: (
        _random((6, 8, 65536), torch.float32, 1), _random((6, 8, 65536), torch.float32, 2),
        _random((6, 2), torch.float32, 3), _random((6, 2), torch.float32, 4), _random((8,), torch.float32, 5), 6, 8,
        65536, 2,
    ),
    "group_norm_backward, held planes": lambda: (
        _random((60, 32, 3136), torch.float16, 1), _random((60, 32, 3136), torch.float16, 2),
        _random((60, 4), torch.float32, 3), _random((60, 4), torch.float32, 4), _random((32,), torch.float32, 5), 60,
        32, 3136, 4,
    ),
    "group_norm_backward, held runs": lambda: (
        _random((60, 36, 225), torch.float16, 1), _random((60, 36, 225), torch.float16, 2),
        _random((60, 4), torch.float32, 3), _random((60, 4), torch.float32, 4), _random((36,), torch.float32, 5), 60,
        36, 225, 4,
    ),
    "group_norm_backward": lambda: (
        _random((6, 32, 900), torch.float16, 1), _random((6, 32, 900), torch.float16, 2),
        _random((6, 4), torch.float32, 3), _random((6, 4), torch.float32, 4), _random((32,), torch.float32, 5), 6, 32,
        900, 4,
    ),
    "group_norm_backward of held pixels": lambda: (
        _image(6, 96, 900, True, torch.float16, 1), _image(6, 96, 900, True, torch.float16, 2),
        _random((6, 4), torch.float32, 3), _random((6, 4), torch.float32, 4), _random((96,), torch.float32, 5), 6, 96,
        900, 4,
    ),
    "batch_norm_backward_reduce": lambda: (
        _random((6, 32, 900), torch.float32, 1), _random((6, 32, 900), torch.float32, 2),
        _random((32,), torch.float32, 3), _random((32,), torch.float32, 4),
    ),
}  # fmt: skip
on_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")


def _bits(results: tuple[Any, ...]) -> list[bytes]:
    return [result.float().cpu().numpy().tobytes() for result in results]


@on_gpu
@pytest.mark.parametrize("name", CALLS)
def test_the_same_bits_run_to_run_on_any_stream_and_in_a_graph(name: str) -> None:
    call, arguments = getattr(backnorm, name.replace(",", " ").split()[0]), CALLS[name]()
    expected = _bits(call(*arguments))
    assert _bits(call(*arguments)) == expected
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        aside = call(*arguments)
    stream.synchronize()
    assert _bits(aside) == expected
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(*arguments)
    for result in captured:
        result.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert _bits(captured) == expected


@on_gpu
@pytest.mark.parametrize("name", [name for name in CALLS if " of " in name])
def test_the_same_bits_where_not_all_programs_run_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[bytes]:
        forget_plans()
        return _bits(getattr(backnorm, name.replace(",", " ").split()[0])(*CALLS[name]()))

    together = run()
    launched: list[Any] = []
    fitting = _launch._fitting

    def one_by_one(launches: Any, multiprocessors: int, shared_memory: int) -> Any:
        launched.extend(launch for launch in launches if launch.apart)
        return fitting(launches, 1, 0)

    monkeypatch.setattr(_launch, "_fitting", one_by_one)
    assert run() == together
    assert launched


@on_gpu
def test_programs_that_wait_for_each_other_on_many_streams() -> None:
    wide: Any = backnorm.layer_norm_backward
    calls = [(wide, _layer_norm_call(300 + i, 40000)) for i in range(6)]
    names = ["group_norm_backward of held pixels", "group_norm_backward, held planes"]
    calls += [(backnorm.group_norm_backward, CALLS[name]()) for name in names for _ in range(4)]
    alone = [_bits(function(*call)) for function, call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    for _ in range(10):
        results = []
        for (function, call), stream in zip(calls, streams):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                results.append(function(*call))
        torch.cuda.synchronize()
        assert [_bits(result) for result in results] == alone


@on_gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cols", [64, 97, 700, 1024, 4096, 8192, 20001, 65536])
def test_a_row_has_the_same_bits_whatever_its_neighbours(cols: int, dtype: str) -> None:
    rows, kind = 3008 if cols < 10000 else 208, DTYPES[dtype]
    dy, x = _random((rows, cols), kind, 1), _random((rows, cols), kind, 2)
    mean, rstd, w = (_random(size, torch.float32, 3) for size in ((rows, 1), (rows, 1), (cols,)))
    whole = backnorm.layer_norm_backward(dy, x, (cols,), mean, rstd, w.to(kind))[0]
    for some in (slice(104, 107), slice(8, 9)):  # whose rows begin on 16 bytes, whatever their length
        dx = backnorm.layer_norm_backward(dy[some], x[some], (cols,), mean[some], rstd[some], w.to(kind))[0]
        assert torch.equal(whole[some], dx)


# Channels, elements of an image, groups: in registers, as rows, read twice, shared, held, by all.
SAMPLES = [
    (1, 700, 1),
    (40, 1, 4),
    (32, 49, 4),
    (256, 49, 4),
    (64, 3136, 8),
    (24, 601, 2),
    (32, 65536, 8),
    (4, 262144, 1),
    (4, 262147, 1),
    (320, 1024, 32),
    (112, 441, 4),
    (512, 300, 4),
    (1024, 4096, 128),
    (80, 3136, 8),
    (64, 9216, 8),
    (256, 196, 8),
    (15, 225, 3),
    (21, 1225, 3),
]


@on_gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pixels", [False, True])
@pytest.mark.parametrize(("c", "hw", "groups"), SAMPLES)
def test_a_sample_has_the_same_bits_whatever_its_neighbours(
    c: int, hw: int, groups: int, pixels: bool, dtype: str
) -> None:
    n = 14
    dy, x = (_image(n, c, hw, pixels, DTYPES[dtype], seed) for seed in (1, 2))
    mean, rstd, w = (_random(size, torch.float32, 3) for size in ((n, groups), (n, groups), (c,)))
    whole = backnorm.group_norm_backward(dy, x, mean, rstd, w, n, c, hw, groups)[0]
    for some in (slice(10, 13), slice(7, 8)):
        count = some.stop - some.start
        dx = backnorm.group_norm_backward(dy[some], x[some], mean[some], rstd[some], w, count, c, hw, groups)[0]
        assert torch.equal(whole[some], dx)


@on_gpu
@pytest.mark.parametrize(
    ("rows", "cols"),
    [
        (2000000, 64),
        (3000000, 45),
        (200000, 700),
        (100000, 1027),
        (70000, 4275),
        (20000, 9895),
        (9000, 4096),
        (40000, 8192),
        (4096, 16384),
        (300, 1000000),
    ],
)
def test_rows_that_are_all_alike(rows: int, cols: int) -> None:
    """Where roundings all go the same way, sums must not be one long chain: within the bound, or (rows of 2049 to 8192
    columns in vectors, whose sums stay in registers) closer than PyTorch's."""
    dy, x = (_random((1, cols), torch.float32, seed).expand(rows, cols).contiguous() for seed in (1, 2))
    mean, rstd, w = (
        torch.zeros(rows, 1, device=DEVICE),
        torch.ones(rows, 1, device=DEVICE),
        _random((cols,), dy.dtype, 3),
    )
    ours = backnorm.layer_norm_backward(dy, x, (cols,), mean, rstd, w, w)[1:]
    theirs = torch.ops.aten.native_layer_norm_backward(dy, x, (cols,), mean, rstd, w, w, (False, True, True))[1:]
    for result, other, term in zip(ours, theirs, (dy[0].double() * x[0].double(), dy[0].double())):
        golden, terms = (rows * term).cpu().numpy(), (rows * term.abs()).cpu().numpy()
        within = [excess(array.cpu().numpy(), golden, terms) for array in (result, other)]
        assert within[0] <= 1 or (cols in (4096, 8192) and within[0] < within[1] / 2), within


@on_gpu
@pytest.mark.parametrize("pixels", [False, True])
@pytest.mark.parametrize(("n", "c", "hw", "groups"), [(64, 256, 3136, 32), (2, 16, 1 << 20, 2), (300, 128, 1023, 8)])
def test_images_that_are_all_alike(n: int, c: int, hw: int, groups: int, pixels: bool) -> None:
    dy, x = (_random((1, c, 1), torch.float32, seed).expand(n, c, hw) for seed in (1, 2))
    dy, x = (t.transpose(1, 2).contiguous().transpose(1, 2) if pixels else t.contiguous() for t in (dy, x))
    one, zero = torch.ones(c, device=DEVICE), torch.zeros(c, device=DEVICE)
    statistics = zero.expand(n, c)[:, :groups].contiguous(), one.expand(n, c)[:, :groups].contiguous()
    sums = backnorm.batch_norm_backward_reduce(dy, x, zero, one)[:2]
    _, dw, db = backnorm.group_norm_backward(dy, x, *statistics, one, n, c, hw, groups)
    of_db = n * hw * dy[0, :, 0].double()
    of_dw = of_db * x[0, :, 0].double()
    for result, golden in ((sums[0], of_db), (sums[1], of_dw), (db, of_db), (dw, of_dw)):
        assert excess(result.cpu().numpy(), golden.cpu().numpy(), golden.abs().cpu().numpy()) <= 1


@on_gpu
@pytest.mark.parametrize("cols", [1024, 1025])
def test_more_than_two_to_the_31_elements(cols: int) -> None:
    rows = 2**21 + 5
    ones, zeros = torch.ones(rows, 1, device="cuda"), torch.zeros(rows, 1, device="cuda")
    dy = torch.ones(rows, cols, dtype=torch.float16, device="cuda")
    x = torch.zeros_like(dy)
    x[-1] = 1
    dx, dw, db = backnorm.layer_norm_backward(dy, x, (cols,), zeros, ones, out=None)
    assert torch.equal(dw, torch.ones_like(dw))
    assert float(dx[-1].abs().max()) == 1  # 1 - 1 - 1 * 1
    assert not dx[:-1].any()
    assert torch.isinf(db).all()  # 2**21 is past the largest float16


@on_gpu
def test_held_pixels_of_more_than_two_to_the_31_elements() -> None:
    n, c, hw, groups = 2700, 256, 3136, 32
    some = _random((hw, c), torch.bfloat16, 1)
    dy = some.expand(n, hw, c).contiguous().transpose(1, 2)
    x = dy.clone()  # as it lies
    mean, rstd = torch.zeros(n, groups, device=DEVICE), torch.ones(n, groups, device=DEVICE)
    dx = backnorm.group_norm_backward(dy, x, mean, rstd, None, n, c, hw, groups, [True, False, False])[0]
    alone = backnorm.group_norm_backward(dy[:1], x[:1], mean[:1], rstd[:1], None, 1, c, hw, groups)[0]
    assert all(torch.equal(dx[i : i + 1], alone) for i in (0, 1, n // 2, n - 1))


@on_gpu
def test_objects_of_other_libraries() -> None:
    cupy = pytest.importorskip("cupy")
    dy, x, shape, mean, rstd, _ = (
        cupy.from_dlpack(a.float()) if torch.is_tensor(a) else a for a in _layer_norm_call(40, 64)
    )
    results = backnorm.layer_norm_backward(dy, x, shape, mean, rstd)
    assert all(isinstance(result, cupy.ndarray) for result in results)
    values = {"gradOut": dy, "input": x, "mean": mean, "rstd": rstd}
    golden = ln.reference({**{k: v.get() for k, v in values.items()}, "normalizedShape": shape})
    for result, name in zip(results, golden):
        assert abs(result.get() - golden[name]).max() <= 1e-5 * abs(golden[name]).max()
