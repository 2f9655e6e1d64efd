"""GroupNorm backward on the CPU, for planes (NCHW).

Small groups are rows of elements, as LayerNorm's are, with a weight and column sums for each element. Larger ones are
read for their sums and then again, from the cache where they fit, for dx. Where there are too few of them for the
threads, sums and dx are two sweeps over smaller tasks; both ways add in the same order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .._native import inline, kernel
from .._rows import begin_run, end_run, factors, sweep
from .._simd import (
    add,
    base,
    copy_bytes,
    fma,
    load_double,
    load_line,
    load_one,
    load_part,
    mul,
    prefetch,
    scratch,
    splat,
    store,
    store_double,
    store_one,
    store_part,
    stream,
    stream_line,
    sub,
    sum_lanes,
    width,
    words,
)
from .._sums import clear, sum_block, sum_run, sum_span
from .._views import AHEAD, SPAN
from .tiling import TABLE_COLUMNS

#: Groups that are rows: bytes of the weights and sums of their elements.
TABLES = TABLE_COLUMNS * 12 + 64


@inline
def dx_of(T: Any, dy: Any, x: Any, count: Any, f: Any) -> Any:
    """dx = rstd * (dy * gamma - c1 - x_hat * c2) of up to 16 elements."""
    mean, rstd, gamma, minus_c1, minus_c2 = f
    x_hat = mul(sub(load_part(T, x, count), mean), rstd)
    return mul(rstd, fma(x_hat, minus_c2, fma(load_part(T, dy, count), gamma, minus_c1)))


@inline
def put_dx(T: Any, dy: Any, x: Any, dx: Any, count: Any, f: Any) -> Any:
    store_part(T, dx, dx_of(T, dy, x, count, f), count)


@inline
def _dx_line(T: Any, dy: Any, x: Any, line: Any, count: Any, f: Any) -> Any:
    """dx of less than a cache line's elements, into memory of our own."""
    for c in range(0, count, 16):
        put_dx(T, dy + c * width(T), x + c * width(T), line + c * width(T), min(16, count - c), f)


@inline
def _put_line(line: Any, first: Any, end: Any) -> Any:
    """What was kept of the cache line that this address ends or lies in, from its byte `first` on."""
    count = (end - 1) % 64 + 1 - first
    if count == 64:
        stream_line(end - 64, load_line(line))
    else:
        copy_bytes(end - count, line + first, count)


