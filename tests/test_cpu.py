"""The CPU kernels: bits that depend on shapes alone, threads, forks, and accuracy beside PyTorch's."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numba import types
from numba.core.ccallback import CFunc

import backnorm
from backnorm import threads, warmup, workspace
from backnorm.accuracy import EPS, excess, relative_error, share_within_half_ulp
from backnorm.datatypes import BF16, F16, F32
from backnorm.ops import OPS, _views
from backnorm.ops._formats import TAGS
from backnorm.ops._native import Kernel, kernel
from backnorm.ops._program import Place, Program
from backnorm.ops._simd import load_double, store_double, words
from backnorm.ops.batch_norm_reduce import reference as bn
from backnorm.ops.batch_norm_reduce import tiling as bn_tiling
from backnorm.ops.group_norm import reference as gn
from backnorm.ops.group_norm import tiling as gn_tiling
from backnorm.ops.layer_norm import cpu as cpu_of_layer_norm
from backnorm.ops.layer_norm import reference as ln
from backnorm.ops.layer_norm.short_rows import SHORT, short_rows
from backnorm.products import PRODUCTS
from backnorm.spec import Call, tensor

from .conftest import forget_plans

NUMPY_TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


pytestmark = pytest.mark.usefixtures("small_work_is_shared_out")


def _arrays(shape: tuple[int, ...], dtype: str, seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(shape, dtype=np.float32).astype(NUMPY_TYPES[dtype]) for _ in "dx")  # type: ignore[return-value]


def layer_norm(rows: int, cols: int, dtype: str) -> tuple[Any, ...]:
    dy, x = _arrays((rows, cols), dtype)
    rng = np.random.default_rng(1)
    mean, rstd = (rng.standard_normal((rows, 1)).astype(np.float32) for _ in "mr")
    return backnorm.layer_norm_backward(dy, x, (cols,), mean, rstd, rng.standard_normal(cols).astype(np.float32))


def group_norm(n: int, c: int, hw: int, group: int, dtype: str, pixels: bool = False) -> tuple[Any, ...]:
    dy, x = _arrays((n, hw, c) if pixels else (n, c, hw), dtype)
    if pixels:
        dy, x = dy.transpose(0, 2, 1), x.transpose(0, 2, 1)
    rng = np.random.default_rng(1)
    mean, rstd = (rng.standard_normal((n, group)).astype(np.float32) for _ in "mr")
    return backnorm.group_norm_backward(dy, x, mean, rstd, rng.standard_normal(c).astype(np.float32), n, c, hw, group)


def batch_norm(n: int, c: int, hw: int, dtype: str, pixels: bool = False) -> tuple[Any, ...]:
    dy, x = _arrays((n, hw, c) if pixels else (n, c, hw), dtype)
    if pixels:
        dy, x = dy.transpose(0, 2, 1), x.transpose(0, 2, 1)
    mean, invstd = (np.random.default_rng(1).standard_normal(c).astype(np.float32) for _ in "mi")
    return backnorm.batch_norm_backward_reduce(dy, x, mean, invstd)


def cropped_batch_norm(n: int, c: int, size: int, dtype: str, pixels: bool = False) -> tuple[Any, ...]:
    dy, x = _arrays((n, size, size, c) if pixels else (n, c, size, size), dtype)
    if pixels:
        dy, x = dy.transpose(0, 3, 1, 2), x.transpose(0, 3, 1, 2)
    mean, invstd = (np.random.default_rng(1).standard_normal(c).astype(np.float32) for _ in "mi")
    return backnorm.batch_norm_backward_reduce(dy[..., 1:-1, 2:], x[..., 1:-1, 2:], mean, invstd)


CALLS = {
    "ln many short rows": lambda t: layer_norm(3001, 64, t),
    "ln shorter rows": lambda t: layer_norm(3001, 19, t),
    "ln ragged short rows": lambda t: layer_norm(1203, 375, t),
    "ln ragged": lambda t: layer_norm(517, 769, t),
    "ln past the caches": lambda t: layer_norm(3001, 784, t),
    "ln wide rows": lambda t: layer_norm(21, 20_001, t),
    "ln whole wide rows": lambda t: layer_norm(53, 9001, t),
    "ln few long rows": lambda t: layer_norm(5, 40_001, t),
    "ln long rows": lambda t: layer_norm(33, 40_001, t),
    "ln longest rows": lambda t: layer_norm(3, 131_100, t),
    "ln one row": lambda t: layer_norm(1, 100_003, t),
    "gn planes": lambda t: group_norm(9, 12, 199, 4, t),
    "gn whole planes": lambda t: group_norm(9, 8, 601, 4, t),
    "gn 7x7": lambda t: group_norm(20, 64, 49, 8, t),
    "gn 7x7, many groups": lambda t: group_norm(20, 66, 49, 33, t),
    "gn few samples": lambda t: group_norm(2, 64, 49, 8, t),
    "gn 7x7, many channels": lambda t: group_norm(20, 96, 49, 3, t),
    "gn 7x7, one group": lambda t: group_norm(5, 300, 49, 1, t),
    "gn 7x7, one large group": lambda t: group_norm(2, 700, 49, 1, t),
    "gn large groups": lambda t: group_norm(1, 8, 30_011, 2, t),
    "gn pixels": lambda t: group_norm(17, 24, 300, 3, t, pixels=True),
    "gn small pixels": lambda t: group_norm(37, 12, 25, 1, t, pixels=True),
    "gn samples of pixels": lambda t: group_norm(37, 33, 25, 1, t, pixels=True),
    "gn 5x5, pixels": lambda t: group_norm(150, 22, 25, 2, t, pixels=True),
    "gn large pixels": lambda t: group_norm(2, 40, 3001, 4, t, pixels=True),
    "bn planes": lambda t: batch_norm(33, 19, 49, t),
    "bn tiny planes": lambda t: batch_norm(101, 1100, 4, t),
    "bn 14x14": lambda t: batch_norm(33, 19, 196, t),
    "bn large planes": lambda t: batch_norm(2, 3, 70_001, t),
    "bn pixels": lambda t: batch_norm(9, 37, 501, t, pixels=True),
    "bn 2-d": lambda t: batch_norm(5003, 70, 1, t),
    "bn cropped": lambda t: cropped_batch_norm(7, 19, 23, t),
    "bn cropped pixels": lambda t: cropped_batch_norm(7, 19, 23, t, pixels=True),
}


MASKS = [mask for mask in itertools.product((True, False), repeat=3) if any(mask)]


def bits(results: tuple[Any, ...]) -> bytes:
    return b"".join(np.ascontiguousarray(array).tobytes() for array in results)


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
@pytest.mark.parametrize("call", CALLS)
def test_the_same_bits_for_any_number_of_threads(call: str, dtype: str) -> None:
    seen = set()
    for count in (1, 2, 3, 7, 16):
        backnorm.set_num_threads(count)
        seen.add(bits(CALLS[call](dtype)))
        seen.add(bits(CALLS[call](dtype)))
    assert len(seen) == 1


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
@pytest.mark.parametrize("call", CALLS)
def test_the_same_bits_on_any_cpu(call: str, dtype: str) -> None:
    """Hashes from an AVX-512 CPU; who changes the order of a sum on purpose writes the new ones into the file."""
    known = json.loads((Path(__file__).parent / "bits.json").read_text(encoding="utf-8"))
    assert hashlib.sha256(bits(CALLS[call](dtype))).hexdigest()[:16] == known[call][dtype]


@kernel
def _count_up() -> Any:
    def run(args: Any, task: Any) -> Any:
        (counts,) = words(args, 1)
        store_double(counts + task * 8, load_double(counts + task * 8) + 1.0)

    return run


@pytest.mark.parametrize("count", [1, 2, 3, 16, 20])
def test_every_task_is_done_once(count: int) -> None:
    """Whatever the threads, which each begin with a range of their own, and from either end."""
    backnorm.set_num_threads(count)
    for first, last in ((0, 1), (0, 19), (5, 7), (3, 1000), (4, 4)):
        program = Program(("counts",))
        for backwards in (False, True):
            program.run(_count_up(), program.arguments(Place("counts", 0)), first, last, 1 << 30, backwards)
        code, counts = program.code(), np.zeros(last + 1)
        for calls in (1, 2, 3):
            threads.run(code, [0, counts.ctypes.data])
            assert (counts[first:last] == 2 * calls).all()
            assert not counts[:first].any()
            assert not counts[last:].any()


def test_the_same_bits_at_any_alignment() -> None:
    rows, cols = 40, 333
    dy, x = _arrays((rows, cols), "float32")
    ones = np.ones((rows, 1), np.float32)
    seen = set()
    for shift in (0, 1, 3, 15):
        moved = [np.empty(rows * cols + 16, np.float32)[shift : shift + rows * cols].reshape(rows, cols) for _ in "dxo"]
        moved[0][...], moved[1][...] = dy, x
        out = (moved[2], np.empty(cols, np.float32), np.empty(cols, np.float32))
        seen.add(bits(backnorm.layer_norm_backward(moved[0], moved[1], (cols,), ones, ones, out=out)))
    assert len(seen) == 1


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
@pytest.mark.parametrize("call", CALLS)
def test_the_same_bits_past_the_caches(call: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = bits(CALLS[call](dtype))
    monkeypatch.setattr(_views, "STREAMED_BYTES", 0)
    forget_plans()
    assert bits(CALLS[call](dtype)) == expected
    forget_plans()


@pytest.mark.parametrize("shift", [0, 1, 4, 60])
@pytest.mark.parametrize("call", CALLS)
def test_a_workspace_may_begin_anywhere_and_is_no_larger_than_said(
    call: str, shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    expected, room, given = bits(CALLS[call]("bfloat16")), 256, []

    def take(size: int) -> int:
        memory = np.full(size + 2 * room, 0xA5, np.uint8)
        given.append((memory, -memory.ctypes.data % 64 + 64 + shift, size))
        return int(memory.ctypes.data + given[-1][1])

    monkeypatch.setattr(workspace, "take", take)
    forget_plans()
    backnorm.set_num_threads(3)
    assert bits(CALLS[call]("bfloat16")) == expected
    for memory, start, size in given:
        assert (memory[:start] == 0xA5).all()
        assert (memory[start + size :] == 0xA5).all()
    assert given


@pytest.mark.parametrize("places", [1, 2, 5])
def test_the_same_bits_where_threads_wait_for_a_place(places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = ("gn 7x7", "gn 7x7, many channels", "gn samples of pixels", "bn planes", "bn tiny planes")
    expected = [bits(CALLS[call]("bfloat16")) for call in calls]
    monkeypatch.setattr(_views, "MOST_PLACES", places)
    forget_plans()
    for count in (2, 7, 20):
        backnorm.set_num_threads(count)
        assert [bits(CALLS[call]("bfloat16")) for call in calls] == expected
    forget_plans()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="looks for x86's instructions")
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_results_past_the_caches_have_instructions_of_their_own(dtype: int) -> None:
    """LLVM has none for vectors of float16, and writes them like any other where it sees that they are such."""
    tag = TAGS[dtype]
    for run in (
        cpu_of_layer_norm._whole_rows._make(tag, tag, True, True, True), short_rows._make(tag, tag, 4, False),
    ):  # fmt: skip
        compiled: Any = CFunc(run, ((types.int64, types.int64), types.void), {}, {"nogil": True})
        compiled.compile()
        assert "movnt" in compiled._library.get_asm_str()


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
@pytest.mark.parametrize("call", [call for call in CALLS if "pixels" in call or "2-d" in call])
def test_the_same_bits_row_by_row(call: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pixels in the caches go four rows at a time."""
    expected = bits(CALLS[call](dtype))
    for tiling in (gn_tiling, bn_tiling):
        monkeypatch.setattr(tiling, "FOURS_BYTES", {4: 0, 2: 0})
    forget_plans()
    assert bits(CALLS[call](dtype)) == expected
    forget_plans()


