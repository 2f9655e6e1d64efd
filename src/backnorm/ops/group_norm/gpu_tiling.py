"""Tiles and workspace of GroupNorm backward on a GPU: pure integers, none of them read off a device."""

from __future__ import annotations

from math import gcd, inf
from typing import NamedTuple

from ...datatypes import itemsize
from ...spec import Call
from .._images import Images, lay_out
from .._tiles import (
    LARGEST_GRID,
    MULTIPROCESSORS,
    SHARED_MEMORY,
    check_length,
    gathered_bytes,
    in_runs,
    power_of_two,
    slot_of_runs,
)
from .._views import Parts, row_step
from ..layer_norm.gpu_tiling import LONGEST_WHOLE_ROW, programs_of_rows

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
LARGEST_SMALL_IMAGE, SHORTEST_ROW, PROGRAMS_OF_ROWS = 256, 2048, 2 * MULTIPROCESSORS
#: Groups of planes that one program reads twice, the second time from the caches: bytes of one of both inputs at most,
#: elements of a tile (twice as many where that makes runs of this length), and warps. 58 microseconds at 32 x 256 x
#: 3136 in bfloat16, against 77 in launches of their own and 72 by programs that share a group; 39 at 8 x 512 x 4096, 43
#: with runs of half the length.
LARGEST_TWICE, TWICE_TILE, TWICE_RUN, TWICE_WARPS = 1 << 19, 4096, 512, 8
#: Loads under way, where rows begin on 16 bytes.
STAGES = 3
#: Split planes: elements of a tile, its columns, tiles of a program, at most. Sweeping as many samples twice as the L2
#: cache holds, before the next, was slower: 108 against 79 microseconds at 32 x 256 x 3136 in bfloat16.
TILE, LONGEST_RUN, MOST_TILES = 2048, 1024, 8
SPLIT_WARPS = 4
#: Pixels: the same.
PIXEL_TILE, WIDEST_PIXELS, FEWEST_PIXEL_TILES, MOST_PIXEL_TILES, PIXEL_SPLITS = 4096, 128, 16, 64, 32
#: Where they come element by element, addresses take registers: registers of a thread at most, and elements of a tile
#: of pixels. Planes of 17 x 232 x 3025 in float16 take 47 microseconds, 52 with more registers (by one program a group
#: they took 159, and 36 against 19 at 43 x 24 x 3025 in bfloat16), pixels of 35 x 312 x 441 in float32 44 instead of 66
#: with larger tiles, of 64 x 100 x 900 in bfloat16 45 instead of 57.
ELEMENTWISE_REGISTERS, ELEMENTWISE_PIXELS = 80, 1024
#: Groups of planes that programs share and read once: bytes of a part of an input, programs (one for each
#: multiprocessor), their warps, and parts of a group at least, by bytes of an element: 233 against 331 microseconds at
#: 16 x 128 x 65536 in bfloat16 (16 parts), but 44 against 40 at 8 x 512 x 4096 (4 parts): steps of several channels
#: take longer than their bytes.
PART_BYTES, SHARING, PART_WARPS = 32768, MULTIPROCESSORS, 8
FEWEST_PARTS = {4: 4, 2: 8}
#: Pixels that programs hold in shared memory: programs of a multiprocessor and of all, their warps and registers of a
#: thread, bytes of a tile's row (the first that groups fill as well as others), pieces of a tile (16 bytes of a thread
#: each) and tiles that fit. 57 microseconds at 32 x 256 x 3136 in bfloat16, against 84 in launches of their own; 3 to 7
#: more with two, four or five programs, or with rows of 256 bytes.
HELD_EACH, HELD_WARPS, HELD_REGISTERS = 3, 4, 168
HELD_PROGRAMS = HELD_EACH * MULTIPROCESSORS
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
#: Groups of planes that one program holds in shared memory: programs of a multiprocessor and their warps, vectors of a
#: thread in a piece, bytes of a piece's row at least. 48 microseconds at 32 x 256 x 3136 in bfloat16 (50 with one
#: vector or 4 warps), against 58 read twice; 28 against 44 at 32 x 512 x 784 (31 with 8 warps).
HELD_PLANES, HELD_PLANES_VECTORS, HELD_PLANES_ROW = ((4, 4), (3, 4), (2, 8), (1, 8)), 2, 128
#: Groups of planes that do not begin on 16 bytes, but are one run of memory: elements of an image that are more than
#: this, and up to which a program has one warp, or else four; channels at a time; programs that a multiprocessor must
#: have room for. In bfloat16, 32 x 1024 x 196 takes 28 microseconds instead of 48 (34 with two warps), 128 x 256 x 196
#: 20 instead of 31, 623 x 32 x 676 in 4 groups 37 instead of 93, 64 x 96 x 3025 44 instead of 69 (62 with one warp);
#: but 256 x 2048 x 49 88 instead of 74, and 43 x 24 x 3025 in 4 groups, of which one fits, 21 instead of 19.
LARGEST_TINY_IMAGE, LARGEST_OF_A_WARP, RUN_CHANNELS, RUN_EACH = 64, 512, (4, 3, 2, 5, 7, 1), 3
#: Programs for the whole call, if it has work for them.
PROGRAMS = 8 * MULTIPROCESSORS


