"""GroupNorm backward on the CPU, for planes (NCHW) and pixels (channels-last).

Whole tasks, a group of planes or a sample of pixels, are read for their sums and then again, from the cache where
they fit, for dx. Where there are too few of them for the threads, sums and dx are two sweeps over smaller tasks; both
ways add in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...threads import launch as on_threads
from .._memory import address, as_float32, part, tag
from .._simd import (
    fma,
    load,
    load_double,
    load_one,
    load_part,
    mul,
    splat,
    store,
    store_double,
    store_one,
    store_part,
    stream,
    sub,
    take_task,
    width,
)
from .._sums import add_partials, inline, kernel, reduce_sums, sum_columns, sum_run, sum_span
from .._views import CHUNK_ROWS, SPAN
from .tiling import Tiling


@inline
def _finish_plane(
    T: Any, U: Any, dy: Any, x: Any, dx: Any, n: Any, m: Any, r: Any, g: Any, c1: Any, c2: Any, streamed: Any
) -> Any:
    """dx = rstd * (dy * gamma - c1 - x_hat * c2) for a run of one channel."""
    size = width(T)
    mean, rstd, gamma, minus_c1, minus_c2 = splat(m), splat(r), splat(g), splat(-c1), splat(-c2)
    lead = (-dx % (16 * width(U))) // width(U) if streamed else 0
    c = 0
    while c < n:
        at = c * size
        count = min(n - c, lead) if lead else min(n - c, 16)
        lead = 0
        if count == 16:
            x_hat = mul(sub(load(T, x + at), mean), rstd)
            value = mul(rstd, fma(x_hat, minus_c2, fma(load(T, dy + at), gamma, minus_c1)))
            if streamed:
                stream(U, dx + c * width(U), value)
            else:
                store(U, dx + c * width(U), value)
        else:
            x_hat = mul(sub(load_part(T, x + at, count), mean), rstd)
            value = mul(rstd, fma(x_hat, minus_c2, fma(load_part(T, dy + at, count), gamma, minus_c1)))
            store_part(U, dx + c * width(U), value, count)
        c += count


@inline
def _finish_pixel(T: Any, U: Any, dy: Any, x: Any, dx: Any, cols: Any, table: Any, pad: Any, streamed: Any) -> Any:
    """The same across the channels of one element; the table holds mean, rstd, gamma, -c1 and -c2 of each channel."""
    size, one = width(T), np.float32(0)
    lead = (-dx % (16 * width(U))) // width(U) if streamed else 0
    c = 0
    while c < cols:
        at, k = c * size, table + c * 4
        count = min(cols - c, lead) if lead else min(cols - c, 16)
        lead = 0
        if count == 16:
            rstd = load(one, k + pad)
            x_hat = mul(sub(load(T, x + at), load(one, k)), rstd)
            wdy = fma(load(T, dy + at), load(one, k + 2 * pad), load(one, k + 3 * pad))
            value = mul(rstd, fma(x_hat, load(one, k + 4 * pad), wdy))
            if streamed:
                stream(U, dx + c * width(U), value)
            else:
                store(U, dx + c * width(U), value)
        else:
            rstd = load_part(one, k + pad, count)
            x_hat = mul(sub(load_part(T, x + at, count), load_part(one, k, count)), rstd)
            minus_c1, minus_c2 = load_part(one, k + 3 * pad, count), load_part(one, k + 4 * pad, count)
            wdy = fma(load_part(T, dy + at, count), load_part(one, k + 2 * pad, count), minus_c1)
            store_part(U, dx + c * width(U), mul(rstd, fma(x_hat, minus_c2, wdy)), count)
        c += count


@inline
def _weigh(
    T: Any, dy: Any, dy_step: Any, x: Any, x_step: Any, rows: Any, run: Any, m: Any, r: Any, g: Any, s1: Any, s2: Any
) -> Any:
    """A channel's share of its group's sums: gamma times its own, or term by term where gamma is not finite."""
    if np.isfinite(g):
        return s1 * np.float64(g), s2 * np.float64(g)
    t1, t2 = 0.0, 0.0
    for i in range(rows):
        a, b = sum_run(T, dy + i * dy_step, x + i * x_step, run, m, r, g)
        t1 += a
        t2 += b
    return t1, t2


@kernel
def _whole_planes(
    next_task: Any, tasks: Any, T: Any, U: Any, dy: Any, dy_n: Any, dy_c: Any, x: Any, x_n: Any, x_c: Any,
    dx: Any, dx_n: Any, dx_c: Any, mean: Any, rstd: Any, gamma: Any, sums: Any, groups: Any, width_g: Any, hw: Any,
    streamed: Any,
) -> Any:  # fmt: skip
    """A group a task: its channels' sums into sums[n][2][c], then dx (None: not wanted)."""
    channels = groups * width_g
    while True:
        task = take_task(next_task)
        if task >= tasks:
            return
        n, first = task // groups, task % groups * width_g
        m, r = load_one(mean + task * 4), load_one(rstd + task * 4)
        c1, c2 = 0.0, 0.0
        for c in range(first, first + width_g):
            d, p = dy + n * dy_n + c * dy_c, x + n * x_n + c * x_c
            s1, s2 = sum_run(T, d, p, hw, m, r, None)
            store_double(sums + (n * 2 * channels + c) * 8, s1)
            store_double(sums + (n * 2 * channels + channels + c) * 8, s2)
            a, b = _weigh(T, d, 0, p, 0, 1, hw, m, r, load_one(gamma + c * 4), s1, s2)
            c1 += a
            c2 += b
        if dx is not None:
            size = np.float64(width_g) * np.float64(hw)
            for c in range(first, first + width_g):
                _finish_plane(
                    T, U, dy + n * dy_n + c * dy_c, x + n * x_n + c * x_c, dx + n * dx_n + c * dx_c, hw, m, r,
                    load_one(gamma + c * 4), np.float32(c1 / size), np.float32(c2 / size), streamed,
                )  # fmt: skip