@inline
def _plane_dx(
    T: Any, streamed: Any, dy: Any, x: Any, dx: Any, hw: Any, f: Any, ahead: Any, line: Any, first: Any
) -> Any:
    """dx of a run of one channel; past the caches, each cache line as soon as it is whole.

    What does not fill one is kept in `line` for the next run, which then follows in memory; bytes before `first` are
    not ours. Returns `first` for that run.
    """
    size = width(T)
    at, end = 0, hw * size
    d, p, target = base(dy), base(x), base(dx)
    if streamed:
        if dx % 64 != 0:
            at = min(end, -dx % 64)
            _dx_line(T, dy, x, line + dx % 64, at // size, f)
            if (dx + at) % 64 == 0:
                _put_line(line, first, dx + at)
                first = 0
        last = at + (end - at) // 64 * 64
        for k in range(at, last, 64):
            if ahead > 0:
                prefetch(d + k + ahead)
                prefetch(p + k + ahead)
            stream(T, target + k, dx_of(T, d + k, p + k, 16, f))
            if size == 2:
                stream(T, target + k + 32, dx_of(T, d + k + 32, p + k + 32, 16, f))
        if last < end:
            _dx_line(T, dy + last, x + last, line, (end - last) // size, f)
    else:
        if dx % 64 != 0 and dx % size == 0 and end > 128:  # stores that cross cache lines cost more than another part
            at = -dx % (16 * size)
            put_dx(T, d, p, target, at // size, f)
        last = at + (end - at) // (16 * size) * (16 * size)
        for k in range(at, last, 16 * size):
            if ahead > 0:
                prefetch(d + k + ahead)
                prefetch(p + k + ahead)
            store(T, target + k, dx_of(T, d + k, p + k, 16, f))
        if last < end:
            put_dx(T, d + last, p + last, target + last, (end - last) // size, f)
    return first


@inline
def _weighed_terms(
    T: Any, dy: Any, dy_step: Any, x: Any, x_step: Any, rows: Any, run: Any, m: Any, r: Any, g: Any
) -> Any:
    """A channel's share of its group's sums, term by term: of a run (planes), or an element of each row (pixels)."""
    if run != 1:
        return sum_run(T, dy, x, run, m, r, g)
    t1, t2 = 0.0, 0.0
    for i in range(rows):
        a, b = sum_block(T, dy + i * dy_step, x + i * x_step, 1, m, r, g)
        t1 += a
        t2 += b
    return t1, t2


@inline
def total_group(
    T: Any, dy: Any, dy_c: Any, dy_h: Any, x: Any, x_c: Any, x_h: Any, rows: Any, run: Any, m: Any, r: Any, gamma: Any,
    sums: Any, pad: Any, channels: Any,
) -> Any:  # fmt: skip
    """A group's sums from those of its channels: gamma times each, or term by term where gamma is not finite."""
    c1, c2 = 0.0, 0.0
    for c in range(channels):
        g = load_one(gamma + c * 4)
        if np.isfinite(g):
            c1 += load_double(sums + c * 8) * np.float64(g)
            c2 += load_double(sums + pad + c * 8) * np.float64(g)
        else:
            a, b = _weighed_terms(T, dy + c * dy_c, dy_h, x + c * x_c, x_h, rows, run, m, r, g)
            c1 += a
            c2 += b
    return c1, c2


@inline
def _plane_factors(m: Any, r: Any, g: Any, c1: Any, c2: Any, size: Any) -> Any:
    return splat(m), splat(r), splat(g), splat(np.float32(-c1 / size)), splat(np.float32(-c2 / size))


@kernel
def whole_planes(T: Any, wants_dx: Any) -> Any:
    """Some groups a task: their channels' sums into sums[sample][2][channel], then dx. Steps count bytes."""

    def run(args: Any, task: Any) -> Any:
        (
            dy, dy_n, dy_c, x, x_n, x_c, dx, dx_n, dx_c, streamed, mean, rstd, gamma, sums, pad, tasks, groups, width_g,
            hw, per, ahead,
        ) = words(args, 21)  # fmt: skip
        line, kept, end = scratch(64), 0, 0
        streamed = streamed if dx % width(T) == 0 else 0
        size = np.float64(width_g) * np.float64(hw)
        for group in range(task * per, min(tasks, task * per + per)):
            n, first = group // groups, group % groups * width_g
            m, r = load_one(mean + group * 4), load_one(rstd + group * 4)
            d, p = dy + n * dy_n + first * dy_c, x + n * x_n + first * x_c
            place = sums + n * 2 * pad + first * 8
            for c in range(width_g):
                s1, s2 = sum_run(T, d + c * dy_c, p + c * x_c, hw, m, r, None)
                store_double(place + c * 8, s1)
                store_double(place + pad + c * 8, s2)
            if wants_dx:
                weights = gamma + first * 4
                c1, c2 = total_group(T, d, dy_c, 0, p, x_c, 0, 1, hw, m, r, weights, place, pad, width_g)
                for c in range(width_g):
                    f = _plane_factors(m, r, load_one(weights + c * 4), c1, c2, size)
                    target = dx + n * dx_n + (first + c) * dx_c
                    kept = kept if end else target % 64
                    kept = _plane_dx(T, streamed, d + c * dy_c, p + c * x_c, target, hw, f, ahead, line, kept)
                    end = target + hw * width(T)
        if streamed and end % 64 != 0:
            _put_line(line, kept, end)

    return run


@inline
def _spread_weights(gamma: Any, channels: Any, hw: Any, w: Any) -> Any:
    """A group's gamma, each hw times; up to 15 more are written behind them."""
    for c in range(channels):
        g = splat(load_one(gamma + c * 4))
        for at in range(c * hw, c * hw + hw, 16):
            store(np.float32(0), w + at * 4, g)


@inline
def _spread_pixels_weights(gamma: Any, channels: Any, hw: Any, w: Any) -> Any:
    """The group's gamma, hw times."""
    for i in range(hw):
        for c in range(channels):
            store_one(w + (i * channels + c) * 4, load_one(gamma + c * 4))


@inline
def _channel_sums(columns: Any, channels: Any, hw: Any, sums: Any, pad: Any) -> Any:
    """The sums of each channel's columns, of dy and `pad` bytes further of dy * x_hat."""
    one, zero = np.float32(0), splat(np.float32(0))
    for c in range(channels):
        a, b = zero, zero
        k, end = c * hw, c * hw + hw
        while k < end:
            place, count = columns + (k >> 4) * 128 + (k & 15) * 4, min(16 - (k & 15), end - k)
            a, b = add(a, load_part(one, place + 64, count)), add(b, load_part(one, place, count))
            k += count
        store_double(sums + c * 8, np.float64(sum_lanes(a)))
        store_double(sums + pad + c * 8, np.float64(sum_lanes(b)))


@inline
def _pixels_channel_sums(columns: Any, channels: Any, hw: Any, sums: Any, pad: Any) -> Any:
    """The same, where a channel's columns are as far apart as there are channels."""
    for c in range(channels):
        s1, s2 = 0.0, 0.0
        for k in range(c, hw * channels, channels):
            place = columns + (k >> 4) * 128 + (k & 15) * 4
            s1, s2 = s1 + np.float64(load_one(place + 64)), s2 + np.float64(load_one(place))
        store_double(sums + c * 8, s1)
        store_double(sums + pad + c * 8, s2)


@kernel
def group_rows(T: Any, U: Any, pixels: Any, columns: Any, wants_dx: Any) -> Any:
    """Groups as rows of one block, like LayerNorm's: some chunks of samples, and of those some groups, a task,
    `together` of them at a time.

    Groups of planes, or of pixels whose channels are all of one group.

    Every element of those groups has its weight in a table and its sums down a chunk's samples in another; the latter
    become the chunk's channel sums, in sums[chunk][2][channel]. So no plane needs a sum across lanes, nor a remainder.
    """
    spread, add_up = (
        (_spread_pixels_weights, _pixels_channel_sums) if pixels else (_spread_weights, _channel_sums)
    )  # fmt: skip

    def run(args: Any, task: Any) -> Any:
        (
            dy, dy_n, dy_g, x, x_n, x_g, dx, dx_n, dx_g, streamed, mean, rstd, gamma, sums, pad, samples, groups,
            width_g, hw, together, task_groups, chunk, chunks, dy_ahead, x_ahead,
        ) = words(args, 25)  # fmt: skip
        weights, cols = scratch(TABLES), width_g * hw
        share, apart, row_bytes = 1.0 / cols, (cols + 15) // 16 * 64, cols * width(U)
        table = weights + together * apart + 64
        tasks = (groups + task_groups - 1) // task_groups
        block, begin = task // tasks, task % tasks * task_groups
        for start in range(block * chunks * chunk, min(samples, (block + 1) * chunks * chunk), chunk):
            end = min(samples, start + chunk)
            for first in range(begin, min(groups, begin + task_groups), together):
                last = min(groups, begin + task_groups, first + together)
                if wants_dx:
                    for g in range(first, last):
                        spread(gamma + g * width_g * 4, width_g, hw, weights + (g - first) * apart)
                if columns:
                    clear(table, (last - first) * apart * 2)
                d, p, at = dy + start * dy_n + first * dy_g, x + start * x_n + first * x_g, (start * groups + first) * 4
                m, r = load_one(mean + at), load_one(rstd + at)
                f, w = factors(m, r, 0.0, 0.0, share), weights
                results = begin_run(U, dx, streamed)
                s, q, _ = sweep(
                    T, U, columns, wants_dx, False, wants_dx, cols, d, p, w, results, table, f, d, p, w, dy_ahead,
                    x_ahead, m, r,
                )  # fmt: skip
                for n in range(start, end):
                    results = begin_run(U, dx + n * dx_n + first * dx_g, streamed)
                    for g in range(first, last):
                        f, own = factors(m, r, s, q, share), (g - first) * apart
                        w, mine = weights + own, table + 2 * own
                        next_n, next_g = (n, g + 1) if g + 1 < last else (n + 1, first)
                        if next_n < end:
                            at = (next_n * groups + next_g) * 4
                            m, r = load_one(mean + at), load_one(rstd + at)
                            next_d, next_p = dy + next_n * dy_n + next_g * dy_g, x + next_n * x_n + next_g * x_g
                            later = 0 if wants_dx else 1  # what a sweep that sums no following row asks for
                            s, q, results = sweep(
                                T, U, columns, wants_dx, True, wants_dx, cols, d, p, w, results, mine, f,
                                next_d + later * dy_ahead, next_p + later * x_ahead,
                                weights + (next_g - first) * apart, dy_ahead, x_ahead, m, r,
                            )  # fmt: skip
                            d, p = next_d, next_p
                        else:
                            _, _, results = sweep(
                                T, U, columns, wants_dx, True, False, cols, d, p, w, results, mine, f, d, p, w, 0, 0,
                                m, r,
                            )  # fmt: skip
                        if wants_dx and (g + 1 == last or dx_g != row_bytes):
                            end_run(U, results)
                            results = begin_run(U, dx + n * dx_n + (g + 1) * dx_g, streamed)
                if columns:
                    for g in range(first, last):
                        place = sums + start // chunk * 2 * pad + g * width_g * 8
                        add_up(table + (g - first) * apart * 2, width_g, hw, place, pad)

    return run


@inline
def _items(task: Any, count: Any, per: Any) -> Any:
    """The first and the end of a task's spans: up to `per` of one group, which has `count`."""
    tasks = (count + per - 1) // per
    group, first = task // tasks, task % tasks * per
    return group * count + first, group * count + min(count, first + per)


@inline
def _span(item: Any, spans: Any, channels: Any) -> Any:
    """Sample, channel and first element of a span."""
    return item // spans // channels, item // spans % channels, item % spans * SPAN


@kernel
def split_planes_sums(T: Any) -> Any:
    """Some spans of a group a task, into span_sums[sample][channel][span]."""

    def run(args: Any, task: Any) -> Any:
        dy, dy_n, dy_c, x, x_n, x_c, mean, rstd, span_sums, groups, width_g, hw, spans, per = words(args, 14)
        channels, size = groups * width_g, width(T)
        first, stop = _items(task, width_g * spans, per)
        for item in range(first, stop):
            n, c, start = _span(item, spans, channels)
            group = (n * groups + c // width_g) * 4
            s1, s2 = sum_span(
                T, dy + n * dy_n + c * dy_c + start * size, x + n * x_n + c * x_c + start * size, min(SPAN, hw - start),
                load_one(mean + group), load_one(rstd + group), None,
            )  # fmt: skip
            store_double(span_sums + item * 16, s1)
            store_double(span_sums + item * 16 + 8, s2)

    return run


@kernel
def split_planes_groups(T: Any) -> Any:
    """A group a task: from its spans' sums to its channels' and its own."""

    def run(args: Any, task: Any) -> Any:
        dy, dy_n, dy_c, x, x_n, x_c, mean, rstd, gamma, span_sums, sums, pad, group_sums, groups, width_g, hw, spans = (
            words(args, 17)
        )
        n, first = task // groups, task % groups * width_g
        place, channels = sums + n * 2 * pad + first * 8, groups * width_g
        for c in range(width_g):
            s1, s2 = 0.0, 0.0
            for span in range(spans):
                s1 += load_double(span_sums + ((n * channels + first + c) * spans + span) * 16)
                s2 += load_double(span_sums + ((n * channels + first + c) * spans + span) * 16 + 8)
            store_double(place + c * 8, s1)
            store_double(place + pad + c * 8, s2)
        m, r = load_one(mean + task * 4), load_one(rstd + task * 4)
        d, p = dy + n * dy_n + first * dy_c, x + n * x_n + first * x_c
        c1, c2 = total_group(T, d, dy_c, 0, p, x_c, 0, 1, hw, m, r, gamma + first * 4, place, pad, width_g)
        store_double(group_sums + task * 16, c1)
        store_double(group_sums + task * 16 + 8, c2)

    return run


@kernel
def split_planes_dx(T: Any) -> Any:
    """Some spans of a group a task."""

    def run(args: Any, task: Any) -> Any:
        (
            dy, dy_n, dy_c, x, x_n, x_c, dx, dx_n, dx_c, streamed, mean, rstd, gamma, group_sums, groups, width_g, hw,
            spans, per,
        ) = words(args, 19)  # fmt: skip
        channels, line, kept, end = groups * width_g, scratch(64), 0, 0
        streamed = streamed if dx % width(T) == 0 else 0
        size = np.float64(width_g) * np.float64(hw)
        first, stop = _items(task, width_g * spans, per)
        for item in range(first, stop):
            n, c, start = _span(item, spans, channels)
            group, count = n * groups + c // width_g, min(SPAN, hw - start)
            f = _plane_factors(
                load_one(mean + group * 4), load_one(rstd + group * 4), load_one(gamma + c * 4),
                load_double(group_sums + group * 16), load_double(group_sums + group * 16 + 8), size,
            )  # fmt: skip
            target = dx + n * dx_n + c * dx_c + start * width(T)
            kept = kept if end else target % 64
            kept = _plane_dx(
                T, streamed, dy + n * dy_n + c * dy_c + start * width(T), x + n * x_n + c * x_c + start * width(T),
                target, count, f, AHEAD, line, kept,
            )  # fmt: skip
            end = target + count * width(T)
        if streamed and end % 64 != 0:
            _put_line(line, kept, end)

    return run
