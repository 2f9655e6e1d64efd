"""Tiles and workspace of GroupNorm backward on a GPU: pure integers, none of them read off a device."""

from __future__ import annotations

from math import gcd, inf
from typing import NamedTuple

from ...datatypes import itemsize
from ...spec import Call
from .._images import Images, lay_out
from .._tiles import LARGEST_GRID, MULTIPROCESSORS, check_length, gathered_bytes, in_runs, power_of_two
from .._views import Parts, row_step
from ..layer_norm.gpu_tiling import LONGEST_WHOLE_ROW
from ..layer_norm.gpu_tiling import PROGRAMS as ROW_PROGRAMS
from ..layer_norm.gpu_tiling import TILE as ROWS_TILE

#: Elements of a group (of planes, padded to powers of two) that stay in one program's registers.
LARGEST_WHOLE_GROUP = 8192
#: Pixels too, if a group's channels are at least so many bytes. 64 x 64 x 49 in bfloat16 takes 6 instead of 11
#: microseconds.
SHORTEST_RUN = 16
#: Elements of a warp. 256 x 2048 x 49 pixels in bfloat16: 84 instead of 128 microseconds with half as many.
WHOLE_WARP = 1024
#: Groups of planes of images up to this size are rows, if they have so many elements: 256 x 2048 x 49 in bfloat16 takes
#: 73 instead of 215 microseconds, 32 x 1024 x 196 (6272 elements) 48 instead of 69, but 128 x 256 x 196 (784) 29
#: instead of 21: the sums of elements are still to be added up then.
LARGEST_SMALL_IMAGE, SHORTEST_ROW = 256, 2048
#: Groups of planes that one program reads twice, the second time from the caches: bytes of one of both inputs at most,
#: elements of a tile (twice as many where that makes runs of this length), and warps. 58 microseconds at 32 x 256 x
#: 3136 in bfloat16, against 77 in launches of their own and 72 by programs that share a group; 39 at 8 x 512 x 4096, 43
#: with runs of half the length.
LARGEST_TWICE, TWICE_TILE, TWICE_RUN, TWICE_WARPS = 1 << 19, 4096, 512, 8
#: So many times fewer bytes where planes do not begin on 16 bytes and one program would take too long.
ELEMENT_BY_ELEMENT = 4
#: Loads under way, where rows begin on 16 bytes.
STAGES = 3
#: Split planes: elements of a tile, its columns, tiles of a program, at most. Sweeping as many samples twice as the L2
#: cache holds, before the next, was slower: 108 against 79 microseconds at 32 x 256 x 3136 in bfloat16.
TILE, LONGEST_RUN, MOST_TILES = 2048, 1024, 8
#: Pixels: the same.
PIXEL_TILE, WIDEST_PIXELS, FEWEST_PIXEL_TILES, MOST_PIXEL_TILES, PIXEL_SPLITS = 4096, 128, 16, 64, 32
#: Groups of planes that programs share and read once: bytes of a part of an input, programs (one for each
#: multiprocessor), their warps, and parts of a group at least, by bytes of an element: 233 against 331 microseconds at
#: 16 x 128 x 65536 in bfloat16 (16 parts), but 44 against 40 at 8 x 512 x 4096 (4 parts): steps of several channels
#: take longer than their bytes.
PART_BYTES, SHARING, PART_WARPS = 32768, MULTIPROCESSORS, 8
FEWEST_PARTS = {4: 4, 2: 8}
#: Pixels that programs hold in shared memory: programs of a multiprocessor and of all, their warps and registers of a
#: thread, bytes of a tile's row (the first that groups fill as well as others), pieces of a tile (16 bytes of a thread
#: each) and tiles that fit. 58 microseconds at 32 x 256 x 3136 in bfloat16, against 84 in launches of their own; 3 to 7
#: more with two, four or five programs, or with rows of 256 bytes.
HELD_EACH, HELD_PROGRAMS, HELD_WARPS, HELD_REGISTERS = 3, 3 * MULTIPROCESSORS, 4, 168
HELD_ROWS, HELD_PIECES, HELD_SLOTS = (128, 256, 512, 1024, 2048, 64), 2, 8
#: Tiles of a part, and whether dx is made a turn later: then two turns are held.
HELD_TURNS = ((3, 1), (2, 1), (1, 1), (7, 0), (6, 0), (5, 0), (4, 0))
#: Microseconds of a turn: of a tile's bytes, of what comes besides if dx is made a turn later and if at once, and of
#: each further 512 words (read off trials with 32 x 256 x 3136 and 8 x 512 x 4096); samples at which the first turn
#: counts as much as the others together.
HELD_TILE, HELD_LATER, HELD_AT_ONCE, HELD_MORE_WORDS, HELD_BATCH = 1.14, 1.2, 2.2, 0.7, 8
#: Groups of a block, words of one, and groups that a thread's vector of channels may be of, at most; how much of a
#: tile's columns are channels at least. 8 x 320 x 4096 in 32 groups (of 10: four to a vector) took 42 against 38.
HELD_GROUPS, HELD_WORDS, HELD_UNITS, HELD_FULL = 16, 2048, 2, 0.6
#: Samples whose sums a program adds up one after the other.
HELD_RUN = 8
#: Programs for the whole call, if it has work for them.
PROGRAMS = 8 * MULTIPROCESSORS