class Rows(NamedTuple):
    """Groups of planes that are LayerNorm's rows: samples and columns of a tile, programs that share the samples."""

    rows: int
    cols: int
    programs: int
    num_warps: int


class Whole(NamedTuple):
    """Groups that stay in one program's registers: rows and columns of its tile."""

    rows: int
    cols: int
    num_warps: int


class Shared(NamedTuple):
    """Groups of planes that programs share, and read once."""

    #: Channels and columns of a part, whether parts cover a group without a rest, parts side by side in an image.
    rows: int
    cols: int
    even: bool
    pieces: int
    #: Parts of a group, and groups at a time.
    parts: int
    lanes: int


class Twice(NamedTuple):
    """Groups of planes that one program reads twice: channels and columns of a tile, whether tiles cover a group."""

    rows: int
    cols: int
    even: bool


class Split(NamedTuple):
    """Groups that all programs read twice, in launches of their own."""

    #: Channels (planes) or elements (pixels) of a tile, and its columns.
    rows: int
    cols: int
    stages: int
    registers: int | None
    #: Programs that share an image, tiles of each, whether these cover images and channels; the same for dx.
    splits: int
    tiles: int
    even: bool
    dx_splits: int
    dx_tiles: int
    dx_even: bool


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

    @property
    def partials(self) -> int:
        return self.runs * self.stride * self.parts


class HeldPlanes(NamedTuple):
    """Groups of planes that stay in one program's shared memory between the sums and dx."""

    #: Channels and columns of a piece, pieces of a group.
    rows: int
    cols: int
    down: int
    across: int
    #: Programs of a multiprocessor, and of them warps, registers of a thread, and bytes.
    each: int
    num_warps: int
    registers: int
    shared_bytes: int


class HeldRuns(NamedTuple):
    """Groups of planes, one run of memory each, that stay in one program's shared memory: its elements, those of an
    image for each thread, in powers of two, and in the ones before; channels at a time."""

    slot: int
    blocks: tuple[tuple[int, int], ...]
    together: int
    num_warps: int
    shared_bytes: int


class Tiling(NamedTuple):
    samples: int
    groups: int
    group_channels: int
    image: int
    images: Images
    #: Small tensors that go through a contiguous copy in the workspace, and where.
    packed: dict[str, int]
    #: Elements of a vector of 16 bytes.
    vector: int
    way: Rows | Whole | Shared | Twice | Split
    #: Instead, where there is so much shared memory and (runs apart) large tensors begin at multiples of 16 bytes.
    held: Held | HeldPlanes | HeldRuns | None
    #: Places in the workspace: sums [sample][piece or split][4][channel], of rows [program][2][column], of held pixels
    #: [run][stride][part][2][channel], of held planes and runs [sample][2][channel]; gathered ones; c1 and c2
    #: [sample][group][2]; words.
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
    in_32_bits = all(HELD_PIECES * rows * abs(step) < 2**31 for _, step in images.steps.values())
    units = vector // gcd(group_channels, vector)
    if best < HELD_FULL or not in_vectors or not in_32_bits or units > HELD_UNITS or image < HELD_PIECES * rows:
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


