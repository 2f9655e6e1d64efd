"""GroupNorm backward of pixels that are read once, and held in shared memory between the sums and dx.

A sample's channels come in blocks of whole groups, its image in parts; as many programs as a block has parts share it,
and exchange the sums of their groups. 84 became 57 microseconds at 32 x 256 x 3136 in bfloat16.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from .._held import add_pairs, fetch, in_float32, pack, statistics, unpack
from .gpu_tiling import HELD_RUN

RUN = gl.constexpr(HELD_RUN)


def _spin(count: int) -> tuple[gl.constexpr, gl.constexpr]:
    """Assembly that reads so many words until none is empty, and its operands."""
    loads = "".join(f"ld.relaxed.gpu.global.b64 ${i}, [${count + i}];\n" for i in range(count))
    tests = "".join(f"setp.eq.s64 empty, ${i}, -1;\n@empty bra again;\n" for i in range(count))
    text = "{\n.reg .pred empty;\nagain:\n" + loads + tests + "}"
    return gl.constexpr(text), gl.constexpr(",".join(["=&l"] * count + ["l"] * count))


_SPIN, _OPERANDS = _spin(1)
_SPIN_2, _OPERANDS_2 = _spin(2)
_SPIN_4, _OPERANDS_4 = _spin(4)
_SPIN_8, _OPERANDS_8 = _spin(8)


@gluon.jit
def _wait(places, COUNT: gl.constexpr):
    """Words once others have written them; a thread looks at COUNT of its words together, 8 at most. COUNT 0: they are
    there."""
    at = places.to(gl.int64)
    if COUNT == 0:
        return gl.load(places)
    elif COUNT >= 8:  # noqa: RET505 (Gluon wants all branches to return)
        return gl.inline_asm_elementwise(_SPIN_8, _OPERANDS_8, [at], dtype=gl.int64, is_pure=False, pack=8)
    elif COUNT == 4:
        return gl.inline_asm_elementwise(_SPIN_4, _OPERANDS_4, [at], dtype=gl.int64, is_pure=False, pack=4)
    elif COUNT == 2:
        return gl.inline_asm_elementwise(_SPIN_2, _OPERANDS_2, [at], dtype=gl.int64, is_pure=False, pack=2)
    else:
        return gl.inline_asm_elementwise(_SPIN, _OPERANDS, [at], dtype=gl.int64, is_pure=False, pack=1)


@gluon.jit
def _piece(slots, slot, i, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Some rows of a tile."""
    return in_float32(slots.index(slot).slice(i * ROWS, ROWS, 0).load(LAYOUT))


@gluon.jit
def _inside(elements, channels, like, FULL: gl.constexpr):
    """A mask of a tile; FULL: all channels are."""
    if FULL:
        mask, _ = gl.broadcast(elements[:, None], like)
        return mask
    else:  # noqa: RET505
        return elements[:, None] & channels[None, :]


@gluon.jit
def _fetch_tiles(
    dy_slots, x_slots, index, dy_ptr, x_ptr, n, samples, stride, dy_n, x_n, dy_step, x_step, dy_at, x_at, at, here,
    image, start, AHEAD: gl.constexpr, COUNT: gl.constexpr, TILES: gl.constexpr, VECTOR: gl.constexpr,
    FULL: gl.constexpr, SAME: gl.constexpr,
):  # fmt: skip
    """COUNT tiles of both inputs into the slots from the index-th on: those AHEAD tiles after sample n's first. What
    lies outside the image, or is no sample, is zeros. SAME: the inputs have the same strides."""
    SLOTS: gl.constexpr = dy_slots.shape[0]
    LENGTH: gl.constexpr = dy_slots.shape[1]
    for i in gl.static_range(COUNT):
        slot, sample = (index + i) % SLOTS, n + (AHEAD + i) // TILES * stride
        place = start + (AHEAD + i) % TILES * LENGTH
        mask = _inside(at < gl.where(sample < samples, image - place, 0), here, dy_at, FULL)
        dy_from = (sample.to(gl.int64) * dy_n + place.to(gl.int64) * dy_step) * VECTOR
        fetch(dy_slots.index(slot), dy_ptr + dy_from + dy_at, mask)
        if SAME:
            fetch(x_slots.index(slot), x_ptr + dy_from + dy_at, mask)
        else:
            x_from = (sample.to(gl.int64) * x_n + place.to(gl.int64) * x_step) * VECTOR
            fetch(x_slots.index(slot), x_ptr + x_from + x_at, mask)
        async_copy.commit_group()