class Held(NamedTuple):
    """Pixels that stay in shared memory between the sums and dx."""

    #: Groups of a block, blocks of a sample, and how many of these are worked on at a time.
    groups: int
    blocks: int
    lanes: int
    #: Rows of a piece and columns of a tile, tiles of a part, parts of an image, turns that dx comes later.
    rows: int
    cols: int
    tiles: int
    parts: int
    lag: int
    #: Samples at a time, and runs of a program.
    stride: int
    runs: int


class Tiling(NamedTuple):
    samples: int
    groups: int
    group_channels: int
    image: int
    images: Images
    #: Small tensors that go through a contiguous copy in the workspace, and where.
    packed: dict[str, int]
    as_rows: bool
    whole: bool
    twice: bool
    #: Channels (planes) or rows (pixels) of a tile, and its columns.
    tile_rows: int
    tile_cols: int
    #: Whether tiles cover the images and channels without a rest, and for dx.
    even: bool
    dx_even: bool
    #: Elements of a vector of 16 bytes.
    vector: int
    #: Programs that share a group and exchange their sums, and how many groups they have at a time.
    parts: int
    lanes: int
    #: Split groups: programs that share an image, tiles of each, and for dx. Groups that are rows: programs that share
    #: the samples.
    splits: int
    tiles: int
    dx_splits: int
    dx_tiles: int
    num_warps: int
    stages: int
    held: Held | None
    #: Places in the workspace: sums [sample][split][4][channel], of rows [split][2][column], gathered ones, c1 and c2
    #: [sample][group][2].
    partials: int
    gathered: int
    group_sums: int
    words: int
    workspace_bytes: int

    @property
    def channels(self) -> int:
        return self.groups * self.group_channels


