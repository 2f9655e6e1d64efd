"""aclnnGroupNormBackward: gradients of GroupNorm from saved statistics."""

from __future__ import annotations

from ...datatypes import BF16, F16, F32, DataType, dtype_name
from ...products import Support
from ...spec import (
    Call,
    Example,
    OpSpec,
    Param,
    Requested,
    Rule,
    Shape,
    Step,
    Witness,
    count_is,
    dtype_supported,
    length_is,
    listing,
    not_null,
    not_overlapping,
    null_or_alive,
    number_rule,
    operator_supported,
    out_pointers,
    rank_between,
    same_dtype,
    shape_is,
    tensor,
)

_MIXED = ((F32, F32), (F16, F16), (F16, F32), (BF16, BF16), (BF16, F32))
"""(gradOut, mean) where a product takes float32 statistics beside 16-bit data."""


def _input_shape(c: Call) -> Shape:
    return tuple(c.input.shape)


def _gamma_shape(c: Call) -> Shape:
    return tuple(c.gamma.shape) if c.present("gamma") else (c.C,)


def _mean_dtype(c: Call) -> int:
    return int(c.mean.dtype)


PARAMS = (
    Param("gradOut", "grad_out", "tensor", "gradient of the forward output, row-major (N, C, HxW)"),
    Param("input", "input", "tensor", "the forward input, row-major (N, C, HxW)"),
    Param("mean", "mean", "tensor", "saved mean, one a sample and group"),
    Param("rstd", "rstd", "tensor", "saved reciprocal standard deviation, one a sample and group"),
    Param("gamma", "weight", "tensor", "the affine weight, one a channel; 1 where absent", optional=True),
    Param("N", "N", "int64", "samples"),
    Param("C", "C", "int64", "channels"),
    Param("HxW", "HxW", "int64", "elements of a channel of a sample"),
    Param("group", "group", "int64", "groups the channels are divided into"),
    Param("outputMask", "output_mask", "bool_array", "which of the three outputs to compute"),
    Param(
        "gradInput", "grad_input", "tensor", "gradient of the input", requested=Requested("outputMask", 0),
        shape=_input_shape, dtype=lambda c: int(c.gradOut.dtype),
    ),
    Param(
        "gradGammaOut", "grad_weight", "tensor", "gradient of gamma", requested=Requested("outputMask", 1),
        shape=_gamma_shape, dtype=_mean_dtype,
    ),
    Param(
        "gradBetaOut", "grad_bias", "tensor", "gradient of beta", requested=Requested("outputMask", 2),
        shape=_gamma_shape, dtype=_mean_dtype,
    ),
    Param("workspaceSize", "workspaceSize", "out_pointer", "bytes of scratch that phase two needs"),
    Param("executor", "executor", "out_pointer", "the plan that phase two runs"),
)  # fmt: skip


def _mean_dtype_rule() -> Rule:
    def allowed(c: Call) -> list[int]:
        dy = c.gradOut.dtype
        return [mean for data, mean in _MIXED if data == dy] if c.support.mixed else [dy]

    half = {name: {"dtype": F16} for name in ("gradOut", "input", "gradInput")}
    return Rule(
        "mean", "have a data type that goes with {gradOut}",
        lambda c: c.mean.dtype in allowed(c), lambda c: dtype_name(c.mean.dtype),
        (
            Witness({"mean": {"dtype": F16}}),
            Witness({"mean": {"dtype": DataType.INT32}}),
            Witness(half, lambda support: support is not None and not support.mixed),
        ),
        expected=lambda c: f"{listing([dtype_name(d) for d in allowed(c)])} beside {dtype_name(c.gradOut.dtype)}",
    )  # fmt: skip


def _not_negative(name: str) -> Rule:
    return number_rule(name, "not be negative", lambda c: c.values[name] >= 0, {name: -1}, {name: -(2**63)})


def _has_channel_limit(support: Support | None) -> bool:
    return support is not None and support.max_channels is not None


def _has_group_limit(support: Support | None) -> bool:
    return support is not None and support.max_group_channels is not None


_SIZES = (
    _not_negative("N"),
    _not_negative("C"),
    _not_negative("HxW"),
    number_rule("group", "be positive", lambda c: c.group > 0, {"group": 0}, {"group": -2}),
    number_rule(
        "group", "divide {C}", lambda c: c.C % c.group == 0, {"group": 4}, {"group": 7},
        expected=lambda c: f"a divisor of {c.C}",
    ),
    number_rule(
        "C", "be within the product's limit", lambda c: c.support.max_channels >= c.C,
        {"C": 240_001, "group": 240_001}, expected=lambda c: f"at most {c.support.max_channels}",
        applies=_has_channel_limit,
    ),
    number_rule(
        "group", "leave no more channels a group than the product's limit",
        lambda c: c.C // c.group <= c.support.max_group_channels,
        {"C": 8001, "group": 1}, expected=lambda c: f"at most {c.support.max_group_channels} of {c.C}",
        applies=_has_group_limit,
    ),
)  # fmt: skip