@pytest.mark.skipif(SHORT == 0, reason="rows stay in registers with AVX-512 only")
@pytest.mark.parametrize("dtype", NUMPY_TYPES)
@pytest.mark.parametrize("cols", [1, 7, 15, 16, 17, 31, 32, 33, 47, 48, 50, 63, 64])
def test_the_same_bits_in_registers(cols: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short rows stay in registers, other CPUs read them again from the cache."""
    rng = np.random.default_rng(1)
    cases = []
    for rows, gap, mask in itertools.product((1, 2, 24, 25, 300, 6001), (0, 3), MASKS):
        dy, x = _arrays((rows, cols + gap), dtype)
        mean, rstd = (rng.standard_normal((rows, 1)).astype(np.float32) for _ in "mr")
        cases.append(
            (dy[:, :cols], x[:, :cols], (cols,), mean, rstd, rng.standard_normal(cols).astype(np.float32), mask)
        )

    def results() -> list[bytes]:
        forget_plans()
        return [
            bits(tuple(a for a in backnorm.layer_norm_backward(*call[:6], output_mask=call[6]) if a is not None))
            for call in cases
        ]

    expected = results()
    monkeypatch.setattr(cpu_of_layer_norm, "SHORT", 0)
    assert results() == expected
    forget_plans()


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
@pytest.mark.parametrize("sizes", [(5000, 70, 1), (1001, 530, 1), (3, 1024, 131), (40, 37, 496)])
def test_pixels_whose_sums_are_added_up_gradually(
    sizes: tuple[int, int, int], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """As those of tensors that no cache holds are."""
    n, c, hw = sizes
    rng = np.random.default_rng(0)
    dy, x = (100 + rng.standard_normal((n, hw, c), dtype=np.float32).astype(NUMPY_TYPES[dtype]) for _ in "dx")
    dy, x = dy.transpose(0, 2, 1), x.transpose(0, 2, 1)
    mean, invstd = (rng.random(c, dtype=np.float32) for _ in "mi")
    call = {"gradOut": dy, "input": x, "mean": mean, "invstd": invstd}
    golden, terms = bn.reference(call), bn.terms(call)
    at_once = backnorm.batch_norm_backward_reduce(dy, x, mean, invstd)
    monkeypatch.setattr(bn_tiling, "CACHED_BYTES", 0)
    monkeypatch.setattr(bn_tiling, "FOURS_BYTES", {4: 0, 2: 0})
    forget_plans()
    seen = set()
    for count in (1, 2, 3, 7, 16):
        backnorm.set_num_threads(count)
        results = backnorm.batch_norm_backward_reduce(dy, x, mean, invstd)
        seen.add(bits(results))
    forget_plans()
    assert len(seen) == 1
    if dtype == "float32" or c > 512:
        assert bits(at_once) not in seen  # another order
    for result, name in zip(results, golden):
        assert excess(result, golden[name], terms[name]) <= 1, name


@pytest.mark.parametrize("call", ["gn large groups", "gn large pixels"])
def test_the_same_bits_batch_by_batch(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Split groups and samples: all in one sweep, and one after the other."""
    expected = bits(CALLS[call]("float32"))
    monkeypatch.setattr(gn_tiling, "BATCH_BYTES", 1)
    forget_plans()
    assert bits(CALLS[call]("float32")) == expected
    forget_plans()


GROUP_NORMS = {
    "planes": (18, 4, 199, 2, False), "aligned planes": (20, 4, 160, 2, False), "7x7": (20, 16, 49, 4, False),
    "large groups of 7x7": (20, 51, 49, 3, False), "samples of pixels": (19, 33, 25, 1, True),
    "larger planes": (18, 4, 601, 2, False), "aligned larger planes": (18, 4, 640, 2, False),
    "short planes": (3, 6, 150, 2, False), "split short planes": (2, 350, 98, 1, False),
    "one large sample": (1, 4, 9001, 2, False), "one channel": (17, 1, 333, 1, False),
    "pixels": (17, 24, 300, 3, True), "aligned pixels": (17, 32, 75, 4, True), "large pixels": (1, 48, 700, 4, True),
    "narrow pixels": (17, 15, 441, 1, True), "small pixels": (37, 12, 25, 1, True), "few pixels": (37, 12, 3, 4, True),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", GROUP_NORMS)
def test_group_norms_bits_at_any_alignment(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the caches and past them, where what does not fill a cache line waits; nothing beside it is written."""
    n, c, hw, group, pixels = GROUP_NORMS[name]
    dy, x = _arrays((n, hw, c) if pixels else (n, c, hw), dtype)
    rng = np.random.default_rng(1)
    mean, rstd = (rng.standard_normal((n, group)).astype(np.float32) for _ in "mr")
    w = rng.standard_normal(c).astype(np.float32)
    seen, room = set(), 256
    for least in (None, 0):
        if least is not None:
            monkeypatch.setattr(_views, "STREAMED_BYTES", least)
        forget_plans()
        for shift in (0, x.itemsize, 32, 60, 64 - x.itemsize, 1):  # in bytes; the last is no multiple of an element
            memory = [np.full(x.nbytes + 2 * room, 0xA5, np.uint8) for _ in "dxo"]
            starts = [-m.ctypes.data % 64 + 64 + shift for m in memory]
            moved = [m[at : at + x.nbytes].view(x.dtype).reshape(x.shape) for m, at in zip(memory, starts)]
            moved[0][...], moved[1][...] = dy, x
            given = [a.transpose(0, 2, 1) for a in moved] if pixels else moved
            out = (given[2], np.empty(c, np.float32), np.empty(c, np.float32))
            backnorm.group_norm_backward(given[0], given[1], mean, rstd, w, n, c, hw, group, out=out)
            seen.add(bits((moved[2], *out[1:])))
            assert (memory[2][: starts[2]] == 0xA5).all()
            assert (memory[2][starts[2] + x.nbytes :] == 0xA5).all()
    forget_plans()
    assert len(seen) == 1


@pytest.mark.parametrize("past_caches", [False, True])
@pytest.mark.parametrize("name", GROUP_NORMS)
def test_group_norm_in_place(name: str, past_caches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """dx where dy or x was."""
    n, c, hw, group, pixels = GROUP_NORMS[name]
    arrays = _arrays((n, hw, c) if pixels else (n, c, hw), "bfloat16")
    rng = np.random.default_rng(1)
    mean, rstd = (rng.standard_normal((n, group)).astype(np.float32) for _ in "mr")
    w = rng.standard_normal(c).astype(np.float32)
    monkeypatch.setattr(_views, "STREAMED_BYTES", 0 if past_caches else 1 << 30)
    forget_plans()
    results = []
    for target in (None, 0, 1):
        images = [array.copy() for array in arrays]
        images = [image.transpose(0, 2, 1) for image in images] if pixels else images
        out = None if target is None else (images[target], np.empty(c, np.float32), np.empty(c, np.float32))
        done = backnorm.group_norm_backward(*images, mean, rstd, w, n, c, hw, group, out=out)
        results.append(bits((done[0].astype(np.float32), *done[1:])))
    forget_plans()
    assert len(set(results)) == 1


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
@pytest.mark.parametrize(("c", "group"), [(15, 3), (16, 4), (32, 2), (40, 1)])
def test_pixels_with_gaps_between_them(c: int, group: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of dy, of x, of dx or of all: right, the same bits through the caches and past them, and nothing in the gaps."""
    n, hw, gap = 17, 150, 5
    dy, x = _arrays((n, hw, c), dtype)
    rng = np.random.default_rng(1)
    mean, rstd = (rng.standard_normal((n, group)).astype(np.float32) for _ in "mr")
    w = rng.standard_normal(c).astype(np.float32)
    wide = [np.full((n, hw, c + gap), np.nan, x.dtype) for _ in "dxo"]
    for array, values in zip(wide, (dy, x)):
        array[:, :, :c] = values
    call = {"gradOut": dy.transpose(0, 2, 1), "input": x.transpose(0, 2, 1), "mean": mean, "rstd": rstd, "gamma": w}
    call |= {"N": n, "C": c, "HxW": hw, "group": group}
    golden, terms = gn.reference(call), gn.terms(call)
    seen = set()
    for least, gaps in itertools.product((1 << 30, 0), itertools.product((False, True), repeat=3)):
        monkeypatch.setattr(_views, "STREAMED_BYTES", least)
        forget_plans()
        plain = (dy, x, np.full_like(x, np.nan))
        images = [(a[:, :, :c] if has else b).transpose(0, 2, 1) for has, a, b in zip(gaps, wide, plain)]
        out = (images[2], np.full(c, np.nan, np.float32), np.full(c, np.nan, np.float32))
        backnorm.group_norm_backward(*images[:2], mean, rstd, w, n, c, hw, group, out=out)
        seen.add((any(gaps), bits(out)))  # pixels without gaps are joined to longer rows, and added in another order
        for result, name in zip(out, golden):
            assert excess(result, golden[name], terms[name]) <= 1
        assert np.isnan(wide[2][:, :, c:].astype(np.float32)).all()
    forget_plans()
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("n", "c", "hw", "dtype", "streamed"),
    [
        (16, 8, 4096, F32, True), (16, 8, 4095, F32, False), (32, 8, 16384, BF16, True), (16, 8, 16384, BF16, False),
        # The strides of a sample or channel that is the only one say nothing.
        (1, 8, 65536, F32, True), (128, 1, 4096, F32, True), (1, 1, 1 << 19, F32, True),
    ],
)  # fmt: skip
def test_which_group_norms_write_past_the_caches(n: int, c: int, hw: int, dtype: int, streamed: bool) -> None:
    image, statistics, weight = tensor(dtype, n, c, hw), tensor(F32, n, 1), tensor(F32, c)
    values = {
        "gradOut": image, "input": image, "mean": statistics, "rstd": statistics, "gamma": weight, "N": n, "C": c,
        "HxW": hw, "group": 1, "gradInput": image, "gradGammaOut": weight, "gradBetaOut": weight,
    }  # fmt: skip
    call = Call(OPS["group_norm_backward"], values, PRODUCTS["Any"])
    assert gn_tiling.tile(call, ("gradInput", "gradGammaOut", "gradBetaOut")).streamed == streamed


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("rows", "cols"), [(1, 512), (2, 512), (75, 512), (90, 272), (45, 1024), (49, 2064)])
def test_the_same_bits_by_pairs(
    rows: int, cols: int, mask: tuple[bool, ...], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Rows go two at a time on some CPUs; with and without gaps between them, wherever dx begins."""
    rng = np.random.default_rng(1)
    mean, rstd = (rng.standard_normal((rows, 1)).astype(np.float32) for _ in "mr")
    w = rng.standard_normal(cols).astype(np.float32)
    monkeypatch.setattr(_views, "STREAMED_BYTES", 0)
    seen = {}
    for longest, gap, shift in itertools.product((0, 1 << 20), (0, 16), (0, 5)):
        monkeypatch.setattr(cpu_of_layer_norm, "LONGEST_OF_PAIRS", longest)
        forget_plans()
        dy, x = (a[:, :cols] for a in _arrays((rows, cols + gap), dtype))
        memory = np.full(shift + rows * (cols + gap) + 64, np.nan, NUMPY_TYPES[dtype])
        dx = memory[shift : shift + rows * (cols + gap)].reshape(rows, cols + gap)[:, :cols]
        out = (dx, np.full(cols, np.nan, np.float32), np.full(cols, np.nan, np.float32))
        given = [array if wanted else None for array, wanted in zip(out, mask)]
        backnorm.layer_norm_backward(dy, x, (cols,), mean, rstd, w, None, mask, out=given)
        assert seen.setdefault((gap, mask), bits(out)) == bits(out)
        dx[...] = np.nan
        assert np.isnan(memory.astype(np.float32)).all()
    forget_plans()


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
@pytest.mark.parametrize("cols", [1, 5, 31, 32, 33, 64, 272, 375, 768, 769, 900, 1023, 1024, 1537, 2901, 14683, 33001])
def test_rows_past_the_caches_stay_within_their_memory(
    cols: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """At any alignment, with and without gaps between the rows, and in place."""
    rows = max(3, 40_000 // cols)  # a row may end with any part of a block
    rows = 49 if cols in (2901, 14683) else rows  # fewer would be split
    dy, x = _arrays((rows, cols), dtype)
    rng = np.random.default_rng(1)
    mean, rstd = (rng.standard_normal((rows, 1)).astype(np.float32) for _ in "mr")
    w = rng.standard_normal(cols).astype(np.float32)
    expected = bits(backnorm.layer_norm_backward(dy, x, (cols,), mean, rstd, w))
    monkeypatch.setattr(_views, "STREAMED_BYTES", 0)
    monkeypatch.setattr(cpu_of_layer_norm, "LONGEST_OF_PAIRS", 1 << 20)  # as on some CPUs
    forget_plans()
    for shift, gap in ((0, 0), (1, 0), (7, 0), (0, 3), (5, 16)):
        memory = np.full(shift + rows * (cols + gap) + 64, np.nan, NUMPY_TYPES[dtype])
        dx = memory[shift : shift + rows * (cols + gap)].reshape(rows, cols + gap)[:, :cols]
        out = (dx, np.full(cols, np.nan, np.float32), np.full(cols, np.nan, np.float32))
        assert bits(backnorm.layer_norm_backward(dy, x, (cols,), mean, rstd, w, out=out)) == expected
        dx[...] = np.nan
        assert np.isnan(memory.astype(np.float32)).all()
        dx[...] = dy
        assert bits(backnorm.layer_norm_backward(dx, x, (cols,), mean, rstd, w, out=out)) == expected
    forget_plans()


def test_planes_and_pixels_give_the_same_gradients() -> None:
    dy, x = _arrays((3, 24, 500), "float32")
    rng = np.random.default_rng(1)
    mean, rstd, w = (rng.standard_normal(s).astype(np.float32) for s in ((3, 4), (3, 4), 24))
    call = {"gradOut": dy, "input": x, "mean": mean, "rstd": rstd, "gamma": w, "N": 3, "C": 24, "HxW": 500, "group": 4}
    golden, terms = gn.reference(call), gn.terms(call)
    flipped = [np.ascontiguousarray(a.transpose(0, 2, 1)).transpose(0, 2, 1) for a in (dy, x)]
    for d, p in ((dy, x), flipped, (dy, flipped[1]), (flipped[0], x)):
        results = backnorm.group_norm_backward(d, p, mean, rstd, w, 3, 24, 500, 4)
        assert results[0].strides == p.strides
        for result, name in zip(results, golden):
            assert excess(result, golden[name], terms[name]) <= 1


@pytest.mark.parametrize("rows", [1, 3, 127, 128, 129, 1000])
@pytest.mark.parametrize("cols", [1, 7, 15, 16, 17, 769, 1023, 1025, 4097, 8193, 16384, 16385, 32768, 32769])
def test_layer_norm_at_the_edges_of_its_blocks(rows: int, cols: int) -> None:
    if rows * cols > 5_000_000:
        pytest.skip("covered by the smaller ones")
    dy, x = _arrays((rows, cols), "bfloat16" if rows % 2 == 0 or cols % 2 else "float32")
    rng = np.random.default_rng(1)
    mean, rstd = (rng.standard_normal((rows, 1)).astype(np.float32) for _ in "mr")
    w = rng.standard_normal(cols).astype(np.float32)
    call = {"gradOut": dy, "input": x, "normalizedShape": (cols,), "mean": mean, "rstd": rstd, "weightOptional": w}
    golden, terms = ln.reference(call), ln.terms(call)
    for result, name in zip(backnorm.layer_norm_backward(dy, x, (cols,), mean, rstd, w), golden):
        assert excess(result, golden[name], terms[name]) <= 1


@pytest.mark.parametrize("samples", [1, 3, 4, 65, 300])
@pytest.mark.parametrize("groups", [5, 1])
@pytest.mark.parametrize(
    ("width", "hw"),
    [
        (1, 49), (2, 49), (4, 36), (8, 1), (8, 2), (3, 7), (8, 49), (12, 33), (15, 49), (16, 48), (7, 100), (16, 49),
        (33, 31), (32, 64), (300, 9), (1000, 4), (110, 100), (2, 384), (2, 385),
    ],
)  # fmt: skip
def test_group_norm_of_small_planes(width: int, hw: int, groups: int, samples: int) -> None:
    """Ragged groups and whole ones, of one block and of several, with every mask and type; samples with gaps between
    them too, and a single group also as pixels."""
    if samples * groups * width * hw > 2_000_000:
        pytest.skip("covered by the smaller ones")
    channels = groups * width
    for i, mask in enumerate(MASKS):
        gap = 3 if i % 2 else 0
        wide = _arrays((samples, channels + gap, hw), ("float32", "bfloat16", "float16")[i % 3], seed=i)
        dy, x = (a[:, :channels] for a in wide)
        if groups == 1 and gap == 0:
            dy, x = (np.ascontiguousarray(a.transpose(0, 2, 1)).transpose(0, 2, 1) for a in (dy, x))
        rng = np.random.default_rng(1)
        mean, rstd = (rng.standard_normal((samples, groups)).astype(np.float32) for _ in "mr")
        w = rng.standard_normal(channels).astype(np.float32)
        sizes = {"N": samples, "C": channels, "HxW": hw, "group": groups}
        call = {"gradOut": dy, "input": x, "mean": mean, "rstd": rstd, "gamma": w, **sizes}
        golden, terms = gn.reference(call), gn.terms(call)
        poison = np.full((samples, channels + gap, hw), np.nan, x.dtype)
        if groups == 1 and gap == 0:
            poison = np.full((samples, hw, channels), np.nan, x.dtype).transpose(0, 2, 1)
        out = [poison[:, :channels], *(np.full(channels, np.nan, np.float32) for _ in "gb")]
        given = [array if wanted else None for array, wanted in zip(out, mask)]
        backnorm.group_norm_backward(dy, x, mean, rstd, w, *sizes.values(), mask, out=given)
        for result, name, wanted in zip(out, golden, mask):
            assert excess(result, golden[name], terms[name]) <= 1 if wanted else np.isnan(result).all(), (name, mask)
        assert np.isnan(poison[:, channels:]).all()


@pytest.mark.parametrize("where", ["dy", "x", "gamma"])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 8, 12])
def test_what_is_not_finite_stays_in_its_group(width: int, where: str) -> None:
    """Sums of several groups of small planes are made together."""
    samples, groups, hw = 20, 11, 49
    channels = groups * width
    dy, x = _arrays((samples, channels, hw), "float32")
    rng = np.random.default_rng(1)
    mean, rstd = (rng.standard_normal((samples, groups)).astype(np.float32) for _ in "mr")
    w = rng.standard_normal(channels).astype(np.float32)
    sizes = {"N": samples, "C": channels, "HxW": hw, "group": groups}
    plain = backnorm.group_norm_backward(dy, x, mean, rstd, w, *sizes.values())
    for value in (np.inf, -np.inf, np.nan):
        channel = int(rng.integers(channels))
        arrays = {"dy": dy.copy(), "x": x.copy(), "gamma": w.copy()}
        arrays[where][(channel,) if where == "gamma" else (7, channel, 5)] = value
        results = backnorm.group_norm_backward(arrays["dy"], arrays["x"], mean, rstd, arrays["gamma"], *sizes.values())
        call = {"gradOut": arrays["dy"], "input": arrays["x"], "mean": mean, "rstd": rstd, "gamma": arrays["gamma"]}
        golden, terms = gn.reference(call | sizes), gn.terms(call | sizes)
        for result, name in zip(results, golden):
            assert excess(result, golden[name], terms[name]) <= 1
        others = np.arange(channels) // width != channel // width
        assert results[0][:, others].tobytes() == plain[0][:, others].tobytes()
        assert not np.isfinite(results[0]).all()


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
@pytest.mark.parametrize("cols", [300, 700, 1536, 1537, 2560, 8192, 9000, 20_001, 40_001, 98_304, 131_072])
def test_a_rows_gradient_does_not_depend_on_how_many_there_are(cols: int, dtype: str) -> None:
    """Where many rows are read whole and few are split, and a single one has a kernel of its own."""
    rows = 49
    dy, x = _arrays((rows, cols), dtype)
    rng = np.random.default_rng(1)
    mean, rstd = (rng.standard_normal((rows, 1)).astype(np.float32) for _ in "mr")
    w = rng.standard_normal(cols).astype(np.float32)
    whole = backnorm.layer_norm_backward(dy, x, (cols,), mean, rstd, w)[0]
    for first, last in ((0, 1), (7, 9), (46, 49), (1, 48)):
        part = slice(first, last)
        some = backnorm.layer_norm_backward(dy[part], x[part], (cols,), mean[part], rstd[part], w)[0]
        assert bits((some,)) == bits((whole[part],))


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
@pytest.mark.parametrize("pixels", [False, True])
@pytest.mark.parametrize(
    ("c", "hw", "group"),
    [
        (24, 49, 3),
        (12, 25, 1),
        (64, 49, 32),
        (64, 49, 2),
        (33, 25, 1),
        (10, 144, 1),
        (6, 1500, 2),
        (40, 384, 1),
        (40, 385, 1),
        (700, 49, 1),
    ],
)
def test_a_samples_gradient_does_not_depend_on_its_neighbours(
    c: int, hw: int, group: int, pixels: bool, dtype: str
) -> None:  # fmt: skip
    n = 70
    dy, x = _arrays((n, hw, c) if pixels else (n, c, hw), dtype)
    if pixels:
        dy, x = dy.transpose(0, 2, 1), x.transpose(0, 2, 1)
    rng = np.random.default_rng(1)
    mean, rstd = (rng.standard_normal((n, group)).astype(np.float32) for _ in "mr")
    w = rng.standard_normal(c).astype(np.float32)
    whole = backnorm.group_norm_backward(dy, x, mean, rstd, w, n, c, hw, group)[0]
    for some in (slice(5, 6), slice(68, 70), slice(1, 4), slice(0, 4), slice(13, 30), slice(60, 70)):
        parts = [a[some] for a in (dy, x, mean, rstd)]
        part = backnorm.group_norm_backward(*parts, w, some.stop - some.start, c, hw, group)[0]
        assert bits((part,)) == bits((whole[some],))


# --- threads and processes ---


def test_calls_from_several_threads_at_once() -> None:
    expected = {name: bits(call("float32")) for name, call in CALLS.items()}
    wrong: list[str] = []

    def work() -> None:
        for name, call in CALLS.items():
            if bits(call("float32")) != expected[name]:
                wrong.append(name)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []


def test_threads_with_little_stack() -> None:
    """In a process of its own, since what it is about ends one."""
    code = """
import threading, numpy as np, torch, backnorm
def work():
    small = torch.ones(4, 256, 4), torch.ones(256)
    backnorm.batch_norm_backward_reduce(small[0], small[0], small[1], small[1])
    large()
def large():
    x, ones, groups = np.ones((40, 1024, 7, 7), np.float32), np.ones(1024, np.float32), np.ones((40, 2), np.float32)
    for _ in range(3):
        backnorm.batch_norm_backward_reduce(x, x, ones, ones)
        backnorm.group_norm_backward(x, x, groups, groups, ones, 40, 1024, 49, 2)
work()
for target, kibibytes in ((work, 112), (large, 64)):
    threading.stack_size(kibibytes << 10)
    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
print("done")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "done\n", done.stderr


def test_a_forked_child_computes_too() -> None:
    backnorm.set_num_threads(4)
    expected = bits(layer_norm(517, 769, "float32"))
    child = os.fork()
    if child == 0:
        os._exit(0 if bits(layer_norm(517, 769, "float32")) == expected else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_thread_counts() -> None:
    backnorm.set_num_threads(3)
    assert backnorm.get_num_threads() == 3
    for bad in (0, -1, 1.5, "2", True, None):
        with pytest.raises(ValueError, match="must be a positive integer"):
            backnorm.set_num_threads(bad)  # type: ignore[arg-type]
    code = "import backnorm; print(backnorm.get_num_threads())"
    for text, printed in (("5", "5"), ("", str(len(os.sched_getaffinity(0))))):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "BACKNORM_NUM_THREADS": text},
            capture_output=True,
            text=True,
        )
        assert done.stdout.strip() == printed
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "BACKNORM_NUM_THREADS": "many"}, capture_output=True, text=True
    )
    assert "BACKNORM_NUM_THREADS must be a positive integer; got 'many'" in done.stderr


