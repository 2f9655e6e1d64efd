"""BatchNorm's backward reduce on the CPU: the jobs of a call, of the kernels in planes.py and pixels.py."""

from __future__ import annotations

from math import prod
from typing import Any

from ...datatypes import itemsize
from ...spec import Call
from .._copy import as_float32, copy, unpack
from .._formats import TAGS, UP_TO_ZEN_4
from .._places import free_all, place_arguments
from .._program import WORKSPACE, Place, Program
from .._sums import ColumnResult, add_up, reduce_columns, task_columns
from .._views import AHEAD
from .axes import in_bytes
from .layout import Axis
from .pixels import pixel_sums, repeat_means
from .planes import plane_sums, small_plane_sums
from .tiling import Tiling, padded

#: Around what there is once.
ONCE = Axis(1, 0, 0)


def build(program: Program, tiling: Tiling, call: Call) -> None:
    """The jobs of a call."""
    layout, channels, size = tiling.layout, tiling.channels, itemsize(call.input.dtype)
    dy, x = Place("gradOut", 0), Place("input", 0)
    for name, (place, strides) in layout.packed.items():
        desc, target = call.values[name], Place(WORKSPACE, place)
        copy(program, desc.shape, Place(name, 0), desc.strides, desc.dtype, target, strides, desc.dtype)
        dy, x = (target, x) if name == "gradOut" else (dy, target)
    outer, inner = layout.outer or [ONCE], layout.inner or [ONCE]
    mean = as_float32(program, "mean", call.mean, channels, tiling.converted.get("mean"))
    invstd: Any = 0
    if "gradWeight" in program:
        invstd = as_float32(program, "invstd", call.invstd, channels, tiling.converted.get("invstd"))
    T, elements = TAGS[call.input.dtype], call.input.numel
    partials, totals = Place(WORKSPACE, tiling.partials), Place(WORKSPACE, tiling.totals)
    if layout.pixels:
        table, pad, count = Place(WORKSPACE, tiling.table), padded(tiling.cols), tiling.pixel_tasks
        alone = UP_TO_ZEN_4 and size == 4 and tiling.ahead == AHEAD and not tiling.fours
        row = tiling.together * size
        program.job(repeat_means(), 1, 1, mean, channels, tiling.together, table, pad * 4)
        program.job(
            pixel_sums(T), count, elements, dy, layout.run.dy * row, x, layout.run.x * row, table, partials, pad * 24,
            channels, tiling.together, layout.run.size, tiling.samples, tiling.task_samples, tiling.chunks,
            tiling.task_chunks, 0 if alone else tiling.ahead, tiling.fours, tiling.gradually, len(outer),
            *in_bytes(outer, size),
        )  # fmt: skip
        per = task_columns(2 * pad)
        program.job(
            reduce_columns(), -(-2 * pad // per), 2 * count * pad, partials + pad * 8, pad * 24, count, 2 * pad, per,
            totals,
        )  # fmt: skip
        sums, apart, step, count = totals, pad * 8, channels * 8, tiling.together
    else:
        count, pad = tiling.sample_tasks, padded(channels)
        tasks = count * -(-channels // tiling.task_channels)
        planes = (
            dy, layout.channel.dy * size, x, layout.channel.x * size, mean, partials, pad * 8, tiling.samples, channels,
            layout.run.size, tiling.task_samples, tiling.task_channels,
        )  # fmt: skip
        if tiling.samples_together:
            free_all(program, tiling.tables)
            program.job(
                small_plane_sums(T), tasks, elements, *planes, len(outer), tiling.samples_together,
                *place_arguments(tiling.tables), *in_bytes(outer, size),
            )  # fmt: skip
        else:
            program.job(
                plane_sums(T), tasks, elements, *planes, tiling.pieces, prod(axis.size for axis in inner),
                0 if UP_TO_ZEN_4 else tiling.ahead, len(outer), len(inner), *in_bytes(outer, size),
                *in_bytes(inner, size),
            )  # fmt: skip
        sums, apart, step = partials, pad * 8, 2 * pad * 8
    results = []
    for name, start, factors in (
        ("gradWeight", sums + apart, invstd), ("gradBias", sums, 0), ("sumDy", sums, 0), ("sumDyXmu", sums + apart, 0),
    ):  # fmt: skip
        if name in program:
            out = Place(WORKSPACE, tiling.scattered[name]) if name in tiling.scattered else Place(name, 0)
            results.append(ColumnResult(call.values[name].dtype, start, factors, out))
    add_up(program, results, True, step, count, channels)
    for name, offset in tiling.scattered.items():
        unpack(program, name, call.values[name], Place(WORKSPACE, offset))