def _elements(c: Call) -> int:
    return int(c.N * c.C * c.HxW)


def _statistics(c: Call) -> int:
    return int(c.N * c.group)


_OUTPUTS = ("gradInput", "gradGammaOut", "gradBetaOut")

STEPS = (
    out_pointers(),
    Step(
        "null pointers",
        (
            *(not_null(name) for name in ("gradOut", "input", "mean", "rstd", "outputMask")),
            null_or_alive("gamma"),
            operator_supported(),
        ),
    ),
    Step("mask", (length_is("outputMask", 3),)),
    Step("requested outputs", tuple(not_null(name) for name in _OUTPUTS)),
    Step(
        "data types",
        (
            dtype_supported("gradOut"),
            dtype_supported("input"),
            same_dtype("input", "gradOut"),
            _mean_dtype_rule(),
            same_dtype("rstd", "mean"),
            same_dtype("gamma", "mean"),
            same_dtype("gradInput", "gradOut"),
            same_dtype("gradGammaOut", "mean"),
            same_dtype("gradBetaOut", "mean"),
        ),
    ),
    Step("sizes and limits", _SIZES),
    Step(
        "ranks, counts and shapes",
        (
            rank_between("gradOut", 0, 8),
            rank_between("input", 0, 8),
            rank_between("mean", 0, 8),
            rank_between("rstd", 0, 8),
            rank_between("gamma", 0, 8),
            count_is("gradOut", "N·C·HxW elements", _elements, {"shape": (2, 6, 5)}),
            count_is("input", "N·C·HxW elements", _elements, {"shape": (2, 6, 5)}, {"shape": ()}),
            count_is("mean", "N·group elements", _statistics, {"shape": (2, 6)}),
            count_is("rstd", "N·group elements", _statistics, {"shape": (3,)}),
            count_is("gamma", "C elements", lambda c: int(c.C), {"shape": (3,)}),
            shape_is("gradInput", "the shape of {input}", _input_shape, {"shape": (2, 24)}),
            shape_is("gradGammaOut", "the shape of {gamma}, or [C] without one,", _gamma_shape, {"shape": (1, 6)}),
            shape_is("gradBetaOut", "the shape of {gamma}, or [C] without one,", _gamma_shape, {"shape": (6, 1)}),
            not_overlapping("gradInput", 3),
            not_overlapping("gradGammaOut", 1),
            not_overlapping("gradBetaOut", 1),
        ),
    ),
)

_ONE_TO_24 = [[[sample * 12 + channel * 4 + i for i in range(1, 5)] for channel in range(3)] for sample in range(2)]

GROUP_NORM = OpSpec(
    name="group_norm_backward",
    c_name="aclnnGroupNormBackward",
    header="aclnn_group_norm_backward.h",
    folder="group_norm",
    title="GroupNorm backward",
    params=PARAMS,
    steps=STEPS,
    good={
        "gradOut": tensor(F32, 2, 6, 4),
        "input": tensor(F32, 2, 6, 4),
        "mean": tensor(F32, 2, 3),
        "rstd": tensor(F32, 2, 3),
        "gamma": tensor(F32, 6),
        "N": 2,
        "C": 6,
        "HxW": 4,
        "group": 3,
        "outputMask": (True, True, True),
        "gradInput": tensor(F32, 2, 6, 4),
        "gradGammaOut": tensor(F32, 6),
        "gradBetaOut": tensor(F32, 6),
        "workspaceSize": True,
        "executor": True,
    },
    example=Example(
        inputs={
            "gradOut": _ONE_TO_24,
            "input": _ONE_TO_24,
            "mean": [[6.5], [18.5]],
            "rstd": [[0.2896827], [0.2896827]],
            "gamma": [1, 1, 1],
            "N": 2,
            "C": 3,
            "HxW": 4,
            "group": 1,
            "outputMask": (True, True, True),
        },
        golden={
            # The true gradient is 0 to seven digits: the data equal the gradient, so x_hat absorbs it.
            "gradInput": [[[0.0] * 4] * 3] * 2,
            "gradGammaOut": [-75.896864, 2.896827, 155.849285],
            "gradBetaOut": [68, 100, 132],
        },
        tolerance=1e-6,
    ),
)  # fmt: skip
