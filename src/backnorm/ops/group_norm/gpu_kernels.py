"""GroupNorm's Triton kernels: groups in registers, split, read twice by one program, and shared by some."""

from __future__ import annotations

import triton
import triton.language as tl

from .._exchange import add_pairs, both, pack, unpack, wait
from .._gpu import RUN, end_run


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
def whole_group(
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
def split_sums(
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
def sum_groups(
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
def split_dx(
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
def group_twice(
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
def shared(
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
