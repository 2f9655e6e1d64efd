"""What both of BatchNorm's CPU kernels need to find their way around a view."""

from __future__ import annotations

from typing import Any

from .._native import inline
from .._workers import _get
from .layout import Axis


@inline
def offset(axes: Any, count: Any, index: Any) -> Any:
    """Bytes to one of the places around which `count` axes lead: (size, step in gradOut, step in input) each."""
    dy, x = 0, 0
    for i in range(count - 1, 0, -1):
        place, size = axes + 24 * i, _get(axes + 24 * i)
        dy, x = dy + index % size * _get(place + 8), x + index % size * _get(place + 16)
        index //= size
    return dy + index * _get(axes + 8), x + index * _get(axes + 16)


def in_bytes(axes: list[Axis], size: int) -> list[int]:
    """Axes as `offset` reads them."""
    return [number for axis in axes for number in (axis.size, axis.dy * size, axis.x * size)]
