"""Sizes and workspace of GroupNorm backward: pure integers."""

from __future__ import annotations

from typing import NamedTuple

from ...spec import Call


class Tiling(NamedTuple):
    samples: int
    groups: int
    group_channels: int
    image: int
    #: float64 channel sums: grad_gamma, then grad_beta.
    workspace_bytes: int


def tile(call: Call, writes: tuple[str, ...]) -> Tiling:
    channel_sums = sum(name in writes for name in ("gradGammaOut", "gradBetaOut"))
    return Tiling(call.N, call.group, call.C // call.group, call.HxW, channel_sums * call.C * 8)
