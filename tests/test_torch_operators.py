"""torch.ops.backnorm.*: PyTorch's own checks of an operator, numbers, masks, vmap, and gradients of gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import backnorm.torch  # noqa: E402
from backnorm.status import AclnnError  # noqa: E402

from .torch_truth import REFERENCES, judge, random  # noqa: E402

OPS = torch.ops.backnorm
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def _layer_norm(dtype: Any, layout: str = "", rows: int = 7, cols: int = 19, affine: bool = True) -> list[Any]:
    dy, x = random((rows, cols), 1, dtype), random((rows, cols), 2, dtype)
    if layout == "strided":
        dy, x = dy.t().contiguous().t(), torch.cat([x, x], 1)[:, :cols]
    statistics = random((rows, 1), 3), random((rows, 1), 4)
    weight, bias = (random((cols,), 5, dtype), random((cols,), 6, dtype)) if affine else (None, None)
    return [dy, x, [cols], *statistics, weight, bias]


def _group_norm(dtype: Any, layout: str = "", affine: bool = True) -> list[Any]:
    n, c, h, w, group = 3, 6, 4, 5, 2
    dy, x = random((n, c, h, w), 1, dtype), random((n, c, h, w), 2, dtype)
    if layout == "strided":
        dy, x = dy.contiguous(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    statistics = random((n, group), 3), random((n, group), 4)
    return [dy, x, *statistics, random((c,), 5) if affine else None, n, c, h * w, group]


def _batch_norm(dtype: Any, layout: str = "", affine: bool = True) -> list[Any]:
    dy, x = random((5, 6, 4, 3), 1, dtype), random((5, 6, 4, 3), 2, dtype)
    if layout == "strided":
        dy = dy.contiguous(memory_format=torch.channels_last)
    return [dy, x, random((6,), 3), random((6,), 4), random((6,), 5, dtype) if affine else None]


CALLS = {
    "layer_norm_backward": _layer_norm, "group_norm_backward": _group_norm, "batch_norm_backward_reduce": _batch_norm,
}  # fmt: skip
PLACES = {  # of the operator's arguments, in the words of the references
    "layer_norm_backward": ("gradOut", "input", "normalizedShape", "mean", "rstd", "weightOptional", "biasOptional"),
    "group_norm_backward": ("gradOut", "input", "mean", "rstd", "gamma", "N", "C", "HxW", "group"),
    "batch_norm_backward_reduce": ("gradOut", "input", "mean", "invstd", "weight"),
}
MASKS = {
    "layer_norm_backward": [([True, True, True],), ([True, False, True],), ([False, True, False],), ([False] * 3,)],
    "group_norm_backward": [([True, True, True],), ([True, False, True],), ([False, True, False],), ([False] * 3,)],
    "batch_norm_backward_reduce": [(True, True, True), (True, False, True), (False, True, False), (False,) * 3],
}


def _wanted(name: str, mask: tuple[Any, ...]) -> list[bool]:
    return list(mask[0]) if len(mask) == 1 else [mask[0], mask[0], mask[1], mask[2]]


def _reference(name: str, arguments: list[Any]) -> tuple[list[Any], list[Any]]:
    call = {
        word: value.double().numpy() if torch.is_tensor(value) else value
        for word, value in zip(PLACES[name], arguments)
    }
    return list(REFERENCES[name].reference(call).values()), list(REFERENCES[name].terms(call).values())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["", "strided"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_results_lie_within_the_bound_and_what_is_masked_off_is_none(
    name: str, affine: bool, layout: str, dtype: Any
) -> None:
    arguments = CALLS[name](dtype, layout, affine=affine)
    golden, terms = _reference(name, arguments)
    for mask in MASKS[name]:
        results = getattr(OPS, name)(*arguments, *mask)
        assert [result is not None for result in results] == _wanted(name, mask)
        for result, right, size in zip(results, golden, terms):
            if result is not None:
                assert judge(result, right, size) <= 1


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("which", range(4))
def test_opcheck(name: str, which: int) -> None:
    """PyTorch's checks of schema, fake kernel, autograd registration and AOT dispatch with symbolic shapes."""
    dtype, layout = (torch.float32, "") if which < 2 else (torch.bfloat16, "strided")
    arguments = CALLS[name](dtype, layout, affine=which != 1)
    if which % 2 == 0:
        arguments = [a.requires_grad_() if i < 2 else a for i, a in enumerate(arguments)]
    overload = getattr(OPS, name).default
    checks = torch.library.opcheck(overload, (*arguments, *MASKS[name][which]))
    assert set(checks.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", CALLS)
def test_fake_results_have_the_layout_of_real_ones(name: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for layout in ("", "strided"):
        arguments = CALLS[name](torch.float16, layout)
        real = getattr(OPS, name)(*arguments)
        with FakeTensorMode() as mode:
            fake = getattr(OPS, name)(*[mode.from_tensor(a) if torch.is_tensor(a) else a for a in arguments])
        for a, b in zip(real, fake):
            assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)


def test_a_broken_rule_is_told_in_the_operators_words() -> None:
    arguments = _layer_norm(torch.float32)
    with pytest.raises(AclnnError, match=r"layer_norm_backward: mean must .* got 3, shape \[3, 1\]"):
        OPS.layer_norm_backward(*arguments[:3], random((3, 1), 3), random((3, 1), 4), *arguments[5:])
    with pytest.raises(AclnnError, match=r"grad_out must .*float64"):
        OPS.layer_norm_backward(*[a.double() if torch.is_tensor(a) else a for a in arguments])


def test_memory_that_was_freed_is_told_not_read() -> None:
    arguments = _layer_norm(torch.float32)
    OPS.layer_norm_backward(*arguments)
    arguments[1].untyped_storage().resize_(0)
    with pytest.raises(AclnnError, match="input must have memory"):
        OPS.layer_norm_backward(*arguments)


@pytest.mark.parametrize("name", CALLS)
def test_vmap_has_the_bits_of_single_calls(name: str) -> None:
    arguments = CALLS[name](torch.bfloat16)
    batch = torch.stack([arguments[0], 2 * arguments[0], arguments[0].flip(0)], 1)
    together = torch.func.vmap(lambda dy: getattr(OPS, name)(dy, *arguments[1:]), in_dims=1)(batch)
    for i in range(3):
        for one, result in zip(together, getattr(OPS, name)(batch[:, i], *arguments[1:])):
            assert torch.equal(one[i], result)
    nothing = torch.func.vmap(lambda dy: getattr(OPS, name)(dy, *arguments[1:]), in_dims=1)(batch[:, :0])
    assert [tuple(result.shape) for result in nothing] == [(0, *result.shape[1:]) for result in together]


def _layer_norm_from_scratch(dy: Any, x: Any, w: Any) -> Any:
    mean, var = x.mean(1, keepdim=True), x.var(1, keepdim=True, correction=0)
    rstd = (var + 1e-5).rsqrt()
    x_hat, g = (x - mean) * rstd, dy * w
    dx = rstd * (g - g.mean(1, keepdim=True) - x_hat * (g * x_hat).mean(1, keepdim=True))
    return dx, (dy * x_hat).sum(0), dy.sum(0)


def _group_norm_from_scratch(dy: Any, x: Any, w: Any, group: int = 2) -> Any:
    n, c, hw = x.shape
    shape = (n, group, c // group, hw)
    dy, x, w = dy.reshape(shape), x.reshape(shape), w.reshape(group, c // group, 1)
    mean, var = x.mean((2, 3), keepdim=True), x.var((2, 3), keepdim=True, correction=0)
    rstd = (var + 1e-5).rsqrt()
    x_hat, g = (x - mean) * rstd, dy * w
    dx = rstd * (g - g.mean((2, 3), keepdim=True) - x_hat * (g * x_hat).mean((2, 3), keepdim=True))
    return dx.reshape(n, c, hw), (dy * x_hat).sum((0, 3)).reshape(c), dy.sum((0, 3)).reshape(c)


def _operator(name: str, x: Any) -> tuple[Any, Any]:
    """The operator as a function of dy, x and weight with statistics saved from x, and the truth of the same."""
    if name == "layer_norm_backward":
        cols = x.shape[1]
        _, mean, rstd = torch.native_layer_norm(x, (cols,), None, None, 1e-5)
        return lambda dy, x, w: OPS.layer_norm_backward(dy, x, [cols], mean, rstd, w), _layer_norm_from_scratch
    n, c, hw = x.shape
    _, mean, rstd = torch.native_group_norm(x, None, None, n, c, hw, 2, 1e-5)
    return (
        lambda dy, x, w: OPS.group_norm_backward(dy, x, mean, rstd, w, n, c, hw, 2), _group_norm_from_scratch
    )  # fmt: skip


def _close(actual: Any, golden: Any, tolerance: float = 2e-4) -> None:
    actual, golden = actual.detach(), golden.detach()
    assert float((actual - golden).abs().max()) <= tolerance * float(golden.abs().max())


@pytest.mark.parametrize("name", ["layer_norm_backward", "group_norm_backward"])
@pytest.mark.parametrize("transform", ["autograd", "jacrev", "jvp", "hessian", "grad of grad", "vmap of grad"])
def test_gradients_of_gradients_at_any_order(name: str, transform: str) -> None:
    """The statistics depend on the input, at every order (aten's own formula forgets it from the second on)."""
    shape = (3, 5) if name == "layer_norm_backward" else (2, 4, 3)
    x, dy = random(shape, 1), random(shape, 2)
    w = random(shape[1:2], 3)
    u = [random(shape, 4), random(shape[1:2], 5), random(shape[1:2], 6)]
    ours, truth = _operator(name, x)

    def loss(function: Any) -> Any:
        def scalar(dy: Any, x: Any, w: Any) -> Any:
            return sum((a.square() * b.to(a.dtype)).sum() for a, b in zip(function(dy, x, w), u))

        return scalar

    def results(function: Any, dtype: Any) -> list[Any]:
        values = [t.to(dtype) for t in (dy, x, w)]
        if transform == "autograd":
            leaves = [v.clone().requires_grad_() for v in values]
            first = torch.autograd.grad(loss(function)(*leaves), leaves, create_graph=True)
            return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), leaves)]
        if transform == "jacrev":
            return list(torch.func.jacrev(lambda *v: function(*v)[0], argnums=(0, 1, 2))(*values))
        if transform == "jvp":
            tangents = tuple(random(v.shape, 7 + i, dtype) for i, v in enumerate(values))
            return list(torch.func.jvp(lambda *v: function(*v), tuple(values), tangents)[1])
        if transform == "hessian":
            return [torch.func.hessian(loss(function), argnums=1)(*values)]
        if transform == "grad of grad":
            inner = torch.func.grad(loss(function), argnums=1)
            return [torch.func.grad(lambda *v: inner(*v).square().sum(), argnums=1)(*values)]
        batch = torch.stack([values[0], -2 * values[0]])
        grads = torch.func.vmap(torch.func.grad(loss(function), argnums=(0, 1, 2)), in_dims=(0, None, None))
        return list(grads(batch, *values[1:]))

    for a, b in zip(results(ours, torch.float32), results(truth, torch.float64)):
        _close(a, b)


