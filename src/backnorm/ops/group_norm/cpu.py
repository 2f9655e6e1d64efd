"""GroupNorm backward on the CPU, for planes (NCHW) and pixels (channels-last).

Whole groups of planes, or samples of pixels, are read for their sums and then again, from the cache where they fit,
for dx. Where there are too few of them for the threads, sums and dx are two sweeps over smaller tasks; both ways add in
the same order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...datatypes import itemsize
from ...spec import Call
from .._copy import as_float32, copy_images, unpack
from .._native import inline, kernel
from .._program import WORKSPACE, Place, Program
from .._simd import (
    TAGS,
    fma,
    load,
    load_double,
    load_one,
    load_part,
    mul,
    prefetch,
    scratch,
    splat,
    store_double,
    store_one,
    store_part,
    store_wide,
    sub,
    width,
    words,
)
from .._sums import (
    flush,
    reduce_partials,
    reduce_tasks,
    sum_block,
    sum_columns,
    sum_run,
    sum_span,
    total_columns,
    total_wide,
)
from .._views import AHEAD, PIXEL_ROWS, SPAN
from .tiling import Tiling, padded

#: Elements of a run of dx that are kept back, and bytes of them, to be written past the caches together.
BLOCK, STAGE = 512, 4096


@inline
def _dx_step(T: Any, U: Any, dy: Any, x: Any, dx: Any, count: Any, f: Any) -> Any:
    """dx = rstd * (dy * gamma - c1 - x_hat * c2) of up to 16 elements."""
    mean, rstd, gamma, minus_c1, minus_c2 = f
    x_hat = mul(sub(load_part(T, x, count), mean), rstd)
    store_part(U, dx, mul(rstd, fma(x_hat, minus_c2, fma(load_part(T, dy, count), gamma, minus_c1))), count)


@inline
def _plane_dx(
    T: Any, U: Any, streamed: Any, dy: Any, x: Any, dx: Any, hw: Any, f: Any, ahead: Any, stage: Any, staged: Any
) -> Any:
    """dx of a run of one channel. Returns how many bytes are left in the stage."""
    size, out = width(T), width(U)
    for first in range(0, hw, BLOCK):
        n = min(BLOCK, hw - first)
        d, p, target = dy + first * size, x + first * size, stage + staged if streamed else dx + first * out
        c = 0
        while c + 16 <= n:
            at = c * size
            if ahead > 0:
                prefetch(d + at + ahead)
                prefetch(p + at + ahead)
            _dx_step(T, U, d + at, p + at, target + c * out, 16, f)
            c += 16
        if c < n:
            _dx_step(T, U, d + c * size, p + c * size, target + c * out, n - c, f)
        if streamed:
            staged += n * out
            if staged + BLOCK * out > STAGE:
                flush(stage, dx + (first + n) * out - staged, staged)
                staged = 0
    return staged


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
def _group_sums(
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
def _whole_planes(T: Any, U: Any, wants_dx: Any) -> Any:
    """Some groups a task: their channels' sums into sums[sample][2][channel], then dx. Steps count bytes."""

    def run(args: Any, task: Any) -> Any:
        (
            dy, dy_n, dy_c, x, x_n, x_c, dx, dx_n, dx_c, streamed, mean, rstd, gamma, sums, pad, tasks, groups, width_g,
            hw, per, ahead,
        ) = words(args, 21)  # fmt: skip
        stage, staged, end = scratch(STAGE), 0, dx
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
                c1, c2 = _group_sums(T, d, dy_c, 0, p, x_c, 0, 1, hw, m, r, weights, place, pad, width_g)
                for c in range(width_g):
                    f = _plane_factors(m, r, load_one(weights + c * 4), c1, c2, size)
                    target = dx + n * dx_n + (first + c) * dx_c
                    staged = _plane_dx(T, U, streamed, d + c * dy_c, p + c * x_c, target, hw, f, ahead, stage, staged)
                    end = target + hw * width(U)
        if streamed:
            flush(stage, end - staged, staged)

    return run


