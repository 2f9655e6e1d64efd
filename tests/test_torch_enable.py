"""enable(): existing models reach our kernels, eagerly and compiled, and everything else stays as it was."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import backnorm.torch  # noqa: E402
from backnorm.accuracy import relative_error  # noqa: E402

from .torch_truth import group_norm_truth, judge, layer_norm_truth, random, to_numpy  # noqa: E402

aten = torch.ops.aten
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    backnorm.torch.reset_stats()
    yield
    backnorm.torch.disable()


def _model(dtype: Any = torch.float32) -> Any:
    torch.manual_seed(0)
    nn = torch.nn
    layers = nn.Sequential(
        nn.Linear(24, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 48), nn.Unflatten(1, (12, 2, 2)),
        nn.GroupNorm(4, 12), nn.Flatten(), nn.LayerNorm(48),
    )  # fmt: skip
    for layer in layers:
        if isinstance(layer, (nn.LayerNorm, nn.GroupNorm)):
            nn.init.normal_(layer.weight)
    return layers.to(dtype)


def _gradients(model: Any, dtype: Any = torch.float32, batch: int = 30) -> list[Any]:
    x = random((batch, 24), 1, dtype).requires_grad_()
    model.zero_grad()
    model(x).backward(random((batch, 48), 2, dtype))
    return [x.grad, *[p.grad.clone() for p in model.parameters()]]


def _counts() -> dict[str, int]:
    return {name: counts.get("backnorm", 0) for name, counts in backnorm.torch.stats().items()}


def _close(some: list[Any], others: list[Any], tolerance: float = 1e-5) -> None:
    for a, b in zip(some, others):
        assert float((a.double() - b.double()).abs().max()) <= tolerance * float(b.abs().max())


def test_an_existing_model_reaches_our_kernels_and_has_the_right_gradients() -> None:
    golden = _gradients(_model(torch.float64), torch.float64)
    with backnorm.torch.enable():
        ours = _gradients(_model())
    assert _counts() == {"layer_norm_backward": 2, "group_norm_backward": 1, "batch_norm_backward_reduce": 0}
    _close(ours, golden)


def test_a_layers_gradients_lie_within_the_bound_of_float64() -> None:
    x, dy, w, b = random((50, 300), 1), random((50, 300), 2), random((300,), 3), random((300,), 4)
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    with backnorm.torch.enable():
        torch.nn.functional.layer_norm(leaves[0], (300,), *leaves[1:]).backward(dy)
    truth = layer_norm_truth(dy, x, (300,), w, b)
    for leaf, name in zip(leaves, ("input", "weight", "bias")):
        assert judge(leaf.grad, *truth[name]) <= 1, name
    x, dy, w, b = random((4, 12, 7, 5), 1), random((4, 12, 7, 5), 2), random((12,), 3), random((12,), 4)
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    with backnorm.torch.enable():
        torch.nn.functional.group_norm(leaves[0], 3, *leaves[1:]).backward(dy)
    truth = group_norm_truth(dy, x, 3, w, b)
    for leaf, name in zip(leaves, ("input", "weight", "bias")):
        assert judge(leaf.grad, *truth[name]) <= 1, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_weight_gradients_are_far_better_than_torchs(dtype: Any) -> None:
    """4096 rows with gradients of one sign, as behind a mean: torch adds the rows up in 16 bits on the CPU."""
    rows, cols = 4096, 64
    x, dy, w = random((rows, cols), 1, dtype), random((rows, cols), 2, dtype).abs(), random((cols,), 3, dtype)
    b = torch.zeros_like(w)
    truth = layer_norm_truth(dy, x, (cols,), w, b)

    def errors() -> list[float]:
        leaves = [t.clone().requires_grad_() for t in (x, w, b)]
        torch.nn.functional.layer_norm(leaves[0], (cols,), *leaves[1:]).backward(dy)
        return [relative_error(to_numpy(leaf.grad), truth[n][0]) for leaf, n in zip(leaves[1:], ("weight", "bias"))]

    theirs = errors()
    with backnorm.torch.enable():
        ours = errors()
    ulp = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    assert all(error <= 3 * ulp for error in ours), ours  # the saved statistics are in 16 bits too
    assert all(error > 4 * mine for error, mine in zip(theirs, ours)), (theirs, ours)
    if dtype == torch.bfloat16:
        assert max(theirs) > 0.02, theirs


def test_what_we_do_not_have_goes_on_to_aten_and_is_counted() -> None:
    expected = _gradients(_model(torch.float64), torch.float64)
    with backnorm.torch.enable():
        got = _gradients(_model(torch.float64), torch.float64)
    assert all(torch.equal(a, b) for a, b in zip(expected, got))
    assert backnorm.torch.stats()["layer_norm_backward"] == {"aten: input is float64": 2}
    assert backnorm.torch.stats()["group_norm_backward"] == {"aten: input is float64": 1}
    x = random((1,) * 8 + (4,), 1)
    arguments = (x, x, [4], torch.zeros(1), torch.ones(1), None, None, [True, False, False])
    expected = aten.native_layer_norm_backward(*arguments)
    with backnorm.torch.enable():
        got = aten.native_layer_norm_backward(*arguments)
    assert torch.equal(got[0], expected[0])
    assert backnorm.torch.stats()["layer_norm_backward"]["aten: input must have 1 to 8 axes"] == 1


def test_the_reduce_that_torch_lacks_on_cpus() -> None:
    x, dy = random((6, 5, 4), 1), random((6, 5, 4), 2)
    arguments = (dy, x, x.mean((0, 2)), torch.ones(5), None)
    with pytest.raises(NotImplementedError):
        aten.batch_norm_backward_reduce(*arguments, True, True, True)
    with backnorm.torch.enable():
        sum_dy, sum_dy_xmu, dw, db = aten.batch_norm_backward_reduce(*arguments, True, True, False)
        wide = aten.batch_norm_backward_reduce(*[a if a is None else a.double() for a in arguments], True, True, False)
    assert db is None
    assert wide[3] is None
    _close([sum_dy, sum_dy_xmu, dw], list(wide[:3]), 1e-6)
    assert backnorm.torch.stats()["batch_norm_backward_reduce"] == {"aten: input is float64": 1, "backnorm": 1}
    with pytest.raises(NotImplementedError):
        aten.batch_norm_backward_reduce(*arguments, True, True, True)


def test_on_and_off() -> None:
    model = _model()
    before = _gradients(model)
    with backnorm.torch.enable():
        with backnorm.torch.enable():
            pass
        assert backnorm.torch.is_enabled()
        _gradients(model)
    assert not backnorm.torch.is_enabled()
    counted = _counts()
    assert counted["layer_norm_backward"] == 2
    assert all(torch.equal(a, b) for a, b in zip(before, _gradients(model)))
    assert _counts() == counted
    backnorm.torch.disable()
    backnorm.torch.enable()
    backnorm.torch.enable()
    _gradients(model)
    backnorm.torch.disable()
    assert not backnorm.torch.is_enabled()
    assert _counts()["layer_norm_backward"] == 4
    assert torch.compiler.config.cache_key_tag == ""
    with pytest.raises(ZeroDivisionError), backnorm.torch.enable():
        raise ZeroDivisionError
    assert not backnorm.torch.is_enabled()


def test_threads_checkpoints_transforms_and_double_backward() -> None:
    from torch.utils.checkpoint import checkpoint

    model = _model()
    golden = _gradients(_model(torch.float64), torch.float64)
    backnorm.torch.enable()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(_gradients(_model())))
    thread.start()
    thread.join()
    _close(found[0], golden)
    for reentrant in (False, True):
        _close(_gradients_of(lambda x, r=reentrant: checkpoint(model, x, use_reentrant=r), model), golden)
    assert _counts()["layer_norm_backward"] == 6

    weight = model[1].weight.detach()
    x = random((5, 3, 48), 1)

    def loss(w: Any, x: Any) -> Any:
        return torch.nn.functional.layer_norm(x, (48,), w).pow(3).sum()

    ours = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(None, 0))(weight, x)
    backnorm.torch.disable()
    theirs = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(None, 0))(weight, x)
    _close(list(ours), list(theirs))
    with backnorm.torch.enable():
        leaf = x[0].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(weight, leaf), leaf, create_graph=True)
        (twice,) = torch.autograd.grad(gradient.square().sum(), leaf)
    leaf = x[0].double().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(weight.double(), leaf), leaf, create_graph=True)
    _close([twice], [torch.autograd.grad(gradient.square().sum(), leaf)[0]], 1e-4)


def _gradients_of(forward: Any, model: Any) -> list[Any]:
    x = random((30, 24), 1).requires_grad_()
    model.zero_grad()
    forward(x).backward(random((30, 48), 2))
    return [x.grad, *[p.grad.clone() for p in model.parameters()]]


def test_autocast() -> None:
    model = _model()
    with torch.autocast("cpu", torch.bfloat16):
        expected = _gradients(model)
        with backnorm.torch.enable():
            got = _gradients(model)
    _close(got, expected, 0.05)  # bfloat16 inside
    assert [a.dtype for a in got] == [b.dtype for b in expected]
    assert _counts() == {"layer_norm_backward": 2, "group_norm_backward": 1, "batch_norm_backward_reduce": 0}


# --- torch.compile ----------------------------------------------------------------------------------------------------


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """A compiler with caches of its own, that gives up rather than break the graph."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    yield lambda model: torch.compile(model, fullgraph=True)
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore")  # inductor's own
def test_a_compiled_model_really_reaches_our_operators(compiler: Any) -> None:
    golden = _gradients(_model(torch.float64), torch.float64)
    plain = compiler(_model())
    _close(_gradients(plain), golden)
    assert _counts()["layer_norm_backward"] == 0
    torch.compiler.reset()
    with backnorm.torch.enable():  # the same code again: nothing may come from the caches on disk
        ours = compiler(_model())
        for calls in (1, 2):
            _close(_gradients(ours), golden)
            assert _counts() == {
                "layer_norm_backward": 2 * calls, "group_norm_backward": calls, "batch_norm_backward_reduce": 0,
            }  # fmt: skip
        _close(_gradients(ours, batch=17), _gradients(_model(torch.float64), torch.float64, batch=17))
    torch.compiler.reset()
    backnorm.torch.reset_stats()
    _close(_gradients(compiler(_model())), golden)
    assert _counts()["layer_norm_backward"] == 0