def _part_of_group(channels: int, image: int, most: int) -> tuple[int, int]:
    """Channels and columns of a part of a group: as few parts as can be, then the longest runs."""
    rows = [1 << i for i in range(power_of_two(channels).bit_length())]
    return min(
        ((r, most // r) for r in rows if most // r >= 16),
        key=lambda part: (-(-channels // part[0]) * -(-image // part[1]), part[0]),
    )


def _share(pieces: int, others: int, programs: int, most: int) -> tuple[int, int]:
    """Tiles of a program and programs of an image of so many pieces, of which the call has as many as the others."""
    splits = -(-pieces // max(1, min(most, others * pieces // programs)))
    return -(-pieces // splits), splits


def _hold(n: int, groups: int, group_channels: int, image: int, size: int, images: Images) -> Held | None:
    """Blocks of channels that fill a tile's columns best, and parts that keep most programs busy, whatever the number
    of samples: a sample has the same sums in any batch."""
    vector, channels, best, block, width = 16 // size, groups * group_channels, 0.0, 1, 1
    for cols in (row // size for row in HELD_ROWS):
        for k in range(min(groups, HELD_GROUPS, cols // group_channels), 0, -1):
            full = channels / (-(-groups // k) * cols)
            if k * group_channels % vector == 0 and full > 1.1 * best:
                best, block, width = full, k, cols
    blocks, rows = -(-groups // block), HELD_WARPS * 32 * vector // width
    steps = [step for pair in images.steps.values() for step in pair]
    in_vectors = all(step % vector == 0 for step in (channels, *steps))
    in_32_bits = all(HELD_PIECES * rows * step < 2**31 for _, step in images.steps.values())
    if best < HELD_FULL or not in_vectors or not in_32_bits or vector // gcd(group_channels, vector) > HELD_UNITS:
        return None
    held, least = None, inf
    for tiles, lag in HELD_TURNS:
        parts = -(-image // (tiles * HELD_PIECES * rows))
        words = power_of_two(parts) * power_of_two(block)
        if parts <= HELD_PROGRAMS and words <= HELD_WORDS:
            lanes = min(blocks, HELD_PROGRAMS // parts)
            stride, rounds = HELD_PROGRAMS // (parts * lanes), -(-blocks // lanes)
            turn = tiles * HELD_TILE + (HELD_LATER if lag else HELD_AT_ONCE)
            turn += max(0, -(-words // 512) - 1) * HELD_MORE_WORDS
            time = rounds * turn * (1 / stride + 1 / HELD_BATCH)
            if time < least:
                least, stride = time, min(n, stride)
                runs = -(-n // (stride * HELD_RUN))
                held = Held(block, blocks, lanes, rows, width, tiles, parts, lag, stride, runs)
    return held


def tile(call: Call, writes: tuple[str, ...]) -> Tiling:
    n, channels, hw, groups = call.N, call.C, call.HxW, call.group
    check_length(call, max(channels, hw))
    parts = Parts()
    names = ["gradOut", "input", *(["gradInput"] if "gradInput" in writes else [])]
    images = lay_out({name: call.values[name] for name in names}, n, channels, hw, parts)
    group_channels = channels // groups
    packed = {}
    for name, count in (
        ("mean", n * groups), ("rstd", n * groups), ("gamma", channels), ("gradGammaOut", channels),
        ("gradBetaOut", channels),
    ):  # fmt: skip
        desc = call.values[name]
        if desc is not None and (name in writes or not name.startswith("grad")) and row_step(desc, 1, count) is None:
            packed[name] = parts.take(count * itemsize(desc.dtype))
    rows, cols = power_of_two(group_channels), max(16, power_of_two(hw))
    if images.pixels:
        rows, cols = power_of_two(hw), rows
    run_bytes = group_channels * itemsize(call.input.dtype)
    whole = rows * cols <= LARGEST_WHOLE_GROUP and (not images.pixels or run_bytes >= SHORTEST_RUN)
    splits, tiles, dx_splits, dx_tiles, num_warps = 1, 1, 1, 1, max(1, min(16, rows * cols // WHOLE_WARP))
    vectors = all(step % 16 == 0 for steps in images.steps.values() for step in steps)
    vector, row = 16 // itemsize(call.input.dtype), group_channels * hw
    as_rows = (
        not images.pixels
        and groups <= LARGEST_GRID
        and hw <= LARGEST_SMALL_IMAGE
        and SHORTEST_ROW <= row <= LONGEST_WHOLE_ROW
        and row % vector == 0
        and all(outer % vector == 0 and (channels == 1 or inner == hw) for outer, inner in images.steps.values())
    )
    twice = (
        not whole
        and not images.pixels
        and "gradInput" in writes
        and 2 * row * itemsize(call.input.dtype) <= (LARGEST_TWICE if vectors else LARGEST_TWICE // ELEMENT_BY_ELEMENT)
        and rows <= TWICE_TILE // 16
    )
    stages = STAGES if vectors else 1
    parts_of_group, lanes = 0, 0
    if stages > 1 and not whole and not as_rows and not images.pixels and "gradInput" in writes:
        part_rows, part_cols = _part_of_group(group_channels, hw, PART_BYTES // itemsize(call.input.dtype))
        parts_of_group = -(-group_channels // part_rows) * -(-hw // part_cols)
        if parts_of_group > SHARING or parts_of_group < FEWEST_PARTS[itemsize(call.input.dtype)]:
            parts_of_group = 0
    if as_rows:
        cols, whole, twice = max(16, power_of_two(row)), False, False
        rows, num_warps, stages = max(1, ROWS_TILE // cols), 4 if cols <= 2048 else 8, STAGES
        tiles_of_rows = -(-n // rows)
        splits = min(tiles_of_rows, in_runs(tiles_of_rows, -(-ROW_PROGRAMS // groups), 1))
    elif parts_of_group:
        twice, num_warps, rows, cols, splits = False, PART_WARPS, part_rows, part_cols, -(-hw // part_cols)
        lanes = min(n * groups, SHARING // parts_of_group)
    elif twice:
        cols, num_warps = min(cols, max(TWICE_TILE, min(2 * TWICE_TILE, TWICE_RUN * rows)) // rows), TWICE_WARPS
    elif not whole:
        num_warps = 4
        if images.pixels:
            cols = min(WIDEST_PIXELS, max(16, power_of_two(channels)))
            rows = PIXEL_TILE // cols
            length = rows
        else:
            cols = min(LONGEST_RUN, cols)
            rows = min(power_of_two(channels), TILE // cols)
            length = cols
        # For dx as many programs as multiprocessors want, with as many tiles as that leaves each. Not so for the sums:
        # a sample's are the same in any batch.
        across, pieces = -(-channels // (cols if images.pixels else rows)), -(-hw // length)
        most = MOST_TILES
        if images.pixels:
            most = max(FEWEST_PIXEL_TILES, min(MOST_PIXEL_TILES, pieces // PIXEL_SPLITS))
        splits = -(-pieces // most)
        tiles = -(-pieces // splits)
        dx_tiles, dx_splits = _share(pieces, n * across, PROGRAMS, MOST_TILES)
    length, width = (rows, cols) if images.pixels else (cols, rows)
    fits = (group_channels if twice else channels) % width == 0
    even, dx_even = fits and hw % (length * tiles) == 0, fits and hw % (length * dx_tiles) == 0
    if parts_of_group:
        even = hw % length == 0 and group_channels % width == 0
    held = None
    if images.pixels and not whole and "gradInput" in writes:
        held = _hold(n, groups, group_channels, hw, itemsize(call.input.dtype), images)
    if as_rows:
        partials = parts.take(splits * 2 * channels * hw * 4)
        gathered = parts.take(gathered_bytes(splits, 2 * channels * hw, hw))
    elif held:  # or split, where addresses are no multiples of 16
        count = held.runs * held.stride * held.parts
        partials = parts.take(max(count * 2, n * splits * 4) * channels * 4)
        gathered = parts.take(max(gathered_bytes(count, 2 * channels), gathered_bytes(n * splits, 4 * channels)))
    else:
        partials = parts.take(n * splits * 4 * channels * 4)
        gathered = parts.take(gathered_bytes(n * splits, 4 * channels))
    group_sums = parts.take(n * groups * 2 * 4)
    words = parts.take(n * (held.blocks * held.parts * held.groups if held else groups * parts_of_group) * 8)
    return Tiling(
        n, groups, group_channels, hw, images, packed, as_rows, whole, twice, rows, cols, even, dx_even, vector,
        parts_of_group, lanes, splits, tiles, dx_splits, dx_tiles, num_warps, stages, held, partials, gathered,
        group_sums, words, parts.bytes,
    )  # fmt: skip
