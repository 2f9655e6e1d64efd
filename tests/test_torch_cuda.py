"""backnorm.torch on a GPU: enable(), modules, torch.compile, CUDA graphs, autocast, and SyncBatchNorm's parts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("triton")

import backnorm.torch  # noqa: E402
from backnorm.torch import GroupNorm, LayerNorm, SyncBatchNorm  # noqa: E402

from .torch_truth import group_norm_truth, judge, layer_norm_truth, random  # noqa: E402

nn = torch.nn
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    backnorm.torch.reset_stats()
    yield
    backnorm.torch.disable()


def _on_gpu(*tensors: Any) -> list[Any]:
    return [t.cuda() for t in tensors]


def _judge(truth: Any, leaves: list[Any], names: tuple[str, ...] = ("input", "weight", "bias")) -> None:
    for leaf, name in zip(leaves, names):
        assert judge(leaf.grad, *truth[name]) <= 1, name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", ["enable", "module"])
def test_layer_norm(way: str, dtype: Any) -> None:
    x, dy, w, b = (random(s, i, dtype) for i, s in enumerate(((300, 200), (300, 200), (200,), (200,))))
    truth = layer_norm_truth(dy, x, (200,), w, b)
    leaves = [t.requires_grad_() for t in _on_gpu(x, w, b)]
    if way == "enable":
        with backnorm.torch.enable():
            nn.functional.layer_norm(leaves[0], (200,), *leaves[1:]).backward(dy.cuda())
    else:
        backnorm.torch.layer_norm(leaves[0], (200,), *leaves[1:]).backward(dy.cuda())
    _judge(truth, leaves)
    assert backnorm.torch.stats()["layer_norm_backward"] == {"backnorm": 1}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels_last", [False, True])
def test_group_norm(channels_last: bool, dtype: Any) -> None:
    x, dy, w, b = (random(s, i, dtype) for i, s in enumerate(((4, 12, 9, 7), (4, 12, 9, 7), (12,), (12,))))
    truth = group_norm_truth(dy, x, 3, w, b)
    leaves = _on_gpu(x, w, b)
    if channels_last:
        leaves[0] = leaves[0].contiguous(memory_format=torch.channels_last)
    leaves = [t.requires_grad_() for t in leaves]
    y = backnorm.torch.group_norm(leaves[0], 3, *leaves[1:])
    torch.testing.assert_close(y, nn.functional.group_norm(leaves[0], 3, *leaves[1:]), rtol=1e-2, atol=1e-2)
    y.backward(dy.cuda())
    _judge(truth, leaves)
    assert leaves[0].grad.stride() == leaves[0].stride()
    if dtype == torch.float32:
        again = [t.detach().requires_grad_() for t in leaves]
        with backnorm.torch.enable():
            nn.functional.group_norm(again[0], 3, *again[1:]).backward(dy.cuda())
        _judge(truth, again)
    assert backnorm.torch.stats()["group_norm_backward"]["backnorm"] >= 1


def test_float64_goes_on_to_aten() -> None:
    x = random((8, 16), 1, torch.float64).cuda().requires_grad_()
    with backnorm.torch.enable():
        nn.functional.layer_norm(x, (16,)).sum().backward()
        y = random((8, 4, 3), 1, torch.float64).cuda()
        zeros, ones = torch.zeros(4).double().cuda(), torch.ones(4).double().cuda()
        # With a weight: aten's own kernel takes the options of the results from it.
        sums = torch.ops.aten.batch_norm_backward_reduce(y, y, zeros, ones, ones, True, True, True)
    torch.testing.assert_close(sums[0], y.sum((0, 2)))
    assert backnorm.torch.stats()["layer_norm_backward"] == {"aten: input is float64": 1}


def _model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 48), nn.LayerNorm(48), nn.Unflatten(1, (12, 2, 2)), nn.GroupNorm(4, 12)).cuda()


def _gradients(model: Any) -> list[Any]:
    x, dy = random((30, 24), 1).cuda().requires_grad_(), random((30, 12, 2, 2), 2).cuda()
    model.zero_grad()
    model(x).backward(dy.to(torch.float32))
    return [x.grad.clone(), *[p.grad.clone() for p in model.parameters()]]


def _close(some: list[Any], others: list[Any], tolerance: float) -> None:
    for a, b in zip(some, others):
        assert float((a - b).abs().max()) <= tolerance * float(b.abs().max()) + 1e-6


def test_compiled_models_reach_our_operators(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    expected = _gradients(_model())
    with backnorm.torch.enable():
        torch.compiler.reset()
        _close(_gradients(torch.compile(_model(), fullgraph=True)), expected, 1e-2)  # TF32 may be on
        assert backnorm.torch.stats()["layer_norm_backward"] == {"backnorm": 1}
        assert backnorm.torch.stats()["group_norm_backward"] == {"backnorm": 1}
    torch.compiler.reset()
    backnorm.torch.reset_stats()
    converted = backnorm.torch.convert(_model())
    _close(_gradients(torch.compile(converted, fullgraph=True)), expected, 1e-2)
    assert backnorm.torch.stats()["layer_norm_backward"] == {"backnorm": 1}
    torch.compiler.reset()


def test_autocast_gives_torchs_types() -> None:
    for ours, theirs, shape in (
        (LayerNorm(6), nn.LayerNorm(6), (4, 6)),
        (GroupNorm(2, 6), nn.GroupNorm(2, 6), (4, 6, 5)),
    ):
        x = random(shape, 1, torch.bfloat16).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            a, b = ours.cuda()(x), theirs.cuda()(x)
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b)
        a.float().sum().backward()


def test_a_training_step_in_a_cuda_graph() -> None:
    model = backnorm.torch.convert(_model())
    x, dy = random((30, 24), 1).cuda(), random((30, 12, 2, 2), 2).cuda()
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            model(x).backward(dy)
    torch.cuda.current_stream().wait_stream(aside)
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(x).backward(dy)
    for parameter in model.parameters():
        parameter.grad.fill_(float("nan"))
    model.zero_grad(set_to_none=False)
    graph.replay()
    torch.cuda.synchronize()
    _close([p.grad for p in model.parameters()], expected, 1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sync_batch_norms_parts(dtype: Any) -> None:
    """Its statistics, elements and gradients on one GPU, as one rank of a group of one would have them."""
    from backnorm.torch import channels, sync_batch_norm

    x, dy = random((8, 6, 5, 4), 1, dtype, 2.0, 3.0), random((8, 6, 5, 4), 2, dtype)
    w, b = random((6,), 3), random((6,), 4)
    for format in (torch.contiguous_format, torch.channels_last):
        on = [t.cuda().contiguous(memory_format=format) for t in (x, dy)]
        count, mean, m2 = sync_batch_norm._statistics(channels.dense(on[0]))
        wide = x.double()
        torch.testing.assert_close(mean.cpu(), wide.mean((0, 2, 3)), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close((m2 / count).cpu(), wide.var((0, 2, 3), correction=0), rtol=1e-5, atol=1e-5)
        mean32, invstd = mean.float(), (m2 / count + 1e-5).rsqrt().float()
        leaf = wide.clone().requires_grad_()
        y = nn.functional.batch_norm(leaf, None, None, w.double(), b.double(), True, 0.0, 1e-5)
        y.backward(dy.double())
        tolerance = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
        ours = sync_batch_norm._normalize(on[0], mean32, invstd, w.cuda(), b.cuda())
        torch.testing.assert_close(ours.cpu().double(), y.detach(), rtol=tolerance, atol=tolerance)
        sums = torch.ops.backnorm.batch_norm_backward_reduce(on[1], on[0], mean32, invstd, w.cuda())
        dx = sync_batch_norm._gradient(on[1], on[0], mean32, invstd, w.cuda(), torch.stack(sums[:2]), count.reshape(1))
        torch.testing.assert_close(dx.cpu().double(), leaf.grad, rtol=tolerance, atol=tolerance)


def test_sync_batch_norm_with_one_process_is_batch_norm() -> None:
    x = random((8, 6, 5), 1).cuda()
    assert torch.equal(SyncBatchNorm(6).cuda()(x), nn.BatchNorm1d(6).cuda()(x))