@pytest.mark.filterwarnings("ignore")
def test_compiled_sixteen_bit_models(compiler: Any) -> None:
    """Mixed precision, where a compiler keeps statistics in other types than aten does, and none of our business."""
    with backnorm.torch.enable():
        model = _model()
        with torch.autocast("cpu", torch.bfloat16):
            expected = _gradients(model)
            backnorm.torch.reset_stats()
            got = _gradients(compiler(model))
        _close(got, expected, 0.05)
        assert _counts() == {"layer_norm_backward": 2, "group_norm_backward": 1, "batch_norm_backward_reduce": 0}
        torch.compiler.reset()
        backnorm.torch.reset_stats()
        wide = _model(torch.float64)
        _close(_gradients(compiler(wide), torch.float64), _gradients(wide, torch.float64), 1e-12)
        assert _counts()["layer_norm_backward"] == 0


# --- threads ----------------------------------------------------------------------------------------------------------


def _reduce(x: Any, dy: Any) -> list[bytes]:
    results = torch.ops.backnorm.layer_norm_backward(dy, x, [x.shape[1]], x.mean(1), x.var(1), None)
    return [result.numpy().tobytes() for result in results]


def test_kernels_run_on_pytorchs_threads_with_the_same_bits() -> None:
    from backnorm import threads
    from backnorm.torch import openmp

    x, dy = random((3000, 300), 1), random((3000, 300), 2)
    arrays = [t.numpy() for t in (dy, x)]
    expected = _reduce(x, dy)
    if openmp._find_library() is not None:
        assert isinstance(threads._pool, threads._OpenMP)
    statistics = (x.mean(1).numpy(), x.var(1).numpy())
    plain = [r.tobytes() for r in backnorm.layer_norm_backward(*arrays, (300,), *statistics)]
    assert plain == expected
    before = torch.get_num_threads()
    try:
        for number in (1, 2, 3, 7):
            torch.set_num_threads(number)
            backnorm.set_num_threads(number)
            assert _reduce(x, dy) == expected
    finally:
        torch.set_num_threads(before)
        backnorm.set_num_threads(threads._usable_cpus())
    found: list[Any] = []
    callers = [threading.Thread(target=lambda: found.append(_reduce(x, dy))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert found == [expected] * 4


_FORKED = """
import os, numpy as np, torch, backnorm, backnorm.torch
x = np.random.default_rng(0).standard_normal((3000, 300)).astype(np.float32)
ones = np.ones((3000, 1), np.float32)
def bits():
    return [r.tobytes() for r in backnorm.layer_norm_backward(x, x, (300,), ones, ones)]
t = torch.from_numpy(x)
torch.ops.backnorm.layer_norm_backward(t, t, [300], torch.from_numpy(ones), torch.from_numpy(ones))
before = bits()
child = os.fork()
if child == 0:
    os._exit(0 if bits() == before else 3)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


_FORKED_BEFORE_OURS = """
import os, torch, backnorm.torch
x, ones = torch.randn(4096, 256), torch.ones(4096, 1)
torch.set_num_threads(2)
torch.nn.functional.layer_norm(x, (256,))  # starts PyTorch's threads, which stay with the parent
child = os.fork()
if child == 0:
    torch.ops.backnorm.layer_norm_backward(x, x, [256], ones, ones)
    os._exit(0)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("program", [_FORKED, _FORKED_BEFORE_OURS])
def test_a_forked_child_has_threads_of_its_own(program: str) -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=60)


def test_contexts_that_overlap_and_are_used_again() -> None:
    first, second = backnorm.torch.enable(), backnorm.torch.enable()
    first.__enter__()
    second.__enter__()
    first.__exit__()
    assert backnorm.torch.is_enabled()
    second.__exit__()
    assert not backnorm.torch.is_enabled()
    with first:
        assert backnorm.torch.is_enabled()
    assert not backnorm.torch.is_enabled()
