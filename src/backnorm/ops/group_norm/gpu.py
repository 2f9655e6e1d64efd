"""GroupNorm backward on a GPU, for planes (NCHW) and pixels (channels-last).

A group that fits one program's registers is read once; those of small images are LayerNorm's rows, which come in whole
vectors. So is a group of planes that fits its shared memory. Of larger ones, some are read twice by one program, the
second time from the caches, and others once by programs that share them, as most pixels are. All else is read twice by
all: sums of each channel, sums of each group, dx.
"""

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

from ...datatypes import F32, DataType
from ...spec import Call
from .._gpu import copy_images, exchange, finish_sums
from .._gpu import pack as copy_in
from .._gpu import unpack as copy_out
from .._launch import Launch, Pointer, or_else, pointer_to
from .._program import WORKSPACE
from .._tiles import MULTIPROCESSORS, TILES_OF_A_RUN, power_of_two
from ..layer_norm.gpu import rows_of_groups
from . import gpu_tiling
from .gpu_held import hold
from .gpu_held_planes import hold_planes
from .gpu_held_runs import hold_runs
from .gpu_kernels import group_twice, shared, split_dx, split_sums, sum_groups, whole_group
from .gpu_tiling import STAGES, Held, HeldPlanes, HeldRuns, Rows, Shared, Split, Tiling, Twice, Whole


class _Call(NamedTuple):
    """What the launches of all ways have in common."""

    tiling: Tiling
    #: gradOut, input, mean, rstd and gamma, or mean again.
    inputs: tuple[Pointer, ...]
    dx: Pointer
    partials: Pointer
    has_w: bool
    wants_dx: bool
    #: From sample to sample and from channel to channel or element to element, of gradOut and input, and of dx.
    in_steps: tuple[int, ...]
    out_steps: tuple[int, ...]

    @property
    def share(self) -> float:
        return 1.0 / (self.tiling.group_channels * self.tiling.image)

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.tiling.groups, self.tiling.group_channels, self.tiling.image


def _as_rows(call: _Call, way: Rows, columns: bool) -> list[Launch]:
    n, (groups, width, image) = call.tiling.samples, call.sizes
    constants = {
        "HAS_W": call.has_w, "WANTS_DX": call.wants_dx, "COLUMNS": columns, "ROWS": way.rows, "COLS": way.cols,
        "PROGRAMS": way.programs, "STAGES": STAGES, "EVEN": n % way.rows == 0 and width * image == way.cols,
        "VECTOR": call.tiling.vector,
    }  # fmt: skip
    steps = (*call.in_steps[::2], call.out_steps[0])
    numbers = (*call.inputs, call.dx, call.partials, n, width * image, *steps, groups, image)
    return [Launch(rows_of_groups, (way.programs, groups), numbers, constants, way.num_warps)]


def _in_registers(call: _Call, way: Whole) -> list[Launch]:
    constants = {
        "HAS_W": call.has_w, "WANTS_DX": call.wants_dx, "PIXELS": call.tiling.images.pixels, "ROWS": way.rows,
        "COLS": way.cols,
    }  # fmt: skip
    numbers = (*call.inputs, call.dx, call.partials, *call.sizes, call.share, *call.in_steps, *call.out_steps)
    return [Launch(whole_group, (call.tiling.samples * call.tiling.groups,), numbers, constants, way.num_warps)]


def _by_some(call: _Call, way: Shared) -> list[Launch]:
    words, count = Pointer(WORKSPACE, call.tiling.words, DataType.INT64), call.tiling.samples * call.tiling.groups
    numbers = (
        *call.inputs, call.dx, words, call.partials, count, way.lanes, *call.sizes, call.share, way.pieces, way.parts,
        *call.in_steps, *call.out_steps,
    )  # fmt: skip

    def launch(SUMS: bool, DX: bool) -> Launch:
        constants = {
            "HAS_W": call.has_w, "SUMS": SUMS, "DX": DX, "ROWS": way.rows, "COLS": way.cols,
            "PARTS": power_of_two(way.parts), "EVEN": way.even, "STAGES": STAGES,
        }  # fmt: skip
        return Launch(shared, (way.lanes * way.parts,), numbers, constants, gpu_tiling.PART_WARPS)

    apart = [launch(SUMS=True, DX=False), launch(SUMS=False, DX=True)]
    return exchange(words, count * way.parts, launch(SUMS=True, DX=True), apart)