@kernel
def _split_planes_sums(
    next_task: Any, tasks: Any, T: Any, dy: Any, dy_n: Any, dy_c: Any, x: Any, x_n: Any, x_c: Any, mean: Any, rstd: Any,
    span_sums: Any, groups: Any, width_g: Any, hw: Any, spans: Any,
) -> Any:  # fmt: skip
    """A span of a plane a task, into span_sums[n][c][span]."""
    channels, size = groups * width_g, width(T)
    while True:
        task = take_task(next_task)
        if task >= tasks:
            return
        n, c, start = task // spans // channels, task // spans % channels, task % spans * SPAN
        group = (n * groups + c // width_g) * 4
        s1, s2 = sum_span(
            T, dy + n * dy_n + c * dy_c + start * size, x + n * x_n + c * x_c + start * size, min(SPAN, hw - start),
            load_one(mean + group), load_one(rstd + group), None,
        )  # fmt: skip
        store_double(span_sums + task * 16, s1)
        store_double(span_sums + task * 16 + 8, s2)


@kernel
def _split_planes_groups(
    next_task: Any, tasks: Any, T: Any, dy: Any, dy_n: Any, dy_c: Any, x: Any, x_n: Any, x_c: Any, mean: Any, rstd: Any,
    gamma: Any, span_sums: Any, sums: Any, group_sums: Any, groups: Any, width_g: Any, hw: Any, spans: Any,
) -> Any:  # fmt: skip
    """A group a task: from its spans' sums to its channels' and its own."""
    channels = groups * width_g
    while True:
        task = take_task(next_task)
        if task >= tasks:
            return
        n, first = task // groups, task % groups * width_g
        m, r = load_one(mean + task * 4), load_one(rstd + task * 4)
        c1, c2 = 0.0, 0.0
        for c in range(first, first + width_g):
            s1, s2 = 0.0, 0.0
            for span in range(spans):
                s1 += load_double(span_sums + ((n * channels + c) * spans + span) * 16)
                s2 += load_double(span_sums + ((n * channels + c) * spans + span) * 16 + 8)
            store_double(sums + (n * 2 * channels + c) * 8, s1)
            store_double(sums + (n * 2 * channels + channels + c) * 8, s2)
            d, p = dy + n * dy_n + c * dy_c, x + n * x_n + c * x_c
            a, b = _weigh(T, d, 0, p, 0, 1, hw, m, r, load_one(gamma + c * 4), s1, s2)
            c1 += a
            c2 += b
        store_double(group_sums + task * 16, c1)
        store_double(group_sums + task * 16 + 8, c2)


@kernel
def _split_planes_dx(
    next_task: Any, tasks: Any, T: Any, U: Any, dy: Any, dy_n: Any, dy_c: Any, x: Any, x_n: Any, x_c: Any,
    dx: Any, dx_n: Any, dx_c: Any, mean: Any, rstd: Any, gamma: Any, group_sums: Any, groups: Any, width_g: Any,
    hw: Any, spans: Any, streamed: Any,
) -> Any:  # fmt: skip
    """A span of a plane a task."""
    channels = groups * width_g
    size = np.float64(width_g) * np.float64(hw)
    while True:
        task = take_task(next_task)
        if task >= tasks:
            return
        n, c, start = task // spans // channels, task // spans % channels, task % spans * SPAN
        group = n * groups + c // width_g
        _finish_plane(
            T, U, dy + n * dy_n + c * dy_c + start * width(T), x + n * x_n + c * x_c + start * width(T),
            dx + n * dx_n + c * dx_c + start * width(U), min(SPAN, hw - start),
            load_one(mean + group * 4), load_one(rstd + group * 4), load_one(gamma + c * 4),
            np.float32(load_double(group_sums + group * 16) / size),
            np.float32(load_double(group_sums + group * 16 + 8) / size), streamed,
        )  # fmt: skip


@inline
def _spread(n: Any, mean: Any, rstd: Any, gamma: Any, table: Any, groups: Any, width_g: Any, pad: Any) -> Any:
    """mean, rstd and gamma of each channel of a sample into its table."""
    for c in range(groups * width_g):
        group = (n * groups + c // width_g) * 4
        store_one(table + c * 4, load_one(mean + group))
        store_one(table + pad + c * 4, load_one(rstd + group))
        store_one(table + 2 * pad + c * 4, load_one(gamma + c * 4))


@inline
def _gather(
    T: Any, n: Any, dy: Any, dy_h: Any, x: Any, x_h: Any, partials: Any, sums: Any, table: Any, groups: Any,
    width_g: Any, hw: Any, chunks: Any, pad: Any,
) -> Any:  # fmt: skip
    """From the chunks' sums of a sample (dy and x are its own) to its channels', and to -c1 and -c2 in its table."""
    channels = groups * width_g
    mine = partials + n * chunks * 2 * pad
    place = sums + n * 2 * channels * 8
    add_partials(mine, 2 * pad, chunks, channels, place)
    add_partials(mine + pad, 2 * pad, chunks, channels, place + channels * 8)
    size = np.float64(width_g) * np.float64(hw)
    for group in range(groups):
        c1, c2 = 0.0, 0.0
        for c in range(group * width_g, group * width_g + width_g):
            a, b = _weigh(
                T, dy + c * width(T), dy_h, x + c * width(T), x_h, hw, 1, load_one(table + c * 4),
                load_one(table + pad + c * 4), load_one(table + 2 * pad + c * 4), load_double(place + c * 8),
                load_double(place + (channels + c) * 8),
            )  # fmt: skip
            c1 += a
            c2 += b
        for c in range(group * width_g, group * width_g + width_g):
            store_one(table + 3 * pad + c * 4, np.float32(-c1 / size))
            store_one(table + 4 * pad + c * 4, np.float32(-c2 / size))


@kernel
def _pixels(
    next_task: Any, tasks: Any, T: Any, U: Any, step: Any, dy: Any, dy_n: Any, dy_h: Any, x: Any, x_n: Any, x_h: Any,
    dx: Any, dx_n: Any, dx_h: Any, mean: Any, rstd: Any, gamma: Any, partials: Any, sums: Any, tables: Any, groups: Any,
    width_g: Any, hw: Any, chunks: Any, streamed: Any,
) -> Any:  # fmt: skip
    """step 0: a sample a task, all of it. Else a sweep of split ones: 1 spreads (a sample a task), 2 sums (a chunk),
    3 gathers (a sample), 4 makes dx (a chunk)."""
    channels = groups * width_g
    pad = (channels + 15) // 16 * 64
    while True:
        task = take_task(next_task)
        if task >= tasks:
            return
        by_chunk = step == 2 or step == 4
        n = task // chunks if by_chunk else task
        first, last = (task % chunks, task % chunks + 1) if by_chunk else (0, chunks)
        table = tables + n * 5 * pad
        d, p = dy + n * dy_n, x + n * x_n
        if step == 0 or step == 1:
            _spread(n, mean, rstd, gamma, table, groups, width_g, pad)
        if step == 0 or step == 2:
            for chunk in range(first, last):
                row = chunk * CHUNK_ROWS
                sum_columns(
                    T, d + row * dy_h, dy_h, p + row * x_h, x_h, min(CHUNK_ROWS, hw - row), channels, table,
                    table + pad, partials + (n * chunks + chunk) * 2 * pad,
                )  # fmt: skip
        if step == 0 or step == 3:
            _gather(T, n, d, dy_h, p, x_h, partials, sums, table, groups, width_g, hw, chunks, pad)
        if (step == 0 or step == 4) and dx is not None:
            for h in range(first * CHUNK_ROWS, min(hw, last * CHUNK_ROWS)):
                _finish_pixel(T, U, d + h * dy_h, p + h * x_h, dx + n * dx_n + h * dx_h, channels, table, pad, streamed)


def launch(tiling: Tiling, tensors: Mapping[str, Any], workspace: Any) -> None:
    n, groups, width_g, hw, channels = (
        tiling.samples, tiling.groups, tiling.group_channels, tiling.image, tiling.channels
    )  # fmt: skip
    images, base = tiling.images, address(workspace)
    views = dict(tensors)
    for name, place in images.packed.items():
        views[name] = _packed(tiling, tensors[name], place, workspace)
        if name != "gradInput":
            views[name][...] = tensors[name].reshape(n, channels, hw)
    x = views["input"]
    T = U = tag(x)
    arguments: list[Any] = []
    for name in ("gradOut", "input", "gradInput"):
        if name in views:
            outer, inner = images.steps[name]
            arguments += [address(views[name]), outer * x.itemsize, inner * x.itemsize]
        else:
            arguments += [None, 0, 0]
    inputs, output = arguments[:6], arguments[6:]
    mean = as_float32(tensors, "mean", tiling.converted, n * groups, workspace)
    rstd = as_float32(tensors, "rstd", tiling.converted, n * groups, workspace)
    gamma = as_float32(tensors, "gamma", tiling.converted, channels, workspace)
    sums, partials = base + tiling.channel_sums, base + tiling.partials
    sizes, size = (groups, width_g, hw), n * channels * hw

    if images.pixels:
        rest = (
            *inputs,
            *output,
            mean,
            rstd,
            gamma,
            partials,
            sums,
            base + tiling.coefficients,
            *sizes,
            tiling.chunks,
            tiling.streamed,
        )
        for step in (1, 2, 3, 4) if tiling.split else (0,):
            on_threads(_pixels, n * tiling.chunks if step in (2, 4) else n, size, T, U, step, *rest)
    elif not tiling.split:
        on_threads(
            _whole_planes, n * groups, size, T, U, *inputs, *output, mean, rstd, gamma, sums, *sizes, tiling.streamed
        )
    else:
        spans = tiling.spans
        group_sums = base + tiling.group_sums
        on_threads(_split_planes_sums, n * channels * spans, size, T, *inputs, mean, rstd, partials, *sizes, spans)
        on_threads(
            _split_planes_groups, n * groups, n * channels * spans, T, *inputs, mean, rstd, gamma, partials, sums,
            group_sums, *sizes, spans,
        )  # fmt: skip
        if "gradInput" in tensors:
            on_threads(
                _split_planes_dx, n * channels * spans, size, T, U, *inputs, *output, mean, rstd, gamma, group_sums,
                *sizes, spans, tiling.streamed,
            )  # fmt: skip
    if "gradInput" in images.packed:
        tensors["gradInput"][...] = views["gradInput"].reshape(tensors["gradInput"].shape)
    for name, offset in (("gradGammaOut", channels), ("gradBetaOut", 0)):
        if name in tensors:
            total = part(workspace, tiling.totals, (channels,), np.float64)
            on_threads(
                reduce_sums,
                -(-channels // 256),
                n * channels,
                sums + offset * 8,
                2 * channels * 8,
                n,
                channels,
                address(total),
            )
            with np.errstate(all="ignore"):
                tensors[name][...] = total.astype(np.float32).astype(tensors[name].dtype).reshape(tensors[name].shape)


def _packed(tiling: Tiling, tensor: Any, place: int, workspace: Any) -> Any:
    """Room for a tensor in the workspace, as (samples, channels, image) in the layout of the call."""
    n, channels, hw = tiling.samples, tiling.channels, tiling.image
    if tiling.images.pixels:
        return part(workspace, place, (n, hw, channels), tensor.dtype).transpose(0, 2, 1)
    return part(workspace, place, (n, channels, hw), tensor.dtype)
