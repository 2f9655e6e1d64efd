"""GroupNorm backward on the CPU, for planes (NCHW).

Groups are read for their sums and then again, from the cache where they fit, for dx. Where there are too few of them
for the threads, sums and dx are two sweeps over smaller tasks; both ways add in the same order. Groups of smaller
planes are in small_planes.py, and of the smallest in rows.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .._lanes import add, all_finite, choose, fma, mul, splat, sub, sum_lanes, widen, zeros_wide
from .._native import inline, kernel
from .._rows import begin_run, end_run, extend_run, pass_over, room_in_run
from .._simd import (
    base,
    load_double,
    load_mixed,
    load_one,
    load_part,
    load_wide,
    load_wide_part,
    prefetch,
    scratch,
    store_double,
    store_halves,
    store_or_stream,
    store_or_stream_mixed,
    store_part,
    store_wide,
    width,
    words,
)
from .._sums import clear, sum_block, sum_eight_planes, sum_run, sum_span
from .._views import LARGEST_LANES, SPAN


@inline
def _dx(dy: Any, x: Any, f: Any) -> Any:
    """dx = rstd * (dy * gamma - c1 - x_hat * c2)."""
    mean, rstd, gamma, minus_c1, minus_c2 = f
    return mul(rstd, fma(mul(sub(x, mean), rstd), minus_c2, fma(dy, gamma, minus_c1)))


@inline
def dx_of(T: Any, dy: Any, x: Any, count: Any, f: Any) -> Any:
    """dx of up to 16 elements."""
    return _dx(load_part(T, dy, count), load_part(T, x, count), f)


@inline
def put_dx(T: Any, dy: Any, x: Any, dx: Any, count: Any, f: Any) -> Any:
    store_part(T, dx, dx_of(T, dy, x, count, f), count)


@inline
def plane_dx(T: Any, streamed: Any, dy: Any, x: Any, dx: Any, hw: Any, f: Any, ahead: Any, results: Any) -> Any:
    """dx of a run of one channel; past the caches, onto a run of results, which goes on: it is given what fills its
    last vector and what begins another, and those between are written as they come."""
    size = width(T)
    at, end, step = 0, hw * size, 16 * size
    d, p, target = base(dy), base(x), base(dx)
    if streamed:
        lead = min(hw, room_in_run(results))
        if lead > 0:
            results = extend_run(T, results, dx_of(T, d, p, lead, f), lead)
            at = lead * size
    elif dx % 64 != 0 and dx % size == 0 and end > 128:  # stores that cross cache lines cost more than another part
        at = -dx % step
        put_dx(T, d, p, target, at // size, f)
    last = at + (end - at) // step * step
    k, line = at, max(64, step)
    while k + line <= last:
        if ahead > 0:  # once for each cache line
            prefetch(d + k + ahead)
            prefetch(p + k + ahead)
        for _ in range(line // step):
            store_or_stream_mixed(T, target + k, _dx(load_mixed(T, d + k), load_mixed(T, p + k), f), streamed)
            k += step
    if ahead > 0:
        for rest in range(k, end, 64):  # else one in three lines of 7x7 planes would come late
            prefetch(d + rest + ahead)
            prefetch(p + rest + ahead)
    if k < last:
        store_or_stream_mixed(T, target + k, _dx(load_mixed(T, d + k), load_mixed(T, p + k), f), streamed)
    if streamed:
        results = pass_over(results, last - at)
        if last < end:
            count = (end - last) // size
            results = extend_run(T, results, dx_of(T, d + last, p + last, count, f), count)
    elif last < end:
        put_dx(T, d + last, p + last, target + last, (end - last) // size, f)
    return results


@inline
def joined_dx(
    T: Any, streamed: Any, dy: Any, x: Any, dx: Any, channels: Any, hw: Any, gamma: Any, f: Any, ahead: Any,
    results: Any,
) -> Any:  # fmt: skip
    """The same of some channels' planes of 16 elements or more, without gaps: what one leaves of a vector, the next one
    fills. Of 49 elements that is two thirds of what `plane_dx` takes."""
    mean, rstd, g, minus_c1, minus_c2 = f
    size, step, end, total, at = width(T), 16 * width(T), hw * width(T), channels * hw * width(T), 0
    if streamed:
        lead = room_in_run(results)
        if lead > 0:
            results = extend_run(T, results, dx_of(T, dy, x, lead, f), lead)
            at = lead * size
    elif dx % step != 0 and dx % size == 0:  # as in `plane_dx`
        at = -dx % step
        put_dx(T, dy, x, dx, at // size, f)
    begun, last = at, at + (total - at) // step * step
    d, p, target, d_ahead, p_ahead = base(dy), base(x), base(dx), base(dy + ahead), base(x + ahead)
    for c in range(channels):
        f, inside = (mean, rstd, g, minus_c1, minus_c2), min(end, last)
        while at + step <= inside:
            if ahead > 0 and (size == 4 or (at - begun) % 64 == 0):  # once for each cache line
                prefetch(d_ahead + at)
                prefetch(p_ahead + at)
            store_or_stream_mixed(T, target + at, _dx(load_mixed(T, d + at), load_mixed(T, p + at), f), streamed)
            at += step
        following = splat(load_one(gamma + min(c + 1, channels - 1) * 4))
        if at < inside:
            if ahead > 0:
                prefetch(d_ahead + at)
                prefetch(p_ahead + at)
            f = mean, rstd, choose(g, following, (end - at) // size), minus_c1, minus_c2
            store_or_stream(T, target + at, dx_of(T, d + at, p + at, 16, f), streamed)
            at += step
        g, end = following, end + hw * size
    count, f = (total - last) // size, (mean, rstd, g, minus_c1, minus_c2)
    if streamed:
        results = pass_over(results, last - begun)
        if count > 0:
            results = extend_run(T, results, dx_of(T, dy + last, x + last, count, f), count)
    elif count > 0:
        put_dx(T, dy + last, x + last, dx + last, count, f)
    return results


@inline
def _weighed_terms(
    T: Any, dy: Any, dy_step: Any, x: Any, x_step: Any, rows: Any, run: Any, m: Any, r: Any, g: Any
) -> Any:
    """A channel's share of its group's sums, term by term: of a run (planes), or an element of each row (pixels)."""
    if run != 1:
        return sum_run(T, dy, x, run, m, r, g, 0)
    t1, t2 = 0.0, 0.0
    for i in range(rows):
        a, b = sum_block(T, dy + i * dy_step, x + i * x_step, 1, m, r, g, 0)
        t1 += a
        t2 += b
    return t1, t2


@inline
def total_group(
    T: Any, dy: Any, dy_c: Any, dy_h: Any, x: Any, x_c: Any, x_h: Any, rows: Any, run: Any, m: Any, r: Any, gamma: Any,
    sums: Any, pad: Any, channels: Any,
) -> Any:  # fmt: skip
    """A group's sums from those of its channels: gamma times each, or term by term where one is not finite. Eight at a
    time, as small_planes.py adds them."""
    c1, c2, finite = zeros_wide(), zeros_wide(), True
    for c in range(0, channels, 8):
        count = min(8, channels - c)
        g = load_part(np.float32(0), gamma + c * 4, count)
        finite = finite and all_finite(g)
        c1 = add(c1, mul(load_wide_part(sums + c * 8, count), widen(g)))
        c2 = add(c2, mul(load_wide_part(sums + pad + c * 8, count), widen(g)))
    if finite:
        return sum_lanes(c1), sum_lanes(c2)
    s1, s2 = 0.0, 0.0
    for c in range(channels):
        g = load_one(gamma + c * 4)
        a, b = _weighed_terms(T, dy + c * dy_c, dy_h, x + c * x_c, x_h, rows, run, m, r, g)
        s1, s2 = s1 + a, s2 + b
    return s1, s2


@inline
def plane_factors(m: Any, r: Any, g: Any, c1: Any, c2: Any, size: Any) -> Any:
    return splat(m), splat(r), splat(g), splat(np.float32(-c1 / size)), splat(np.float32(-c2 / size))


@inline
def add_channels(sums: Any, totals: Any, pad: Any, channels: Any) -> Any:
    """Channel sums of a sample, or of a group, onto those of some samples. Up to 15 channels behind get zeros added."""
    for c in range(0, channels * 8, 128):
        for at in (c, pad + c):
            value = load_wide_part(sums + at, min(16, channels - c // 8))
            store_wide(totals + at, add(load_wide(totals + at), value))


@kernel
def whole_planes(T: Any, wants_dx: Any) -> Any:
    """Some groups a task: their channels' sums into sums[sample][2][channel], then dx. Steps count bytes.

    Of small samples some are `together` a task, which adds up their sums behind those of the one at hand.
    """

    def run(args: Any, task: Any) -> Any:
        (
            dy, dy_n, dy_c, x, x_n, x_c, dx, dx_n, dx_c, streamed, mean, rstd, gamma, sums, sums_n, pad, tasks, groups,
            width_g, hw, together, per, ahead, sums_ahead,
        ) = words(args, 24)  # fmt: skip
        size = np.float64(width_g) * np.float64(hw)
        streamed = streamed if dx % width(T) == 0 else 0
        n, g = task * per // groups, task * per % groups
        results = begin_run(T, dx + n * dx_n + g * width_g * dx_c, streamed)
        if together > 1:
            clear(sums + n // together * sums_n + 2 * pad, 2 * pad + 128)
        for group in range(task * per, min(tasks, task * per + per)):
            first = g * width_g
            m, r = load_one(mean + group * 4), load_one(rstd + group * 4)
            d, p = dy + n * dy_n + first * dy_c, x + n * x_n + first * x_c
            place = sums + n // together * sums_n + first * 8
            for c in range(width_g):
                s1, s2 = sum_run(T, d + c * dy_c, p + c * x_c, hw, m, r, None, sums_ahead)
                store_double(place + c * 8, s1)
                store_double(place + pad + c * 8, s2)
            if together > 1:
                add_channels(place, place + 2 * pad, pad, width_g)
            if wants_dx:
                weights, target = gamma + first * 4, dx + n * dx_n + first * dx_c
                c1, c2 = total_group(T, d, dy_c, 0, p, x_c, 0, 1, hw, m, r, weights, place, pad, width_g)
                for c in range(width_g):
                    f = plane_factors(m, r, load_one(weights + c * 4), c1, c2, size)
                    results = plane_dx(T, streamed, d + c * dy_c, p + c * x_c, target + c * dx_c, hw, f, ahead, results)
            n, g = (n, g + 1) if g + 1 < groups else (n + 1, 0)
        end_run(T, results)

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


@inline
def _next_span(c: Any, start: Any, hw: Any) -> Any:
    """Channel and first element of the span after this one."""
    return (c, start + SPAN) if start + SPAN < hw else (c + 1, 0)


@kernel
def split_planes_sums(T: Any) -> Any:
    """Some spans of a group a task, into span_sums[2][sample][channel][span]; `apart` is the step of the first axis."""

    def run(args: Any, task: Any) -> Any:
        dy, dy_n, dy_c, x, x_n, x_c, mean, rstd, span_sums, apart, groups, width_g, hw, spans, per, ahead = words(
            args, 16
        )
        channels, size = groups * width_g, width(T)
        first, stop = _items(task, width_g * spans, per)
        n, c, start = _span(first, spans, channels)
        group = (n * groups + c // width_g) * 4
        m, r = load_one(mean + group), load_one(rstd + group)
        if hw <= LARGEST_LANES:
            d, p, lanes = dy + n * dy_n + c * dy_c, x + n * x_n + c * x_c, scratch(512)
            for item in range(first, stop, 8):
                count, place = min(8, stop - item), span_sums + item * 8
                # All of one group.
                both = sum_eight_planes(T, d, dy_c, p, x_c, count, hw, mean + group, rstd + group, 8, lanes)
                store_halves(both, place, place + apart, count)
                d, p = d + 8 * dy_c, p + 8 * x_c
            return
        for item in range(first, stop):
            at = start * size
            s1, s2 = sum_span(
                T, dy + n * dy_n + c * dy_c + at, x + n * x_n + c * x_c + at, min(SPAN, hw - start), m, r, None, ahead
            )
            store_double(span_sums + item * 8, s1)
            store_double(span_sums + apart + item * 8, s2)
            c, start = _next_span(c, start, hw)

    return run


@kernel
def split_planes_groups(T: Any) -> Any:
    """A group a task: from its spans' sums to its channels' and its own."""

    def run(args: Any, task: Any) -> Any:
        (
            dy, dy_n, dy_c, x, x_n, x_c, mean, rstd, gamma, span_sums, apart, sums, pad, group_sums, groups, width_g,
            hw, spans,
        ) = words(args, 18)  # fmt: skip
        n, first = task // groups, task % groups * width_g
        place, channels = sums + n * 2 * pad + first * 8, groups * width_g
        for c in range(width_g):
            s1, s2 = 0.0, 0.0
            for span in range(spans):
                item = span_sums + ((n * channels + first + c) * spans + span) * 8
                s1, s2 = s1 + load_double(item), s2 + load_double(item + apart)
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
            spans, joined, per, ahead,
        ) = words(args, 21)  # fmt: skip
        channels, size = groups * width_g, np.float64(width_g) * np.float64(hw)
        streamed = streamed if dx % width(T) == 0 else 0
        first, stop = _items(task, width_g * spans, per)
        n, c, start = _span(first, spans, channels)
        results = begin_run(T, dx + n * dx_n + c * dx_c + start * width(T), streamed)
        group = n * groups + c // width_g
        m, r, place = load_one(mean + group * 4), load_one(rstd + group * 4), group_sums + group * 16
        c1, c2 = load_double(place), load_double(place + 8)
        if joined:
            d, p, target, weights = (
                dy + n * dy_n + c * dy_c,
                x + n * x_n + c * x_c,
                dx + n * dx_n + c * dx_c,
                gamma + c * 4,
            )
            f = plane_factors(m, r, load_one(weights), c1, c2, size)
            end_run(T, joined_dx(T, streamed, d, p, target, stop - first, hw, weights, f, ahead, results))
            return
        for _ in range(first, stop):
            at, f = start * width(T), plane_factors(m, r, load_one(gamma + c * 4), c1, c2, size)
            results = plane_dx(
                T, streamed, dy + n * dy_n + c * dy_c + at, x + n * x_n + c * x_c + at, dx + n * dx_n + c * dx_c + at,
                min(SPAN, hw - start), f, ahead, results,
            )  # fmt: skip
            c, start = _next_span(c, start, hw)
        end_run(T, results)

    return run
