"""GroupNorm backward on a GPU, for planes (NCHW) and pixels (channels-last).

A group that fits one program's registers is read once; those of small images are LayerNorm's rows, which come in whole
vectors. Of larger groups of planes, some are read twice by one program, the second time from the caches, and others
once by programs that share them, as most pixels are. All else is read twice by all: sums of each channel, sums of each
group, dx.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import triton
import triton.language as tl

from ...datatypes import F32, DataType
from ...spec import Call
from .._exchange import add_pairs, both, pack, unpack, wait
from .._gpu import RUN, copy_images, end_run, exchange, finish_sums
from .._gpu import pack as copy_in
from .._gpu import unpack as copy_out
from .._launch import Launch, Pointer, in_vectors, pointer_to
from .._program import WORKSPACE
from .._tiles import TILES_OF_A_RUN, power_of_two
from ..layer_norm.gpu import rows_of_groups
from .gpu_held import hold
from .gpu_tiling import HELD_EACH, HELD_PIECES, HELD_REGISTERS, HELD_SLOTS, HELD_WARPS, Held, Tiling


@triton.jit
def _offsets(n, n_step, step, channel, at, PIXELS: tl.constexpr):
    """Of a tile of channels and elements of their image: pixels have an element's channels in a row, planes a
    channel's elements."""
    if PIXELS:
        return n * n_step + at[:, None].to(tl.int64) * step + channel[None, :]
    else:  # noqa: RET505 (Triton wants both branches to return)
        return n * n_step + channel[:, None].to(tl.int64) * step + at[None, :]


@triton.jit
def _along(of_channels, of_elements, PIXELS: tl.constexpr):
    """Two vectors, each along its axis of a tile."""
    if PIXELS:
        return of_channels[None, :], of_elements[:, None]
    else:  # noqa: RET505
        return of_channels[:, None], of_elements[None, :]