def _hold_planes(group_channels: int, image: int, size: int, images: Images) -> HeldPlanes | None:
    """Pieces that cover a group with as little beside it as can be, then those with the most channels."""
    vector = 16 // size
    steps = [step for pair in images.steps.values() for step in pair]
    in_vectors = all(step % vector == 0 for step in (image, *steps))
    in_32_bits = all(2 * group_channels * abs(step) < 2**31 for _, step in images.steps.values())
    if not in_vectors or not in_32_bits:
        return None
    for each, num_warps in HELD_PLANES:
        piece = num_warps * 32 * vector * HELD_PLANES_VECTORS
        shapes = [(1 << i, piece >> i) for i in range(16) if (piece >> i) * size >= HELD_PLANES_ROW]
        covers = [(rows, cols, -(-group_channels // rows), -(-image // cols)) for rows, cols in shapes]
        rows, cols, down, across = min(covers, key=lambda cover: (cover[2] * cover[3], -cover[0]))
        # With gamma, and what the sums of rows take on their way from warp to warp.
        shared_bytes = down * across * piece * size * 2 + down * rows * 4 + 640
        if each * (shared_bytes + 1024) <= SHARED_MEMORY:
            registers = min(255, 65536 // (each * num_warps * 32) // 8 * 8)  # of all that a multiprocessor has
            return HeldPlanes(rows, cols, down, across, each, num_warps, registers, shared_bytes)
    return None


def _hold_runs(group_channels: int, image: int, size: int, images: Images) -> HeldRuns | None:
    vector, steps = 16 // size, images.steps.values()
    in_vectors = all(step % vector == 0 for step in (image, *(outer for outer, _ in steps)))
    one_run = all(inner == image for _, inner in steps)
    if in_vectors or not one_run or image <= LARGEST_TINY_IMAGE:
        return None
    num_warps = 1 if image <= LARGEST_OF_A_WARP else 4
    blocks, slot = slot_of_runs((group_channels - 1) * image, image, 32 * num_warps, vector)
    shared_bytes = 2 * slot * size + 256  # and what sums take on their way from warp to warp
    if RUN_EACH * (shared_bytes + 1024) > SHARED_MEMORY:
        return None
    together = next(count for count in RUN_CHANNELS if group_channels % count == 0)
    return HeldRuns(slot, blocks, together, num_warps, shared_bytes)


def _as_rows(n: int, groups: int, channels: int, image: int, vector: int, images: Images) -> Rows | None:
    row = channels // groups * image
    in_vectors = row % vector == 0 and all(outer % vector == 0 for outer, _ in images.steps.values())
    contiguous = channels == 1 or all(inner == image for _, inner in images.steps.values())
    if images.pixels or groups > LARGEST_GRID or image > LARGEST_SMALL_IMAGE or not in_vectors or not contiguous:
        return None
    if not SHORTEST_ROW <= row <= LONGEST_WHOLE_ROW:
        return None
    cols = max(16, power_of_two(row))
    programs_of_one = programs_of_rows(cols, True)
    rows = programs_of_one.tile // cols
    tiles = -(-n // rows)
    programs = min(tiles, in_runs(tiles, -(-PROGRAMS_OF_ROWS // groups), 1))
    return Rows(rows, cols, programs, programs_of_one.num_warps)


def _whole(group_channels: int, image: int, size: int, pixels: bool) -> Whole | None:
    rows, cols = power_of_two(group_channels), max(16, power_of_two(image))
    if pixels:
        rows, cols = power_of_two(image), rows
    if rows * cols > LARGEST_WHOLE_GROUP or (pixels and group_channels * size < SHORTEST_RUN):
        return None
    return Whole(rows, cols, max(1, min(16, rows * cols // WHOLE_WARP)))


def _shared(groups: int, group_channels: int, image: int, size: int) -> Shared | None:
    rows, cols = _part_of_group(group_channels, image, PART_BYTES // size)
    pieces = -(-image // cols)
    parts = -(-group_channels // rows) * pieces
    if not FEWEST_PARTS[size] <= parts <= SHARING:
        return None
    even = image % cols == 0 and group_channels % rows == 0
    return Shared(rows, cols, even, pieces, parts, min(groups, SHARING // parts))


def _twice(group_channels: int, image: int, size: int) -> Twice | None:
    rows = power_of_two(group_channels)
    if 2 * group_channels * image * size > LARGEST_TWICE or rows > TWICE_TILE // 16:
        return None
    tile = max(TWICE_TILE, min(2 * TWICE_TILE, TWICE_RUN * rows))
    cols = min(max(16, power_of_two(image)), tile // rows)
    return Twice(rows, cols, group_channels % rows == 0 and image % cols == 0)


def _split(n: int, channels: int, image: int, pixels: bool, stages: int) -> Split:
    if pixels:
        cols = min(WIDEST_PIXELS, max(16, power_of_two(channels)))
        rows = (PIXEL_TILE if stages > 1 else ELEMENTWISE_PIXELS) // cols
    else:
        cols = min(LONGEST_RUN, max(16, power_of_two(image)))
        rows = min(power_of_two(channels), TILE // cols)
    registers = None if stages > 1 else ELEMENTWISE_REGISTERS
    length, width = (rows, cols) if pixels else (cols, rows)
    pieces, most = -(-image // length), MOST_TILES
    if pixels:
        most = max(FEWEST_PIXEL_TILES, min(MOST_PIXEL_TILES, pieces // PIXEL_SPLITS))
    # For dx as many programs as multiprocessors want, with as many tiles as that leaves each. Not so for the sums: a
    # sample's are the same in any batch.
    splits = -(-pieces // most)
    tiles = -(-pieces // splits)
    dx_tiles, dx_splits = _share(pieces, n * -(-channels // width), PROGRAMS, MOST_TILES)
    even, dx_even = (channels % width == 0 and image % (length * count) == 0 for count in (tiles, dx_tiles))
    return Split(rows, cols, stages, registers, splits, tiles, even, dx_splits, dx_tiles, dx_even)


def tile(call: Call, writes: tuple[str, ...]) -> Tiling:
    n, channels, image, groups, size = call.N, call.C, call.HxW, call.group, itemsize(call.input.dtype)
    check_length(call, max(channels, image))
    parts, wants_dx = Parts(), "gradInput" in writes
    names = ["gradOut", "input", *(["gradInput"] if wants_dx else [])]
    images = lay_out({name: call.values[name] for name in names}, n, channels, image, parts)
    group_channels, vector, pixels = channels // groups, 16 // size, images.pixels
    packed = {}
    for name, count in (
        ("mean", n * groups), ("rstd", n * groups), ("gamma", channels), ("gradGammaOut", channels),
        ("gradBetaOut", channels),
    ):  # fmt: skip
        desc = call.values[name]
        if desc is not None and (name in writes or not name.startswith("grad")) and row_step(desc, 1, count) is None:
            packed[name] = parts.take(count * itemsize(desc.dtype))
    stages = STAGES if all(step % 16 == 0 for steps in images.steps.values() for step in steps) else 1
    way: Rows | Whole | Shared | Twice | Split | None
    way = _as_rows(n, groups, channels, image, vector, images) or _whole(group_channels, image, size, pixels)
    if not way and not pixels and wants_dx and stages > 1:
        way = _shared(n * groups, group_channels, image, size) or _twice(group_channels, image, size)
    way = way or _split(n, channels, image, pixels, stages)
    held: Held | HeldPlanes | HeldRuns | None = None
    if wants_dx and not pixels:
        held = _hold_runs(group_channels, image, size, images)
        if not held and not isinstance(way, (Rows, Whole)):
            held = _hold_planes(group_channels, image, size, images)
    elif wants_dx and isinstance(way, Split):
        held = _hold(n, groups, group_channels, image, size, images)
    if isinstance(way, Rows):
        partials = parts.take(max(way.programs * image, n) * 2 * channels * 4)
        together = max(gathered_bytes(way.programs, 2 * channels * image, image), gathered_bytes(n, 2 * channels))
        gathered = parts.take(together)
    else:
        count = n * (way.splits if isinstance(way, Split) else way.pieces if isinstance(way, Shared) else 1)
        partial, together = count * 4 * channels * 4, gathered_bytes(count, 4 * channels)
        if isinstance(held, Held):
            partial = max(partial, held.partials * 2 * channels * 4)
            together = max(together, gathered_bytes(held.partials, 2 * channels))
        partials, gathered = parts.take(partial), parts.take(together)
    group_sums, words = parts.take(n * groups * 2 * 4), 0
    if isinstance(held, Held):
        words = n * held.blocks * held.parts * held.groups
    elif isinstance(way, Shared):
        words = n * groups * way.parts
    return Tiling(
        n, groups, group_channels, image, images, packed, vector, way, held, partials, gathered, group_sums,
        parts.take(words * 8), parts.bytes,
    )  # fmt: skip
