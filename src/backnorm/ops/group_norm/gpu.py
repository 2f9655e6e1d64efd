"""GroupNorm backward on a GPU, for planes (NCHW) and pixels (channels-last).

A group of planes that fits one program's registers is read once. Others are read twice: sums of each channel, sums of
each group, dx.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ...datatypes import F32
from ...spec import Call
from .._gpu import Launch, Pointer, copy_images, finish_sums, pack, unpack
from .._program import WORKSPACE
from .._tiles import power_of_two
from .gpu_tiling import Tiling


@triton.jit
def _whole_group(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, gamma_ptr, dx_ptr, partials_ptr, groups, group_channels, image, share, dy_n,
    dy_c, x_n, x_c, dx_n, dx_c, HAS_W: tl.constexpr, WANTS_DX: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """A group: the sums of its channels, and dx."""
    group = tl.program_id(0)
    n = (group // groups).to(tl.int64)
    row, at = tl.arange(0, ROWS), tl.arange(0, COLS)
    there = row < group_channels
    channel = group % groups * group_channels + row
    mask = there[:, None] & (at < image)[None, :]
    mean, rstd = tl.load(mean_ptr + group).to(tl.float32), tl.load(rstd_ptr + group).to(tl.float32)
    dy_at = dy_ptr + n * dy_n + channel[:, None].to(tl.int64) * dy_c + at[None, :]
    x_at = x_ptr + n * x_n + channel[:, None].to(tl.int64) * x_c + at[None, :]
    dy = tl.load(dy_at, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
    x_hat = tl.where(mask, (x - mean) * rstd, 0.0)
    channels = groups * group_channels
    place = partials_ptr + n * 4 * channels + channel
    tl.store(place, tl.sum(dy, axis=1), mask=there)
    tl.store(place + channels, tl.sum(dy * x_hat, axis=1), mask=there)
    if WANTS_DX:
        wdy = dy
        if HAS_W:
            gamma = tl.load(gamma_ptr + channel, mask=there, other=0.0).to(tl.float32)
            wdy = tl.where(mask, dy * gamma[:, None], 0.0)
        c1 = tl.sum(tl.sum(wdy, axis=1), axis=0) * share
        c2 = tl.sum(tl.sum(wdy * x_hat, axis=1), axis=0) * share
        dx = rstd * (wdy - c1 - x_hat * c2)
        dx_at = dx_ptr + n * dx_n + channel[:, None].to(tl.int64) * dx_c + at[None, :]
        tl.store(dx_at, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _split_sums(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, gamma_ptr, partials_ptr, groups, group_channels, image, splits, dy_n, dy_step,
    x_n, x_step, HAS_W: tl.constexpr, PIXELS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """TILES tiles of some channels of a sample: sums of dy and dy * x_hat, plain and times gamma, of each channel."""
    channels = groups * group_channels
    WIDTH: tl.constexpr = COLS if PIXELS else ROWS
    LENGTH: tl.constexpr = ROWS if PIXELS else COLS
    channel = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    there = channel < channels
    split, n = tl.program_id(1), tl.program_id(0).to(tl.int64)
    group = n * groups + channel // group_channels
    mean = tl.load(mean_ptr + group, mask=there, other=0.0).to(tl.float32)
    rstd = tl.load(rstd_ptr + group, mask=there, other=0.0).to(tl.float32)
    gamma = tl.full([WIDTH], 1.0, tl.float32)
    if HAS_W:
        gamma = tl.load(gamma_ptr + channel, mask=there, other=0.0).to(tl.float32)
    a, b = tl.zeros([ROWS, COLS], tl.float32), tl.zeros([ROWS, COLS], tl.float32)
    c, d = tl.zeros([ROWS, COLS], tl.float32), tl.zeros([ROWS, COLS], tl.float32)
    for tile in tl.range(0, TILES):
        at = (split * TILES + tile) * LENGTH + tl.arange(0, LENGTH)
        if PIXELS:
            mask = (at < image)[:, None] & there[None, :]
            dy_at = dy_ptr + n * dy_n + at[:, None].to(tl.int64) * dy_step + channel[None, :]
            x_at = x_ptr + n * x_n + at[:, None].to(tl.int64) * x_step + channel[None, :]
            m, r, g = mean[None, :], rstd[None, :], gamma[None, :]
        else:
            mask = there[:, None] & (at < image)[None, :]
            dy_at = dy_ptr + n * dy_n + channel[:, None].to(tl.int64) * dy_step + at[None, :]
            x_at = x_ptr + n * x_n + channel[:, None].to(tl.int64) * x_step + at[None, :]
            m, r, g = mean[:, None], rstd[:, None], gamma[:, None]
        dy = tl.load(dy_at, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
        x_hat = tl.where(mask, (x - m) * r, 0.0)
        a += dy
        b += dy * x_hat
        if HAS_W:
            wdy = tl.where(mask, dy * g, 0.0)
            c += wdy
            d += wdy * x_hat
    AXIS: tl.constexpr = 0 if PIXELS else 1
    place = partials_ptr + (n * splits + split) * 4 * channels + channel
    s1, s2 = tl.sum(a, axis=AXIS), tl.sum(b, axis=AXIS)
    tl.store(place, s1, mask=there)
    tl.store(place + channels, s2, mask=there)
    if HAS_W:
        s1, s2 = tl.sum(c, axis=AXIS), tl.sum(d, axis=AXIS)
    tl.store(place + 2 * channels, s1, mask=there)
    tl.store(place + 3 * channels, s2, mask=there)


@triton.jit
def _group_sums(
    partials_ptr, group_sums_ptr, groups, group_channels, share, splits, CHANNELS: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """c1 and c2 of a group."""
    group = tl.program_id(0)
    n = (group // groups).to(tl.int64)
    channels = groups * group_channels
    row = tl.arange(0, CHANNELS)
    a, b = tl.zeros([SPLITS, CHANNELS], tl.float64), tl.zeros([SPLITS, CHANNELS], tl.float64)
    for start in range(0, splits, SPLITS):
        split = start + tl.arange(0, SPLITS)
        mask = (split < splits)[:, None] & (row < group_channels)[None, :]
        place = partials_ptr + (n * splits + split[:, None]) * 4 * channels
        place += 2 * channels + group % groups * group_channels + row[None, :]
        a += tl.load(place, mask=mask, other=0.0)
        b += tl.load(place + channels, mask=mask, other=0.0)
    tl.store(group_sums_ptr + 2 * group, (tl.sum(tl.sum(a, axis=1), axis=0) * share).to(tl.float32))
    tl.store(group_sums_ptr + 2 * group + 1, (tl.sum(tl.sum(b, axis=1), axis=0) * share).to(tl.float32))


@triton.jit
def _split_dx(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, gamma_ptr, dx_ptr, group_sums_ptr, groups, group_channels, image, dy_n,
    dy_step, x_n, x_step, dx_n, dx_step, HAS_W: tl.constexpr, PIXELS: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """dx of TILES tiles of some channels of a sample."""
    channels = groups * group_channels
    WIDTH: tl.constexpr = COLS if PIXELS else ROWS
    LENGTH: tl.constexpr = ROWS if PIXELS else COLS
    channel = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    there = channel < channels
    split, n = tl.program_id(1), tl.program_id(0).to(tl.int64)
    group = n * groups + channel // group_channels
    mean = tl.load(mean_ptr + group, mask=there, other=0.0).to(tl.float32)
    rstd = tl.load(rstd_ptr + group, mask=there, other=0.0).to(tl.float32)
    c1 = tl.load(group_sums_ptr + 2 * group, mask=there, other=0.0)
    c2 = tl.load(group_sums_ptr + 2 * group + 1, mask=there, other=0.0)
    gamma = tl.full([WIDTH], 1.0, tl.float32)
    if HAS_W:
        gamma = tl.load(gamma_ptr + channel, mask=there, other=0.0).to(tl.float32)
    for tile in tl.range(0, TILES):
        at = (split * TILES + tile) * LENGTH + tl.arange(0, LENGTH)
        if PIXELS:
            mask = (at < image)[:, None] & there[None, :]
            dy_at = dy_ptr + n * dy_n + at[:, None].to(tl.int64) * dy_step + channel[None, :]
            x_at = x_ptr + n * x_n + at[:, None].to(tl.int64) * x_step + channel[None, :]
            dx_at = dx_ptr + n * dx_n + at[:, None].to(tl.int64) * dx_step + channel[None, :]
            m, r, g, u, v = mean[None, :], rstd[None, :], gamma[None, :], c1[None, :], c2[None, :]
        else:
            mask = there[:, None] & (at < image)[None, :]
            dy_at = dy_ptr + n * dy_n + channel[:, None].to(tl.int64) * dy_step + at[None, :]
            x_at = x_ptr + n * x_n + channel[:, None].to(tl.int64) * x_step + at[None, :]
            dx_at = dx_ptr + n * dx_n + channel[:, None].to(tl.int64) * dx_step + at[None, :]
            m, r, g, u, v = mean[:, None], rstd[:, None], gamma[:, None], c1[:, None], c2[:, None]
        dy = tl.load(dy_at, mask=mask, other=0.0).to(tl.float32)
        x_hat = (tl.load(x_at, mask=mask, other=0.0).to(tl.float32) - m) * r
        dx = r * (dy * g - u - x_hat * v)
        tl.store(dx_at, dx.to(dx_ptr.dtype.element_ty), mask=mask)


def launches(tiling: Tiling, call: Call, writes: tuple[str, ...]) -> list[Launch]:
    images, channels, values = tiling.images, tiling.channels, call.values
    n, groups, width, hw = tiling.samples, tiling.groups, tiling.group_channels, tiling.image
    shape = (n, channels, hw)

    def pointer(name: str) -> Pointer:
        places = images.packed if name in images.packed else tiling.packed
        if name in places:
            return Pointer(WORKSPACE, places[name], values[name].dtype)
        return Pointer(name, 0, values[name].dtype)

    steps: list[Launch] = []
    for name in images.packed:
        if name != "gradInput":
            steps += copy_images(name, values[name], images, shape, True)
    for name in tiling.packed:
        if name not in writes:
            steps += pack(name, values[name], tiling.packed[name])
    has_w, wants_dx = values["gamma"] is not None, "gradInput" in writes
    dy, x, mean, rstd = (pointer(name) for name in ("gradOut", "input", "mean", "rstd"))
    gamma, dx = pointer("gamma") if has_w else mean, pointer("gradInput") if wants_dx else x
    partials, group_sums = Pointer(WORKSPACE, tiling.partials, F32), Pointer(WORKSPACE, tiling.group_sums, F32)
    inputs, in_steps = (dy, x, mean, rstd, gamma), (*images.steps["gradOut"], *images.steps["input"])
    out_steps = images.steps["gradInput"] if wants_dx else (0, 0)
    rows, cols, share = tiling.tile_rows, tiling.tile_cols, 1.0 / (width * hw)
    if tiling.whole:
        steps.append(
            Launch(
                _whole_group, (n * groups,), (*inputs, dx, partials, groups, width, hw, share, *in_steps, *out_steps),
                {"HAS_W": has_w, "WANTS_DX": wants_dx, "ROWS": rows, "COLS": cols}, tiling.num_warps,
            )
        )  # fmt: skip
    else:
        across = -(-channels // (cols if images.pixels else rows))
        sizes = {"HAS_W": has_w, "PIXELS": images.pixels, "ROWS": rows, "COLS": cols, "TILES": tiling.tiles}
        grid = (n, tiling.splits, across)
        numbers: tuple[Any, ...] = (groups, width, hw, tiling.splits)
        steps.append(Launch(_split_sums, grid, (*inputs, partials, *numbers, *in_steps), sizes, tiling.num_warps))
        if wants_dx:
            summed = {"CHANNELS": power_of_two(width), "SPLITS": max(1, min(16, 1024 // power_of_two(width)))}
            numbers = (partials, group_sums, groups, width, share, tiling.splits)
            steps.append(Launch(_group_sums, (n * groups,), numbers, summed, 1))
            numbers = (*inputs, dx, group_sums, groups, width, hw, *in_steps, *out_steps)
            steps.append(Launch(_split_dx, grid, numbers, sizes, tiling.num_warps))
    if "gradInput" in images.packed:
        steps += copy_images("gradInput", values["gradInput"], images, shape, False)
    dgamma, dbeta = (pointer(name) if name in writes else None for name in ("gradGammaOut", "gradBetaOut"))
    if dgamma or dbeta:
        gathered = Pointer(WORKSPACE, tiling.gathered, F32)
        steps += finish_sums(
            partials, gathered, n * tiling.splits, 4 * channels, channels, channels, dbeta, None, dgamma
        )
    for name in writes:
        if name in tiling.packed:
            steps += unpack(name, values[name], tiling.packed[name])
    return steps
