"""Compiles every CPU kernel by calling each operator on the smallest input that reaches it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from . import functional
from .datatypes import BF16, F16, F32, NUMPY

_TYPES = (F32, F16, BF16)


def work() -> Iterator[Callable[[], object]]:
    """The calls to make: types, masks, and both ways each operator can go."""
    vectors = (5, 16, 20, 32, 40, 48, 60, 64)  # one to four, which stay in registers
    for dtype, cols in itertools.product(_TYPES, vectors):
        yield partial(_layer_norm, NUMPY[dtype], (4, cols), (True, True, True))
    for dtype, shape in itertools.product(_TYPES, ((4, 100), (4, 1000), (2, 32800), (1, 32800))):
        for mask in ((True, True, True), (True, False, False), (False, True, False)):
            yield partial(_layer_norm, NUMPY[dtype], shape, mask)
    for dtype, cols in itertools.product(_TYPES, (768, 784)):  # rows by pairs, of one block or of several
        for mask in ((True, True, True), (True, False, False)):
            yield partial(_layer_norm, NUMPY[dtype], (2800, cols), mask)
    for dtype in (F16, BF16):  # a single long row writes the gradients of float32 weights itself
        yield partial(_layer_norm, NUMPY[dtype], (1, 32800), (True, True, True), np.ones(32800, np.float32))
    # A split sample of pixels and a split group of planes, whole ones, small and large, and those that are rows, of one
    # block or of several.
    shapes = ((1, 4, 120, 2), (1, 4, 120, 1), (16, 4, 120, 2), (16, 4, 400, 2), (1, 4, 3, 1), (1, 40, 20, 1))
    for dtype, sizes, pixels in itertools.product(_TYPES, shapes, (False, True)):
        for mask in ((True, True, True), (True, False, False), (False, True, True)):
            yield partial(_group_norm, NUMPY[dtype], sizes, pixels, mask)
    for dtype, image in itertools.product(_TYPES, ((), (3,), (300,))):  # pixels, small and larger planes
        yield partial(_batch_norm, NUMPY[dtype], (2, 4, *image))
    for dtype in _TYPES:  # views that are copied
        yield partial(_batch_norm, NUMPY[dtype], (2, 4, 6), 2)
    for dtype, pixels in itertools.product(_TYPES, (False, True)):
        yield partial(_channels, dtype, pixels)
    yield _calls_of_torch


def compile_one(call: Callable[[], object]) -> None:
    call()


def _layer_norm(dtype: object, shape: tuple[int, int], mask: tuple[bool, ...], weight: object = None) -> None:
    rows, cols = shape
    x, ones = np.ones(shape, dtype), np.ones((rows, 1), np.float32)  # type: ignore[call-overload]
    functional.layer_norm_backward(x, x, (cols,), ones, ones, weight, weight, mask)


def _group_norm(dtype: object, sizes: tuple[int, int, int, int], pixels: bool, mask: tuple[bool, ...]) -> None:
    samples, channels, image, groups = sizes
    shape = (samples, image, channels) if pixels else (samples, channels, image)
    x = np.ones(shape, dtype)  # type: ignore[call-overload]
    x = x.transpose(0, 2, 1) if pixels else x
    ones = np.ones((samples, groups), np.float32)
    functional.group_norm_backward(x, x, ones, ones, None, samples, channels, image, groups, mask)


def _batch_norm(dtype: object, shape: tuple[int, ...], step: int = 1) -> None:
    x = np.ones(shape, dtype)[..., ::step]  # type: ignore[call-overload]
    functional.batch_norm_backward_reduce(x, x, np.ones(4, np.float32), np.ones(4, np.float32))


def _calls_of_torch() -> None:
    from .ops._calls import compile_all

    compile_all()


def _channels(dtype: int, pixels: bool) -> None:
    from .ops._channels import Layout, elements, statistics

    layout = Layout(dtype, pixels, 2, 4, 3)
    statistics(layout), elements(layout, False), elements(layout, True)