def test_warm_up_leaves_no_kernel_to_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[Any] = set()

    def address(self: Kernel, *constants: Any) -> int:
        asked.add((self, *((type(constant), constant) for constant in constants)))
        return 0

    def plan_all(calls: Iterable[Callable[[], object]]) -> set[Any]:
        asked.clear()
        forget_plans()
        for call in calls:
            call()
        return set(asked)

    monkeypatch.setattr(Kernel, "__call__", address)
    monkeypatch.setattr(threads, "run", lambda *_: None)
    monkeypatch.setattr(warmup, "_channels", lambda *_: None)  # its own kernels, made for torch's modules
    monkeypatch.setattr(warmup, "_calls_of_torch", lambda: None)
    warm = plan_all(warmup.work())
    used = plan_all(partial(call, dtype) for call in CALLS.values() for dtype in NUMPY_TYPES)
    forget_plans()
    assert len(used) > 50
    assert used <= warm


def test_importing_compiles_nothing() -> None:
    code = "import sys, backnorm; print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# --- accuracy, beside PyTorch ---


def _torch(array: np.ndarray) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


DATA = {
    "normal": lambda rng, shape: rng.standard_normal(shape, dtype=np.float32),
    "far from zero": lambda rng, shape: 100 + rng.standard_normal(shape, dtype=np.float32),
}
GRADIENTS = {
    "both signs": lambda rng, shape: rng.standard_normal(shape, dtype=np.float32),
    "one sign": lambda rng, shape: 0.5 + rng.random(shape, dtype=np.float32),
}


