"""GroupNorm backward on the CPU, for pixels (channels-last).

A sample is read for its sums and then again for dx; where there are too few samples for the threads, in sweeps over
smaller tasks, which add in the same order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .._formats import UP_TO_ZEN_4
from .._lanes import splat
from .._native import inline, kernel
from .._simd import base, load, load_one, prefetch, store, store_one, store_or_stream, store_wide, stream, width, words
from .._sums import add_columns, clear, sum_columns, total_wide
from .._views import AHEAD
from .planes import add_channels, dx_of, put_dx, total_group
from .tiling import SUMMED_ROWS


@inline
def _fill(row: Any, value: Any, first: Any, end: Any) -> Any:
    """A value into some columns of a table's row; up to 15 more are written behind them."""
    for c in range(first, end, 16):
        store(np.float32(0), row + c * 4, splat(value))


@inline
def _repeat(row: Any, channels: Any, cols: Any) -> Any:
    """The channels' values of one pixel for the others of a row, and for 16 columns more: what begins the next row."""
    one = np.float32(0)
    for c in range(0, cols - channels + 16, min(16, channels)):
        store(one, row + (channels + c) * 4, load(one, row + c * 4))


@inline
def _spread(mean: Any, rstd: Any, table: Any, apart: Any, groups: Any, width_g: Any, cols: Any) -> Any:
    """A sample's mean and rstd of each column into its table."""
    for group in range(groups):
        first, end = group * width_g, group * width_g + width_g
        _fill(table, load_one(mean + group * 4), first, end)
        _fill(table + apart, load_one(rstd + group * 4), first, end)
    _repeat(table, groups * width_g, cols)
    _repeat(table + apart, groups * width_g, cols)


@inline
def _spread_gamma(gamma: Any, row: Any, channels: Any, cols: Any) -> Any:
    for c in range(channels):
        store_one(row + c * 4, load_one(gamma + c * 4))
    _repeat(row, channels, cols)


@inline
def _gather(
    T: Any, dy: Any, dy_h: Any, x: Any, x_h: Any, partials: Any, sums: Any, totals: Any, table: Any, apart: Any,
    mean: Any, rstd: Any, gamma: Any, groups: Any, width_g: Any, hw: Any, blocks: Any, together: Any, pad: Any,
    wants_dx: Any,
) -> Any:  # fmt: skip
    """From the blocks' sums of a sample to its channels', and to -c1 and -c2 in its table; addresses are its own."""
    channels = groups * width_g
    cols = channels * together
    half = (cols + 15) // 16 * 128
    if blocks == 1:
        totals = partials
    else:
        for at in range(0, 2 * half, 128):
            store_wide(totals + at, total_wide(partials + at, 3 * half, blocks))
    for c in range(0, channels, 16):
        store_wide(sums + c * 8, total_wide(totals + c * 8, channels * 8, together))
        store_wide(sums + pad + c * 8, total_wide(totals + half + c * 8, channels * 8, together))
    if wants_dx:
        size = np.float64(width_g) * np.float64(hw)
        for group in range(groups):
            first = group * width_g
            m, r = load_one(mean + group * 4), load_one(rstd + group * 4)
            c1, c2 = total_group(
                T, dy + first * width(T), width(T), dy_h, x + first * width(T), width(T), x_h, hw, 1, m, r,
                gamma + first * 4, sums + first * 8, pad, width_g,
            )  # fmt: skip
            _fill(table + 3 * apart, np.float32(-c1 / size), first, first + width_g)
            _fill(table + 4 * apart, np.float32(-c2 / size), first, first + width_g)
        _repeat(table + 3 * apart, channels, cols)
        _repeat(table + 4 * apart, channels, cols)


@inline
def _coefficients(place: Any, apart: Any) -> Any:
    """mean, rstd, gamma, -c1 and -c2 of 16 columns."""
    one = np.float32(0)
    mean, rstd, gamma = load(one, place), load(one, place + apart), load(one, place + 2 * apart)
    return mean, rstd, gamma, load(one, place + 3 * apart), load(one, place + 4 * apart)


@inline
def _few_dx(T: Any, dy: Any, x: Any, dx: Any, count: Any, table: Any, apart: Any, c: Any, cols: Any) -> Any:
    """dx of less than a cache line's elements, of which the first is in column c; returns the column behind them."""
    for first in range(0, count, 16):
        at, some = first * width(T), min(16, count - first)
        put_dx(T, dy + at, x + at, dx + at, some, _coefficients(table + c * 4, apart))
        c = c + some if c + some < cols else c + some - cols
    return c


