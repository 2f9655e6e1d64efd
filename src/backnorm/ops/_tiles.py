"""The sizes the GPU's tilings share. Pure integers."""

from __future__ import annotations

#: Of an H200. A constant, since grids shape the sums: the bits are then the same on any GPU.
MULTIPROCESSORS = 132
#: Tiles that a program adds up one after the other in float32, where results show it. Terms that are all alike round
#: the same way each time: the sum of n is off by n / 4 roundings, and 8 are allowed.
TILES_OF_A_RUN = 24
#: More partials than this are added in two stages, by this many programs each.
MOST_PARTIALS, PARTS = 512, 64


def power_of_two(size: int) -> int:
    """The smallest one that is not below."""
    return 1 << max(0, size - 1).bit_length()


def in_runs(tiles: int, programs: int, runs: int) -> int:
    """That many programs for so many tiles, or a multiple of it, if each would have more runs."""
    return programs * -(-tiles // (programs * TILES_OF_A_RUN * runs))


def gathered_bytes(count: int, step: int, inner: int = 1) -> int:
    """What the last stage of a sum over `count` partials of `step` float32 numbers, `inner` of a sum in each, needs of
    the workspace."""
    return PARTS * step * 4 if count * inner > MOST_PARTIALS else 0