@gluon.jit
def _sums(
    dy_slots, x_slots, index, mean, rstd, gamma, at, left, LAYOUT: gl.constexpr, ROWS: gl.constexpr,
    TILES: gl.constexpr, EDGE: gl.constexpr, WEIGHED: gl.constexpr,
):  # fmt: skip
    """Sums of dy and dy * x_hat over a part's pieces, for each row and channel of a piece. EDGE: the part may leave the
    image, after `left` elements; WEIGHED: of gamma times dy instead. (Where there is no channel, all are zeros.)"""
    SLOTS: gl.constexpr = dy_slots.shape[0]
    PIECES: gl.constexpr = dy_slots.shape[1] // ROWS
    COLS: gl.constexpr = dy_slots.shape[2]
    a, b = gl.zeros([ROWS, COLS], gl.float32, LAYOUT), gl.zeros([ROWS, COLS], gl.float32, LAYOUT)
    for tile in range(TILES):
        slot = (index + tile) % SLOTS
        for i in gl.static_range(PIECES):
            dy = _piece(dy_slots, slot, i, ROWS, LAYOUT)
            x_hat = (_piece(x_slots, slot, i, ROWS, LAYOUT) - mean[None, :]) * rstd[None, :]
            if WEIGHED:
                dy *= gamma[None, :]
            if EDGE:
                there = (at < left - (tile * PIECES + i) * ROWS)[:, None]
                x_hat = gl.where(there, x_hat, 0.0)
                if WEIGHED:
                    dy = gl.where(there, dy, 0.0)
            a += dy
            b += dy * x_hat
    return a, b


@gluon.jit
def _spread(of_units, LAYOUT: gl.constexpr, UNIT: gl.constexpr, UNITS: gl.constexpr):
    """A number of each unit of channels to these."""
    COUNT: gl.constexpr = of_units.shape[0]
    t = gl.convert_layout(of_units, gl.SliceLayout(1, UNITS))[:, None] + gl.zeros([COUNT, UNIT], gl.float32, UNITS)
    return gl.convert_layout(gl.reshape(t, [COUNT * UNIT]), LAYOUT)


@gluon.jit
def _of_groups(a, b, is_of, UNIT: gl.constexpr):
    """Sums of pieces' rows and channels as sums of the block's groups; is_of: which unit of channels is of which."""
    ROWS: gl.constexpr = a.shape[0]
    COUNT: gl.constexpr = a.shape[1] // UNIT
    OF_UNITS: gl.constexpr = gl.SliceLayout(1, is_of.type.layout)
    a, b = gl.reduce((gl.reshape(a, [ROWS, COUNT, UNIT]), gl.reshape(b, [ROWS, COUNT, UNIT])), 2, add_pairs)
    a, b = gl.reduce((a, b), 0, add_pairs)
    a, b = gl.convert_layout(a, OF_UNITS)[:, None], gl.convert_layout(b, OF_UNITS)[:, None]
    return gl.reduce((gl.where(is_of, a, 0.0), gl.where(is_of, b, 0.0)), 0, add_pairs)


