"""GroupNorm backward on the CPU: the jobs of a call. The kernels are in rows.py, small_planes.py, planes.py and
pixels.py."""

from __future__ import annotations

from typing import Any

from ...datatypes import itemsize
from ...spec import Call
from .._copy import as_float32, copy_images, unpack
from .._formats import TAGS, UP_TO_ZEN_4
from .._places import free_all, place_arguments
from .._program import WORKSPACE, Place, Program
from .._sums import ColumnResult, add_up
from .._views import AHEAD, LONGEST_BLOCK
from .pixels import pixels
from .planes import split_planes_dx, split_planes_groups, split_planes_sums, whole_planes
from .rows import group_rows
from .small_planes import small_planes
from .tiling import LONGEST_AHEAD, LONGEST_AHEAD_ON_ZEN, Tiling, padded, sums_bytes


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
    ahead, sums_ahead = _requests(tiling)
    sums, partials = Place(WORKSPACE, tiling.channel_sums), Place(WORKSPACE, tiling.partials)
    sums_n = sums_bytes(channels, tiling.samples_together)

    if images.pixels and not tiling.as_rows:
        shared = (
            *inputs, *output, mean, rstd, gamma, partials, sums, sums_n, pad,
            Place(WORKSPACE, tiling.totals), Place(WORKSPACE, tiling.coefficients), tiling.row_of_table, n, groups,
            width_g, hw, tiling.blocks, tiling.block_rows, tiling.together, ahead, tiling.fours,
        )  # fmt: skip
        if tiling.split:
            by_block = program.arguments(*shared, tiling.per_split_task), tiling.split_tasks
            by_sample = program.arguments(*shared, 1), 1
            steps = zip((1, 2, 3, 4) if wants_dx else (1, 2, 3), (by_sample, by_block) * 2)
            _by_batches(program, tiling, n, elements, [(pixels(T, wants_dx, step), *rest) for step, rest in steps])
        else:
            program.job(pixels(T, wants_dx, 0), -(-n // tiling.per_task), elements, *shared, tiling.per_task)
    elif tiling.as_rows:
        (dy, dy_n, dy_c, x, x_n, x_c), (dx, dx_n, dx_c, streamed) = inputs, output
        next_row = (AHEAD, AHEAD) if tiling.row_groups == groups else (dy_n, x_n)
        columns = "gradGammaOut" in program or "gradBetaOut" in program
        free_all(program, tiling.tables)
        program.job(
            group_rows(T, T, images.pixels, columns, wants_dx, width_g * hw <= LONGEST_BLOCK), tiling.row_tasks,
            elements, dy, dy_n, dy_c * width_g, x, x_n, x_c * width_g, dx, dx_n, dx_c * width_g, streamed, mean, rstd,
            gamma, sums, pad, n, groups, width_g, hw, tiling.row_groups, tiling.task_groups, tiling.chunk_samples,
            tiling.per_task, *next_row, *place_arguments(tiling.tables),
        )  # fmt: skip
    elif not tiling.split:
        shared = *inputs, *output, mean, rstd, gamma, sums, sums_n, pad, n * groups, groups, width_g, hw
        together, per, tasks = tiling.samples_together, tiling.per_task, -(-n * groups // tiling.per_task)
        if tiling.small_planes:
            own = tiling.joined_planes, together, per, ahead, tiling.batch, tiling.at_once
            program.job(small_planes(T, wants_dx), tasks, elements, *shared, *own)
        else:
            program.job(whole_planes(T, wants_dx), tasks, elements, *shared, together, per, ahead, sums_ahead)
    else:
        spans, per, tasks = tiling.spans, tiling.per_split_task, tiling.split_tasks
        apart = n * channels * spans * 8
        group_sums, shape_g = Place(WORKSPACE, tiling.group_sums), (groups, width_g, hw, spans)
        sweeps = [
            (
                split_planes_sums(T),
                program.arguments(*inputs, mean, rstd, partials, apart, *shape_g, per, sums_ahead),
                tasks,
            ),
            (
                split_planes_groups(T),
                program.arguments(*inputs, mean, rstd, gamma, partials, apart, sums, pad, group_sums, *shape_g),
                1,
            ),
        ]
        if wants_dx:
            dx = program.arguments(
                *inputs, *output, mean, rstd, gamma, group_sums, *shape_g, tiling.joined_planes, per, ahead
            )
            sweeps.append((split_planes_dx(T), dx, tasks))
        _by_batches(program, tiling, n * groups, elements, sweeps)
    if "gradInput" in images.packed:
        copy_images(program, "gradInput", call.gradInput, images, shape, False)
    parts = tiling.chunks if tiling.as_rows else -(-n // tiling.samples_together)
    results = []
    if tiling.samples_together > 1:
        sums += 2 * pad
    for name, start in (("gradGammaOut", sums + pad), ("gradBetaOut", sums)):
        if name in program:
            out = Place(WORKSPACE, tiling.scattered[name]) if name in tiling.scattered else Place(name, 0)
            results.append(ColumnResult(call.values[name].dtype, start, 0, out))
    add_up(program, results, True, sums_n, parts, channels)
    for name, offset in tiling.scattered.items():
        unpack(program, name, call.values[name], Place(WORKSPACE, offset))


def _requests(tiling: Tiling) -> tuple[int, int]:
    """From how many bytes ahead memory is asked for: for dx and, of planes, for sums."""
    own = tiling.unit_bytes * (min(tiling.batch, tiling.groups) if tiling.small_planes else 1)
    if UP_TO_ZEN_4:
        far = AHEAD if tiling.split and not tiling.images.pixels else 0
        return own if own <= LONGEST_AHEAD_ON_ZEN else far, 0
    return own if own <= LONGEST_AHEAD and not tiling.split else AHEAD, tiling.sums_ahead


def _by_batches(
    program: Program, tiling: Tiling, wholes: int, elements: int, sweeps: list[tuple[int, int, int]]
) -> None:
    """Sweeps (a kernel, its arguments, the tasks of a group or sample) over some groups or samples at a time, so that
    the last one, which makes dx, finds them in the cache."""
    for first in range(0, wholes, tiling.batch):
        last = min(wholes, first + tiling.batch)
        for sweep in sweeps:
            kernel, arguments, tasks = sweep
            size = elements // wholes * (last - first)
            program.run(kernel, arguments, first * tasks, last * tasks, size, backwards=sweep is sweeps[-1])
