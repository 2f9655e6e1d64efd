"""One of the processes of tests/test_torch_distributed.py: python sync_batch_norm_rank.py CHECK STORE RANK SIZE."""

from __future__ import annotations

import datetime
import os
import sys
import time
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import backnorm.torch
from backnorm.accuracy import excess
from backnorm.torch import SyncBatchNorm

TIMEOUT = 60.0


def numpy(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def random(shape: Any, seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, shift: float = 0.0) -> Any:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (values * scale + shift).to(dtype)


def truth(x: torch.Tensor, dy: torch.Tensor, w: torch.Tensor | None, b: torch.Tensor | None) -> dict[str, Any]:
    """In float64, of the joined batch: outputs, gradients, statistics and the size of the terms they are made of."""
    x, dy = x.double(), dy.double()
    by_channel = [-1 if axis == 1 else 1 for axis in range(x.ndim)]
    axes = [axis for axis in range(x.ndim) if axis != 1]
    n, c = x.numel() // x.shape[1], x.shape[1]
    weight = torch.ones(c).double() if w is None else w.double()
    bias = torch.zeros(c).double() if b is None else b.double()
    leaf = x.clone().requires_grad_()
    y = F.batch_norm(leaf, None, None, weight, bias, True, 0.0, 1e-5)
    y.backward(dy)
    mean, var = x.mean(axes), x.var(axes, correction=0)
    invstd = (var + 1e-5).rsqrt().view(by_channel)
    scale = weight.abs().view(by_channel)
    # float32 statistics are inputs of the backward pass: their rounding counts as one of the terms' roundings.
    x_hat = (x.abs() + mean.abs().view(by_channel)) * invstd
    c1, c2 = dy.abs().mean(axes, keepdim=True), (dy.abs() * x_hat).mean(axes, keepdim=True)
    return {
        "y": y.detach(), "dx": leaf.grad, "mean": mean, "var": var, "x_hat": (x - mean.view(by_channel)) * invstd,
        "unbiased": x.var(axes), "y_terms": x_hat * scale + bias.abs().view(by_channel),
        "dx_terms": invstd * scale * (dy.abs() + c1 + x_hat * c2), "x_hat_terms": x_hat, "n": n,
    }  # fmt: skip


def check(what: str, actual: torch.Tensor, golden: torch.Tensor, terms: torch.Tensor) -> None:
    found = excess(numpy(actual), golden.numpy(), terms.numpy())
    assert found <= 1, f"{what}: {found} of the bound"


CASES = [
    # shape without the batch, sizes of the shards by rank, type, channels-last, options
    ((7, 5, 4), (3, 2, 4, 1), torch.float32, False, {}),
    ((7, 5, 4), (3, 0, 4, 0), torch.float32, True, {"momentum": None}),
    ((19,), (5, 1, 2, 6), torch.float32, False, {"affine": False}),
    ((33, 6), (1, 4, 0, 3), torch.bfloat16, False, {"momentum": 0.3}),
    ((16, 3, 3), (2, 2, 2, 2), torch.bfloat16, True, {"track_running_stats": False}),
    ((5, 2, 3, 4), (2, 1, 3, 1), torch.float16, False, {"momentum": 0.0}),
    ((3, 40, 40), (2, 5, 1, 1), torch.float32, False, {"affine": True}),
]


def one_case(group: Any, ranks: int, case: Any) -> tuple[Any, ...]:
    rank = dist.get_rank(group)
    shape, sizes, dtype, channels_last, options = case
    sizes = sizes[:ranks]
    begin, size = sum(sizes[:rank]), sizes[rank]
    x, dy = random((sum(sizes), *shape), 1, dtype, 2.0, 3.0), random((sum(sizes), *shape), 2, dtype)
    module = SyncBatchNorm(shape[0], process_group=group, **options)
    if module.affine:
        with torch.no_grad():
            module.weight.copy_(random(shape[:1], 3))
            module.bias.copy_(random(shape[:1], 4))
    golden = truth(x, dy, *(None if p is None else p.detach() for p in (module.weight, module.bias)))
    mine = slice(begin, begin + size)
    leaf = x[mine].clone()
    if channels_last:
        leaf = leaf.contiguous(memory_format=torch.channels_last)
    leaf.requires_grad_()
    upstream = dy[mine]
    y = module(leaf)
    assert y.dtype == dtype
    y.backward(upstream)
    check(f"{case} y", y, golden["y"][mine], golden["y_terms"][mine])
    check(f"{case} dx", leaf.grad, golden["dx"][mine], golden["dx_terms"][mine])
    assert leaf.grad.stride() == leaf.stride() or size == 0
    if module.affine:
        axes = [axis for axis in range(x.ndim) if axis != 1]
        local, terms = dy[mine].double() * golden["x_hat"][mine], dy[mine].double().abs()
        check(f"{case} dw", module.weight.grad, local.sum(axes), (terms * golden["x_hat_terms"][mine]).sum(axes))
        check(f"{case} db", module.bias.grad, dy[mine].double().sum(axes), terms.sum(axes))
    if module.track_running_stats:
        factor = 1.0 if module.momentum is None else module.momentum
        ones, zeros = torch.ones(shape[0]).double(), torch.zeros(shape[0]).double()
        torch.testing.assert_close(module.running_mean.double(), factor * golden["mean"] + zeros, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(
            module.running_var.double(), factor * golden["unbiased"] + (1 - factor) * ones, rtol=1e-6, atol=1e-7
        )
        assert module.num_batches_tracked == 1
        together = [torch.empty_like(module.running_var) for _ in range(ranks)]
        dist.all_gather(together, module.running_var, group)
        assert all(torch.equal(other, together[0]) for other in together), "the same bits on every rank"
    return y.detach(), leaf.grad, module.running_mean, module.running_var


def same_bits(group: Any, ranks: int) -> None:
    """Run to run; and empty shards change nothing."""
    first, again = one_case(group, ranks, CASES[0]), one_case(group, ranks, CASES[0])
    assert all(torch.equal(a, b) for a, b in zip(first, again))


def empty_shards_change_nothing(pair: Any, all_ranks: Any) -> None:
    case = (*CASES[0][:1], (3, 2, 0, 0), *CASES[0][2:])
    wide = one_case(all_ranks, 4, case)
    if dist.get_rank() < 2:
        narrow = one_case(pair, 2, case)
        assert all(torch.equal(a, b) for a, b in zip(wide, narrow))


def other_modes(group: Any, ranks: int) -> None:
    x = random((4, 6, 5), 10 + dist.get_rank(group))
    module = SyncBatchNorm(6, process_group=group)
    with torch.no_grad():
        assert not module(x).requires_grad
    before = module.running_mean.clone()
    alone = torch.nn.BatchNorm1d(6).eval()
    alone.load_state_dict(module.state_dict())
    assert torch.equal(module.eval()(x), alone(x))
    assert torch.equal(module.running_mean, before)
    module.train()
    module.weight.requires_grad_(False)
    leaf = x.clone().requires_grad_()
    module(leaf).sum().backward()
    assert module.weight.grad is None
    assert module.bias.grad is not None
    # One sample on one rank and none elsewhere has no variance, and every rank says so.
    single = x[:1, :, :1] if dist.get_rank(group) == 0 else x[:0, :, :1]
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        module(single)


def gradients_of_gradients(group: Any, ranks: int, dtype: torch.dtype) -> None:
    rank = dist.get_rank(group)
    x, dy, u = (random((3 * ranks, 4, 5), seed, dtype) for seed in (1, 2, 3))
    w, b = random((4,), 4, dtype), random((4,), 5, dtype)

    def twice(normalize: Any, x: Any, dy: Any, u: Any, w: Any) -> tuple[Any, ...]:
        x, dy, w = (t.clone().requires_grad_() for t in (x, dy, w))
        dx, dw = torch.autograd.grad(normalize(x, w), (x, w), dy, create_graph=True)
        ((dx * u).sum() + dw.square().sum()).backward()
        return dx.detach(), dw.detach(), x.grad, dy.grad, w.grad

    # The joined batch, with the weight's gradient of every shard apart, as each rank has it.
    whole = x.double()

    def joined(x: Any, w: Any) -> Any:
        return torch.cat(
            [
                y * weights[i][:, None] + b.double()[:, None]
                for i, y in enumerate(F.batch_norm(x, None, None, None, None, True, 0.0, 1e-5).split(3))
            ]
        )

    weights = [w.double().clone().requires_grad_() for _ in range(ranks)]
    leaf, upstream = whole.clone().requires_grad_(), dy.double().clone().requires_grad_()
    dx, *dws = torch.autograd.grad(joined(leaf, None), (leaf, *weights), upstream, create_graph=True)
    ((dx * u.double()).sum() + sum(dw.square().sum() for dw in dws)).backward()
    mine = slice(3 * rank, 3 * rank + 3)
    golden = (dx[mine], dws[rank], leaf.grad[mine], upstream.grad[mine], weights[rank].grad)

    module = SyncBatchNorm(4, process_group=group).to(dtype)
    with torch.no_grad():
        module.bias.copy_(b)

    def ours(x: Any, w: Any) -> Any:
        return torch.func.functional_call(module, {"weight": w}, (x,))

    results = twice(ours, x[mine], dy[mine], u[mine], w)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    for name, ours_, true in zip(("dx", "dw", "ddx", "ddy", "ddw"), results, golden):
        off = float((ours_.double() - true.detach()).abs().max() / true.detach().abs().max())
        assert off < tolerance, f"{name} in {dtype}: {off}"


def in_a_model(group: Any, ranks: int) -> None:
    """convert_sync_batchnorm and DistributedDataParallel give the gradients of one process with the joined batch."""
    from torch.nn.parallel import DistributedDataParallel

    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten(),
            torch.nn.Linear(8 * 16, 5), torch.nn.BatchNorm1d(5),
        )  # fmt: skip

    rank = dist.get_rank(group)
    x, dy = random((4 * ranks, 3, 6, 6), 1), random((4 * ranks, 5), 2)
    alone = model().double()
    alone(x.double()).backward(dy.double())
    converted = SyncBatchNorm.convert_sync_batchnorm(model(), group)
    assert [type(m).__module__ for m in converted if "Batch" in type(m).__name__] == [
        "backnorm.torch.sync_batch_norm"
    ] * 2
    parallel = DistributedDataParallel(converted, process_group=group)
    mine = slice(4 * rank, 4 * rank + 4)
    parallel(x[mine]).backward(dy[mine] * ranks)  # which averages
    for (name, expected), actual in zip(alone.named_parameters(), converted.parameters()):
        largest = float(expected.grad.abs().max())
        error = float((actual.grad.double() - expected.grad).abs().max())
        assert error <= 2e-5 * max(largest, 1.0), (name, error, largest)


def everything() -> None:
    groups = {2: dist.new_group([0, 1]), 3: dist.new_group([0, 1, 2]), 4: dist.group.WORLD}
    backnorm.torch.reset_stats()
    for ranks, group in groups.items():
        if dist.get_rank() < ranks:
            for case in CASES:
                one_case(group, ranks, case)
            same_bits(group, ranks)
            other_modes(group, ranks)
            gradients_of_gradients(group, ranks, torch.float64)
            gradients_of_gradients(group, ranks, torch.float32)
            in_a_model(group, ranks)
    empty_shards_change_nothing(groups[2], groups[4])
    assert backnorm.torch.stats()["batch_norm_backward_reduce"]["backnorm"] > 0


def a_rank_dies() -> None:
    """Rank 1 leaves between the forward and the backward pass; the others are told."""
    module = SyncBatchNorm(6)
    x = random((4, 6, 5), dist.get_rank()).requires_grad_()
    y = module(x)
    if dist.get_rank() == 1:
        os._exit(0)
    begun = time.monotonic()
    try:
        y.sum().backward()
    except RuntimeError as error:
        print(f"told after {time.monotonic() - begun:.1f} s: {type(error).__name__}: {str(error)[:200]}")
        assert time.monotonic() - begun < TIMEOUT + 5
        sys.stdout.flush()
        os._exit(0)  # there is no group left to take leave of
    raise AssertionError("the others did not notice")


if __name__ == "__main__":
    warnings.simplefilter("error", RuntimeWarning)
    _, name, store, rank, size = sys.argv
    torch.set_num_threads(1)
    backnorm.set_num_threads(1)
    np.seterr(all="ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(size),
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )  # fmt: skip
    {"everything": everything, "a_rank_dies": a_rank_dies}[name]()
    dist.barrier()
    dist.destroy_process_group()
    print("ok")