def _judge(results: Any, peers: Any, golden: dict[str, Any], terms: dict[str, Any]) -> None:
    """float32: no worse than the larger of PyTorch's error and 4 roundings; 16 bits: the ulp rule.

    The share of well rounded elements is taken over a call's 16-bit outputs together: a column sum that nearly cancels
    has an ulp below any float32 term's rounding, and among 256 columns one or two may.
    """
    well_rounded, count = 0.0, 0
    for result, peer, name in zip(results, peers, golden):
        if result.dtype == np.float32:
            theirs = relative_error(peer.float().numpy(), golden[name]) if peer is not None else 0.0
            assert relative_error(result, golden[name]) <= max(theirs, 4 * EPS), name
        else:
            assert excess(result, golden[name], terms[name]) <= 1, name
            well_rounded += share_within_half_ulp(result, golden[name]) * result.size
            count += result.size
    assert well_rounded >= 0.999 * count


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize(("rows", "cols"), [(4096, 256), (64, 8192), (131_072, 16)])
def test_layer_norm_accuracy(rows: int, cols: int, data: str, gradient: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    x = DATA[data](rng, (rows, cols)).astype(NUMPY_TYPES[dtype])
    dy = GRADIENTS[gradient](rng, (rows, cols)).astype(NUMPY_TYPES[dtype])
    x64 = x.astype(np.float64)
    mean = x64.mean(axis=1, keepdims=True).astype(np.float32)
    rstd = (1 / np.sqrt(x64.var(axis=1, keepdims=True) + 1e-5)).astype(np.float32)
    w = rng.standard_normal(cols, dtype=np.float32)
    w = w.astype(NUMPY_TYPES[dtype])
    call = {"gradOut": dy, "input": x, "normalizedShape": (cols,), "mean": mean, "rstd": rstd, "weightOptional": w}
    golden, terms = ln.reference(call), ln.terms(call)
    results = backnorm.layer_norm_backward(dy, x, (cols,), mean, rstd, w)
    peers: Any = [None] * 3
    if dtype == "float32":
        tensors = [_torch(a) for a in (dy, x, mean, rstd, w)]
        peers = torch.ops.aten.native_layer_norm_backward(
            tensors[0], tensors[1], [cols], *tensors[2:4], tensors[4], tensors[4], [True] * 3
        )
    _judge(results, peers, golden, terms)


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
@pytest.mark.parametrize("pixels", [False, True])
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize(("n", "hw", "group"), [(8, 1024, 8), (300, 49, 8), (300, 49, 1), (40, 384, 1)])
def test_group_norm_accuracy(n: int, hw: int, group: int, data: str, pixels: bool, dtype: str) -> None:
    c = 32
    rng = np.random.default_rng(0)
    x = DATA[data](rng, (n, hw, c) if pixels else (n, c, hw)).astype(NUMPY_TYPES[dtype])
    dy = rng.standard_normal(x.shape, dtype=np.float32).astype(NUMPY_TYPES[dtype])
    if pixels:
        x, dy = x.transpose(0, 2, 1), dy.transpose(0, 2, 1)
    grouped = x.astype(np.float64).reshape(n, group, -1)
    mean = grouped.mean(axis=2).astype(np.float32)
    rstd = (1 / np.sqrt(grouped.var(axis=2) + 1e-5)).astype(np.float32)
    w = rng.standard_normal(c, dtype=np.float32)
    call = {
        "gradOut": dy,
        "input": x,
        "mean": mean,
        "rstd": rstd,
        "gamma": w,
        "N": n,
        "C": c,
        "HxW": hw,
        "group": group,
    }
    golden, terms = gn.reference(call), gn.terms(call)
    results = backnorm.group_norm_backward(dy, x, mean, rstd, w, n, c, hw, group)
    peers: Any = [None] * 3
    if dtype == "float32":
        tensors = [_torch(np.ascontiguousarray(a)) for a in (dy, x, mean, rstd, w)]
        peers = torch.ops.aten.native_group_norm_backward(*tensors, n, c, hw, group, [True] * 3)
    _judge(results, peers, golden, terms)


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
@pytest.mark.parametrize(
    ("n", "c", "hw", "pixels"),
    [
        (16, 32, 4096, False), (16, 32, 4096, True), (1_000_000, 3, 1, True), (10_000, 5, 49, False),
        (300_000, 3, 4, False), (1001, 7, 64, False), (500, 9, 65, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_batch_norm_accuracy(gradient: str, n: int, c: int, hw: int, pixels: bool, dtype: str) -> None:
    rng = np.random.default_rng(0)
    shape = (n, hw, c) if pixels else (n, c, hw)
    x = DATA["far from zero"](rng, shape).astype(NUMPY_TYPES[dtype])
    dy = GRADIENTS[gradient](rng, shape).astype(NUMPY_TYPES[dtype])
    if pixels:
        x, dy = x.transpose(0, 2, 1), dy.transpose(0, 2, 1)
    mean = np.full(c, 100, np.float32)
    invstd = rng.random(c, dtype=np.float32)
    call = {"gradOut": dy, "input": x, "mean": mean, "invstd": invstd}
    golden, terms = bn.reference(call), bn.terms(call)
    for result, name in zip(backnorm.batch_norm_backward_reduce(dy, x, mean, invstd), golden):
        assert relative_error(result, golden[name]) <= 4 * EPS, name
        assert excess(result, golden[name], terms[name]) <= 1, name


@pytest.mark.parametrize(
    ("c", "hw", "group", "pixels"),
    [
        (1, 368, 1, False), (1, 384, 1, False), (1, 1024, 1, False), (16, 48, 1, False), (48, 24, 2, True),
        (48, 40, 2, True), (8, 49, 1, False), (12, 25, 1, True),
    ],
)  # fmt: skip
def test_group_norm_of_elements_that_are_all_alike(c: int, hw: int, group: int, pixels: bool) -> None:
    """Every rounding of a sum goes the same way; far from the mean, x_hat adds its own."""
    n, rng = 3000, np.random.default_rng(0)
    dy, x = (np.full((n, c, hw), 1, np.float32) * _of_each(rng, n, *span) for span in ((0.5, 1.5), (-5, 5)))
    if pixels:
        dy, x = (np.ascontiguousarray(array.transpose(0, 2, 1)).transpose(0, 2, 1) for array in (dy, x))
    mean, rstd = (np.repeat(_of_each(rng, n, *span)[:, 0], group, axis=1) for span in ((-45, -35), (0.5, 2)))
    call = {"gradOut": dy, "input": x, "mean": mean, "rstd": rstd, "gamma": None}
    call |= {"N": n, "C": c, "HxW": hw, "group": group}
    result = backnorm.group_norm_backward(dy, x, mean, rstd, None, n, c, hw, group)[0]
    assert excess(result, gn.reference(call)["gradInput"], gn.terms(call)["gradInput"]) <= 1


@pytest.mark.parametrize("cols", [64, 512, 640, 768, 769, 2000])
def test_layer_norm_of_elements_that_are_all_alike(cols: int) -> None:
    n, rng = 3000, np.random.default_rng(0)
    dy, x = (np.full((n, cols), 1, np.float32) * _of_each(rng, n, *span)[:, 0] for span in ((0.5, 1.5), (-5, 5)))
    mean, rstd = (_of_each(rng, n, *span)[:, 0] for span in ((-45, -35), (0.5, 2)))
    call = {"gradOut": dy, "input": x, "normalizedShape": (cols,), "mean": mean, "rstd": rstd, "weightOptional": None}
    result = backnorm.layer_norm_backward(dy, x, (cols,), mean, rstd)[0]
    assert excess(result, ln.reference(call)["gradInputOut"], ln.terms(call)["gradInputOut"]) <= 1


@pytest.mark.parametrize("samples", [640, 37])
@pytest.mark.parametrize("hw", [1, 9, 49, 100, 250, 256, 257])
def test_batch_norm_of_channels_that_are_all_alike(hw: int, samples: int) -> None:
    """Up to 256 elements of a plane and some samples are summed in float32."""
    c, rng = 40, np.random.default_rng(0)
    each = [rng.uniform(*span, (1, c, 1)).astype(np.float32) for span in ((0.5, 1.5), (-5, 5))]
    dy, x = (np.ascontiguousarray(np.broadcast_to(values, (samples, c, hw))) for values in each)
    mean, invstd = (rng.uniform(*span, c).astype(np.float32) for span in ((-45, -35), (0.5, 2)))
    call = {"gradOut": dy, "input": x, "mean": mean, "invstd": invstd}
    golden, terms = bn.reference(call), bn.terms(call)
    for result, name in zip(backnorm.batch_norm_backward_reduce(dy, x, mean, invstd), golden):
        assert excess(result, golden[name], terms[name]) <= 1, name


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
@pytest.mark.parametrize("samples", [1, 17, 40, 300])
@pytest.mark.parametrize(("c", "hw"), [(1, 49), (7, 4), (19, 64), (37, 65), (9, 255), (5, 256), (5, 257), (1030, 3)])
def test_batch_norm_of_small_planes(c: int, hw: int, samples: int, dtype: str) -> None:
    """Channels of no whole vector, chunks of samples that are ragged, and every set of results."""
    dy, x = _arrays((samples, c, hw), dtype)
    rng = np.random.default_rng(1)
    mean, invstd, weight = (rng.standard_normal(c).astype(np.float32) for _ in "miw")
    call = {"gradOut": dy, "input": x, "mean": mean, "invstd": invstd, "weight": weight}
    golden, terms = bn.reference(call), bn.terms(call)
    for switches in MASKS:
        wanted = (switches[0], *switches)
        out = [np.full(c, np.nan, np.float32) for _ in wanted]
        given = [array if asked else None for array, asked in zip(out, wanted)]
        backnorm.batch_norm_backward_reduce(dy, x, mean, invstd, weight, *switches, out=given)
        for result, name, asked in zip(out, golden, wanted):
            assert excess(result, golden[name], terms[name]) <= 1 if asked else np.isnan(result).all(), (name, switches)


def _of_each(rng: np.random.Generator, samples: int, low: float, high: float) -> Any:
    """A number for each sample."""
    return rng.uniform(low, high, (samples, 1, 1)).astype(np.float32)


def test_bfloat16_weight_gradients_are_right_where_torch_is_not() -> None:
    rows, cols = 4096, 64
    dy, x = _arrays((rows, cols), "bfloat16")
    zeros, ones = np.zeros((rows, 1), np.float32), np.ones((rows, 1), np.float32)
    call = {"gradOut": dy, "input": x, "normalizedShape": (cols,), "mean": zeros, "rstd": ones}
    golden = ln.reference(call)["gradWeightOut"]
    ours = backnorm.layer_norm_backward(dy, x, (cols,), zeros, ones)[1]
    statistics = [_torch(a).bfloat16() for a in (zeros, ones)]
    weight = torch.ones(cols, dtype=torch.bfloat16)
    theirs = torch.ops.aten.native_layer_norm_backward(
        _torch(dy), _torch(x), [cols], *statistics, weight, weight, [True] * 3
    )[1]
    assert relative_error(ours, golden) < 2**-8
    assert relative_error(theirs.float().numpy(), golden) > 2 * relative_error(ours, golden)
