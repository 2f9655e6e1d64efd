"""The sizes the GPU's tilings share. Pure integers."""

from __future__ import annotations

from ..spec import Call
from ..status import AclnnError, Status

#: Of an H200. A constant, since grids shape the sums: the bits are then the same on any GPU.
MULTIPROCESSORS = 132
#: Bytes that a multiprocessor of it has.
SHARED_MEMORY = 228 * 1024
#: Tiles that a program adds up one after the other in float32, where results show it. Terms that are all alike round
#: the same way each time: the sum of n is off by n / 4 roundings, and 8 are allowed.
TILES_OF_A_RUN = 24
#: More partials than this are added in two stages, by this many programs each.
MOST_PARTIALS, PARTS = 4 * MULTIPROCESSORS, 64


#: Of a grid's second axis.
LARGEST_GRID = 65535


def check_length(call: Call, length: int) -> None:
    """Kernels count along one axis in 32 bits, and from tile to tile past its end."""
    most = 2**31 - 2**16
    if length > most:
        raise AclnnError(
            Status.ACLNN_ERR_INNER_TILING_ERROR,
            "input",
            f"{call.op.name}: input must have rows, columns and images of at most {most} on a GPU; got {length}",
        )


def power_of_two(size: int) -> int:
    """The smallest one that is not below."""
    return 1 << max(0, size - 1).bit_length()


def _powers_of_two(number: int) -> tuple[tuple[int, int], ...]:
    """Those it is the sum of, largest first, and the sum of the ones before."""
    powers = [1 << bit for bit in reversed(range(number.bit_length())) if number >> bit & 1]
    return tuple((power, sum(powers[:i])) for i, power in enumerate(powers))


def slot_of_runs(before: int, length: int, threads: int, vector: int) -> tuple[tuple[tuple[int, int], ...], int]:
    """For runs of memory that begin within a vector, and are read `length` elements at a time, the last of them after
    those before: how many of them a thread has, in powers of two (and in the ones before); elements of shared memory
    that hold all, a power of two."""
    blocks = _powers_of_two(-(-length // threads))
    read = vector - 1 + before + sum(block for block, _ in blocks) * threads
    return blocks, max(power_of_two(read), threads * vector)


def in_runs(tiles: int, programs: int, runs: int) -> int:
    """Programs for so many tiles: that many, or the multiple of it with which none has more than so many runs."""
    return programs * -(-tiles // (programs * TILES_OF_A_RUN * runs))


def gathered_bytes(count: int, step: int, inner: int = 1) -> int:
    """What the last stage of a sum over `count` partials of `step` float32 numbers, `inner` of a sum in each, needs of
    the workspace."""
    return max(1, PARTS // inner) * step * 4 if count * inner > MOST_PARTIALS else 0
