"""Copies between views, converting: what the kernels cannot read or write in place goes through the workspace."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ..datatypes import F32, itemsize
from ..spec import TensorDesc, contiguous_strides
from ._formats import TAGS
from ._images import Images, layout_strides
from ._native import inline, kernel
from ._program import WORKSPACE, Place, Program
from ._simd import copy_bytes, copy_scalar, load, load_scalar, store, store_scalar, width, words
from ._views import image_strides, joined_axes

#: Elements of a task.
_TASK = 16384

_constants = np.array([0, 1], np.float32)
#: Addresses of a float32 zero and one, to fill with.
ZERO, ONE = (_constants.ctypes.data + 4 * i for i in (0, 1))


@inline
def _convert_line(T: Any, U: Any, source: Any, source_step: Any, target: Any, target_step: Any, n: Any) -> Any:
    at = 0
    if source_step == width(T) and target_step == width(U):
        while at + 16 <= n:
            store(U, target + at * target_step, load(T, source + at * source_step))
            at += 16
    for i in range(at, n):
        store_scalar(U, target + i * target_step, load_scalar(T, source + i * source_step))


@inline
def _copy_line(T: Any, source: Any, source_step: Any, target: Any, target_step: Any, n: Any) -> Any:
    """The same without a conversion: BatchNorm of every other element of a row in bfloat16 takes half the time."""
    if source_step == width(T) and target_step == width(T):
        copy_bytes(target, source, n * width(T))
    else:
        for i in range(n):
            copy_scalar(T, target + i * target_step, source + i * source_step)


@kernel
def _copy(T: Any, U: Any) -> Any:
    """Lines along the last of four axes, some of them a task."""
    alike = type(T) is type(U)

    def run(args: Any, task: Any) -> Any:
        src, dst, lines, per_task, n1, n2, n3, s0, s1, s2, s3, d0, d1, d2, d3 = words(args, 15)
        for line in range(task * per_task, min(lines, task * per_task + per_task)):
            i, j, k = line // (n1 * n2), line // n2 % n1, line % n2
            s, d = src + i * s0 + j * s1 + k * s2, dst + i * d0 + j * d1 + k * d2
            if alike:
                _copy_line(T, s, s3, d, d3, n3)
            else:
                _convert_line(T, U, s, s3, d, d3, n3)

    return run


def copy(
    program: Program, shape: Any, source: Any, source_strides: Any, source_dtype: int, target: Any, target_strides: Any,
    target_dtype: int,
) -> None:  # fmt: skip
    """A job for every part of the view that has four axes; strides count elements."""
    sizes = itemsize(source_dtype), itemsize(target_dtype)
    axes = joined_axes(shape, [s * sizes[0] for s in source_strides], [s * sizes[1] for s in target_strides])
    _copy_axes(program, axes, source, target, _copy(TAGS[source_dtype], TAGS[target_dtype]))


def _copy_axes(program: Program, axes: list[list[int]], source: Any, target: Any, kernel: int) -> None:
    if len(axes) > 4:  # rare enough to be unrolled
        (size, s, d), *inner = axes
        for i in range(size):
            _copy_axes(program, inner, source + i * s, target + i * d, kernel)
        return
    axes = [[1, 0, 0]] * (4 - len(axes)) + axes
    lines, n = prod(axis[0] for axis in axes[:3]), axes[3][0]
    per_task = max(1, _TASK // n)
    program.job(
        kernel, -(-lines // per_task), lines * n, source, target, lines, per_task, *[axis[0] for axis in axes[1:]],
        *[axis[1] for axis in axes], *[axis[2] for axis in axes],
    )  # fmt: skip


def pack(program: Program, name: str, desc: TensorDesc, place: Place) -> None:
    """A tensor into the workspace, contiguous."""
    contiguous = contiguous_strides(desc.shape)
    copy(program, desc.shape, Place(name, 0), desc.strides, desc.dtype, place, contiguous, desc.dtype)


def unpack(program: Program, name: str, desc: TensorDesc, place: Place) -> None:
    """The other way."""
    contiguous = contiguous_strides(desc.shape)
    copy(program, desc.shape, place, contiguous, desc.dtype, Place(name, 0), desc.strides, desc.dtype)


def copy_images(program: Program, name: str, desc: TensorDesc, images: Images, shape: Any, into: bool) -> None:
    """A tensor, read row-major as (samples, channels, image), into its place in the workspace, or back."""
    place = Place(WORKSPACE, images.packed[name])
    strides = image_strides(desc, shape)
    if strides is None:  # then all are planes, which is its own order
        (pack if into else unpack)(program, name, desc, place)
        return
    inside = layout_strides(images, shape[1], shape[2])
    if into:
        copy(program, shape, Place(name, 0), strides, desc.dtype, place, inside, desc.dtype)
    else:
        copy(program, shape, place, inside, desc.dtype, Place(name, 0), strides, desc.dtype)


def as_float32(program: Program, name: str, desc: TensorDesc | None, size: int, place: int | None) -> Place:
    """A small tensor as contiguous float32, in the workspace if it has a place there; ones where it is absent."""
    if place is None:
        return Place(name, 0)
    target = Place(WORKSPACE, place)
    if desc is None:
        copy(program, (size,), ONE, (0,), F32, target, (1,), F32)
    else:
        contiguous = contiguous_strides(desc.shape)
        copy(program, desc.shape, Place(name, 0), desc.strides, desc.dtype, target, contiguous, F32)
    return target


def fill_with_zeros(program: Program, name: str, desc: TensorDesc) -> None:
    zero = (0,) * len(desc.shape)
    copy(program, desc.shape, ZERO, zero, F32, Place(name, 0), desc.strides, desc.dtype)
