"""BatchNorm's backward reduce on a GPU, for planes (NCHW) and pixels (channels-last and 2-D)."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ...datatypes import F32
from ...spec import Call
from .._gpu import copy_images, end_run, finish_sums, pack, unpack
from .._launch import Launch, Pointer, pointer_to
from .._program import WORKSPACE
from .._tiles import TILES_OF_A_RUN
from .gpu_tiling import Tiling


@triton.jit
def _plane_sums(
    dy_ptr, x_ptr, mean_ptr, partials_ptr, channels, image, dy_n, dy_c, x_n, x_c, tiles, per_split, pieces,
    ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr, LONG: tl.constexpr, VECTOR: tl.constexpr,
    SHIFTS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Some pieces of the images of ROWS channels. LONG: more than one run. SHIFTS: images begin anywhere, but pieces at
    multiples of VECTOR elements, 16 bytes, and are read in whole vectors: what these hold of other images is dropped.
    ALIGNED: the tensors begin on 16 bytes too, so that no vector with an element of theirs leaves the memory they were
    given."""
    channel = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    there = channel < channels
    mean = tl.load(mean_ptr + channel, mask=there, other=0.0).to(tl.float32)
    a, b = tl.zeros([ROWS, COLS], tl.float32), tl.zeros([ROWS, COLS], tl.float32)
    all_a, all_b = a, b
    for tile in tl.range(split * per_split, tl.minimum(tiles, split * per_split + per_split), num_stages=STAGES):
        n = (tile // pieces).to(tl.int64)
        at = tile % pieces * COLS + tl.arange(0, COLS)
        dy_start, x_start = n * dy_n + channel.to(tl.int64) * dy_c, n * x_n + channel.to(tl.int64) * x_c
        dy_at = dy_ptr + (dy_start // VECTOR * VECTOR)[:, None] + at[None, :]
        x_at = x_ptr + (x_start // VECTOR * VECTOR)[:, None] + at[None, :]
        if SHIFTS:
            shift = (x_start % VECTOR).to(tl.int32)[:, None]
            keep = (at[None, :] >= shift) & (at[None, :] < image + shift)
            reads = (at // VECTOR * VECTOR)[None, :] < image + shift if ALIGNED else keep
        else:
            keep = (at // VECTOR * VECTOR < image)[None, :]
            reads = keep
        dy = tl.load(dy_at, mask=there[:, None] & reads, other=0.0).to(tl.float32)
        x = tl.load(x_at, mask=there[:, None] & reads, other=0.0).to(tl.float32)
        a += tl.where(keep, dy, 0.0) if SHIFTS else dy
        b += tl.where(keep, dy * (x - mean[:, None]), 0.0)
        if LONG:
            a, b, all_a, all_b = end_run(tile - split * per_split, a, b, all_a, all_b)
    if LONG:
        a += all_a
        b += all_b
    place = partials_ptr + split.to(tl.int64) * 2 * channels + channel
    tl.store(place, tl.sum(a, axis=1), mask=there)
    tl.store(place + channels, tl.sum(b, axis=1), mask=there)


@triton.jit
def _row_sums(
    dy_ptr, x_ptr, mean_ptr, partials_ptr, cols, rows, dy_n, dy_h, x_n, x_h, tiles, per_split, pieces, rest,
    channels, inner, PIXELS: tl.constexpr, RAGGED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    STAGES: tl.constexpr, LONG: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Some rows of COLS consecutive elements, `inner` of each channel. RAGGED: `rest` elements follow the last row.
    LONG: more tiles of rows than one run. Rows begin and end on multiples of VECTOR elements."""
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    split = tl.program_id(1)
    there = col // VECTOR * VECTOR < cols
    channel = col % channels if PIXELS else col // inner
    mean = tl.load(mean_ptr + channel, mask=there, other=0.0).to(tl.float32)
    a, b = tl.zeros([ROWS, COLS], tl.float32), tl.zeros([ROWS, COLS], tl.float32)
    all_a, all_b = a, b
    for tile in tl.range(split * per_split, tl.minimum(tiles, split * per_split + per_split), num_stages=STAGES):
        n = (tile // pieces).to(tl.int64)
        at = tile % pieces * ROWS + tl.arange(0, ROWS)
        mask = (at < rows)[:, None] & there[None, :]
        dy_row, x_row = n * dy_n + at.to(tl.int64) * dy_h, n * x_n + at.to(tl.int64) * x_h
        dy_at = dy_ptr + (dy_row // VECTOR * VECTOR)[:, None] + col[None, :]
        x_at = x_ptr + (x_row // VECTOR * VECTOR)[:, None] + col[None, :]
        dy = tl.load(dy_at, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
        a += dy
        b += tl.where(mask, dy * (x - mean[None, :]), 0.0)
        if LONG:
            a, b, all_a, all_b = end_run(tile - split * per_split, a, b, all_a, all_b)
    if LONG:
        a += all_a
        b += all_b
    s1, s2 = tl.sum(a, axis=0), tl.sum(b, axis=0)
    if RAGGED:  # outside of the loop, whose elements come in vectors
        mask = col < tl.where(split == 0, rest, 0)
        dy = tl.load(dy_ptr + tl.cast(rows, tl.int64) * dy_h + col, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + tl.cast(rows, tl.int64) * x_h + col, mask=mask, other=0.0).to(tl.float32)
        s1 += dy
        s2 += tl.where(mask, dy * (x - mean), 0.0)
    place = partials_ptr + split.to(tl.int64) * 2 * cols + col
    tl.store(place, s1, mask=there)
    tl.store(place + cols, s2, mask=there)


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
    # What is not read in vectors of 16 bytes cannot be copied ahead; element by element is slower than waiting.
    stages = 3 if tiling.vector > 1 or all(step % 16 == 0 for step in steps_of) else 1
    long = tiling.per_split > TILES_OF_A_RUN
    constants: dict[str, Any] = {"ROWS": rows, "COLS": cols, "STAGES": stages, "LONG": long, "VECTOR": tiling.vector}
    width, pieces = channels * tiling.inner, tiling.pieces
    if tiling.by_rows:
        numbers: tuple[int, ...] = (
            width, tiling.rows, *steps_of, tiling.samples * pieces, tiling.per_split, pieces, tiling.rest, channels,
            tiling.inner,
        )  # fmt: skip
        constants = {"PIXELS": images.pixels, "RAGGED": tiling.rest > 0, **constants}
        steps.append(Launch(_row_sums, (-(-width // cols), tiling.splits), (*tensors, *numbers), constants))
    else:
        numbers = (channels, tiling.image, *steps_of, tiling.samples * pieces, tiling.per_split, pieces)
        constants |= {"SHIFTS": tiling.shifts, "ALIGNED": False}
        grid = (-(-channels // rows), tiling.splits)
        steps.append(Launch(_plane_sums, grid, (*tensors, *numbers), constants, aligned="ALIGNED"))
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