@gluon.jit
def _all_words(words_at, part, parts, is_of, GROUPS: gl.constexpr, PARTS: gl.constexpr, AWAITED: gl.constexpr):
    """Sums of the words of a block's parts, for each unit of channels."""
    G2: gl.constexpr = is_of.shape[1]
    WARPS: gl.constexpr = gl.num_warps()
    WORDS: gl.constexpr = gl.BlockedLayout([1, 1], [32 // G2, G2], [WARPS, 1], [1, 0])
    OF_GROUPS: gl.constexpr = gl.SliceLayout(0, is_of.type.layout)
    p = gl.arange(0, PARTS, layout=gl.SliceLayout(1, WORDS))[:, None]
    g = gl.arange(0, G2, layout=gl.SliceLayout(0, WORDS))[None, :]
    there = (p < parts) & (g < GROUPS)
    places = words_at + gl.where(there, p * GROUPS + g, part * GROUPS)
    a, b = unpack(_wait(places, max(1, PARTS * G2 // (32 * WARPS)) if AWAITED else 0))
    a, b = gl.reduce((gl.where(there, a, 0.0), gl.where(there, b, 0.0)), 0, add_pairs)
    a, b = gl.convert_layout(a, OF_GROUPS)[None, :], gl.convert_layout(b, OF_GROUPS)[None, :]
    return gl.reduce((gl.where(is_of, a, 0.0), gl.where(is_of, b, 0.0)), 1, add_pairs)


@gluon.jit
def _statistics(mean_ptr, rstd_ptr, n, samples, groups, group, there):
    """Of a sample's groups."""
    return statistics(mean_ptr, rstd_ptr, n.to(gl.int64) * groups + group, there & (n < samples))


@gluon.jit
def _write_run(place, channels, a, b, here):
    a, b = gl.reduce((a, b), 0, add_pairs)
    gl.store(place, a, mask=here)
    gl.store(place + channels, b, mask=here)


@gluon.jit
def hold(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, gamma_ptr, dx_ptr, words_ptr, partials_ptr, samples, stride, groups, blocks,
    block_lanes, image, share, parts, runs, dy_n, dy_step, x_n, x_step, dx_n, dx_step, HAS_W: gl.constexpr,
    SUMS: gl.constexpr, DX: gl.constexpr, GROUPS: gl.constexpr, WIDTH: gl.constexpr, UNIT: gl.constexpr,
    ROWS: gl.constexpr, COLS: gl.constexpr, PIECES: gl.constexpr, TILES: gl.constexpr, SLOTS: gl.constexpr,
    LAG: gl.constexpr, PARTS: gl.constexpr, VECTOR: gl.constexpr, FULL: gl.constexpr, SAME: gl.constexpr,
):  # fmt: skip
    """A part of the image of every stride-th sample, in some blocks of GROUPS groups of WIDTH channels. SUMS: the sums
    of its channels, and those of its groups as words; DX: with the words of the other parts dx, LAG turns later. A
    thread has UNIT channels after another of one group. FULL: blocks fill the tiles' columns. Strides are in vectors,
    for the compiler to see that they are."""
    WARPS: gl.constexpr = gl.num_warps()
    LENGTH: gl.constexpr = ROWS * PIECES
    THREADS: gl.constexpr = min(32, COLS // VECTOR)
    REST: gl.constexpr = 32 // THREADS
    G2: gl.constexpr = triton.next_power_of_2(GROUPS)
    LAGS: gl.constexpr = LAG if SUMS and DX else 0  # 1 at most: statistics are kept for one turn
    # A thread has VECTOR channels of a row, and their units; every warp has all channels, units and groups.
    TILE: gl.constexpr = gl.BlockedLayout([1, VECTOR], [REST, THREADS], [WARPS, 1], [1, 0])
    UNITS: gl.constexpr = gl.BlockedLayout([VECTOR // UNIT, UNIT], [THREADS, REST], [1, WARPS], [0, 1])
    PAIRS: gl.constexpr = gl.BlockedLayout([VECTOR // UNIT, max(1, G2 // REST)], [THREADS, REST], [1, WARPS], [0, 1])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    OF_CHANNELS: gl.constexpr = gl.SliceLayout(0, TILE)
    part, lane = gl.program_id(0) % parts, gl.program_id(0) // parts
    first, start = lane // block_lanes, part * (TILES * LENGTH)
    turns, left, channels = (samples - first + stride - 1) // stride, image - start, groups * WIDTH
    inner = gl.arange(0, COLS, layout=OF_CHANNELS)
    of_unit = gl.arange(0, COLS // UNIT, layout=gl.SliceLayout(1, PAIRS)) * UNIT // WIDTH
    g = gl.arange(0, G2, layout=gl.SliceLayout(0, PAIRS))
    is_of = of_unit[:, None] == g[None, :]
    at = gl.arange(0, ROWS, layout=gl.SliceLayout(1, TILE))
    tile_at = gl.arange(0, LENGTH, layout=gl.SliceLayout(1, TILE))
    dy_slots = gl.allocate_shared_memory(dy_ptr.dtype.element_ty, [SLOTS, LENGTH, COLS], PLAIN)
    x_slots = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [SLOTS, LENGTH, COLS], PLAIN)
    for block in range(lane % block_lanes, blocks, block_lanes):
        room = gl.minimum(GROUPS, groups - block * GROUPS)
        here, there = inner // VECTOR < room * WIDTH // VECTOR, of_unit < room
        channel, group = gl.multiple_of(block * (GROUPS * WIDTH), VECTOR) + inner, block * GROUPS + of_unit
        gamma = gl.full([COLS], 1.0, gl.float32, OF_CHANNELS)
        odd = part < 0
        if HAS_W:
            gamma = gl.load(gamma_ptr + channel, mask=here, other=0.0).to(gl.float32)
            odd = gl.sum((gamma - gamma != 0).to(gl.int32), 0) > 0  # then its sums are made term by term
        dy_at = tile_at[:, None] * (dy_step * VECTOR) + channel[None, :]
        x_at = tile_at[:, None] * (x_step * VECTOR) + channel[None, :]
        dx_at = at[:, None] * (dx_step * VECTOR) + channel[None, :]
        _fetch_tiles(
            dy_slots, x_slots, part * 0, dy_ptr, x_ptr, first, samples, stride, dy_n, x_n, dy_step, x_step, dy_at, x_at,
            tile_at, here, image, start, 0, SLOTS, TILES, VECTOR, FULL, SAME,
        )  # fmt: skip
        all_a, all_b = gl.zeros([ROWS, COLS], gl.float32, TILE), gl.zeros([ROWS, COLS], gl.float32, TILE)
        mean, rstd = _statistics(mean_ptr, rstd_ptr, first, samples, groups, group, there)
        # Values of their own: what begins as another variable's value, Triton does not take along from turn to turn.
        mean_before, rstd_before = gl.zeros_like(mean), gl.zeros_like(rstd)
        for turn in range(0, turns + LAGS):
            done, then = turn - LAGS, first + (turn + 1) * stride
            mean_then, rstd_then = mean, rstd
            # A turn before they are needed, if dx is made a turn later; where it is made at once, that was slower: 79
            # against 71 microseconds at 8 x 512 x 4096 in float32.
            if LAGS > 0:
                mean_then, rstd_then = _statistics(mean_ptr, rstd_ptr, then, samples, groups, group, there)
            if SUMS:  # noqa: SIM102 (the compiler knows it)
                if turn < turns:
                    n = (first + turn * stride).to(gl.int64)
                    if LAGS == 0:
                        mean, rstd = _statistics(mean_ptr, rstd_ptr, n, samples, groups, group, there)
                    m, r = _spread(mean, OF_CHANNELS, UNIT, UNITS), _spread(rstd, OF_CHANNELS, UNIT, UNITS)
                    slot = turn * TILES
                    async_copy.wait_group(SLOTS - (LAGS + 1) * TILES)
                    if left >= TILES * LENGTH:
                        a, b = _sums(dy_slots, x_slots, slot, m, r, gamma, at, left, TILE, ROWS, TILES, False, False)
                    else:
                        a, b = _sums(dy_slots, x_slots, slot, m, r, gamma, at, left, TILE, ROWS, TILES, True, False)
                    all_a += a
                    all_b += b
                    if (turn % RUN == RUN - 1) | (turn == turns - 1):
                        run = ((turn // RUN * stride + first) * parts + part).to(gl.int64)
                        _write_run(partials_ptr + run * (2 * channels) + channel, channels, all_a, all_b, here)
                        all_a, all_b = gl.zeros_like(a), gl.zeros_like(b)
                    if HAS_W:
                        if odd:
                            a, b = _sums(dy_slots, x_slots, slot, m, r, gamma, at, left, TILE, ROWS, TILES, True, True)
                        else:
                            a, b = a * gamma[None, :], b * gamma[None, :]
                    c1, c2 = _of_groups(a, b, is_of, UNIT)
                    word = words_ptr + ((n * blocks + block) * parts + part) * GROUPS + g
                    gl.store(word, pack(c1, c2), mask=g < GROUPS)
            if done >= 0:
                if DX:
                    n = (first + done * stride).to(gl.int64)
                    if LAGS == 0:
                        mean_before, rstd_before = _statistics(mean_ptr, rstd_ptr, n, samples, groups, group, there)
                    words_at = words_ptr + (n * blocks + block) * (parts * GROUPS)
                    c1, c2 = _all_words(words_at, part, parts, is_of, GROUPS, PARTS, SUMS)
                    m = _spread(mean_before, OF_CHANNELS, UNIT, UNITS)
                    r = _spread(rstd_before, OF_CHANNELS, UNIT, UNITS)
                    c1 = _spread(c1 * share, OF_CHANNELS, UNIT, UNITS)
                    c2 = _spread(c2 * share, OF_CHANNELS, UNIT, UNITS)
                    if not SUMS:
                        async_copy.wait_group(SLOTS - TILES)
                    for tile in range(TILES):
                        slot = (done * TILES + tile) % SLOTS
                        for i in gl.static_range(PIECES):
                            dy, x = _piece(dy_slots, slot, i, ROWS, TILE), _piece(x_slots, slot, i, ROWS, TILE)
                            x_hat = (x - m[None, :]) * r[None, :]
                            dx = r[None, :] * (dy * gamma[None, :] - c1[None, :] - x_hat * c2[None, :])
                            place = (tile * PIECES + i) * ROWS
                            dx_from = (n * dx_n + (start + place).to(gl.int64) * dx_step) * VECTOR
                            mask = _inside(at < left - place, here, dx_at, FULL)
                            gl.store(dx_ptr + dx_from + dx_at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
                _fetch_tiles(
                    dy_slots, x_slots, done * TILES, dy_ptr, x_ptr, first + done * stride, samples, stride, dy_n, x_n,
                    dy_step, x_step, dy_at, x_at, tile_at, here, image, start, SLOTS, TILES, TILES, VECTOR, FULL, SAME,
                )  # fmt: skip
            mean_before, rstd_before, mean, rstd = mean, rstd, mean_then, rstd_then
        async_copy.wait_group(0)
        if SUMS:  # noqa: SIM102
            if turns == (runs - 1) * RUN:  # others have a run more
                run = (((runs - 1) * stride + first) * parts + part).to(gl.int64)
                _write_run(partials_ptr + run * (2 * channels) + channel, channels, all_a, all_b, here)
