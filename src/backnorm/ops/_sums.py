"""The sums more than one CPU kernel is made of, in an order that depends on sizes alone.

float32 within BLOCK elements of a run or some rows of a column, float64 beyond.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from ._formats import TAGS
from ._lanes import add, fma, fold, keep, mul, narrow, splat, sub, sum_folded, sum_lanes, widen, zeros_wide
from ._native import inline, kernel
from ._program import Place, Program
from ._simd import (
    base,
    copy_bytes,
    load,
    load_line,
    load_one,
    load_part,
    load_wide,
    prefetch,
    prefetch_once,
    store,
    store_part,
    store_wide,
    stream_line,
    width,
    words,
)
from ._views import BLOCK, SPAN


@inline
def _terms(T: Any, dy: Any, x: Any, count: Any, mean: Any, rstd: Any, g: Any) -> Any:
    """wdy and x_hat of up to 16 elements, zeros beyond; None for rstd or g stands for 1."""
    wdy, x_hat = load_part(T, dy, count), sub(load_part(T, x, count), mean)
    if rstd is not None:
        x_hat = mul(x_hat, rstd)
    if g is not None:
        wdy = keep(mul(wdy, splat(g)), count)
    return wdy, keep(x_hat, count)


@inline
def _ask(dy: Any, x: Any, rstd: Any) -> Any:
    """For a cache line of both: with rstd, they are read again for dx."""
    if rstd is None:
        prefetch_once(dy)
        prefetch_once(x)
    else:
        prefetch(dy)
        prefetch(x)


@inline
def sum_block(T: Any, dy: Any, x: Any, n: Any, m: Any, r: Any, g: Any, ahead: Any) -> Any:
    """Sums of wdy = dy * g and wdy * x_hat over up to BLOCK elements; memory is asked for `ahead` bytes, if not 0.

    Four vectors of sums take turns: each sees 16 additions, a quarter of the digits lost and none of the waiting.
    """
    zero = splat(np.float32(0))
    a0, a1, a2, a3, b0, b1, b2, b3 = zero, zero, zero, zero, zero, zero, zero, zero
    mean = splat(m)
    rstd = None if r is None else splat(r)
    size = width(T)
    step, end = 16 * size, n * size
    at = 0
    while at + 4 * step <= end:
        if ahead > 0:
            for line in range(at + ahead, at + ahead + 4 * step, 64):
                _ask(dy + line, x + line, r)
        wdy, x_hat = _terms(T, dy + at, x + at, 16, mean, rstd, g)
        a0, b0 = add(a0, wdy), fma(wdy, x_hat, b0)
        wdy, x_hat = _terms(T, dy + at + step, x + at + step, 16, mean, rstd, g)
        a1, b1 = add(a1, wdy), fma(wdy, x_hat, b1)
        wdy, x_hat = _terms(T, dy + at + 2 * step, x + at + 2 * step, 16, mean, rstd, g)
        a2, b2 = add(a2, wdy), fma(wdy, x_hat, b2)
        wdy, x_hat = _terms(T, dy + at + 3 * step, x + at + 3 * step, 16, mean, rstd, g)
        a3, b3 = add(a3, wdy), fma(wdy, x_hat, b3)
        at += 4 * step
    while at + step <= end:
        wdy, x_hat = _terms(T, dy + at, x + at, 16, mean, rstd, g)
        a0, b0 = add(a0, wdy), fma(wdy, x_hat, b0)
        at += step
    if at < end:
        wdy, x_hat = _terms(T, dy + at, x + at, (end - at) // size, mean, rstd, g)
        a1, b1 = add(a1, wdy), fma(wdy, x_hat, b1)
    s1, s2 = add(add(a0, a1), add(a2, a3)), add(add(b0, b1), add(b2, b3))
    return np.float64(sum_lanes(s1)), np.float64(sum_lanes(s2))


@inline
def sum_span(T: Any, dy: Any, x: Any, n: Any, m: Any, r: Any, g: Any, ahead: Any) -> Any:
    """The same over up to SPAN elements."""
    s1, s2 = 0.0, 0.0
    size = width(T)
    for i in range(0, n, BLOCK):
        a, b = sum_block(T, dy + i * size, x + i * size, min(BLOCK, n - i), m, r, g, ahead)
        s1 += a
        s2 += b
    return s1, s2


@inline
def sum_run(T: Any, dy: Any, x: Any, n: Any, m: Any, r: Any, g: Any, ahead: Any) -> Any:
    """The same over a whole run."""
    s1, s2 = 0.0, 0.0
    size = width(T)
    for i in range(0, n, SPAN):
        a, b = sum_span(T, dy + i * size, x + i * size, min(SPAN, n - i), m, r, g, ahead)
        s1 += a
        s2 += b
    return s1, s2


@inline
def sum_eight_planes(
    T: Any, dy: Any, dy_c: Any, x: Any, x_c: Any, count: Any, hw: Any, means: Any, rstds: Any, width_g: Any, lanes: Any
) -> Any:
    """float64 sums of dy and, behind them, of dy * x_hat over up to 8 planes of up to LARGEST_LANES elements, zeros for
    those from `count` on. Every `width_g` planes have a mean and an rstd.

    Two vectors of sums take turns. The lanes of 8 planes, 512 bytes of memory, are added up together: of 49 elements
    that is half of what a plane takes otherwise.
    """
    size = width(T)
    pairs, singles, rest = hw // 32 * 32 * size, hw // 16 * 16 * size, hw % 16
    mean, rstd, left, place = splat(load_one(means)), splat(load_one(rstds)), width_g, lanes
    for _ in range(count):
        if left == 0:
            means, rstds, left = means + 4, rstds + 4, width_g
            mean, rstd = splat(load_one(means)), splat(load_one(rstds))
        d, p, at, zero = base(dy), base(x), 0, splat(np.float32(0))
        a, b, c, e = zero, zero, zero, zero
        while at < pairs:
            wdy, x_hat = _terms(T, d + at, p + at, 16, mean, rstd, None)
            a, b, at = add(a, wdy), fma(wdy, x_hat, b), at + 16 * size
            wdy, x_hat = _terms(T, d + at, p + at, 16, mean, rstd, None)
            c, e, at = add(c, wdy), fma(wdy, x_hat, e), at + 16 * size
        if at < singles:
            wdy, x_hat = _terms(T, d + at, p + at, 16, mean, rstd, None)
            a, b, at = add(a, wdy), fma(wdy, x_hat, b), at + 16 * size
        if rest > 0:
            wdy, x_hat = _terms(T, d + at, p + at, rest, mean, rstd, None)
            c, e = add(c, wdy), fma(wdy, x_hat, e)
        store(np.float32(0), place, fold(add(a, c), add(b, e)))
        left, place, dy, x = left - 1, place + 64, dy + dy_c, x + x_c
    return widen(sum_folded(lanes, count))


@inline
def sum_columns(
    T: Any, dy: Any, dy_step: Any, x: Any, x_step: Any, rows: Any, cols: Any, last: Any, means: Any, rstds: Any,
    sums: Any, ahead: Any, fours: Any,
) -> Any:  # fmt: skip
    """float32 sums of dy and dy * x_hat down some rows, of which the last one ends after `last` columns.

    Row after row: several at a time are no streams a prefetcher follows (20 against 33 GB/s for rows of 1 KiB on two
    cores of a Zen 4). But `fours` of them where the caches have them.
    """
    clear(sums, (cols + 15) // 16 * 128)
    first = 0
    whole = rows if last == cols else rows - 1
    while fours and first + 4 <= whole:
        d, p = dy + first * dy_step, x + first * x_step
        add_four_rows(T, d, dy_step, p, x_step, cols, means, rstds, sums, ahead)
        first += 4
    for row in range(first, rows):
        n = last if row + 1 == rows else cols
        add_row(T, dy + row * dy_step, x + row * x_step, n, means, rstds, sums, ahead)


@inline
def add_row(T: Any, dy: Any, x: Any, n: Any, means: Any, rstds: Any, sums: Any, ahead: Any) -> Any:
    """A row's dy and dy * x_hat onto the sums of its columns, which are 16 of dy, 16 of dy * x_hat, and so on.

    Every column has its mean and its rstd (None: they count as 1). `ahead`, if not 0, is from where memory is asked
    for, in bytes.
    """
    step, c = 16 * width(T), 0
    while c + 32 <= n:
        if ahead > 0:
            _ask(dy + ahead, x + ahead, rstds)
        _store_sums(sums, _column_sums(T, dy, x, 16, c * 4, means, rstds, sums))
        if ahead > 0 and width(T) == 4:  # else in the cache line asked for above
            _ask(dy + step + ahead, x + step + ahead, rstds)
        _store_sums(sums + 128, _column_sums(T, dy + step, x + step, 16, c * 4 + 64, means, rstds, sums + 128))
        c, sums, dy, x = c + 32, sums + 256, dy + 2 * step, x + 2 * step
    while c < n:
        if ahead > 0:
            _ask(dy + ahead, x + ahead, rstds)
        _store_sums(sums, _column_sums(T, dy, x, min(16, n - c), c * 4, means, rstds, sums))
        c, sums, dy, x = c + 16, sums + 128, dy + step, x + step


@inline
def add_last_row(T: Any, dy: Any, x: Any, n: Any, means: Any, sums: Any, totals: Any, apart: Any, ahead: Any) -> Any:
    """A row in the order of `add_row`, without rstds; but the sums go on to float64 totals, those of dy * x_hat `apart`
    bytes further, and begin anew."""
    step, c, zero = 16 * width(T), 0, splat(np.float32(0))
    while c < n:
        if ahead > 0:
            _ask(dy + ahead, x + ahead, None)
        a, b = _column_sums(T, dy, x, min(16, n - c), c * 4, means, None, sums)
        store_wide(totals, add(load_wide(totals), widen(a)))
        store_wide(totals + apart, add(load_wide(totals + apart), widen(b)))
        _store_sums(sums, (zero, zero))
        c, sums, totals, dy, x = c + 16, sums + 128, totals + 128, dy + step, x + step


@inline
def add_four_rows(
    T: Any, dy: Any, dy_step: Any, x: Any, x_step: Any, n: Any, means: Any, rstds: Any, sums: Any, ahead: Any
) -> Any:
    """Four rows in the order of `add_row`, but their sums are loaded and stored once."""
    step, c = 16 * width(T), 0
    while c + 16 <= n:
        if ahead > 0:
            for row in range(4):
                _ask(dy + row * dy_step + ahead, x + row * x_step + ahead, rstds)
        _four_terms(T, dy, dy_step, x, x_step, 16, c * 4, means, rstds, sums)
        c, sums, dy, x = c + 16, sums + 128, dy + step, x + step
    if c < n:
        _four_terms(T, dy, dy_step, x, x_step, n - c, c * 4, means, rstds, sums)


@inline
def _four_terms(
    T: Any, dy: Any, dy_step: Any, x: Any, x_step: Any, count: Any, at: Any, means: Any, rstds: Any, sums: Any
) -> Any:
    one = np.float32(0)
    a0, a1 = load_part(T, dy, count), load_part(T, dy + dy_step, count)
    a2, a3 = load_part(T, dy + 2 * dy_step, count), load_part(T, dy + 3 * dy_step, count)
    b = fma(a0, _x_hat(T, x, count, at, means, rstds), load(one, sums + 64))
    b = fma(a1, _x_hat(T, x + x_step, count, at, means, rstds), b)
    b = fma(a2, _x_hat(T, x + 2 * x_step, count, at, means, rstds), b)
    b = fma(a3, _x_hat(T, x + 3 * x_step, count, at, means, rstds), b)
    store(one, sums, add(add(add(add(load(one, sums), a0), a1), a2), a3))
    store(one, sums + 64, b)


@inline
def _column_sums(T: Any, dy: Any, x: Any, count: Any, at: Any, means: Any, rstds: Any, sums: Any) -> Any:
    """The sums of up to 16 columns with another row."""
    one = np.float32(0)
    # All loads come before the stores: 3 to 6 % faster.
    d, x_hat = load_part(T, dy, count), _x_hat(T, x, count, at, means, rstds)
    return add(load(one, sums), d), fma(d, x_hat, load(one, sums + 64))


@inline
def _store_sums(place: Any, sums: Any) -> Any:
    store(np.float32(0), place, sums[0])
    store(np.float32(0), place + 64, sums[1])


@inline
def _x_hat(T: Any, x: Any, count: Any, at: Any, means: Any, rstds: Any) -> Any:
    """x_hat of up to 16 columns, zeros beyond; `at` bytes into the tables of means and rstds."""
    x_hat = sub(load_part(T, x, count), load(np.float32(0), means + at))
    if rstds is not None:
        x_hat = mul(x_hat, load(np.float32(0), rstds + at))
    return keep(x_hat, count)


@inline
def add_columns(sums: Any, cols: Any, totals: Any, apart: Any) -> Any:
    """What sum_columns made of one chunk onto float64 totals."""
    for v in range((cols + 15) // 16):
        a, b = totals + v * 128, totals + apart + v * 128
        store_wide(a, add(load_wide(a), widen(load(np.float32(0), sums + v * 128))))
        store_wide(b, add(load_wide(b), widen(load(np.float32(0), sums + v * 128 + 64))))


@inline
def begin_chunks(totals: Any, apart: Any, chunks: Any) -> Any:
    """Zeros for a task's column sums: float32 ones of the chunk at hand, whose place is returned, and before them, if
    the task has several, float64 totals."""
    sums = totals + 2 * apart if chunks > 1 else totals
    clear(totals, sums - totals + apart)
    return sums


@inline
def end_chunk(sums: Any, cols: Any, totals: Any, apart: Any) -> Any:
    """A chunk's sums onto the totals; the next one's begin."""
    add_columns(sums, cols, totals, apart)
    clear(sums, apart)


@kernel
def reduce_columns() -> Any:
    """totals = the sum of `count` float64 partials, `step` bytes apart; some columns, all in whole vectors, a task."""

    def run(args: Any, task: Any) -> Any:
        partials, step, count, cols, per_task, totals = words(args, 6)
        for c in range(task * per_task, min(cols, (task + 1) * per_task), 16):
            store_wide(totals + c * 8, total_wide(partials + c * 8, step, count))

    return run


@inline
def _store_some(U: Any, out: Any, c: Any, cols: Any, value: Any) -> Any:
    if c + 16 <= cols:
        store(U, out + c * width(U), value)
    elif c < cols:
        store_part(U, out + c * width(U), value, cols - c)


@inline
def _total(partials: Any, step: Any, count: Any) -> Any:
    """float64 sums of 16 columns of `count` float32 partials, `step` bytes apart."""
    total = zeros_wide()
    for i in range(count):
        total = add(total, widen(load(np.float32(0), partials + i * step)))
    return total


@inline
def total_wide(partials: Any, step: Any, count: Any) -> Any:
    """The same of float64 partials."""
    total = zeros_wide()
    for i in range(count):
        total = add(total, load_wide(partials + i * step))
    return total


@inline
def _reduce(U: Any, wide: Any, partials: Any, step: Any, count: Any, c: Any, cols: Any, factors: Any, out: Any) -> Any:
    """16 columns of an output, from column c on; `factors`, if not 0, are multiplied with."""
    place = partials + c * 8
    total = total_wide(place, step, count) if wide else _total(place, step, count)
    if factors != 0:
        total = mul(total, widen(load_part(np.float32(0), factors + c * 4, min(16, cols - c))))
    _store_some(U, out, c, cols, narrow(total))


@kernel
def reduce_partials(U: Any, wide: Any) -> Any:
    """out[c] = the sum of `count` float32 or float64 partials, `step` bytes apart, rounded to the output's type.

    Some columns a task, of one or two outputs; 16 of them are together, 128 bytes from the next.
    """

    def run(args: Any, task: Any) -> Any:
        step, count, cols, per_task, partials, factors, out, partials_2, factors_2, out_2 = words(args, 10)
        for c in range(task * per_task, min(cols, (task + 1) * per_task), 16):
            _reduce(U, wide, partials, step, count, c, cols, factors, out)
            if out_2 != 0:
                _reduce(U, wide, partials_2, step, count, c, cols, factors_2, out_2)

    return run


@inline
def clear(place: Any, size: Any) -> Any:
    """Zeros; `size` in bytes, a multiple of 64."""
    for at in range(0, size, 64):
        store(np.float32(0), place + at, splat(np.float32(0)))


@inline
def flush(stage: Any, target: Any, count: Any) -> Any:
    """Bytes to memory past the caches, where whole cache lines can be."""
    lead = min(count, -target % 64)
    copy_bytes(target, stage, lead)
    lines = (count - lead) // 64 * 64
    for at in range(lead, lead + lines, 64):
        stream_line(target + at, load_line(stage + at))
    copy_bytes(target + lead + lines, stage + lead + lines, count - lead - lines)


def task_columns(cols: int) -> int:
    """Columns of a task that adds up partial sums: few where there are few, but not a million tasks of a million."""
    return 64 * max(1, cols // (64 * 128))


class ColumnResult(NamedTuple):
    """An output with an element for each column: where its partial sums begin, and what they are multiplied with."""

    dtype: int
    partials: Place
    factors: int | Place
    out: Place


def add_up(program: Program, results: list[ColumnResult], wide: bool, step: int, count: int, cols: int) -> None:
    """The jobs of `reduce_partials`: two outputs of a type at a time, whose partials often share cache lines."""
    per_task, none = task_columns(cols), (0, 0, 0)
    for dtype in dict.fromkeys(result.dtype for result in results):
        of_type = [result[1:] for result in results if result.dtype == dtype]
        for one, other in zip_longest(of_type[::2], of_type[1::2], fillvalue=none):
            program.job(
                reduce_partials(TAGS[dtype], wide), -(-cols // per_task), count * cols, step, count, cols, per_task,
                *one, *other,
            )  # fmt: skip
