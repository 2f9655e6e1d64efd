"""Views as the CPU kernels see them, the sizes of their sums, and the workspace cut into parts. Pure integers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from ..spec import Shape, TensorDesc

#: The tree of every sum. Elements of a run summed in float32; elements of a run summed together in float64; rows of a
#: column summed in float32, in LayerNorm and for BatchNorm's pixels. n equal rows may be off by n / 4 + 1 / 2 roundings
#: of 2**-24, of which the bound allows 8 (GroupNorm's dx has others too, see SUMMED_ROWS in its tiling.py).
BLOCK, SPAN, CHUNK_ROWS, PIXEL_ROWS = 1024, 8192, 24, 24

#: Elements of planes that are summed lane by lane, 8 planes at a time, in two vectors of sums, 12 additions each.
LARGEST_LANES = 2 * 12 * 16

#: Rows, LayerNorm's and those that are GroupNorm's small groups: columns that are summed in float32, where a row has no
#: more, and where it has.
LONGEST_BLOCK, ROW_BLOCK = 768, 512
#: Columns of a row whose blocks are added up in float64 before they are added to the row's sums; and the most of a
#: split row that a task sums, and makes dx of: in the rows of a whole chunk, one after the other, so that their weight
#: and column sums stay in the cache. (Row by row, so that it is read again from the cache, 64 rows of a million take
#: 1.6 times as long in 16 bits on a Xeon, 1.5 in float32, and as long on an EPYC.)
ROW_SPAN = 8192

#: Pixels are summed four rows at a time, in the same order, where sums are what takes longest: in tensors of which two
#: have no more bytes than this, by an element's size, and the caches have them (BatchNorm of 16x128x441 in bfloat16: 55
#: instead of 65 microseconds, GroupNorm of 12x256x400 135 and 107; in float32 of 32x64x49 30 and 24, but BatchNorm of
#: 4x256x784 53 and 59). But rows multiples of PAGE apart compete for the same places of the L1 cache (BatchNorm of
#: 16384x2048 in bfloat16: 4.4 instead of 2.8 ms).
FOURS_BYTES, PAGE = {4: 4 << 20, 2: 7 << 20}, 4096

#: Bytes by which kernels ask for memory ahead of its use. Up to Zen 4 into the L2 cache: into the L1 cache, or 1 KiB
#: ahead, the requests hold up the loads, and LayerNorm of 768 columns is 1.05 instead of 1.6 times as fast as PyTorch.
#: On others into the L1 cache: BatchNorm is 1.05 times as fast on one Xeon, as fast on another, LayerNorm 1.0 to 1.06;
#: 1.5 to 4.5 KiB are alike. (Zen 5: 1.05 times, GroupNorm's planes 1.1; 2 KiB lose where memory is fast.)
AHEAD = 3072

#: Two inputs of no more bytes may in part be in the L3 cache.
CACHED_BYTES = 16 << 20

#: Bytes of a cache line.
LINE = 64
#: More tasks than this at a time wait for one another, where they need places of their own.
MOST_PLACES = 64


class Places(NamedTuple):
    """Memory for tasks that run at the same time, see `_places.py`: where it is in the workspace, bytes from one to the
    next, how many. A place begins with whether it is taken and what it holds, on a cache line of its own."""

    offset: int
    step: int
    number: int


class Parts:
    """Hands out aligned places in a workspace, one after the other."""

    def __init__(self) -> None:
        self.bytes = 0

    def take(self, size: int) -> int:
        """The offset of a new part; every part starts on a cache line."""
        place = self.bytes
        self.bytes += -(-size // LINE) * LINE
        return place

    def take_places(self, size: int, tasks: int) -> Places:
        """Memory of so many bytes for each of so many tasks."""
        step, number = LINE + -(-size // LINE) * LINE, min(tasks, MOST_PLACES)
        return Places(self.take(number * step + LINE), step, number)  # where they begin depends on the workspace


def reshaped(shape: Sequence[int], strides: Sequence[int], new_shape: Sequence[int]) -> tuple[int, ...] | None:
    """The strides under which a non-empty view has another shape of the same size, row-major; None if it cannot."""
    old = [(size, stride) for size, stride in zip(shape, strides) if size != 1]
    new: list[int] = [0] * len(new_shape)
    axes = [axis for axis, size in enumerate(new_shape) if size != 1]
    while old and axes:
        # The shortest run of old axes and of new axes that hold the same number of elements.
        run, group = [old.pop()], [axes.pop()]
        old_size, new_size = run[0][0], new_shape[group[0]]
        while old_size != new_size:
            if old_size < new_size:
                run.insert(0, old.pop())
                old_size *= run[0][0]
            else:
                group.insert(0, axes.pop())
                new_size *= new_shape[group[0]]
        for (_, outer), (size, inner) in pairwise(run):
            if outer != size * inner:
                return None  # a gap inside what must become one axis
        step = run[-1][1]
        for axis in reversed(group):
            new[axis] = step
            step *= new_shape[axis]
    return tuple(new)


#: Results of so many bytes or more are written past the caches: they would only push the inputs out of them. In float32
#: LayerNorm of 1000 x 768, 2.9 MiB, takes 0.25 instead of 0.43 ms if its inputs are in memory, 0.23 instead of 0.21 if
#: the L3 cache has them (on a Xeon 0.23 instead of 0.35 and 0.32).
STREAMED_BYTES = 2 << 20


def worth_streaming(elements: int, size: int, sixteen_bits_worth: int) -> bool:
    """Whether to write results of this size past the caches; in 16 bits, where arithmetic takes longer and hides more
    of what memory takes, only if there are so many times as many bytes."""
    return elements * size >= STREAMED_BYTES * (1 if size == 4 else sixteen_bits_worth)


def task_elements(total: int) -> int:
    """How much of a tensor a task should take: enough to outweigh its start, little enough for all threads to end at
    the same time (LayerNorm of 4096 x 768 in float32 takes 0.99 ms in 64 tasks and 1.04 in 32)."""
    return max(8192, min(131072, total // 64))


def row_step(desc: TensorDesc, rows: int, cols: int) -> int | None:
    """Elements from row to row, where the tensor is rows of contiguous columns; None where it must be packed."""
    strides = reshaped(desc.shape, desc.strides, (rows, cols))
    if strides is None or (cols > 1 and strides[1] != 1):
        return None
    return strides[0]


def image_strides(desc: TensorDesc, shape: Shape) -> tuple[int, int, int] | None:
    """(sample, channel, element) strides of a tensor seen as (samples, channels, image)."""
    strides = reshaped(desc.shape, desc.strides, shape)
    return None if strides is None else (strides[0], strides[1], strides[2])


def joined_axes(shape: Sequence[int], *strides: Sequence[int]) -> list[list[int]]:
    """Axes of size 1 dropped, neighbours joined where every tensor steps evenly over both: [size, stride, ...]."""
    axes: list[list[int]] = []
    for axis in zip(shape, *strides):
        if axis[0] == 1:
            continue
        if axes and all(outer == axis[0] * inner for outer, inner in zip(axes[-1][1:], axis[1:])):
            axes[-1] = [axes[-1][0] * axis[0], *axis[1:]]
        else:
            axes.append(list(axis))
    return axes