def _by_one_twice(call: _Call, way: Twice) -> list[Launch]:
    long = -(-call.tiling.image // way.cols) > TILES_OF_A_RUN
    constants = {
        "HAS_W": call.has_w, "ROWS": way.rows, "COLS": way.cols, "EVEN": way.even, "STAGES": STAGES, "LONG": long,
    }  # fmt: skip
    numbers = (*call.inputs, call.dx, call.partials, *call.sizes, call.share, *call.in_steps, *call.out_steps)
    grid = (call.tiling.samples * call.tiling.groups,)
    return [Launch(group_twice, grid, numbers, constants, gpu_tiling.TWICE_WARPS)]


def _by_all_twice(call: _Call, way: Split) -> list[Launch]:
    n, pixels, (groups, width, _) = call.tiling.samples, call.tiling.images.pixels, call.sizes
    group_sums = Pointer(WORKSPACE, call.tiling.group_sums, F32)
    across = -(-call.tiling.channels // (way.cols if pixels else way.rows))
    sizes = {"HAS_W": call.has_w, "PIXELS": pixels, "ROWS": way.rows, "COLS": way.cols}
    numbers: tuple[Any, ...] = (*call.inputs, call.partials, *call.sizes, way.splits, *call.in_steps)
    constants = {**sizes, "EVEN": way.even, "TILES": way.tiles, "STAGES": way.stages}
    warps, registers = gpu_tiling.SPLIT_WARPS, way.registers
    kernels = [Launch(split_sums, (n * way.splits * across,), numbers, constants, warps, registers=registers)]
    if call.wants_dx:
        constants = {"CHANNELS": power_of_two(width), "SPLITS": max(1, min(16, 1024 // power_of_two(width)))}
        numbers = (call.partials, group_sums, groups, width, call.share, way.splits)
        kernels.append(Launch(sum_groups, (n * groups,), numbers, constants, 1))
        constants = {**sizes, "EVEN": way.dx_even, "TILES": way.dx_tiles}
        numbers = (*call.inputs, call.dx, group_sums, *call.sizes, way.dx_splits, *call.in_steps, *call.out_steps)
        grid = (n * way.dx_splits * across,)
        kernels.append(Launch(split_dx, grid, numbers, constants, warps, registers=registers))
    return kernels


def _in_shared_memory(call: _Call, held: Held) -> list[Launch]:
    n, (groups, width, image) = call.tiling.samples, call.sizes
    vector, words = call.tiling.vector, Pointer(WORKSPACE, call.tiling.words, DataType.INT64)
    numbers = (
        *call.inputs, call.dx, words, call.partials, n, held.stride, groups, held.blocks, held.lanes, image, call.share,
        held.parts, held.runs, *[step // vector for step in (*call.in_steps, *call.out_steps)],
    )  # fmt: skip

    def held_by(SUMS: bool, DX: bool) -> Launch:
        constants = {
            "HAS_W": call.has_w, "SUMS": SUMS, "DX": DX, "GROUPS": held.groups, "WIDTH": width,
            "UNIT": gcd(width, vector), "ROWS": held.rows, "COLS": held.cols, "PIECES": gpu_tiling.HELD_PIECES,
            "TILES": held.tiles, "SLOTS": gpu_tiling.HELD_SLOTS, "LAG": held.lag, "PARTS": power_of_two(held.parts),
            "VECTOR": vector, "FULL": held.groups * width == held.cols and groups % held.groups == 0,
            "SAME": call.in_steps[:2] == call.in_steps[2:],
        }  # fmt: skip
        grid = (held.stride * held.lanes * held.parts,)
        launch = Launch(hold, grid, numbers, constants, gpu_tiling.HELD_WARPS, each=gpu_tiling.HELD_EACH)
        return launch._replace(registers=gpu_tiling.HELD_REGISTERS)

    apart = [held_by(SUMS=True, DX=False), held_by(SUMS=False, DX=True)]
    return exchange(words, n * held.blocks * held.parts * held.groups, held_by(SUMS=True, DX=True), apart)


def _by_one_in_shared_memory(call: _Call, held: HeldPlanes) -> list[Launch]:
    count, (groups, width, image), vector = call.tiling.samples * call.tiling.groups, call.sizes, call.tiling.vector
    steps = [step // vector for step in (*call.in_steps, *call.out_steps)]
    constants = {
        "HAS_W": call.has_w, "WIDTH": width, "ROWS": held.rows, "COLS": held.cols, "DOWN": held.down,
        "ACROSS": held.across, "VECTOR": vector, "EVEN": image % held.cols == 0,
    }  # fmt: skip
    numbers = (*call.inputs, call.dx, call.partials, count, groups, image, call.share, *steps)
    grid = (min(count, held.each * MULTIPROCESSORS),)
    launch = Launch(hold_planes, grid, numbers, constants, held.num_warps, registers=held.registers)
    return [launch._replace(shared_bytes=held.shared_bytes)]


def _as_runs_in_shared_memory(call: _Call, held: HeldRuns) -> list[Launch]:
    groups, width, image = call.sizes
    constants = {
        "HAS_W": call.has_w, "WIDTH": width, "LANES": max(power_of_two(width), 32 * held.num_warps),
        "BLOCKS": held.blocks, "SLOT": held.slot, "TOGETHER": held.together,
    }  # fmt: skip
    steps = (*call.in_steps[::2], call.out_steps[0])
    numbers = (*call.inputs, call.dx, call.partials, groups, image, call.share, *steps)
    launch = Launch(hold_runs, (call.tiling.samples * groups,), numbers, constants, held.num_warps)
    return [launch._replace(shared_bytes=held.shared_bytes, anywhere=True)]


def launches(tiling: Tiling, call: Call, writes: tuple[str, ...]) -> list[Launch]:
    images, channels, image, values, way = tiling.images, tiling.channels, tiling.image, call.values, tiling.way
    n, shape = tiling.samples, (tiling.samples, channels, image)

    def pointer(name: str) -> Pointer:
        return pointer_to(name, values[name], images.packed, tiling.packed)

    steps: list[Launch] = []
    for name in images.packed:
        if name != "gradInput":
            steps += copy_images(name, values[name], images, shape, True)
    for name in tiling.packed:
        if name not in writes:
            steps += copy_in(name, values[name], tiling.packed[name])
    has_w, wants_dx = values["gamma"] is not None, "gradInput" in writes
    inputs = tuple(pointer(name) for name in ("gradOut", "input", "mean", "rstd", "gamma" if has_w else "mean"))
    partials, gathered = Pointer(WORKSPACE, tiling.partials, F32), Pointer(WORKSPACE, tiling.gathered, F32)
    common = _Call(
        tiling, inputs, pointer("gradInput" if wants_dx else "input"), partials, has_w, wants_dx,
        (*images.steps["gradOut"], *images.steps["input"]), images.steps["gradInput"] if wants_dx else (0, 0),
    )  # fmt: skip
    dgamma, dbeta = (pointer(name) if name in writes else None for name in ("gradGammaOut", "gradBetaOut"))

    def finish(count: int, sums: int) -> list[Launch]:
        """dgamma and dbeta of so many partials of so many sums of each channel."""
        if not dgamma and not dbeta:
            return []
        return finish_sums(partials, gathered, count, sums * channels, channels, channels, dbeta, None, dgamma)

    if isinstance(way, Rows):
        kernels = _as_rows(common, way, bool(dgamma or dbeta))
        if dgamma or dbeta:
            kernels += finish_sums(
                partials, gathered, way.programs, 2 * channels * image, channels * image, channels, dgamma, None, dbeta,
                inner=image, inner_step=1, col_step=image,
            )  # fmt: skip
    elif isinstance(way, Whole):
        kernels = _in_registers(common, way) + finish(n, 4)
    elif isinstance(way, Shared):
        kernels = _by_some(common, way) + finish(n * way.pieces, 4)
    elif isinstance(way, Twice):
        kernels = _by_one_twice(common, way) + finish(n, 4)
    else:
        kernels = _by_all_twice(common, way) + finish(n * way.splits, 4)
    if isinstance(tiling.held, HeldPlanes):
        kernels = or_else(_by_one_in_shared_memory(common, tiling.held) + finish(n, 2), kernels)
    elif isinstance(tiling.held, HeldRuns):
        kernels = or_else(_as_runs_in_shared_memory(common, tiling.held) + finish(n, 2), kernels)
    elif tiling.held:
        kernels = or_else(_in_shared_memory(common, tiling.held) + finish(tiling.held.partials, 2), kernels)
    steps += kernels
    if "gradInput" in images.packed:
        steps += copy_images("gradInput", values["gradInput"], images, shape, False)
    for name in writes:
        if name in tiling.packed:
            steps += copy_out(name, values[name], tiling.packed[name])
    return steps
