"""How BatchNorm's CPU kernels go through gradOut and input: pure integers.

All axes but the channels' are summed over, so their order is free: they are taken in the order of memory, and joined
where both tensors step evenly. What is left is one of two layouts. In *pixels* (channels-last, 2-D) the channels are
contiguous, and a row of them is added to the sums of all. In *planes* (NCHW) a run of elements of one channel is. Any
steps may lie around either. A tensor without one of them, or with the other one than input, is packed first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...datatypes import itemsize
from ...spec import Shape, TensorDesc
from .._views import Parts, joined_axes


class Axis(NamedTuple):
    """One that is summed over: its size, and elements from one to the next in gradOut and in input."""

    size: int
    dy: int
    x: int


class Packed(NamedTuple):
    """A tensor that is copied into the workspace: where, and with which strides."""

    place: int
    strides: Shape


class Layout(NamedTuple):
    pixels: bool
    packed: dict[str, Packed]
    #: The channels.
    channel: Axis
    #: Around the channels; and around the run of planes, within a channel.
    outer: list[Axis]
    inner: list[Axis]
    #: The innermost axis that is summed over. Planes: contiguous elements of one channel. Pixels: rows of channels.
    run: Axis


def lay_out(dy: TensorDesc, x: TensorDesc, parts: Parts) -> Layout:
    packed: dict[str, Packed] = {}

    def pack(name: str, desc: TensorDesc) -> Shape:
        """Both in the order of input's axes, so that they fit together."""
        strides = _dense(desc.shape, _order(x.strides))
        packed[name] = Packed(parts.take(desc.numel * itemsize(desc.dtype)), strides)
        return strides

    x_strides = x.strides
    found = _arrange(x.shape, x_strides, x_strides)
    if found is None:
        x_strides = pack("input", x)
    found = _arrange(x.shape, dy.strides, x_strides)
    if found is None:
        found = _arrange(x.shape, pack("gradOut", dy), x_strides)
    assert found is not None
    return found._replace(packed=packed)


def _order(strides: Sequence[int]) -> list[int]:
    """Axes as they lie in memory, the outermost first; an axis that repeats the same elements is outermost."""
    return sorted(range(len(strides)), key=lambda axis: (strides[axis] != 0, -abs(strides[axis])))


def _dense(shape: Sequence[int], order: Sequence[int]) -> Shape:
    """Strides of a tensor without gaps, whose axes lie in this order."""
    strides, step = [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis], step = step, step * shape[axis]
    return tuple(strides)


def _arrange(shape: Sequence[int], dy: Sequence[int], x: Sequence[int]) -> Layout | None:
    """The layout of two tensors in place, if they have one."""
    order = [axis for axis in _order(x) if axis != 1]
    summed = joined_axes(*([values[axis] for axis in order] for values in (shape, dy, x)))
    axes = [Axis(*axis) for axis in summed]
    channel = Axis(shape[1], dy[1], x[1]) if shape[1] > 1 else Axis(1, 1, 1)
    last = axes[-1] if axes else Axis(1, 1, 1)
    if last.x == 1 and (axes or channel.size == 1 or channel.x != 1):  # one row of pixels alone is no plane
        if last.dy != 1:
            return None
        outside = [abs(axis.x) >= abs(channel.x) or axis.x == 0 for axis in axes[:-1]]
        outer, inner = ([axis for axis, out in zip(axes, outside) if out is which] for which in (True, False))
        return Layout(False, {}, channel, outer, inner, last)
    if channel.size > 1 and channel.x == 1 and channel.dy == 1:
        run = last if axes else Axis(1, channel.size, channel.size)
        return Layout(True, {}, channel, axes[:-1], [], run)
    return None
