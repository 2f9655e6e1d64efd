"""BatchNorm's CPU kernels on views: which are read in place, and that all are summed right."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import backnorm
from backnorm.accuracy import EPS, excess, relative_error
from backnorm.datatypes import BF16, F16, F32, itemsize
from backnorm.ops import OPS
from backnorm.ops._views import Parts
from backnorm.ops.batch_norm_reduce import reference as bn
from backnorm.ops.batch_norm_reduce.layout import Axis, lay_out
from backnorm.ops.batch_norm_reduce.tiling import tile
from backnorm.products import PRODUCTS
from backnorm.spec import Call, TensorDesc

DTYPES = {F32: np.float32, F16: np.float16, BF16: ml_dtypes.bfloat16}


pytestmark = pytest.mark.usefixtures("small_work_is_shared_out")


def _inside(memory: np.ndarray) -> np.ndarray:
    """All but the borders of the last two axes."""
    return memory[..., 2:-1, 1:-2]


#: From a way to make memory of a shape to a view (n, c, h, w) of it.
VIEWS: dict[str, Callable[[Any, int, int, int, int], np.ndarray]] = {
    "planes": lambda make, n, c, h, w: make(n, c, h, w),
    "cropped": lambda make, n, c, h, w: _inside(make(n, c, h + 3, w + 3)),
    "cropped in one axis": lambda make, n, c, h, w: make(n, c, h, w + 2)[..., 1:-1],
    "some channels": lambda make, n, c, h, w: make(n, c + 3, h, w)[:, 2:-1],
    "pixels": lambda make, n, c, h, w: make(n, h, w, c).transpose(0, 3, 1, 2),
    "cropped pixels": lambda make, n, c, h, w: _inside(make(n, h + 3, w + 3, c).transpose(0, 3, 1, 2)),
    "some channels of pixels": lambda make, n, c, h, w: make(n, h, w, c + 5)[..., 3:-2].transpose(0, 3, 1, 2),
    "channels first": lambda make, n, c, h, w: make(c, n, h, w).transpose(1, 0, 2, 3),
    "channels third": lambda make, n, c, h, w: make(n, h, c, w).transpose(0, 2, 1, 3),
    "samples last": lambda make, n, c, h, w: make(c, h, w, n).transpose(3, 0, 1, 2),
    "samples reversed": lambda make, n, c, h, w: make(n, c, h, w)[::-1],
    "columns reversed": lambda make, n, c, h, w: make(n, c, h, w)[..., ::-1],
    "every other column": lambda make, n, c, h, w: make(n, c, h, 2 * w)[..., ::2],
    "one sample for all": lambda make, n, c, h, w: np.broadcast_to(make(1, c, h, w), (n, c, h, w)),
    "one element for all": lambda make, n, c, h, w: np.broadcast_to(make(1, 1, 1, 1), (n, c, h, w)),
}  # fmt: skip
SHAPES = [(3, 5, 7, 9), (2, 20, 6, 40), (5, 3, 4, 1), (1, 4, 9, 200), (4, 1, 5, 6), (1, 1, 1, 1), (30, 70, 1, 1)]


def _memory(dtype: Any, seed: int) -> Callable[..., np.ndarray]:
    """Numbers around 3, for which a wrong element is seen."""
    rng = np.random.default_rng(seed)
    return lambda *shape: (3 + rng.standard_normal(shape, dtype=np.float32)).astype(dtype)


def _check(dy: np.ndarray, x: np.ndarray) -> None:
    channels = x.shape[1]
    rng = np.random.default_rng(2)
    mean, invstd = (rng.standard_normal(channels, dtype=np.float32) for _ in "mi")
    call = {"gradOut": dy, "input": x, "mean": mean, "invstd": invstd}
    golden, terms = bn.reference(call), bn.terms(call)
    seen = set()
    for count in (1, 3):
        backnorm.set_num_threads(count)
        out = tuple(np.full(channels, np.nan, np.float32) for _ in range(4))
        for result, name in zip(backnorm.batch_norm_backward_reduce(dy, x, mean, invstd, out=out), golden):
            assert excess(result, golden[name], terms[name]) <= 1, name
        seen.add(b"".join(array.tobytes() for array in out))
    assert len(seen) == 1


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("view", VIEWS)
def test_every_view_is_summed_right(view: str, shape: tuple[int, int, int, int]) -> None:
    for dtype in DTYPES.values():
        dy, x = (VIEWS[view](_memory(dtype, seed), *shape) for seed in range(2))
        assert x.shape == shape
        _check(dy, x)


@pytest.mark.parametrize("views", list(itertools.permutations(VIEWS, 2)), ids=" and ".join)
def test_gradients_and_inputs_may_have_different_views(views: tuple[str, str]) -> None:
    _check(*(VIEWS[view](_memory(np.float32, seed), 3, 18, 5, 33) for seed, view in enumerate(views)))


@pytest.mark.parametrize("shape", [(2, 3, 4, 5, 6, 7), (3, 4, 2, 3, 2, 2, 3, 2)])
@pytest.mark.parametrize("pixels", [False, True])
def test_gaps_between_any_axes(shape: tuple[int, ...], pixels: bool) -> None:
    """As many axes as there can be, none of which can be joined to another."""
    views = []
    for seed in range(2):
        memory = _memory(np.float32, seed)(*(size + 1 for size in shape))
        if pixels:
            memory = np.moveaxis(np.ascontiguousarray(np.moveaxis(memory, 1, -1)), -1, 1)
        views.append(memory[tuple(slice(size) for size in shape)])
    _check(views[0], views[1])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("view", ["cropped", "cropped pixels", "channels third", "samples last"])
def test_sums_of_terms_that_are_all_alike(view: str, dtype: Any) -> None:
    """Every rounding goes the same way, and there are no more than 8, however many rows there are."""
    dy, x = (VIEWS[view](lambda *shape, v=value: np.full(shape, v, dtype), 40, 3, 70, 23) for value in (1.1, 3.7))
    mean, invstd = np.full(3, 0.3, np.float32), np.ones(3, np.float32)
    golden = bn.reference({"gradOut": dy, "input": x, "mean": mean, "invstd": invstd})
    for result, name in zip(backnorm.batch_norm_backward_reduce(dy, x, mean, invstd), golden):
        assert relative_error(result, golden[name]) <= 8 * EPS, name


@pytest.mark.parametrize(
    ("shape", "axes", "tasks", "share"),
    [
        ((64, 3, 66, 66), (0, 1, 2, 3), 12, 0.1), ((3, 64, 66, 66), (1, 0, 2, 3), 12, 0.1),
        ((64, 18, 4, 512), (0, 3, 1, 2), 12, 0.5), ((8, 6, 4, 4096), (0, 3, 1, 2), 3, 0.5),
    ],
)  # fmt: skip
def test_crops_are_work_for_many_threads_and_need_little_memory(
    shape: tuple[int, ...], axes: tuple[int, ...], tasks: int, share: float
) -> None:
    """Few channels with many runs of each; and runs of two pixels, of which a task has many."""
    view = np.zeros(shape, np.float32).transpose(axes)[..., 1:-1, 1:-1]
    desc = TensorDesc(view.shape, F32, tuple(stride // 4 for stride in view.strides))
    small = TensorDesc(view.shape[1:2], F32, (1,))
    values = {"gradOut": desc, "input": desc, "mean": small, "invstd": small, "weight": None}
    values |= dict.fromkeys(("sumDy", "sumDyXmu", "gradWeight", "gradBias"), small)
    values |= dict.fromkeys(("inputG", "weightG", "biasG"), True)
    outputs = ("sumDy", "sumDyXmu", "gradWeight", "gradBias")
    tiling = tile(Call(OPS["batch_norm_backward_reduce"], values, PRODUCTS["Any"]), outputs)
    found = tiling.pixel_tasks if tiling.layout.pixels else tiling.sample_tasks
    assert tasks <= found <= 128
    assert tiling.workspace_bytes <= share * view.size * 4


def test_long_runs_are_work_for_several_threads() -> None:
    dy, x = (_memory(np.float32, seed)(1, 2, 150_001) for seed in range(2))
    _check(dy, x)


def _lay_out(view: str, other: str | None = None, dtype: int = F32) -> Any:
    descs = []
    for name in (other or view, view):
        array = VIEWS[name](lambda *shape: np.zeros(shape, np.float32), 4, 6, 5, 8)
        descs.append(TensorDesc(array.shape, dtype, tuple(stride // 4 for stride in array.strides)))
    parts = Parts()
    return lay_out(descs[0], descs[1], parts), parts.bytes


@pytest.mark.parametrize(
    ("view", "pixels", "outer", "inner", "run"),
    [
        ("planes", False, [4], [], 40), ("cropped", False, [4], [5], 8), ("cropped in one axis", False, [4], [5], 8),
        ("some channels", False, [4], [], 40), ("pixels", True, [], [], 160), ("cropped pixels", True, [4, 5], [], 8),
        ("some channels of pixels", True, [], [], 160), ("channels first", False, [], [], 160),
        ("channels third", False, [20], [], 8), ("samples last", False, [], [], 160),
        ("samples reversed", False, [4], [], 40), ("one sample for all", False, [4], [], 40),
    ],
)  # fmt: skip
def test_views_that_are_read_in_place(view: str, pixels: bool, outer: list[int], inner: list[int], run: int) -> None:
    layout, workspace = _lay_out(view)
    assert workspace == 0
    assert not layout.packed
    assert layout.pixels is pixels
    assert [axis.size for axis in layout.outer] == outer
    assert [axis.size for axis in layout.inner] == inner
    assert layout.run.size == run


@pytest.mark.parametrize(
    ("view", "other", "packed"),
    [
        ("every other column", None, ["input", "gradOut"]), ("columns reversed", None, ["input", "gradOut"]),
        ("pixels", "planes", ["gradOut"]), ("planes", "one element for all", ["gradOut"]),
        ("columns reversed", "planes", ["input"]), ("cropped", "cropped in one axis", []),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_views_that_are_copied(view: str, other: str | None, packed: list[str], dtype: int) -> None:
    """As few as can be, and gradients in the order of the inputs."""
    layout, workspace = _lay_out(view, other, dtype)
    assert list(layout.packed) == packed
    assert workspace == len(packed) * 4 * 6 * 40 * itemsize(dtype)
    if other == "planes" and packed == ["gradOut"]:
        assert layout.pixels
        assert layout.run == Axis(160, 6, 6)