@triton.jit
def _place(program, across, splits, PIXELS: tl.constexpr):
    """Which sample, split and tile of channels a program has; neighbours have neighbouring memory."""
    inner = program % (across * splits)
    split = inner // across if PIXELS else inner % splits
    part = inner % across if PIXELS else inner // splits
    return (program // (across * splits)).to(tl.int64), split, part


@triton.jit
def _of_channels(ptr, index, there):
    return tl.load(ptr + index, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _load(ptr, offsets, mask, EVEN: tl.constexpr):
    """A tile; EVEN: all of it is inside, and no mask is looked at."""
    if EVEN:
        return tl.load(ptr + offsets).to(tl.float32)
    else:  # noqa: RET505
        return tl.load(ptr + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _whole_group(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, gamma_ptr, dx_ptr, partials_ptr, groups, group_channels, image, share, dy_n,
    dy_step, x_n, x_step, dx_n, dx_step, HAS_W: tl.constexpr, WANTS_DX: tl.constexpr, PIXELS: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """A group: the sums of its channels, and dx."""
    group = tl.program_id(0)
    n = (group // groups).to(tl.int64)
    inner, at = tl.arange(0, COLS if PIXELS else ROWS), tl.arange(0, ROWS if PIXELS else COLS)
    there = inner < group_channels
    channel = group % groups * group_channels + inner
    of_channels, of_elements = _along(there, at < image, PIXELS)
    mask = of_channels & of_elements
    mean, rstd = tl.load(mean_ptr + group).to(tl.float32), tl.load(rstd_ptr + group).to(tl.float32)
    dy = _load(dy_ptr, _offsets(n, dy_n, dy_step, channel, at, PIXELS), mask, False)
    x = _load(x_ptr, _offsets(n, x_n, x_step, channel, at, PIXELS), mask, False)
    x_hat = tl.where(mask, (x - mean) * rstd, 0.0)
    channels = groups * group_channels
    place = partials_ptr + n * 4 * channels + channel
    tl.store(place, tl.sum(dy, axis=0 if PIXELS else 1), mask=there)
    tl.store(place + channels, tl.sum(dy * x_hat, axis=0 if PIXELS else 1), mask=there)
    if WANTS_DX:
        wdy = dy
        if HAS_W:
            gamma, _ = _along(_of_channels(gamma_ptr, channel, there), at, PIXELS)
            wdy = tl.where(mask, dy * gamma, 0.0)
        c1 = tl.sum(tl.sum(wdy, axis=1), axis=0) * share
        c2 = tl.sum(tl.sum(wdy * x_hat, axis=1), axis=0) * share
        dx = rstd * (wdy - c1 - x_hat * c2)
        place = dx_ptr + _offsets(n, dx_n, dx_step, channel, at, PIXELS)
        tl.store(place, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _add_fours(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@triton.jit
def _sums(
    dy_ptr, x_ptr, n, dy_n, dy_step, x_n, x_step, channel, there, image, start, pieces, mean, rstd, gamma,
    PIXELS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
    LONG: tl.constexpr, WEIGHED: tl.constexpr,
):  # fmt: skip
    """Sums of dy and dy * x_hat of each channel over some pieces of its image; LONG: more than one run; WEIGHED: of
    gamma times dy instead."""
    LENGTH: tl.constexpr = ROWS if PIXELS else COLS
    a, b = tl.zeros([ROWS, COLS], tl.float32), tl.zeros([ROWS, COLS], tl.float32)
    all_a, all_b = a, b
    for piece in tl.range(start, start + pieces, num_stages=STAGES):
        at = piece * LENGTH + tl.arange(0, LENGTH)
        inside, image_inside = _along(there, at < image, PIXELS)
        mask = inside & image_inside
        dy = _load(dy_ptr, _offsets(n, dy_n, dy_step, channel, at, PIXELS), mask, EVEN)
        x = _load(x_ptr, _offsets(n, x_n, x_step, channel, at, PIXELS), mask, EVEN)
        x_hat = (x - mean) * rstd
        if WEIGHED:
            dy *= gamma
        if not EVEN:
            x_hat = tl.where(mask, x_hat, 0.0)
            if WEIGHED:
                dy = tl.where(mask, dy, 0.0)
        a += dy
        b += dy * x_hat
        if LONG:
            a, b, all_a, all_b = end_run(piece - start, a, b, all_a, all_b)
    if LONG:
        a += all_a
        b += all_b
    return tl.reduce((a, b), 0 if PIXELS else 1, add_pairs)


@triton.jit
def _all_sums(
    dy_ptr, x_ptr, n, dy_n, dy_step, x_n, x_step, channel, there, image, start, pieces, mean, rstd, gamma,
    HAS_W: tl.constexpr, PIXELS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """The sums, plain and weighed: gamma times the plain ones, or where gamma is not finite term by term."""
    m, _ = _along(mean, channel, PIXELS)
    r, _ = _along(rstd, channel, PIXELS)
    g, _ = _along(gamma, channel, PIXELS)
    s1, s2 = _sums(
        dy_ptr, x_ptr, n, dy_n, dy_step, x_n, x_step, channel, there, image, start, pieces, m, r, g, PIXELS, ROWS, COLS,
        STAGES, EVEN, LONG, False,
    )  # fmt: skip
    s3, s4 = s1, s2
    if HAS_W:
        s3, s4 = s1 * gamma, s2 * gamma
        if tl.sum((gamma - gamma != 0).to(tl.int32), axis=0) > 0:
            s3, s4 = _sums(
                dy_ptr, x_ptr, n, dy_n, dy_step, x_n, x_step, channel, there, image, start, pieces, m, r, g, PIXELS,
                ROWS, COLS, 1, EVEN, LONG, True,
            )  # fmt: skip
    return s1, s2, s3, s4


@triton.jit
def _split_sums(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, gamma_ptr, partials_ptr, groups, group_channels, image, splits, dy_n, dy_step,
    x_n, x_step, HAS_W: tl.constexpr, PIXELS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    EVEN: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """TILES tiles of some channels of a sample: sums of dy and dy * x_hat, plain and times gamma, of each channel."""
    channels = groups * group_channels
    WIDTH: tl.constexpr = COLS if PIXELS else ROWS
    n, split, part = _place(tl.program_id(0), tl.cdiv(channels, WIDTH), splits, PIXELS)
    channel = part * WIDTH + tl.arange(0, WIDTH)
    there = channel < channels
    group = n * groups + channel // group_channels
    mean, rstd = _of_channels(mean_ptr, group, there), _of_channels(rstd_ptr, group, there)
    gamma = _of_channels(gamma_ptr, channel, there) if HAS_W else rstd
    s1, s2, s3, s4 = _all_sums(
        dy_ptr, x_ptr, n, dy_n, dy_step, x_n, x_step, channel, there, image, split * TILES, TILES, mean, rstd, gamma,
        HAS_W, PIXELS, ROWS, COLS, STAGES, EVEN, TILES > RUN,
    )  # fmt: skip
    place = partials_ptr + (n * splits + split) * 4 * channels + channel
    tl.store(place, s1, mask=there)
    tl.store(place + channels, s2, mask=there)
    tl.store(place + 2 * channels, s3, mask=there)
    tl.store(place + 3 * channels, s4, mask=there)


@triton.jit
def _group_sums(
    partials_ptr, group_sums_ptr, groups, group_channels, share, splits, CHANNELS: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """c1 and c2 of a group."""
    group = tl.program_id(0)
    n = (group // groups).to(tl.int64)
    channels = groups * group_channels
    row = tl.arange(0, CHANNELS)
    a, b = tl.zeros([SPLITS, CHANNELS], tl.float64), tl.zeros([SPLITS, CHANNELS], tl.float64)
    for start in range(0, splits, SPLITS):
        split = start + tl.arange(0, SPLITS)
        mask = (split < splits)[:, None] & (row < group_channels)[None, :]
        place = partials_ptr + (n * splits + split[:, None]) * 4 * channels
        place += 2 * channels + group % groups * group_channels + row[None, :]
        a += tl.load(place, mask=mask, other=0.0)
        b += tl.load(place + channels, mask=mask, other=0.0)
    tl.store(group_sums_ptr + 2 * group, (tl.sum(tl.sum(a, axis=1), axis=0) * share).to(tl.float32))
    tl.store(group_sums_ptr + 2 * group + 1, (tl.sum(tl.sum(b, axis=1), axis=0) * share).to(tl.float32))


@triton.jit
def _make_dx(
    dy_ptr, x_ptr, dx_ptr, n, dy_n, dy_step, x_n, x_step, dx_n, dx_step, channel, there, image, start, pieces, mean,
    rstd, gamma, c1, c2, HAS_W: tl.constexpr, PIXELS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """dx of some pieces of an image, the last first. Nobody reads them again."""
    LENGTH: tl.constexpr = ROWS if PIXELS else COLS
    m, _ = _along(mean, channel, PIXELS)
    r, _ = _along(rstd, channel, PIXELS)
    g, _ = _along(gamma, channel, PIXELS)
    u, _ = _along(c1, channel, PIXELS)
    v, _ = _along(c2, channel, PIXELS)
    for piece in tl.range(0, pieces):
        at = (start + pieces - 1 - piece) * LENGTH + tl.arange(0, LENGTH)
        inside, image_inside = _along(there, at < image, PIXELS)
        mask = inside & image_inside
        dy_at, x_at = _offsets(n, dy_n, dy_step, channel, at, PIXELS), _offsets(n, x_n, x_step, channel, at, PIXELS)
        dx_at = dx_ptr + _offsets(n, dx_n, dx_step, channel, at, PIXELS)
        if EVEN:
            dy = tl.load(dy_ptr + dy_at, eviction_policy="evict_first").to(tl.float32)
            x = tl.load(x_ptr + x_at, eviction_policy="evict_first").to(tl.float32)
        else:
            dy = tl.load(dy_ptr + dy_at, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            x = tl.load(x_ptr + x_at, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if HAS_W:
            dy *= g
        dx = (r * (dy - u - (x - m) * r * v)).to(dx_ptr.dtype.element_ty)
        if EVEN:
            tl.store(dx_at, dx, eviction_policy="evict_first")
        else:
            tl.store(dx_at, dx, mask=mask, eviction_policy="evict_first")


@triton.jit
def _split_dx(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, gamma_ptr, dx_ptr, group_sums_ptr, groups, group_channels, image, splits, dy_n,
    dy_step, x_n, x_step, dx_n, dx_step, HAS_W: tl.constexpr, PIXELS: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, EVEN: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """dx of TILES tiles of some channels of a sample. Those that were summed last come first: the L2 cache still has
    them."""
    channels = groups * group_channels
    WIDTH: tl.constexpr = COLS if PIXELS else ROWS
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    n, split, part = _place(program, tl.cdiv(channels, WIDTH), splits, PIXELS)
    channel = part * WIDTH + tl.arange(0, WIDTH)
    there = channel < channels
    group = n * groups + channel // group_channels
    mean, rstd = _of_channels(mean_ptr, group, there), _of_channels(rstd_ptr, group, there)
    gamma = _of_channels(gamma_ptr, channel, there) if HAS_W else rstd
    c1 = _of_channels(group_sums_ptr, 2 * group, there)
    c2 = _of_channels(group_sums_ptr, 2 * group + 1, there)
    _make_dx(
        dy_ptr, x_ptr, dx_ptr, n, dy_n, dy_step, x_n, x_step, dx_n, dx_step, channel, there, image, split * TILES,
        TILES, mean, rstd, gamma, c1, c2, HAS_W, PIXELS, ROWS, COLS, EVEN,
    )  # fmt: skip


@triton.jit
def _group_twice(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, gamma_ptr, dx_ptr, partials_ptr, groups, group_channels, image, share, dy_n,
    dy_step, x_n, x_step, dx_n, dx_step, HAS_W: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """A group of planes: the sums of its channels, then dx; what was read last is read again first, since the caches
    still have it. LONG: an image is more pieces than one run."""
    channels, pieces = groups * group_channels, tl.cdiv(image, COLS)
    group = tl.program_id(0)
    n, inner = (group // groups).to(tl.int64), tl.arange(0, ROWS)
    channel, there = group % groups * group_channels + inner, inner < group_channels
    mean, rstd = _of_channels(mean_ptr, group + inner * 0, there), _of_channels(rstd_ptr, group + inner * 0, there)
    gamma = _of_channels(gamma_ptr, channel, there) if HAS_W else rstd
    s1, s2, s3, s4 = _all_sums(
        dy_ptr, x_ptr, n, dy_n, dy_step, x_n, x_step, channel, there, image, group * 0, pieces, mean, rstd, gamma,
        HAS_W, False,
        ROWS, COLS, STAGES, EVEN, LONG,
    )  # fmt: skip
    place = partials_ptr + n * 4 * channels + channel
    tl.store(place, s1, mask=there)
    tl.store(place + channels, s2, mask=there)
    c1, c2 = tl.zeros([ROWS], tl.float32) + tl.sum(s3, axis=0) * share, tl.sum(s4, axis=0) * share
    _make_dx(
        dy_ptr, x_ptr, dx_ptr, n, dy_n, dy_step, x_n, x_step, dx_n, dx_step, channel, there, image, 0, pieces, mean,
        rstd, gamma, c1, c2 + tl.zeros([ROWS], tl.float32), HAS_W, False, ROWS, COLS, EVEN,
    )  # fmt: skip


@triton.jit
def _shared(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, gamma_ptr, dx_ptr, words_ptr, partials_ptr, count, lanes, groups, group_channels,
    image, share, pieces, parts, dy_n, dy_c, x_n, x_c, dx_n, dx_c, HAS_W: tl.constexpr, SUMS: tl.constexpr,
    DX: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A part of every lanes-th group of planes. SUMS: the sums of its channels, and those of the part as a word; DX:
    with the words of the group's other parts dx. Where there are both, dx is made a turn later, of what stayed in
    registers. EVEN: parts cover the groups without a rest."""
    LAGS: tl.constexpr = SUMS and DX
    part, lane = tl.program_id(0) % parts, tl.program_id(0) // parts
    lag = lanes if LAGS else 0
    row, at = part // pieces * ROWS + tl.arange(0, ROWS), part % pieces * COLS + tl.arange(0, COLS)
    here, every = row < group_channels, tl.arange(0, PARTS)
    keep = tl.full([ROWS, COLS], 1, tl.int32) > 0 if EVEN else here[:, None] & (at < image)[None, :]
    channels = groups * group_channels
    dy_before = tl.zeros([ROWS, COLS], dy_ptr.dtype.element_ty)
    x_before = tl.zeros([ROWS, COLS], x_ptr.dtype.element_ty)
    mean_before, rstd_before, gamma_before = 0.0, 0.0, tl.zeros([ROWS], tl.float32)
    for turn in tl.range(lane, count + lag, lanes, num_stages=STAGES):
        group = tl.cast(turn, tl.int64)
        done = group - lag
        inside, finishes = group < count, done >= 0
        n, channel = group // groups, group % groups * group_channels + row
        dy = tl.load(dy_ptr + _offsets(n, dy_n, dy_c, channel, at, False), mask=both(keep, inside), other=0.0)
        x = tl.load(x_ptr + _offsets(n, x_n, x_c, channel, at, False), mask=both(keep, inside), other=0.0)
        mean = tl.load(mean_ptr + group, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + group, mask=inside, other=0.0).to(tl.float32)
        gamma = tl.full([ROWS], 1.0, tl.float32)
        if HAS_W:
            gamma = _of_channels(gamma_ptr, channel, both(here, inside))
        if SUMS:
            f = dy.to(tl.float32)
            x_hat = tl.where(keep, (x.to(tl.float32) - mean) * rstd, 0.0)
            if HAS_W:
                wdy = tl.where(keep, f * gamma[:, None], 0.0)
                s1, s2, s3, s4 = tl.reduce((f, f * x_hat, wdy, wdy * x_hat), 1, _add_fours)
            else:
                s1, s2 = tl.reduce((f, f * x_hat), 1, add_pairs)
                s3, s4 = s1, s2
            place = partials_ptr + (n * pieces + part % pieces) * 4 * channels + channel
            tl.store(place, s1, mask=both(here, inside))
            tl.store(place + channels, s2, mask=both(here, inside))
            c1, c2 = tl.reduce((s3, s4), 0, add_pairs)
            tl.store(words_ptr + group * parts + part, pack(c1, c2), mask=inside)
        if not LAGS:
            dy_before, x_before, mean_before, rstd_before, gamma_before = dy, x, mean, rstd, gamma
        if DX:
            there = both(every < parts, finishes)
            place = tl.where(there, done * parts + every, lane * parts + part)
            a, b = unpack(wait(words_ptr, place, LAGS))
            a, b = tl.reduce((tl.where(there, a, 0.0), tl.where(there, b, 0.0)), 0, add_pairs)
            wdy = dy_before.to(tl.float32) * gamma_before[:, None]
            x_hat = (x_before.to(tl.float32) - mean_before) * rstd_before
            dx = (rstd_before * (wdy - a * share - x_hat * (b * share))).to(dx_ptr.dtype.element_ty)
            channel = done % groups * group_channels + row
            place = dx_ptr + _offsets(done // groups, dx_n, dx_c, channel, at, False)
            tl.store(place, dx, mask=both(keep, finishes))
        if LAGS:
            dy_before, x_before, mean_before, rstd_before, gamma_before = dy, x, mean, rstd, gamma


def _hold(
    tiling: Tiling, held: Held, pointers: tuple[Pointer, ...], gathered: Pointer, dgamma: Pointer | None,
    dbeta: Pointer | None, has_w: bool, share: float, otherwise: list[Launch],
) -> list[Launch]:  # fmt: skip
    """Pixels in shared memory, or where addresses are no multiples of 16 these other launches."""
    n, groups, width, channels = tiling.samples, tiling.groups, tiling.group_channels, tiling.channels
    *_, words, partials = pointers
    steps = [tiling.images.steps[name] for name in ("gradOut", "input", "gradInput")]
    numbers = (
        *pointers, n, held.stride, groups, held.blocks, held.lanes, tiling.image, share, held.parts, held.runs,
        *[step // tiling.vector for pair in steps for step in pair],
    )  # fmt: skip

    def launch(SUMS: bool, DX: bool) -> Launch:
        constants = {
            "HAS_W": has_w, "SUMS": SUMS, "DX": DX, "GROUPS": held.groups, "WIDTH": width,
            "UNIT": gcd(width, tiling.vector), "ROWS": held.rows, "COLS": held.cols, "PIECES": HELD_PIECES,
            "TILES": held.tiles, "SLOTS": HELD_SLOTS, "LAG": held.lag, "PARTS": power_of_two(held.parts),
            "VECTOR": tiling.vector, "FULL": held.groups * width == held.cols and groups % held.groups == 0,
            "SAME": steps[0] == steps[1],
        }  # fmt: skip
        grid = (held.stride * held.lanes * held.parts,)
        return Launch(hold, grid, numbers, constants, HELD_WARPS, registers=HELD_REGISTERS, each=HELD_EACH)

    apart = [launch(SUMS=True, DX=False), launch(SUMS=False, DX=True)]
    kernels = exchange(words, n * held.blocks * held.parts * held.groups, launch(SUMS=True, DX=True), apart)
    if dgamma or dbeta:
        count = held.runs * held.stride * held.parts
        kernels += finish_sums(partials, gathered, count, 2 * channels, channels, channels, dbeta, None, dgamma)
    return in_vectors(kernels, otherwise)


def launches(tiling: Tiling, call: Call, writes: tuple[str, ...]) -> list[Launch]:
    images, channels, values = tiling.images, tiling.channels, call.values
    n, groups, width, hw = tiling.samples, tiling.groups, tiling.group_channels, tiling.image
    shape = (n, channels, hw)

    def pointer(name: str) -> Pointer:
        return pointer_to(name, values[name], images.packed, tiling.packed)

    steps: list[Launch] = []
    for name in images.packed:
        if name != "gradInput":
            steps += copy_images(name, values[name], images, shape, True)
    for name in tiling.packed:
        if name not in writes:
            steps += copy_in(name, values[name], tiling.packed[name])
    has_w, wants_dx = values["gamma"] is not None, "gradInput" in writes
    dy, x, mean, rstd = (pointer(name) for name in ("gradOut", "input", "mean", "rstd"))
    gamma, dx = pointer("gamma") if has_w else mean, pointer("gradInput") if wants_dx else x
    partials, group_sums = Pointer(WORKSPACE, tiling.partials, F32), Pointer(WORKSPACE, tiling.group_sums, F32)
    inputs, in_steps = (dy, x, mean, rstd, gamma), (*images.steps["gradOut"], *images.steps["input"])
    out_steps = images.steps["gradInput"] if wants_dx else (0, 0)
    rows, cols, share = tiling.tile_rows, tiling.tile_cols, 1.0 / (width * hw)
    dgamma, dbeta = (pointer(name) if name in writes else None for name in ("gradGammaOut", "gradBetaOut"))
    gathered, words = Pointer(WORKSPACE, tiling.gathered, F32), Pointer(WORKSPACE, tiling.words, DataType.INT64)
    kernels: list[Launch] = []
    numbers: tuple[Any, ...]
    if tiling.as_rows:
        constants: dict[str, Any] = {
            "HAS_W": has_w, "WANTS_DX": wants_dx, "COLUMNS": len(writes) > wants_dx, "ROWS": rows, "COLS": cols,
            "PROGRAMS": tiling.splits, "STAGES": tiling.stages, "EVEN": n % rows == 0 and width * hw == cols,
            "VECTOR": tiling.vector,
        }  # fmt: skip
        numbers = (*inputs, dx, partials, n, width * hw, *in_steps[::2], out_steps[0], groups, hw)
        kernels.append(Launch(rows_of_groups, (tiling.splits, groups), numbers, constants, tiling.num_warps))
    elif tiling.whole:
        kernels.append(
            Launch(
                _whole_group, (n * groups,), (*inputs, dx, partials, groups, width, hw, share, *in_steps, *out_steps),
                {"HAS_W": has_w, "WANTS_DX": wants_dx, "PIXELS": images.pixels, "ROWS": rows, "COLS": cols},
                tiling.num_warps,
            )
        )  # fmt: skip
    elif tiling.parts:
        parts = tiling.parts
        numbers = (
            *inputs, dx, words, partials, n * groups, tiling.lanes, groups, width, hw, share, tiling.splits, parts,
            *in_steps, *out_steps,
        )  # fmt: skip

        def shared(SUMS: bool, DX: bool) -> Launch:
            constants = {
                "HAS_W": has_w, "SUMS": SUMS, "DX": DX, "ROWS": rows, "COLS": cols, "PARTS": power_of_two(parts),
                "EVEN": tiling.even, "STAGES": tiling.stages,
            }  # fmt: skip
            return Launch(_shared, (tiling.lanes * parts,), numbers, constants, tiling.num_warps)

        apart = [shared(SUMS=True, DX=False), shared(SUMS=False, DX=True)]
        kernels += exchange(words, n * groups * parts, shared(SUMS=True, DX=True), apart)
    elif tiling.twice:
        constants = {"HAS_W": has_w, "ROWS": rows, "COLS": cols, "EVEN": tiling.even, "STAGES": tiling.stages}
        constants["LONG"] = -(-hw // cols) > TILES_OF_A_RUN
        numbers = (*inputs, dx, partials, groups, width, hw, share, *in_steps, *out_steps)
        kernels.append(Launch(_group_twice, (n * groups,), numbers, constants, tiling.num_warps))
    else:
        across = -(-channels // (cols if images.pixels else rows))
        sizes = {"HAS_W": has_w, "PIXELS": images.pixels, "ROWS": rows, "COLS": cols}
        numbers = (*inputs, partials, groups, width, hw, tiling.splits, *in_steps)
        constants = {**sizes, "EVEN": tiling.even, "TILES": tiling.tiles, "STAGES": tiling.stages}
        kernels.append(Launch(_split_sums, (n * tiling.splits * across,), numbers, constants, tiling.num_warps))
        if wants_dx:
            summed = {"CHANNELS": power_of_two(width), "SPLITS": max(1, min(16, 1024 // power_of_two(width)))}
            numbers = (partials, group_sums, groups, width, share, tiling.splits)
            kernels.append(Launch(_group_sums, (n * groups,), numbers, summed, 1))
            numbers = (*inputs, dx, group_sums, groups, width, hw, tiling.dx_splits, *in_steps, *out_steps)
            constants = {**sizes, "EVEN": tiling.dx_even, "TILES": tiling.dx_tiles}
            grid = (n * tiling.dx_splits * across,)
            kernels.append(Launch(_split_dx, grid, numbers, constants, tiling.num_warps))
    if dgamma or dbeta:
        all_columns = channels * hw
        if tiling.as_rows:
            kernels += finish_sums(
                partials, gathered, tiling.splits, 2 * all_columns, all_columns, channels, dgamma, None, dbeta,
                inner=hw, inner_step=1, col_step=hw,
            )  # fmt: skip
        else:
            kernels += finish_sums(
                partials, gathered, n * tiling.splits, 4 * channels, channels, channels, dbeta, None, dgamma
            )
    if tiling.held:
        kernels = _hold(
            tiling, tiling.held, (*inputs, dx, words, partials), gathered, dgamma, dbeta, has_w, share, kernels
        )
    steps += kernels
    if "gradInput" in images.packed:
        steps += copy_images("gradInput", values["gradInput"], images, shape, False)
    for name in writes:
        if name in tiling.packed:
            steps += copy_out(name, values[name], tiling.packed[name])
    return steps
