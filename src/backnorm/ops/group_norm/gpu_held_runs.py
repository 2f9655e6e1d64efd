"""GroupNorm backward of planes that do not begin on 16 bytes, as those of 15 x 15, or of 14 x 14 in 16 bits.

Where a group of them is one run of memory, a program copies that to shared memory in whole vectors, reads it from there
channel by channel, element by element, and writes dx in its place.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from .._held import (
    add_pairs,
    columns_layout,
    each_in_float32,
    fetch_run,
    places_of,
    read_at,
    shift_of,
    statistics,
    write_at,
    write_run,
)


@gluon.jit
def _sums(slots, dy_from, x_from, mean, rstd, factor, image, places, BLOCKS: gl.constexpr, TERMS: gl.constexpr):
    """Of a channel's dy and dy * x_hat. TERMS: of dy times a factor."""
    THREADS: gl.constexpr = 32 * gl.num_warps()
    OF_COLS: gl.constexpr = gl.SliceLayout(0, columns_layout(1, gl.num_warps()))
    a, b = gl.zeros([THREADS], gl.float32, OF_COLS), gl.zeros([THREADS], gl.float32, OF_COLS)
    for block in gl.static_range(len(BLOCKS)):
        before = BLOCKS[block][1] * THREADS
        dy = each_in_float32(read_at(slots[0], 0, dy_from + before, places[block]))
        x_hat = (each_in_float32(read_at(slots[1], 0, x_from + before, places[block])) - mean) * rstd
        if TERMS:
            dy *= factor
        if block == len(BLOCKS) - 1:
            dy = gl.where(before + places[block] < image, dy, 0.0)
            x_hat = gl.where(before + places[block] < image, x_hat, 0.0)
        s1, s2 = gl.reduce((dy, dy * x_hat), 0, add_pairs)
        a += gl.convert_layout(s1, OF_COLS)
        b += gl.convert_layout(s2, OF_COLS)
    return gl.reduce((a, b), 0, add_pairs)


@gluon.jit
def _write_dx(
    slots, dy_from, x_from, dx_ptr, dx_at, gamma_ptr, mean, rstd, m1, m2, image, places, HAS_W: gl.constexpr,
    WIDTH: gl.constexpr, BLOCKS: gl.constexpr, TOGETHER: gl.constexpr, IN_PLACE: gl.constexpr,
):  # fmt: skip
    """dx of a group, to where dy is in shared memory or straight to its own place."""
    THREADS: gl.constexpr = 32 * gl.num_warps()
    for start in range(0, WIDTH, TOGETHER):
        for i in gl.static_range(TOGETHER):
            gamma = 1.0
            if HAS_W:
                gamma = gl.load(gamma_ptr + start + i).to(gl.float32)
            for block in gl.static_range(len(BLOCKS)):
                at = (start + i) * image + BLOCKS[block][1] * THREADS
                inside = BLOCKS[block][1] * THREADS + places[block] < image
                dy = read_at(slots[0], 0, dy_from + at, places[block])
                x_hat = (each_in_float32(read_at(slots[1], 0, x_from + at, places[block])) - mean) * rstd
                dx = (rstd * (each_in_float32(dy) * gamma - m1 - x_hat * m2)).to(dx_ptr.dtype.element_ty)
                if IN_PLACE:  # what lies behind the image is the next one's, and stays
                    if block == len(BLOCKS) - 1:
                        dx = gl.where(inside, dx, dy)
                    write_at(slots[0], 0, dy_from + at, places[block], dx)
                else:
                    gl.store(dx_ptr + dx_at + at + places[block], dx, mask=inside)


@gluon.jit
def hold_runs(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, gamma_ptr, dx_ptr, partials_ptr, groups, image, share, dy_n, x_n, dx_n,
    HAS_W: gl.constexpr, WIDTH: gl.constexpr, LANES: gl.constexpr, BLOCKS: gl.constexpr, SLOT: gl.constexpr,
    TOGETHER: gl.constexpr,
):  # fmt: skip
    """A group of WIDTH channels, TOGETHER of them at a time. An image is in BLOCKS: how many elements for each thread,
    and in the blocks before."""
    WARPS: gl.constexpr = gl.num_warps()
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dys = gl.allocate_shared_memory(dy_ptr.dtype.element_ty, [1, SLOT], FLAT)
    xs = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [1, SLOT], FLAT)
    group = gl.program_id(0)
    n, channel, count = (group // groups).to(gl.int64), group % groups * WIDTH, WIDTH * image
    first = channel.to(gl.int64) * image
    dy_at, x_at, dx_at = n * dy_n + first, n * x_n + first, n * dx_n + first
    fetch_run(dys, 0, dy_ptr, dy_at, count)
    fetch_run(xs, 0, x_ptr, x_at, count)
    async_copy.commit_group()
    mean, rstd = statistics(mean_ptr, rstd_ptr, group, group >= 0)
    OF_CHANNELS: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    inner, gammas = gl.arange(0, LANES, layout=OF_CHANNELS), gl.full([LANES], 1.0, gl.float32, OF_CHANNELS)
    if HAS_W:
        gammas = gl.load(gamma_ptr + channel + inner, mask=inner < WIDTH, other=0.0).to(gl.float32)
    dy_from, x_from, dx_from = shift_of(dy_ptr, dy_at), shift_of(x_ptr, x_at), shift_of(dx_ptr, dx_at)
    slots, places = (dys, xs), places_of(BLOCKS)
    async_copy.wait_group(0)
    s1, s2 = gl.zeros([LANES], gl.float32, OF_CHANNELS), gl.zeros([LANES], gl.float32, OF_CHANNELS)
    for start in range(0, WIDTH, TOGETHER):
        for i in gl.static_range(TOGETHER):
            at = (start + i) * image
            a, b = _sums(slots, dy_from + at, x_from + at, mean, rstd, 1.0, image, places, BLOCKS, False)
            s1, s2 = gl.where(inner == start + i, a, s1), gl.where(inner == start + i, b, s2)
    to_sums = partials_ptr + n * 2 * groups * WIDTH + channel + inner
    gl.store(to_sums, s1, mask=inner < WIDTH)
    gl.store(to_sums + groups * WIDTH, s2, mask=inner < WIDTH)
    if HAS_W:
        s1, s2 = s1 * gammas, s2 * gammas
        if gl.sum((gammas - gammas != 0).to(gl.int32), 0) > 0:  # not finite: term by term
            for c in range(WIDTH):
                gamma = gl.load(gamma_ptr + channel + c).to(gl.float32)
                at = c * image
                a, b = _sums(slots, dy_from + at, x_from + at, mean, rstd, gamma, image, places, BLOCKS, True)
                s1, s2 = gl.where(inner == c, a, s1), gl.where(inner == c, b, s2)
    m1, m2 = gl.reduce((s1, s2), 0, add_pairs)
    m1, m2 = m1 * share, m2 * share
    if dx_from == dy_from:
        _write_dx(
            slots, dy_from, x_from, dx_ptr, dx_at, gamma_ptr + channel, mean, rstd, m1, m2, image, places, HAS_W,
            WIDTH, BLOCKS, TOGETHER, True,
        )  # fmt: skip
        write_run(dys, 0, dx_ptr, dx_at, count)
    else:
        _write_dx(
            slots, dy_from, x_from, dx_ptr, dx_at, gamma_ptr + channel, mean, rstd, m1, m2, image, places, HAS_W,
            WIDTH, BLOCKS, TOGETHER, False,
        )  # fmt: skip
