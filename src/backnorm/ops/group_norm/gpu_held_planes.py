"""GroupNorm backward of planes whose groups fit shared memory: read once, and held there between the sums and dx.

A program has a whole group, in pieces, and needs nobody's sums. While dx of one is written, the next group's pieces
take its place, and where others run on the same multiprocessor, these take turns in waiting for memory. 58 became 48
microseconds at 32 x 256 x 3136 in bfloat16.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from .._held import add_pairs, fetch, in_float32, statistics


@gluon.jit
def _fetch_piece(
    slots, piece, dy_ptr, x_ptr, group, count, groups, dy_n, dy_c, x_n, x_c, row, at, image, WIDTH: gl.constexpr,
    ACROSS: gl.constexpr, VECTOR: gl.constexpr,
):  # fmt: skip
    """A piece of both inputs into its slot. What lies outside of the group, or is none, is zeros."""
    dy_slots, x_slots = slots
    ROWS: gl.constexpr = dy_slots.shape[1]
    COLS: gl.constexpr = dy_slots.shape[2]
    n, first = (group // groups).to(gl.int64), (group % groups * WIDTH).to(gl.int64)
    inner, col = piece // ACROSS * ROWS + row, piece % ACROSS * COLS + at
    inside = (inner < gl.where(group < count, WIDTH, 0))[:, None] & (col // VECTOR < image // VECTOR)[None, :]
    dy_from, x_from = (n * dy_n + first * dy_c) * VECTOR, (n * x_n + first * x_c) * VECTOR
    fetch(dy_slots.index(piece), dy_ptr + dy_from + (inner[:, None] * (dy_c * VECTOR) + col[None, :]), inside)
    fetch(x_slots.index(piece), x_ptr + x_from + (inner[:, None] * (x_c * VECTOR) + col[None, :]), inside)
    async_copy.commit_group()


@gluon.jit
def _terms(slots, piece, mean, rstd, LAYOUT: gl.constexpr):
    """dy and x_hat of a piece."""
    dy_slots, x_slots = slots
    dy, x = in_float32(dy_slots.index(piece).load(LAYOUT)), in_float32(x_slots.index(piece).load(LAYOUT))
    return dy, (x - mean) * rstd


@gluon.jit
def _add_pieces(slots, a, b, start, mean, rstd, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """To the sums of dy and dy * x_hat, those of some pieces."""
    for i in range(COUNT):
        dy, x_hat = _terms(slots, start + i, mean, rstd, LAYOUT)
        a += dy
        b += dy * x_hat
    return a, b


@gluon.jit
def hold_planes(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, gamma_ptr, dx_ptr, partials_ptr, count, groups, image, share, dy_n, dy_c, x_n,
    x_c, dx_n, dx_c, HAS_W: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr,
    DOWN: gl.constexpr, ACROSS: gl.constexpr, VECTOR: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """Some groups of WIDTH channels: the sums of their channels, and dx. A group is DOWN times ACROSS pieces of ROWS
    channels and COLS elements of their image; EVEN: these end with the image. Strides are in vectors, for the compiler
    to see that they are."""
    WARPS: gl.constexpr = gl.num_warps()
    PIECES: gl.constexpr = DOWN * ACROSS
    # Pieces that are waited for first; the others come while these are added up.
    FIRST: gl.constexpr = DOWN // 2 * ACROSS if DOWN > 1 else ACROSS // 2
    THREADS: gl.constexpr = min(32, COLS // VECTOR)
    WARPS_ACROSS: gl.constexpr = min(WARPS, COLS // (VECTOR * THREADS))
    TILE: gl.constexpr = gl.BlockedLayout(
        [1, VECTOR], [32 // THREADS, THREADS], [WARPS // WARPS_ACROSS, WARPS_ACROSS], [1, 0]
    )
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, TILE)
    row, at = gl.arange(0, ROWS, layout=OF_ROWS), gl.arange(0, COLS, layout=gl.SliceLayout(0, TILE))
    dy_slots = gl.allocate_shared_memory(dy_ptr.dtype.element_ty, [PIECES, ROWS, COLS], PLAIN)
    x_slots = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [PIECES, ROWS, COLS], PLAIN)
    gammas = gl.allocate_shared_memory(gl.float32, [DOWN, ROWS], FLAT)
    slots, last = (dy_slots, x_slots), ((ACROSS - 1) * COLS + at < image)[None, :]
    first, step, channels = gl.program_id(0), gl.num_programs(0), groups * WIDTH
    for piece in range(PIECES):
        _fetch_piece(
            slots, piece, dy_ptr, x_ptr, first, count, groups, dy_n, dy_c, x_n, x_c, row, at, image, WIDTH, ACROSS,
            VECTOR,
        )  # fmt: skip
    mean, rstd = statistics(mean_ptr, rstd_ptr, first, first < count)
    for group in range(first, count, step):
        n, channel = (group // groups).to(gl.int64), group % groups * WIDTH
        c1, c2 = gl.zeros([ROWS], gl.float32, OF_ROWS), gl.zeros([ROWS], gl.float32, OF_ROWS)
        odd, gamma = gl.zeros([ROWS], gl.int32, OF_ROWS), gl.full([ROWS], 1.0, gl.float32, OF_ROWS)
        async_copy.wait_group(PIECES - FIRST)
        for down in range(DOWN):
            inner = down * ROWS + row
            if HAS_W:
                gamma = gl.load(gamma_ptr + channel + inner, mask=inner < WIDTH, other=0.0).to(gl.float32)
                odd += (gamma - gamma != 0).to(gl.int32)
                if DOWN > 1:
                    gammas.index(down).store(gamma)
            a, b = gl.zeros([ROWS, COLS], gl.float32, TILE), gl.zeros([ROWS, COLS], gl.float32, TILE)
            if DOWN > 1:
                if down == DOWN // 2:
                    async_copy.wait_group(0)
                a, b = _add_pieces(slots, a, b, down * ACROSS, mean, rstd, ACROSS - 1, TILE)
            else:
                a, b = _add_pieces(slots, a, b, 0, mean, rstd, FIRST, TILE)
                async_copy.wait_group(0)
                a, b = _add_pieces(slots, a, b, FIRST, mean, rstd, ACROSS - 1 - FIRST, TILE)
            dy, x_hat = _terms(slots, down * ACROSS + ACROSS - 1, mean, rstd, TILE)
            if not EVEN:
                x_hat = gl.where(last, x_hat, 0.0)
            s1, s2 = gl.reduce((a + dy, b + dy * x_hat), 1, add_pairs)
            place = partials_ptr + n * 2 * channels + channel + inner
            gl.store(place, s1, mask=inner < WIDTH)
            gl.store(place + channels, s2, mask=inner < WIDTH)
            c1 += gl.where(inner < WIDTH, s1 * gamma, 0.0)
            c2 += gl.where(inner < WIDTH, s2 * gamma, 0.0)
        if HAS_W:  # noqa: SIM102 (the compiler knows it)
            if gl.sum(odd, 0) > 0:  # gamma is not finite: term by term
                c1, c2 = gl.zeros_like(c1), gl.zeros_like(c2)
                for piece in range(PIECES):
                    inner = piece // ACROSS * ROWS + row
                    inside = (inner < WIDTH)[:, None] & (piece % ACROSS * COLS + at < image)[None, :]
                    dy, x_hat = _terms(slots, piece, mean, rstd, TILE)
                    if DOWN > 1:
                        gamma = gammas.index(piece // ACROSS).load(OF_ROWS)
                    wdy = gl.where(inside, dy * gamma[:, None], 0.0)
                    s1, s2 = gl.reduce((wdy, gl.where(inside, wdy * x_hat, 0.0)), 1, add_pairs)
                    c1 += s1
                    c2 += s2
        m1, m2 = gl.reduce((c1, c2), 0, add_pairs)
        m1, m2 = m1 * share, m2 * share
        then = group + step
        mean_then, rstd_then = statistics(mean_ptr, rstd_ptr, then, then < count)  # nobody waits for them
        dx_from = (n * dx_n + channel.to(gl.int64) * dx_c) * VECTOR
        for piece in range(PIECES):
            inner, col = piece // ACROSS * ROWS + row, piece % ACROSS * COLS + at
            if HAS_W:  # noqa: SIM102
                if DOWN > 1:
                    gamma = gammas.index(piece // ACROSS).load(OF_ROWS)
            dy, x_hat = _terms(slots, piece, mean, rstd, TILE)
            dx = rstd * (dy * gamma[:, None] - m1 - x_hat * m2)
            inside = (inner < WIDTH)[:, None] & (col // VECTOR < image // VECTOR)[None, :]
            dx_at = dx_from + (inner[:, None] * (dx_c * VECTOR) + col[None, :])
            gl.store(dx_ptr + dx_at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
            _fetch_piece(
                slots, piece, dy_ptr, x_ptr, then, count, groups, dy_n, dy_c, x_n, x_c, row, at, image, WIDTH, ACROSS,
                VECTOR,
            )  # fmt: skip
        mean, rstd = mean_then, rstd_then
    async_copy.wait_group(0)
