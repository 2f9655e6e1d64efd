"""Tiles and workspace of BatchNorm's backward reduce on a GPU: pure integers, none of them read off a device."""

from __future__ import annotations

from math import gcd, prod
from typing import NamedTuple

from ...datatypes import itemsize
from ...spec import Call
from .._images import Images, lay_out
from .._tiles import LARGEST_GRID, MULTIPROCESSORS, check_length, gathered_bytes, in_runs, power_of_two
from .._views import Parts, row_step

#: Elements of a tile; its columns at most, for planes, pixels and small images; and how many programs there should be,
#: two for each multiprocessor (34 against 43 microseconds with four, 32 x 112 x 112 x 64 bfloat16).
TILE, LONGEST_RUN, WIDEST_PIXELS, WIDEST_ROWS, PROGRAMS = 4096, 2048, 64, 512, 2 * MULTIPROCESSORS
#: Planes of images up to this are read as rows of all channels' elements, if these begin on 16 bytes: 49 of them are no
#: whole vectors.
LARGEST_SMALL_IMAGE = 512
#: Pixels of few channels are joined to rows of about this many elements; of more, where only those begin on 16 bytes.
JOINED = 256
#: Runs of tiles that a program adds up.
MOST_RUNS = 4


class Tiling(NamedTuple):
    samples: int
    channels: int
    image: int
    images: Images
    #: Small tensors that go through a contiguous copy in the workspace, and where.
    packed: dict[str, int]
    #: Rows of consecutive elements, and how many elements of a channel one holds: pixels, some of them joined, and
    #: planes of small images. Elements that follow the last row.
    by_rows: bool
    rows: int
    inner: int
    rest: int
    #: Elements of a vector of 16 bytes that rows are multiples of, or 1. Planes: 1 where gradOut and input do not lie
    #: alike; and whether images begin or end within one.
    vector: int
    shifts: bool
    #: Channels or rows of a tile, and its columns; how many tiles cover a sample.
    tile_rows: int
    tile_cols: int
    pieces: int
    #: Programs that share a channel, and tiles of each.
    splits: int
    per_split: int
    partials: int
    gathered: int
    workspace_bytes: int


def _joined(rows: int, channels: int) -> int:
    """How many pixels are one row: as many as let rows begin on 16 bytes, whatever their type, if there are so many."""
    least = 16 // gcd(channels, 16)
    most = min(rows, max(least, JOINED // channels))
    return max(1, most // least * least)


def _vector(call: Call, images: Images, image: int) -> int:
    """Elements of a vector of 16 bytes, where each image begins as far from one in gradOut as in input; 1 where the
    compiler sees for itself that all begin with one."""
    sizes = {itemsize(call.values[name].dtype) for name in images.steps}
    vector = 16 // max(sizes)
    dy, x = images.steps["gradOut"], images.steps["input"]
    alike = len(sizes) == 1 and all(a >= 0 and b >= 0 and (a - b) % vector == 0 for a, b in zip(dy, x))
    return 1 if not alike or all(step % 16 == 0 for step in (image, *dy, *x)) else vector


def tile(call: Call, writes: tuple[str, ...]) -> Tiling:
    samples, channels, *axes = call.input.shape
    image = prod(axes)
    check_length(call, max(image, samples))
    parts = Parts()
    images = lay_out({name: call.values[name] for name in ("gradOut", "input")}, samples, channels, image, parts)
    small = ("mean", *(["invstd"] if "gradWeight" in writes else []), *writes)
    packed = {
        name: parts.take(channels * itemsize(call.values[name].dtype))
        for name in small
        if row_step(call.values[name], 1, channels) is None
    }
    of_16_bytes = 16 // max(itemsize(call.values[name].dtype) for name in images.steps)
    rows, inner, rest, by_rows = image, 1, 0, images.pixels
    if images.pixels and (image == 1 or all(o == image * i for o, i in images.steps.values())):
        # One sample after the other without a gap: one long column of rows.
        steps = {name: o if image == 1 else i for name, (o, i) in images.steps.items()}
        samples, rows = 1, samples * image
        if all(step == channels for step in steps.values()):
            inner = _joined(rows, channels)
        images = images._replace(steps={name: (0, step * inner) for name, step in steps.items()})
        rows, rest = rows // inner, rows % inner * channels
    elif (
        not images.pixels
        and image <= LARGEST_SMALL_IMAGE
        and all(c == image and o % of_16_bytes == 0 for o, c in images.steps.values())
    ):
        images = images._replace(steps={name: (0, o) for name, (o, _) in images.steps.items()})
        samples, rows, inner, by_rows = 1, samples, image, True
    vector, shifts = 1, False
    if by_rows:
        widest = WIDEST_PIXELS if images.pixels else WIDEST_ROWS
        tile_cols = min(widest, max(16, power_of_two(channels * inner)))
        tile_rows = TILE // tile_cols
        pieces, across = -(-rows // tile_rows), -(-channels * inner // tile_cols)
        steps_of = (step for pair in images.steps.values() for step in pair)
        vector = of_16_bytes if all(step % of_16_bytes == 0 for step in (channels * inner, *steps_of)) else 1
    else:
        vector = _vector(call, images, image)
        shifts = any(step % vector for step in (image, *images.steps["input"]))
        run = image + vector - 1 if shifts else image
        tile_cols = min(LONGEST_RUN, max(16, power_of_two(run)))
        tile_rows = min(power_of_two(channels), TILE // tile_cols)
        pieces, across = -(-run // tile_cols), -(-channels // tile_rows)
    tiles = samples * pieces
    splits = min(tiles, LARGEST_GRID, in_runs(tiles, max(1, PROGRAMS // across), MOST_RUNS))
    per_split = -(-tiles // splits)
    splits = -(-tiles // per_split)
    partials = parts.take(splits * 2 * channels * inner * 4)
    gathered = parts.take(gathered_bytes(splits, 2 * channels * inner, inner))
    return Tiling(
        samples, channels, image, images, packed, by_rows, rows, inner, rest, vector, shifts, tile_rows, tile_cols,
        pieces, splits, per_split, partials, gathered, parts.bytes,
    )  # fmt: skip
