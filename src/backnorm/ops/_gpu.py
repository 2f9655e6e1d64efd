"""GPU kernels of more than one operator: the last stage of every sum, copies of views, zeros, empty words."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import triton
import triton.language as tl

from ..datatypes import itemsize
from ..spec import TensorDesc, contiguous_strides
from ._images import Images, layout_strides
from ._launch import Launch, Pointer
from ._program import WORKSPACE
from ._tiles import MOST_PARTIALS, PARTS, TILES_OF_A_RUN, power_of_two
from ._views import image_strides, joined_axes

RUN = tl.constexpr(TILES_OF_A_RUN)


@triton.jit
def ends_a_run(turn):
    return turn % RUN == RUN - 1


@triton.jit
def end_run(turn, a, b, all_a, all_b):
    """Two sums of a run, which end as zeros if this turn ends it, and those of all before it."""
    if ends_a_run(turn):
        all_a += a
        all_b += b
        a, b = tl.zeros_like(a), tl.zeros_like(b)
    return a, b, all_a, all_b


@triton.jit
def _finish_sums(
    partials_ptr, a_ptr, a_too_ptr, b_ptr, b_scaled_ptr, factors_ptr, count, step, apart, inner, inner_step, col_step,
    cols, A: tl.constexpr,
    A_TOO: tl.constexpr, B: tl.constexpr, B_SCALED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Two sums over `count` partials, `step` elements apart, the second `apart` elements after the first, in float64;
    each into up to two outputs, the last of which is the second sum times its factor. Where a column has `inner`
    numbers in a partial, `inner_step` apart, each of them counts."""
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    keep = col < cols
    a, b = tl.zeros([ROWS, COLS], tl.float64), tl.zeros([ROWS, COLS], tl.float64)
    for start in range(0, count, ROWS):
        row = start + tl.arange(0, ROWS)
        place = partials_ptr + ((row // inner).to(tl.int64) * step + row % inner * inner_step)[:, None]
        place += col[None, :] * col_step
        mask = (row < count)[:, None] & keep[None, :]
        if A or A_TOO:
            a += tl.load(place, mask=mask, other=0.0)
        if B or B_SCALED:
            b += tl.load(place + apart, mask=mask, other=0.0)
    a_sum, b_sum = tl.sum(a, axis=0), tl.sum(b, axis=0)
    if A:
        tl.store(a_ptr + col, a_sum.to(tl.float32).to(a_ptr.dtype.element_ty), mask=keep)
    if A_TOO:
        tl.store(a_too_ptr + col, a_sum.to(tl.float32).to(a_too_ptr.dtype.element_ty), mask=keep)
    if B:
        tl.store(b_ptr + col, b_sum.to(tl.float32).to(b_ptr.dtype.element_ty), mask=keep)
    if B_SCALED:
        scaled = b_sum * tl.load(factors_ptr + col, mask=keep, other=0.0).to(tl.float64)
        tl.store(b_scaled_ptr + col, scaled.to(tl.float32).to(b_scaled_ptr.dtype.element_ty), mask=keep)


@triton.jit
def _gather_sums(partials_ptr, out_ptr, count, step, width, per, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Some of the partials into one, where there are many of them: out[part][column], all sums of a partial alike."""
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    part = tl.program_id(1)
    keep = col < width
    total = tl.zeros([ROWS, COLS], tl.float64)
    for start in range(part * per, tl.minimum(count, part * per + per), ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < tl.minimum(count, part * per + per))[:, None] & keep[None, :]
        total += tl.load(partials_ptr + row[:, None].to(tl.int64) * step + col[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + part.to(tl.int64) * step + col, tl.sum(total, axis=0).to(tl.float32), mask=keep)


#: Partials and columns of a tile of the last stage, and its warps: 3 microseconds instead of 4 for LayerNorm of 1024
#: columns, 4 instead of 7 for BatchNorm of 64 channels' pixels, against 16 columns and 4 warps.
FINISH_ROWS, FINISH_COLS, FINISH_WARPS = 64, 8, 8


def finish_sums(
    partials: Pointer, gathered: Pointer, count: int, step: int, apart: int, cols: int, a: Pointer | None,
    a_too: Pointer | None, b: Pointer | None, b_scaled: Pointer | None = None, factors: Pointer | None = None,
    inner: int = 1, inner_step: int = 0, col_step: int = 1,
) -> list[Launch]:  # fmt: skip
    """The last stage of two sums, over `count` partials of `step` elements."""
    launches = []
    if count * inner > MOST_PARTIALS:
        parts = max(1, PARTS // inner)
        per = -(-count // parts)
        launches.append(
            Launch(
                _gather_sums,
                (-(-step // 128), parts),
                (partials, gathered, count, step, step, per),
                {"ROWS": 8, "COLS": 128},
            )
        )
        partials, count = gathered, -(-count // per)
    # Few columns are spread over many programs; more where a program would have little to add.
    rows = min(FINISH_ROWS, power_of_two(count * inner))
    width, warps = (FINISH_COLS, FINISH_WARPS) if cols < 8192 else (max(32, 2048 // rows), 4)
    outputs = [pointer or partials for pointer in (a, a_too, b, b_scaled, factors)]
    flags = {"A": a is not None, "A_TOO": a_too is not None, "B": b is not None, "B_SCALED": b_scaled is not None}
    return [
        *launches,
        Launch(
            _finish_sums,
            (-(-cols // width),),
            (partials, *outputs, count * inner, step, apart, inner, inner_step, col_step, cols),
            {**flags, "ROWS": rows, "COLS": width},
            num_warps=warps,
        ),
    ]


@triton.jit
def _copy(
    source_ptr, target_ptr, size, n1, n2, n3, s0, s1, s2, s3, t0, t1, t2, t3, BLOCK: tl.constexpr
):  # fmt: skip
    """Elements of a view of four axes."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = at < size
    i3, rest = at % n3, at // n3
    i2, rest = rest % n2, rest // n2
    i1, i0 = rest % n1, rest // n1
    value = tl.load(source_ptr + i0 * s0 + i1 * s1 + i2 * s2 + i3 * s3, mask=keep)
    tl.store(target_ptr + i0 * t0 + i1 * t1 + i2 * t2 + i3 * t3, value.to(target_ptr.dtype.element_ty), mask=keep)


def copy(shape: Any, source: Pointer, source_strides: Any, target: Pointer, target_strides: Any) -> list[Launch]:
    """A view into another of the same shape; strides count elements."""
    axes = joined_axes(shape, source_strides, target_strides)
    if len(axes) > 4:
        (size, s, t), *inner = axes
        launches: list[Launch] = []
        for i in range(size):
            here = source._replace(offset=source.offset + i * s * itemsize(source.dtype))
            there = target._replace(offset=target.offset + i * t * itemsize(target.dtype))
            sizes, *strides = zip(*inner)
            launches += copy(sizes, here, strides[0], there, strides[1])
        return launches
    axes = [[1, 0, 0]] * (4 - len(axes)) + axes
    size = prod(axis[0] for axis in axes)
    return [
        Launch(
            _copy,
            (-(-size // 1024),),
            (source, target, size, *[a[0] for a in axes[1:]], *[a[1] for a in axes], *[a[2] for a in axes]),
            {"BLOCK": 1024},
        )
    ]


def pack(name: str, desc: TensorDesc, place: int) -> list[Launch]:
    """A tensor into the workspace, contiguous."""
    target = Pointer(WORKSPACE, place, desc.dtype)
    return copy(desc.shape, Pointer(name, 0, desc.dtype), desc.strides, target, contiguous_strides(desc.shape))


def unpack(name: str, desc: TensorDesc, place: int) -> list[Launch]:
    """The other way."""
    source = Pointer(WORKSPACE, place, desc.dtype)
    return copy(desc.shape, source, contiguous_strides(desc.shape), Pointer(name, 0, desc.dtype), desc.strides)


def copy_images(name: str, desc: TensorDesc, images: Images, shape: Any, into: bool) -> list[Launch]:
    """A tensor, read row-major as (samples, channels, image), into its place in the workspace, or back."""
    place = images.packed[name]
    strides = image_strides(desc, shape)
    if strides is None:  # then all are planes, which is its own order
        return pack(name, desc, place) if into else unpack(name, desc, place)
    inside = layout_strides(images, shape[1], shape[2])
    outer, inner = Pointer(name, 0, desc.dtype), Pointer(WORKSPACE, place, desc.dtype)
    return copy(shape, outer, strides, inner, inside) if into else copy(shape, inner, inside, outer, strides)


@triton.jit
def _fill(target_ptr, size, n1, n2, n3, t0, t1, t2, t3, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    i3, rest = at % n3, at // n3
    i2, rest = rest % n2, rest // n2
    zero = tl.zeros([BLOCK], tl.float32).to(target_ptr.dtype.element_ty)
    tl.store(target_ptr + rest // n1 * t0 + rest % n1 * t1 + i2 * t2 + i3 * t3, zero, mask=at < size)


@triton.jit
def _empty_words(target_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target_ptr + at, tl.full([BLOCK], -1, tl.int64), mask=at < size)


def exchange(words: Pointer, size: int, together: Launch, apart: Sequence[Launch]) -> list[Launch]:
    """A launch whose programs exchange that many words, or where they cannot all run at a time, others."""
    empty = Launch(_empty_words, (-(-size // 1024),), (words, size), {"BLOCK": 1024})
    return [empty, together._replace(apart=tuple(apart))]


def fill_with_zeros(name: str, desc: TensorDesc) -> list[Launch]:
    axes = joined_axes(desc.shape, desc.strides)
    outer, inner = axes[:-4], [[1, 0]] * (4 - len(axes)) + axes[-4:]
    size = prod(axis[0] for axis in inner)
    numbers = (size, *[a[0] for a in inner[1:]], *[a[1] for a in inner])
    places = [0]
    for count, step in outer:
        places = [place + i * step for place in places for i in range(count)]
    return [
        Launch(
            _fill,
            (-(-size // 1024),),
            (Pointer(name, place * itemsize(desc.dtype), desc.dtype), *numbers),
            {"BLOCK": 1024},
        )
        for place in places
    ]
