"""The references themselves: against torch's float64 autograd, the golden numbers, and the definitions."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch

from backnorm.ops import OPS


def _reference(folder: str):  # type: ignore[no-untyped-def]
    return importlib.import_module(f"backnorm.ops.{folder}.reference")


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_the_example_gives_the_golden_numbers(op) -> None:  # type: ignore[no-untyped-def]
    inputs = {p.name: op.example.inputs[p.name] for p in op.inputs}
    results = _reference(op.folder).reference(inputs)
    for name, golden in op.example.golden.items():
        np.testing.assert_allclose(results[name], np.array(golden, float), rtol=1e-7, atol=1e-6)


@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm_is_the_gradient(affine: bool) -> None:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(3, 4, 5, 6, dtype=torch.float64, generator=g).requires_grad_()
    w, b = (torch.randn(5, 6, dtype=torch.float64, generator=g).requires_grad_() if affine else None for _ in "wb")
    dy = torch.randn(3, 4, 5, 6, dtype=torch.float64, generator=g)
    y, mean, rstd = torch.native_layer_norm(x, (5, 6), w, b, 1e-5)
    y.backward(dy)
    results = _reference("layer_norm").reference({
        "gradOut": dy, "input": x.detach(), "normalizedShape": (5, 6), "mean": mean.detach(), "rstd": rstd.detach(),
        "weightOptional": w.detach() if affine else None,
    })  # fmt: skip
    np.testing.assert_allclose(results["gradInputOut"], x.grad, rtol=1e-10, atol=1e-12)
    if affine:
        np.testing.assert_allclose(results["gradWeightOut"], w.grad, rtol=1e-10)
        np.testing.assert_allclose(results["gradBiasOut"], b.grad, rtol=1e-10)


@pytest.mark.parametrize("affine", [True, False])
def test_group_norm_is_the_gradient(affine: bool) -> None:
    g = torch.Generator().manual_seed(2)
    x = torch.randn(3, 6, 5, 4, dtype=torch.float64, generator=g).requires_grad_()
    w, b = (torch.randn(6, dtype=torch.float64, generator=g).requires_grad_() if affine else None for _ in "wb")
    dy = torch.randn(3, 6, 5, 4, dtype=torch.float64, generator=g)
    y, mean, rstd = torch.native_group_norm(x, w, b, 3, 6, 20, 2, 1e-5)
    y.backward(dy)
    results = _reference("group_norm").reference({
        "gradOut": dy, "input": x.detach(), "mean": mean.detach(), "rstd": rstd.detach(),
        "gamma": w.detach() if affine else None, "N": 3, "C": 6, "HxW": 20, "group": 2,
    })  # fmt: skip
    np.testing.assert_allclose(results["gradInput"], x.grad, rtol=1e-10, atol=1e-12)
    if affine:
        np.testing.assert_allclose(results["gradGammaOut"], w.grad, rtol=1e-10)
        np.testing.assert_allclose(results["gradBetaOut"], b.grad, rtol=1e-10)


@pytest.mark.parametrize("shape", [(7, 3), (4, 3, 5), (2, 3, 4, 5), (2, 3, 1, 2, 1, 3)])
def test_batch_norm_sums_are_the_gradient_and_rebuild_it(shape: tuple[int, ...]) -> None:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(shape, dtype=torch.float64, generator=g).requires_grad_()
    w, b = (torch.randn(3, dtype=torch.float64, generator=g).requires_grad_() for _ in "wb")
    dy = torch.randn(shape, dtype=torch.float64, generator=g)
    axes = [axis for axis in range(x.ndim) if axis != 1]
    mean = x.mean(axes)
    invstd = (x.var(axes, unbiased=False) + 1e-5).rsqrt()
    torch.nn.functional.batch_norm(x, None, None, w, b, training=True, eps=1e-5).backward(dy)
    results = _reference("batch_norm_reduce").reference(
        {"gradOut": dy, "input": x.detach(), "mean": mean.detach(), "invstd": invstd.detach()}
    )
    np.testing.assert_allclose(results["gradWeight"], w.grad, rtol=1e-9)
    np.testing.assert_allclose(results["gradBias"], b.grad, rtol=1e-9)
    # SyncBatchNorm's elementwise step, from the two sums
    column = [1, 3] + [1] * (x.ndim - 2)
    sum_dy, sum_dy_xmu = (torch.tensor(results[n]).view(column) for n in ("sumDy", "sumDyXmu"))
    mu, inv, weight = (t.detach().view(column) for t in (mean, invstd, w))
    count = x.numel() // 3
    dx = (dy - sum_dy / count - (x.detach() - mu) * inv**2 * sum_dy_xmu / count) * inv * weight
    np.testing.assert_allclose(dx, x.grad, rtol=1e-9, atol=1e-12)


def test_terms_are_never_smaller_than_the_result() -> None:
    rng = np.random.default_rng(5)
    for op in OPS.values():
        call = {
            p.name: rng.standard_normal(op.good[p.name].shape) if p.kind == "tensor" else op.good[p.name]
            for p in op.inputs
        }
        module = _reference(op.folder)
        golden, terms = module.reference(call), module.terms(call)
        for name in golden:
            assert golden[name].shape == terms[name].shape
            assert (np.abs(golden[name]) <= terms[name] * (1 + 1e-12)).all()
