"""The sizes the GPU's tilings share. Pure integers."""

from __future__ import annotations

#: More partials than this are added in two stages, by this many programs each.
MOST_PARTIALS, PARTS = 1024, 64


def power_of_two(size: int) -> int:
    """The smallest one that is not below."""
    return 1 << max(0, size - 1).bit_length()


def gathered_bytes(count: int, step: int) -> int:
    """What the last stage of a sum over `count` partials of `step` float32 numbers needs of the workspace."""
    return PARTS * step * 4 if count > MOST_PARTIALS else 0