@kernel
def _split_planes_sums(T: Any) -> Any:
    """Some spans of planes a task, into span_sums[sample][channel][span]."""

    def run(args: Any, task: Any) -> Any:
        dy, dy_n, dy_c, x, x_n, x_c, mean, rstd, span_sums, tasks, groups, width_g, hw, spans, per = words(args, 15)
        channels, size = groups * width_g, width(T)
        for item in range(task * per, min(tasks, task * per + per)):
            n, c, start = item // spans // channels, item // spans % channels, item % spans * SPAN
            group = (n * groups + c // width_g) * 4
            s1, s2 = sum_span(
                T, dy + n * dy_n + c * dy_c + start * size, x + n * x_n + c * x_c + start * size, min(SPAN, hw - start),
                load_one(mean + group), load_one(rstd + group), None,
            )  # fmt: skip
            store_double(span_sums + item * 16, s1)
            store_double(span_sums + item * 16 + 8, s2)

    return run


@kernel
def _split_planes_groups(T: Any) -> Any:
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
        c1, c2 = _group_sums(T, d, dy_c, 0, p, x_c, 0, 1, hw, m, r, gamma + first * 4, place, pad, width_g)
        store_double(group_sums + task * 16, c1)
        store_double(group_sums + task * 16 + 8, c2)

    return run


@kernel
def _split_planes_dx(T: Any, U: Any) -> Any:
    """Some spans of planes a task."""

    def run(args: Any, task: Any) -> Any:
        (
            dy, dy_n, dy_c, x, x_n, x_c, dx, dx_n, dx_c, streamed, mean, rstd, gamma, group_sums, tasks, groups,
            width_g, hw, spans, per,
        ) = words(args, 20)  # fmt: skip
        channels, stage, staged, end = groups * width_g, scratch(STAGE), 0, dx
        size = np.float64(width_g) * np.float64(hw)
        for item in range(task * per, min(tasks, task * per + per)):
            n, c, start = item // spans // channels, item // spans % channels, item % spans * SPAN
            group, count = n * groups + c // width_g, min(SPAN, hw - start)
            f = _plane_factors(
                load_one(mean + group * 4), load_one(rstd + group * 4), load_one(gamma + c * 4),
                load_double(group_sums + group * 16), load_double(group_sums + group * 16 + 8), size,
            )  # fmt: skip
            target = dx + n * dx_n + c * dx_c + start * width(U)
            staged = _plane_dx(
                T, U, streamed, dy + n * dy_n + c * dy_c + start * width(T), x + n * x_n + c * x_c + start * width(T),
                target, count, f, AHEAD, stage, staged,
            )  # fmt: skip
            end = target + count * width(U)
        if streamed:
            flush(stage, end - staged, staged)

    return run


@inline
def _coefficient(table: Any, column: Any, which: Any) -> Any:
    """Where a sample's table has mean (0), rstd, gamma, -c1 or -c2 (4) of a column: 16 of each together."""
    return table + (column >> 4) * 320 + which * 64 + (column & 15) * 4


@inline
def _spread(n: Any, mean: Any, rstd: Any, gamma: Any, table: Any, groups: Any, width_g: Any, together: Any) -> Any:
    """mean, rstd and gamma of each column into a sample's table."""
    column = 0
    for _ in range(together):
        for group in range(groups):
            m, r = load_one(mean + (n * groups + group) * 4), load_one(rstd + (n * groups + group) * 4)
            for c in range(group * width_g, group * width_g + width_g):
                place = _coefficient(table, column, 0)
                store_one(place, m)
                store_one(place + 64, r)
                store_one(place + 128, load_one(gamma + c * 4))
                column += 1


@inline
def _gather(
    T: Any, dy: Any, dy_h: Any, x: Any, x_h: Any, partials: Any, sums: Any, totals: Any, table: Any, mean: Any,
    rstd: Any, gamma: Any, groups: Any, width_g: Any, hw: Any, chunks: Any, together: Any, pad: Any, wants_dx: Any,
) -> Any:  # fmt: skip
    """From the chunks' sums of a sample to its channels', and to -c1 and -c2 in its table; addresses are its own."""
    channels = groups * width_g
    cols = channels * together
    apart = (cols + 15) // 16 * 128
    total_columns(partials, apart, chunks, cols, totals, apart)
    for c in range(0, channels, 16):
        store_wide(sums + c * 8, total_wide(totals + c * 8, channels * 8, together))
        store_wide(sums + pad + c * 8, total_wide(totals + apart + c * 8, channels * 8, together))
    if wants_dx:
        size = np.float64(width_g) * np.float64(hw)
        for group in range(groups):
            first = group * width_g
            m, r = load_one(mean + group * 4), load_one(rstd + group * 4)
            c1, c2 = _group_sums(
                T, dy + first * width(T), width(T), dy_h, x + first * width(T), width(T), x_h, hw, 1, m, r,
                gamma + first * 4, sums + first * 8, pad, width_g,
            )  # fmt: skip
            minus_c1, minus_c2 = np.float32(-c1 / size), np.float32(-c2 / size)
            for i in range(together):
                for c in range(i * channels + first, i * channels + first + width_g):
                    store_one(_coefficient(table, c, 3), minus_c1)
                    store_one(_coefficient(table, c, 4), minus_c2)


@inline
def _pixel_step(T: Any, U: Any, dy: Any, x: Any, dx: Any, count: Any, table: Any) -> Any:
    one = np.float32(0)
    mean, rstd, gamma = load(one, table), load(one, table + 64), load(one, table + 128)
    _dx_step(T, U, dy, x, dx, count, (mean, rstd, gamma, load(one, table + 192), load(one, table + 256)))


@inline
def _pixels_dx(
    T: Any, U: Any, streamed: Any, dy: Any, dy_h: Any, x: Any, x_h: Any, dx: Any, dx_h: Any, rows: Any, cols: Any,
    last: Any, table: Any, ahead: Any, stage: Any,
) -> Any:  # fmt: skip
    """dx of some rows, the last of which ends after `last` columns."""
    size, out, staged = width(T), width(U), 0
    for row in range(rows):
        d, p, place = dy + row * dy_h, x + row * x_h, dx + row * dx_h
        n = last if row + 1 == rows else cols
        for first in range(0, n, BLOCK):
            c, end, t = first, min(n, first + BLOCK), table + first * 20
            target = stage + staged - first * out if streamed else place
            while c + 16 <= end:
                at = c * size
                if ahead > 0:
                    prefetch(d + at + ahead)
                    prefetch(p + at + ahead)
                _pixel_step(T, U, d + at, p + at, target + c * out, 16, t)
                c, t = c + 16, t + 320
            if c < end:
                _pixel_step(T, U, d + c * size, p + c * size, target + c * out, end - c, t)
            if streamed:
                staged += (end - first) * out
                if staged + BLOCK * out > STAGE or (row + 1 == rows and end == n):
                    flush(stage, place + end * out - staged, staged)
                    staged = 0


@kernel
def _pixels(T: Any, U: Any, wants_dx: Any, step: Any) -> Any:
    """step 0: some samples a task, all of each. Else a sweep of split ones: 1 spreads (a sample a task), 2 sums (some
    chunks of a sample), 3 gathers (a sample), 4 makes dx (some chunks)."""
    by_chunk = step in (2, 4)
    spreads, sums_up, gathers, makes_dx = (step in (0, own) for own in (1, 2, 3, 4))

    def run(args: Any, task: Any) -> Any:
        (
            dy, dy_n, dy_h, x, x_n, x_h, dx, dx_n, dx_h, streamed, mean, rstd, gamma, partials, sums, pad, totals,
            tables, samples, groups, width_g, hw, chunks, together, per, ahead,
        ) = words(args, 26)  # fmt: skip
        stage = scratch(STAGE)
        cols, rows = groups * width_g * together, (hw + together - 1) // together
        ragged = (hw - (rows - 1) * together) * groups * width_g
        vectors = (cols + 15) // 16
        tasks = (chunks + per - 1) // per
        start, stop = task * per, min(samples, task * per + per)
        if by_chunk:
            start, stop = task // tasks, task // tasks + 1
        for n in range(start, stop):
            d, p, table = dy + n * dy_n, x + n * x_n, tables + n * vectors * 320
            mine, place = partials + n * chunks * vectors * 128, sums + n * 2 * pad
            first, last = (task % tasks * per, min(chunks, task % tasks * per + per)) if by_chunk else (0, chunks)
            if spreads:
                _spread(n, mean, rstd, gamma, table, groups, width_g, together)
            if sums_up:
                for chunk in range(first, last):
                    row = chunk * PIXEL_ROWS
                    count = min(PIXEL_ROWS, rows - row)
                    sum_columns(
                        T, d + row * dy_h, dy_h, p + row * x_h, x_h, count, cols,
                        ragged if row + count == rows else cols, table, 320, True, mine + chunk * vectors * 128,
                    )  # fmt: skip
            if gathers:
                _gather(
                    T, d, dy_h // together, p, x_h // together, mine, place, totals + n * (vectors * 256 + 128), table,
                    mean + n * groups * 4, rstd + n * groups * 4, gamma, groups, width_g, hw, chunks, together, pad,
                    wants_dx,
                )  # fmt: skip
            if makes_dx and wants_dx:
                row = first * PIXEL_ROWS
                count = min(rows, last * PIXEL_ROWS) - row
                _pixels_dx(
                    T, U, streamed, d + row * dy_h, dy_h, p + row * x_h, x_h, dx + n * dx_n + row * dx_h, dx_h, count,
                    cols, ragged if row + count == rows else cols, table, ahead, stage,
                )  # fmt: skip

    return run


def build(program: Program, tiling: Tiling, call: Call) -> None:
    """The jobs of a call."""
    n, groups, width_g, hw, channels = (
        tiling.samples, tiling.groups, tiling.group_channels, tiling.image, tiling.channels
    )  # fmt: skip
    images, shape, size = tiling.images, (n, channels, hw), itemsize(call.input.dtype)
    wants_dx = "gradInput" in program
    arguments: list[Any] = []
    for name in ("gradOut", "input", "gradInput"):
        if name not in program:
            arguments += [0, 0, 0]
            continue
        place = Place(name, 0)
        if name in images.packed:
            place = Place(WORKSPACE, images.packed[name])
            if name != "gradInput":
                copy_images(program, name, call.values[name], images, shape, True)
        outer, inner = images.steps[name]
        arguments += [place, outer * size, inner * tiling.together * size]
    inputs, output = arguments[:6], (*arguments[6:], tiling.streamed)
    mean, rstd, gamma = (
        as_float32(program, name, call.values[name], count, tiling.converted.get(name))
        for name, count in (("mean", n * groups), ("rstd", n * groups), ("gamma", channels))
    )
    T, elements, pad = TAGS[call.input.dtype], n * channels * hw, padded(channels) * 8
    sums, partials = Place(WORKSPACE, tiling.channel_sums), Place(WORKSPACE, tiling.partials)

    if images.pixels:
        for step in (1, 2, 3, 4) if tiling.split else (0,):
            per = tiling.per_split_task if step in (2, 4) else 1 if tiling.split else tiling.per_task
            tasks = n * -(-tiling.chunks // per) if step in (2, 4) else -(-n // per)
            program.job(
                _pixels(T, T, wants_dx, step), tasks, elements, *inputs, *output, mean, rstd, gamma,
                partials, sums, pad, Place(WORKSPACE, tiling.totals), Place(WORKSPACE, tiling.coefficients), n, groups,
                width_g, hw, tiling.chunks, tiling.together, per, tiling.ahead,
            )  # fmt: skip
    elif not tiling.split:
        program.job(
            _whole_planes(T, T, wants_dx), -(-n * groups // tiling.per_task), elements, *inputs,
            *output, mean, rstd, gamma, sums, pad, n * groups, groups, width_g, hw, tiling.per_task, tiling.ahead,
        )  # fmt: skip
    else:
        spans, per, items = tiling.spans, tiling.per_split_task, n * channels * tiling.spans
        group_sums = Place(WORKSPACE, tiling.group_sums)
        program.job(
            _split_planes_sums(T), -(-items // per), elements, *inputs, mean, rstd, partials, items, groups, width_g,
            hw, spans, per,
        )  # fmt: skip
        program.job(
            _split_planes_groups(T), n * groups, items, *inputs, mean, rstd, gamma, partials, sums, pad, group_sums,
            groups, width_g, hw, spans,
        )  # fmt: skip
        if wants_dx:
            program.job(
                _split_planes_dx(T, T), -(-items // per), elements, *inputs, *output, mean, rstd,
                gamma, group_sums, items, groups, width_g, hw, spans, per,
            )  # fmt: skip
    if "gradInput" in images.packed:
        copy_images(program, "gradInput", call.gradInput, images, shape, False)
    for name, start in (("gradGammaOut", sums + pad), ("gradBetaOut", sums)):
        if name in program:
            out = Place(WORKSPACE, tiling.scattered[name]) if name in tiling.scattered else Place(name, 0)
            program.job(
                reduce_partials(TAGS[call.values[name].dtype], True), reduce_tasks(channels), n * channels, start, 128,
                2 * pad, n, channels, 0, out,
            )  # fmt: skip
            if name in tiling.scattered:
                unpack(program, name, call.values[name], out)
