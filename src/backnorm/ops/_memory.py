"""From NumPy views to what the CPU kernels take: addresses, contiguous copies in the workspace, tags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..datatypes import NUMPY
from ._simd import TAGS

_TAGS = {NUMPY[number]: tag for number, tag in TAGS.items()}


def address(array: Any) -> int:
    """Where the element at index 0 lies."""
    place: int = array.__array_interface__["data"][0]
    return place


def tag(array: Any) -> Any:
    return _TAGS[array.dtype]


def part(workspace: Any, place: int, shape: Any, dtype: Any) -> Any:
    """A contiguous array in the workspace."""
    return np.ndarray(shape, dtype, workspace, place)


def as_float32(tensors: Mapping[str, Any], name: str, places: Mapping[str, int], size: int, workspace: Any) -> int:
    """The address of a small tensor as contiguous float32; ones where it is absent."""
    if name not in places:
        return address(tensors[name])
    copy = part(workspace, places[name], (size,), np.float32)
    copy[...] = tensors[name].reshape(size) if name in tensors else 1
    return address(copy)
