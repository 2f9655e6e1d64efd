"""Compiles the Gluon kernels for GPUs of two kinds, without one: what the interpreter cannot step through is
seen to be what this version of Triton takes. Called by test_gpu.py in a process of its own."""

from __future__ import annotations

import re
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from backnorm.arrays import describe
from backnorm.backends import _Cuda
from backnorm.datatypes import DataType
from backnorm.ops import OPS
from backnorm.ops._launch import Launch, Pointer
from backnorm.ops._tiles import SHARED_MEMORY
from backnorm.ops.group_norm.gpu import launches
from backnorm.ops.group_norm.gpu_held import hold
from backnorm.ops.group_norm.gpu_held_planes import hold_planes
from backnorm.ops.group_norm.gpu_held_runs import hold_runs
from backnorm.ops.group_norm.gpu_tiling import HELD_EACH
from backnorm.ops.layer_norm import gpu as layer_norm
from backnorm.ops.layer_norm.gpu_held_rows import hold_rows
from backnorm.plan import make_plan
from backnorm.spec import ARRAYS

TYPES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}


def held(n: int, c: int, hw: int, group: int, kind: torch.dtype, plain: bool, pixels: bool = True) -> list[Launch]:
    """The launches of such a kernel for a call: all in one, and sums and dx apart. Plain: without gamma, but with a
    view for gradOut."""
    op = OPS["group_norm_backward"]
    if pixels:
        image = torch.empty(n, hw, c, dtype=kind).transpose(1, 2)
        view = torch.empty(n, hw, 2 * c, dtype=kind)[:, :, :c].transpose(1, 2)
    else:
        image, view = torch.empty(n, c, hw, dtype=kind), torch.empty(n, c, 2 * hw, dtype=kind)[:, :, :hw]
    tensors = {
        "gradOut": view if plain else image, "input": image, "mean": torch.empty(n, group),
        "rstd": torch.empty(n, group), "gamma": torch.empty(c), "gradInput": image, "gradGammaOut": torch.empty(c),
        "gradBetaOut": torch.empty(c),
    }  # fmt: skip
    values: dict[str, Any] = {name: describe(tensor, op.name, name).desc for name, tensor in tensors.items()}
    if plain:
        values["gamma"] = None
    values |= {"N": n, "C": c, "HxW": hw, "group": group, "outputMask": (True,) * 3}
    plan = make_plan(op, {**values, "workspaceSize": True, "executor": True}, "Any", ARRAYS)
    tiling = _Cuda(op.folder).tile(plan.call, plan.writes)
    kernel = hold if pixels else hold_planes if hw % 8 == 0 else hold_runs
    (launch,) = (launch for launch in launches(tiling, plan.call, plan.writes) if launch.kernel is kernel)
    return [launch, *(launch.apart or ())]


def held_rows(rows: int, cols: int, kind: torch.dtype, results: torch.dtype, gap: int = 0) -> Launch:
    op = OPS["layer_norm_backward"]
    image = torch.empty(rows, cols + gap, dtype=kind)[:, :cols]
    row, col = torch.empty(rows, 1), torch.empty(cols, dtype=results)
    tensors = {
        "gradOut": image, "input": image, "mean": row, "rstd": row, "weightOptional": col, "gradInputOut": image,
        "gradWeightOut": col, "gradBiasOut": col,
    }  # fmt: skip
    values: dict[str, Any] = {name: describe(tensor, op.name, name).desc for name, tensor in tensors.items()}
    values |= {"normalizedShape": (cols,), "biasOptional": None, "outputMask": (True,) * 3}
    plan = make_plan(op, {**values, "workspaceSize": True, "executor": True}, "Any", ARRAYS)
    tiling = _Cuda(op.folder).tile(plan.call, plan.writes)
    (launch,) = (one for one in layer_norm.launches(tiling, plan.call, plan.writes) if one.kernel is hold_rows)
    return launch


def compile_for(capability: int, launch: Launch, kind: torch.dtype) -> int:
    """The shared memory of a program."""
    types: dict[str, str] = {}
    constants: dict[str, Any] = dict(launch.constants)
    attributes = {}
    names = launch.kernel.arg_names
    for i, (name, value) in enumerate(zip(names, launch.arguments)):
        if isinstance(value, Pointer):
            types[name] = (
                "*i64"
                if value.dtype == DataType.INT64
                else TYPES[kind]
                if name in ("dy_ptr", "x_ptr", "dx_ptr")
                else "*fp32"
            )
        elif isinstance(value, float):
            types[name] = "fp32"
        elif value == 1:
            constants[name] = 1
        else:
            types[name] = "i32"
        if value.may_be_aligned if isinstance(value, Pointer) else value % 16 == 0:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(
        launch.kernel, {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()}, attributes,
    )  # fmt: skip
    options = {"num_warps": launch.num_warps, "maxnreg": launch.registers, "enable_fp_fusion": True}
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    copies = re.findall(r"cp\.async\.\w+\.shared\.global.*?, (0x\w+|\d+),", kernel.asm["ptx"])
    assert {int(size, 0) for size in copies} == {16}, "not all is copied in vectors of 16 bytes"
    if launch.kernel in (hold_rows, hold_runs):
        assert "matrix" not in kernel.asm["ptx"], "instructions that want multiples of 16 bytes"
    return int(kernel.metadata.shared)


if __name__ == "__main__":
    for n, c, hw, group, kind, plain in (
        (32, 256, 3136, 32, torch.bfloat16, False), (2, 160, 1000, 8, torch.float32, True),
        (3, 1024, 3136, 2, torch.float16, False),
    ):  # fmt: skip
        for launch in held(n, c, hw, group, kind, plain):
            shared = compile_for(90, launch, kind)
            assert HELD_EACH * (shared + 1024) <= SHARED_MEMORY, shared
    for n, c, hw, group, kind, plain in (
        (32, 256, 3136, 32, torch.bfloat16, False), (2, 640, 1024, 32, torch.float32, True),
        (9, 1280, 256, 32, torch.float16, False), (9, 1024, 196, 32, torch.bfloat16, False),
        (5, 24, 625, 3, torch.float32, False),
    ):  # fmt: skip
        (launch,) = held(n, c, hw, group, kind, plain, pixels=False)
        assert compile_for(90, launch, kind) <= launch.shared_bytes
    for launch in held(32, 256, 3136, 32, torch.bfloat16, False)[1:]:
        compile_for(80, launch, torch.bfloat16)
    for rows, cols, kind, results, gap in (
        (9000, 45, torch.bfloat16, torch.float32, 0), (3, 1027, torch.float32, torch.float32, 3),
        (40000, 4275, torch.float16, torch.float16, 0), (40000, 9895, torch.bfloat16, torch.float32, 0),
    ):  # fmt: skip
        launch = held_rows(rows, cols, kind, results, gap)
        assert compile_for(90, launch, kind) <= launch.shared_bytes
        if launch.shared_bytes <= 163 * 1024:
            compile_for(80, launch, kind)
