"""What the tests of backnorm.torch compare with: float64 autograd of torch's own layers, and the size of the terms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import torch
import torch.nn.functional as F

from backnorm.accuracy import excess
from backnorm.ops.batch_norm_reduce import reference as batch_norm
from backnorm.ops.group_norm import reference as group_norm
from backnorm.ops.layer_norm import reference as layer_norm

REFERENCES = {
    "layer_norm_backward": layer_norm,
    "group_norm_backward": group_norm,
    "batch_norm_backward_reduce": batch_norm,
}


def random(shape: Sequence[int], seed: int, dtype: Any = torch.float32, scale: float = 1.0, shift: float = 0.0) -> Any:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (values * scale + shift).to(dtype)


def to_numpy(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def judge(actual: torch.Tensor, golden: Any, terms: Any) -> float:
    """The largest error over its bound."""
    shape = tuple(actual.shape)
    return excess(to_numpy(actual), golden.reshape(shape), terms.reshape(shape))


def layer_norm_truth(
    dy: torch.Tensor, x: torch.Tensor, shape: Sequence[int], weight: Any, bias: Any, eps: float = 1e-5
) -> dict[str, tuple[Any, Any]]:
    """Output and gradients in float64, from float64 statistics, each with the size of its terms."""
    return _truth(
        lambda x, w, b: F.layer_norm(x, shape, w, b, eps), dy, x, weight, bias, "layer_norm_backward",
        x.double().reshape(*x.shape[: x.ndim - len(shape)], -1), eps,
        lambda mean, rstd: {"normalizedShape": tuple(shape), "weightOptional": _plain(weight)},
    )  # fmt: skip


def group_norm_truth(
    dy: torch.Tensor, x: torch.Tensor, groups: int, weight: Any, bias: Any, eps: float = 1e-5
) -> dict[str, tuple[Any, Any]]:
    n, c = x.shape[:2]
    return _truth(
        lambda x, w, b: F.group_norm(x, groups, w, b, eps), dy, x, weight, bias, "group_norm_backward",
        x.double().reshape(n, groups, -1), eps,
        lambda mean, rstd: {
            "gamma": _plain(weight), "N": n, "C": c, "HxW": x[0, 0].numel(), "group": groups,
        },
    )  # fmt: skip


def _plain(tensor: Any) -> Any:
    return None if tensor is None else tensor.detach().double().cpu().numpy()


def _truth(
    function: Any, dy: Any, x: Any, weight: Any, bias: Any, name: str, rows: Any, eps: float, others: Any
) -> dict[str, tuple[Any, Any]]:
    leaves = [None if t is None else t.detach().double().cpu().requires_grad_() for t in (x, weight, bias)]
    y = function(*leaves)
    y.backward(dy.detach().double().cpu())
    rows = rows.detach().cpu()
    mean = rows.mean(-1, keepdim=True)
    rstd = (rows.var(-1, correction=0, keepdim=True) + eps).rsqrt()
    call = {
        "gradOut": _plain(dy), "input": _plain(x), "mean": mean.numpy(), "rstd": rstd.numpy(), **others(mean, rstd),
    }  # fmt: skip
    # The statistics are computed in float32: their roundings count among those of the terms, which are as large as
    # the data were before the mean was taken from them.
    spread = {**call, "mean": -abs(call["mean"]), "input": abs(call["input"])}
    terms = list(REFERENCES[name].terms(spread).values())
    truth = {"input": (leaves[0].grad.numpy(), terms[0])}
    for word, leaf, size in zip(("weight", "bias"), leaves[1:], terms[1:]):
        if leaf is not None:
            truth[word] = leaf.grad.numpy(), size
    truth["output"] = y.detach().numpy(), abs(y.detach().numpy())
    return truth
