"""BatchNorm's backward reduce on a GPU, for planes (NCHW) and pixels (channels-last and 2-D)."""

from __future__ import annotations

import triton
import triton.language as tl

from ...datatypes import F32
from ...spec import Call
from .._gpu import copy_images, finish_sums, pack, unpack
from .._launch import Launch, Pointer, pointer_to
from .._program import WORKSPACE
from .gpu_tiling import Tiling


@triton.jit
def _plane_sums(
    dy_ptr, x_ptr, mean_ptr, partials_ptr, channels, image, dy_n, dy_c, x_n, x_c, tiles, per_split, pieces,
    ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Some pieces of the images of ROWS channels."""
    channel = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    there = channel < channels
    mean = tl.load(mean_ptr + channel, mask=there, other=0.0).to(tl.float32)
    a, b = tl.zeros([ROWS, COLS], tl.float32), tl.zeros([ROWS, COLS], tl.float32)
    for tile in tl.range(split * per_split, tl.minimum(tiles, split * per_split + per_split), num_stages=STAGES):
        n = (tile // pieces).to(tl.int64)
        at = tile % pieces * COLS + tl.arange(0, COLS)
        mask = there[:, None] & (at < image)[None, :]
        dy_at = dy_ptr + n * dy_n + channel[:, None].to(tl.int64) * dy_c + at[None, :]
        x_at = x_ptr + n * x_n + channel[:, None].to(tl.int64) * x_c + at[None, :]
        dy = tl.load(dy_at, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
        a += dy
        b += tl.where(mask, dy * (x - mean[:, None]), 0.0)
    place = partials_ptr + split.to(tl.int64) * 2 * channels + channel
    tl.store(place, tl.sum(a, axis=1), mask=there)
    tl.store(place + channels, tl.sum(b, axis=1), mask=there)


@triton.jit
def _row_sums(
    dy_ptr, x_ptr, mean_ptr, partials_ptr, cols, rows, dy_n, dy_h, x_n, x_h, tiles, per_split, pieces, limit,
    channels, inner, PIXELS: tl.constexpr, RAGGED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Some rows of COLS consecutive elements, `inner` of each channel. RAGGED: a sample has `limit` elements, less than
    its rows; elements then are loaded one by one."""
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    split = tl.program_id(1)
    there = col < cols
    channel = col % channels if PIXELS else col // inner
    mean = tl.load(mean_ptr + channel, mask=there, other=0.0).to(tl.float32)
    a, b = tl.zeros([ROWS, COLS], tl.float32), tl.zeros([ROWS, COLS], tl.float32)
    for tile in tl.range(split * per_split, tl.minimum(tiles, split * per_split + per_split), num_stages=STAGES):
        n = (tile // pieces).to(tl.int64)
        at = tile % pieces * ROWS + tl.arange(0, ROWS)
        mask = (at < rows)[:, None] & there[None, :]
        if RAGGED:
            mask &= at[:, None].to(tl.int64) * cols + col[None, :] < limit
        dy_at = dy_ptr + n * dy_n + at[:, None].to(tl.int64) * dy_h + col[None, :]
        x_at = x_ptr + n * x_n + at[:, None].to(tl.int64) * x_h + col[None, :]
        dy = tl.load(dy_at, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
        a += dy
        b += tl.where(mask, dy * (x - mean[None, :]), 0.0)
    place = partials_ptr + split.to(tl.int64) * 2 * cols + col
    tl.store(place, tl.sum(a, axis=0), mask=there)
    tl.store(place + cols, tl.sum(b, axis=0), mask=there)


def launches(tiling: Tiling, call: Call, writes: tuple[str, ...]) -> list[Launch]:
    images, channels, values = tiling.images, tiling.channels, call.values
    shape = (call.input.shape[0], channels, tiling.image)

    def pointer(name: str) -> Pointer:
        return pointer_to(name, values[name], images.packed, tiling.packed)

    steps: list[Launch] = []
    for name in images.packed:
        steps += copy_images(name, values[name], images, shape, True)
    for name in tiling.packed:
        if name not in writes:
            steps += pack(name, values[name], tiling.packed[name])
    partials = Pointer(WORKSPACE, tiling.partials, F32)
    rows, cols = tiling.tile_rows, tiling.tile_cols
    tensors = (pointer("gradOut"), pointer("input"), pointer("mean"), partials)
    steps_of = (*images.steps["gradOut"], *images.steps["input"])
    # Rows that do not begin on 16 bytes cannot be copied ahead in vectors; element by element is slower than waiting.
    stages = 3 if all(step % 16 == 0 for step in steps_of) else 1
    constants, width = {"ROWS": rows, "COLS": cols, "STAGES": stages}, channels * tiling.inner
    if tiling.by_rows:
        pieces = -(-tiling.rows // rows)
        numbers: tuple[int, ...] = (
            width, tiling.rows, *steps_of, tiling.samples * pieces, tiling.per_split, pieces,
            call.input.numel // tiling.samples, channels, tiling.inner,
        )  # fmt: skip
        grid, ragged = (-(-width // cols), tiling.splits), tiling.samples * tiling.rows * width > call.input.numel
        flags = {"PIXELS": images.pixels, "RAGGED": ragged}
        steps.append(Launch(_row_sums, grid, (*tensors, *numbers), {**flags, **constants}))
    else:
        pieces = -(-tiling.image // cols)
        numbers = (channels, tiling.image, *steps_of, tiling.samples * pieces, tiling.per_split, pieces)
        steps.append(Launch(_plane_sums, (-(-channels // rows), tiling.splits), (*tensors, *numbers), constants))
    sum_dy, grad_bias, sum_dy_xmu, grad_weight = (
        pointer(name) if name in writes else None for name in ("sumDy", "gradBias", "sumDyXmu", "gradWeight")
    )
    steps += finish_sums(
        partials, Pointer(WORKSPACE, tiling.gathered, F32), tiling.splits, 2 * width, width, channels, sum_dy,
        grad_bias, sum_dy_xmu, grad_weight, pointer("invstd") if grad_weight else None,
        *((tiling.inner, channels, 1) if images.pixels else (tiling.inner, 1, tiling.inner)),
    )  # fmt: skip
    for name in writes:
        if name in tiling.packed:
            steps += unpack(name, values[name], tiling.packed[name])
    return steps
