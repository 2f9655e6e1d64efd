"""Whom a GPU's bench measures against beside PyTorch's own kernels: each peer is one call on one set of inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .bench import Sizes

Peer = Callable[[], Any]

#: What --against takes; torch is always measured.
PEERS = ("torch", "compile", "liger")


def missing(peer: str) -> str | None:
    """Why a peer cannot be measured here, None where it can."""
    if peer == "liger":
        try:
            import liger_kernel.ops  # noqa: F401
        except ImportError:
            return "liger-kernel is not installed (pip install liger-kernel); its column is left out"
    return None


def make_peer(peer: str, op: str, sizes: Sizes, tensors: tuple[Any, ...]) -> Peer | None:
    """The peer's call, None where it has no such operator."""
    return {"compile": _compiled, "liger": _liger}[peer](op, sizes, tensors)


# --- torch.compile: inductor's kernels for the gradients written out ---


def layer_norm(dy: Any, x: Any, mean: Any, rstd: Any, w: Any) -> tuple[Any, ...]:
    dy, x_hat = dy.float(), (x.float() - mean) * rstd
    wdy = dy * w.float()
    c1, c2 = wdy.mean(-1, keepdim=True), (wdy * x_hat).mean(-1, keepdim=True)
    dx = (wdy - c1 - x_hat * c2) * rstd
    return dx.to(x.dtype), (dy * x_hat).sum(0).to(w.dtype), dy.sum(0).to(w.dtype)


def group_norm(dy: Any, x: Any, mean: Any, rstd: Any, w: Any, group: int) -> tuple[Any, ...]:
    n, c = x.shape[:2]

    def grouped(t: Any) -> Any:
        return t.float().reshape(n, c, -1).unflatten(1, (group, c // group))

    mean, rstd = mean.view(n, group, 1, 1), rstd.view(n, group, 1, 1)
    dy, x_hat = grouped(dy), (grouped(x) - mean) * rstd
    wdy = dy * w.float().view(1, group, c // group, 1)
    c1, c2 = wdy.mean((2, 3), keepdim=True), (wdy * x_hat).mean((2, 3), keepdim=True)
    dx = (wdy - c1 - x_hat * c2) * rstd
    return dx.reshape(x.shape).to(x.dtype), (dy * x_hat).sum((0, 3)).flatten(), dy.sum((0, 3)).flatten()


def batch_norm_reduce(dy: Any, x: Any, mean: Any, rstd: Any) -> tuple[Any, ...]:
    axes = [axis for axis in range(x.dim()) if axis != 1]
    dy, centred = dy.float(), x.float() - mean.view(1, -1, *[1] * (x.dim() - 2))
    sum_dy, sum_dy_xmu = dy.sum(axes), (dy * centred).sum(axes)
    return sum_dy, sum_dy_xmu, sum_dy_xmu * rstd, sum_dy


def _compiled(op: str, sizes: Sizes, tensors: tuple[Any, ...]) -> Peer:
    import torch

    dy, x, mean, rstd, w = tensors
    if op == "layer_norm_backward":
        function, arguments = layer_norm, (dy, x, mean, rstd, w)
    elif op == "group_norm_backward":
        function, arguments = group_norm, (dy, x, mean, rstd, w, sizes["group"])  # type: ignore[assignment]
    else:
        function, arguments = batch_norm_reduce, (dy, x, mean, rstd)  # type: ignore[assignment]
    compiled = torch.compile(function, dynamic=False, fullgraph=True)
    return lambda: compiled(*arguments)


def forget_compiled() -> None:
    """Dynamo gives up on a function after eight shapes and would run it uncompiled."""
    import torch

    torch._dynamo.reset()


# --- Liger ---


def _liger(op: str, sizes: Sizes, tensors: tuple[Any, ...]) -> Peer | None:
    dy, x, mean, rstd, w = tensors
    if op == "layer_norm_backward":
        from liger_kernel.ops.layer_norm import layer_norm_backward

        m, r = mean.flatten(), rstd.flatten()
        return lambda: layer_norm_backward(dy, x, w, w, m, r)
    if op == "group_norm_backward":
        from liger_kernel.ops.group_norm import group_norm_backward

        n, c, group = sizes["N"], sizes["C"], sizes["group"]

        def planes() -> Any:  # channels-last goes through a copy, as with PyTorch's kernel
            kept = x.contiguous().view(n, group, -1)
            return group_norm_backward(dy.contiguous(), kept, w, w, mean, rstd, c, group)

        return planes
    return None
