"""Tensors of samples, channels and images for the CPU kernels: which of two layouts, and how many bytes. Pure integers.

In *planes* (NCHW) the elements of a channel's image are contiguous; in *pixels* (channels-last) the channels of an
element are. What is neither is packed into one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..datatypes import NUMPY
from ..spec import TensorDesc
from ._views import Parts, image_strides


class Images(NamedTuple):
    pixels: bool
    #: Elements from sample to sample, and from channel to channel (planes) or element to element (pixels), by tensor.
    steps: dict[str, tuple[int, int]]
    #: Tensors that are copied to or from the workspace in the layout, and where.
    packed: dict[str, int]


def lay_out(tensors: Mapping[str, TensorDesc], samples: int, channels: int, image: int, parts: Parts) -> Images:
    """The layout of the last of the inputs decides; `tensors` maps names to descriptors."""
    shape = (samples, channels, image)
    strides = {name: image_strides(desc, shape) for name, desc in tensors.items()}
    lead = strides["input"]
    pixels = lead is not None and channels > 1 and lead[1] == 1 and (image == 1 or lead[2] != 1)
    steps, packed = {}, {}
    for name, desc in tensors.items():
        found = strides[name]
        inner, count, outer = (1, channels, 2) if pixels else (2, image, 1)
        if found is None or (count > 1 and found[inner] != 1):
            packed[name] = parts.take(desc.numel * NUMPY[desc.dtype].itemsize)
            found = (channels * image, 1, channels) if pixels else (channels * image, image, 1)
        steps[name] = (found[0], found[outer])
    return Images(pixels, steps, packed)
