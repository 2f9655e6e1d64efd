"""Tensors of samples, channels and images for the CPU kernels: which of two layouts, and how many bytes. Pure integers.

In *planes* (NCHW) the elements of a channel's image are contiguous; in *pixels* (channels-last) the channels of an
element are. What is neither is packed into one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import NamedTuple

from ..datatypes import itemsize
from ..spec import TensorDesc
from ._views import Parts, image_strides

#: Rows of pixels are joined to rows of no more elements.
_LONGEST = 1024


class Images(NamedTuple):
    pixels: bool
    #: Elements from sample to sample, and from channel to channel (planes) or element to element (pixels), by tensor.
    steps: dict[str, tuple[int, int]]
    #: Tensors that are copied to or from the workspace in the layout, and where.
    packed: dict[str, int]


def lay_out(tensors: Mapping[str, TensorDesc], samples: int, channels: int, image: int, parts: Parts) -> Images:
    """The layout of input decides; `tensors` maps names to descriptors."""
    shape = (samples, channels, image)
    strides = {name: image_strides(desc, shape) for name, desc in tensors.items()}
    lead = strides["input"]
    pixels = lead is not None and channels > 1 and lead[1] == 1 and (image == 1 or lead[2] != 1)
    if None in strides.values():
        pixels = False  # an order of its own, which only planes can be packed from
    steps, packed = {}, {}
    for name, desc in tensors.items():
        found = strides[name]
        inner, count, outer = (1, channels, 2) if pixels else (2, image, 1)
        if found is None or (count > 1 and found[inner] != 1):
            packed[name] = parts.take(desc.numel * itemsize(desc.dtype))
            found = (channels * image, 1, channels) if pixels else (channels * image, image, 1)
        # Steps along an axis of one element may be any: here they are those of a contiguous tensor, so that one sample
        # is read as many are.
        step = found[outer] if shape[outer] > 1 else count
        steps[name] = (found[0] if samples > 1 else channels * image, step)
    return Images(pixels, steps, packed)


def joined(dense: bool, channels: int, image: int, wanted: int) -> int:
    """How many elements' channels (pixels, one after the other if `dense`) the kernels take as one row: enough to keep
    vectors busy, `wanted` of them, and so many that they fill whole ones where images are large enough for what that
    costs."""
    if not dense:
        return 1
    shortest = -(-wanted // channels)
    full = 16 // gcd(channels, 16)
    full *= -(-shortest // full)
    if full * channels <= _LONGEST and full * 32 <= image:
        return full
    return min(shortest, image)


def layout_strides(images: Images, channels: int, image: int) -> tuple[int, int, int]:
    """Strides of (samples, channels, image) in a packed tensor."""
    return (channels * image, 1, channels) if images.pixels else (channels * image, image, 1)