def test_the_reduce_operator_can_be_differentiated() -> None:
    arguments = [a.clone().requires_grad_() for a in _batch_norm(torch.float32)[:4]]
    u = random((4, 6), 9)
    (torch.stack(OPS.batch_norm_backward_reduce(*arguments)) * u).sum().backward()
    dy, x, mean, invstd = (a.detach().double().requires_grad_() for a in arguments)
    by_channel = (1, 6, 1, 1)
    sums = dy.sum((0, 2, 3)), (dy * (x - mean.view(by_channel))).sum((0, 2, 3))
    (torch.stack([sums[0], sums[1], sums[1] * invstd, sums[0]]) * u.double()).sum().backward()
    for ours, truth in zip(arguments, (dy, x, mean, invstd)):
        _close(ours.grad, truth.grad, 1e-5)


def test_calls_are_counted() -> None:
    backnorm.torch.reset_stats()
    OPS.layer_norm_backward(*_layer_norm(torch.float32))
    OPS.layer_norm_backward(*_layer_norm(torch.float16))
    assert backnorm.torch.stats()["layer_norm_backward"] == {"backnorm": 2}
    assert backnorm.torch.stats()["group_norm_backward"] == {}


def test_empty_batches() -> None:
    dx, dw, db = OPS.layer_norm_backward(*_layer_norm(torch.float32, rows=0))
    assert dx.shape == (0, 19)
    assert not dw.any()
    assert not db.any()
    x = torch.empty(0, 6, 4)
    sums = OPS.batch_norm_backward_reduce(x, x, torch.zeros(6), torch.ones(6))
    assert all(math.isclose(float(s.abs().sum()), 0.0) for s in sums)
