"""What both of BatchNorm's CPU kernels need to find their way around a view."""

from __future__ import annotations

from typing import Any

from llvmlite.binding import get_host_cpu_name

from .._native import inline
from .._workers import _get
from .layout import Axis

#: Zen's own prefetchers are better left alone in float32: 65536x512 takes 8.1 to 8.3 ms, with memory asked for ahead
#: 8.4 to 8.8 (PyTorch 8.0 to 8.1). A Xeon takes 11.4, and 10.7 with it; both need it in 16 bits (here 4.1, not 4.6).
ON_ZEN = get_host_cpu_name().startswith("znver")


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