@inline
def _run_dx(
    T: Any, streamed: Any, dy: Any, x: Any, dx: Any, count: Any, table: Any, apart: Any, cols: Any, ahead: Any
) -> Any:
    """dx of a contiguous run of rows of `cols` columns: a few elements up to an address from which whole vectors (past
    the caches: whole cache lines) can be stored, vectors wherever in a row they begin, and the rest."""
    size = width(T)
    line = 64 if streamed else 16 * size
    at = min(count * size, -dx % line) if dx % size == 0 else 0
    last = at + (count * size - at) // line * line
    c = _few_dx(T, dy, x, dx, at // size, table, apart, 0, cols)
    d, p, target = base(dy), base(x), base(dx)
    for k in range(at, last, 16 * size):
        if ahead > 0 and (size == 4 or (k - at) % 64 == 0):  # once for each cache line
            prefetch(d + k + ahead)
            prefetch(p + k + ahead)
        value = dx_of(T, d + k, p + k, 16, _coefficients(table + c * 4, apart))
        if streamed:
            stream(T, target + k, value)
        else:
            store(T, target + k, value)
        c = c + 16 if c + 16 < cols else c + 16 - cols
    _few_dx(T, dy + last, x + last, dx + last, count - last // size, table, apart, c, cols)


@inline
def _whole_rows_dx(
    T: Any, streamed: Any, dy: Any, dy_h: Any, x: Any, x_h: Any, dx: Any, dx_h: Any, rows: Any, cols: Any, table: Any,
    apart: Any, ahead: Any,
) -> Any:  # fmt: skip
    """dx of rows that are whole cache lines each."""
    size, one = width(T), np.float32(0)
    step, end, wider = 16 * size, cols * size, 4 // size
    means, rstds, gammas, c1s, c2s = (
        base(table),
        base(table + apart),
        base(table + 2 * apart),
        base(table + 3 * apart),
        base(table + 4 * apart),
    )
    for _ in range(rows):
        d, p, target, d_ahead, p_ahead, at = base(dy), base(x), base(dx), base(dy + ahead), base(x + ahead), 0
        while at < end:
            if ahead > 0 and (size == 4 or at % 64 == 0):  # once for each cache line
                prefetch(d_ahead + at)
                prefetch(p_ahead + at)
            c = at * wider
            f = (
                load(one, means + c),
                load(one, rstds + c),
                load(one, gammas + c),
                load(one, c1s + c),
                load(one, c2s + c),
            )
            store_or_stream(T, target + at, dx_of(T, d + at, p + at, 16, f), streamed)
            at += step
        dy, x, dx = dy + dy_h, x + x_h, dx + dx_h


@inline
def _four_rows_dx(
    T: Any, dy: Any, dy_h: Any, x: Any, x_h: Any, dx: Any, dx_h: Any, cols: Any, table: Any, apart: Any
) -> Any:
    """dx of four rows, whose coefficients are then loaded once."""
    size, c = width(T), 0
    while c + 16 <= cols:
        f, at = _coefficients(table + c * 4, apart), c * size
        for i in range(4):
            store(T, dx + i * dx_h + at, dx_of(T, dy + i * dy_h + at, x + i * x_h + at, 16, f))
        c += 16
    if c < cols:
        f, at = _coefficients(table + c * 4, apart), c * size
        for i in range(4):
            put_dx(T, dy + i * dy_h + at, x + i * x_h + at, dx + i * dx_h + at, cols - c, f)


@kernel
def pixels(T: Any, wants_dx: Any, step: Any) -> Any:
    """step 0: some samples a task, all of each; of more than one the sums are added up behind those of the one at hand.
    Else a sweep of split ones: 1 spreads (a sample a task), 2 sums (some blocks of a sample), 3 gathers (a sample), 4
    makes dx (some blocks). A block is some chunks of SUMMED_ROWS rows; its sums are float64, after float32 ones of the
    chunk at hand."""
    by_block = step in (2, 4)
    spreads, sums_up, gathers, makes_dx = (step in (0, own) for own in (1, 2, 3, 4))

    def run(args: Any, task: Any) -> Any:
        (
            dy, dy_n, dy_h, x, x_n, x_h, dx, dx_n, dx_h, streamed, mean, rstd, gamma, partials, sums, sums_n, pad,
            totals, tables, apart, samples, groups, width_g, hw, blocks, block_rows, together, ahead, fours, per,
        ) = words(args, 30)  # fmt: skip
        channels = groups * width_g
        cols, rows = channels * together, (hw + together - 1) // together
        ragged = (hw - (rows - 1) * together) * channels
        half, row_bytes = (cols + 15) // 16 * 128, cols * width(T)
        contiguous = dy_h == row_bytes and x_h == row_bytes and dx_h == row_bytes
        streamed = streamed if dx % width(T) == 0 else 0
        lines = dx % 64 == 0 and dx_n % 64 == 0 and dx_h % 64 == 0 and row_bytes % 64 == 0
        tasks = (blocks + per - 1) // per
        start, stop, summed = task * per, min(samples, task * per + per), per if step == 0 else 1
        if by_block:
            start, stop = task // tasks, task // tasks + 1
        for n in range(start, stop):
            d, p, m, r = dy + n * dy_n, x + n * x_n, mean + n * groups * 4, rstd + n * groups * 4
            own = task if step == 0 else n  # a task's samples one after the other use the same memory
            table, mine = tables + own * 5 * apart, partials + own * blocks * 3 * half
            place = sums + n // summed * sums_n
            first, last = (task % tasks * per, min(blocks, task % tasks * per + per)) if by_block else (0, blocks)
            if spreads:
                _spread(m, r, table, apart, groups, width_g, cols)
                if wants_dx and n == start:
                    _spread_gamma(gamma, table + 2 * apart, channels, cols)
            if sums_up:
                for block in range(first, last):
                    block_sums = mine + block * 3 * half
                    clear(block_sums, 2 * half)
                    for row in range(block * block_rows, min(rows, block * block_rows + block_rows), SUMMED_ROWS):
                        count = min(SUMMED_ROWS, rows - row)
                        sum_columns(
                            T, d + row * dy_h, dy_h, p + row * x_h, x_h, count, cols,
                            ragged if row + count == rows else cols, table, table + apart, block_sums + 2 * half,
                            AHEAD if width(T) == 2 or not UP_TO_ZEN_4 else 0, fours,  # in float32 Zen loses by it
                        )  # fmt: skip
                        add_columns(block_sums + 2 * half, cols, block_sums, half)
            if gathers:
                if summed > 1 and n == start:
                    clear(place + 2 * pad, 2 * pad)
                _gather(
                    T, d, dy_h // together, p, x_h // together, mine, place, totals + own * (2 * half + 128), table,
                    apart, m, r, gamma, groups, width_g, hw, blocks, together, pad, wants_dx,
                )  # fmt: skip
                if summed > 1:
                    add_channels(place, place + 2 * pad, pad, channels)
            if makes_dx and wants_dx:
                # Backwards: the L2 cache has still what was read last (11.3 instead of 11.9 ms for 32 x 256 x 3136 in
                # float32).
                for block in range(last - 1, first - 1, -1):
                    row = block * block_rows
                    count = min(rows, row + block_rows) - row
                    short = cols - ragged if row + count == rows else 0
                    if fours:
                        whole = (count - 1) // 4 * 4
                        for i in range(row, row + whole, 4):
                            _four_rows_dx(
                                T, d + i * dy_h, dy_h, p + i * x_h, x_h, dx + n * dx_n + i * dx_h, dx_h, cols, table,
                                apart,
                            )  # fmt: skip
                        row, count = row + whole, count - whole
                    if lines:
                        whole = count if short == 0 else count - 1
                        _whole_rows_dx(
                            T, streamed, d + row * dy_h, dy_h, p + row * x_h, x_h, dx + n * dx_n + row * dx_h, dx_h,
                            whole, cols, table, apart, ahead,
                        )  # fmt: skip
                        row, count = row + whole, count - whole
                    runs, length = (1, count * cols) if contiguous else (count, cols)
                    for i in range(row, row + runs):
                        _run_dx(
                            T, streamed, d + i * dy_h, p + i * x_h, dx + n * dx_n + i * dx_h,
                            length - short if i + 1 == row + runs else length, table, apart, cols, ahead,
                        )  # fmt: skip

    return run
