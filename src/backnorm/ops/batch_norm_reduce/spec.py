"""aclnnBatchNormReduceBackward: the sums that SyncBatchNorm's backward pass reduces over its ranks."""

from __future__ import annotations

from ...datatypes import F32, Format, format_name
from ...spec import (
    ACLNN,
    C,
    Call,
    Example,
    OpSpec,
    Param,
    Requested,
    Rule,
    Shape,
    Step,
    Witness,
    dtype_supported,
    not_null,
    not_overlapping,
    null_or_alive,
    operator_supported,
    out_pointers,
    public_format,
    rank_between,
    same_dtype,
    shape_is,
    shape_text,
    tensor,
)


def _channels(c: Call) -> Shape:
    return tuple(c.input.shape[1:2])


def _mean_dtype(c: Call) -> int:
    return int(c.mean.dtype)


def _weight_dtype(c: Call) -> int:
    return int((c.weight or c.mean).dtype)


def _output(name: str, array_name: str, switch: str, meaning: str) -> Param:
    return Param(
        name, array_name, "tensor", meaning, requested=Requested(switch), shape=_channels,
        dtype=_mean_dtype if switch == "inputG" else _weight_dtype,
    )  # fmt: skip


PARAMS = (
    Param("gradOut", "grad_out", "tensor", "gradient of the forward output; axis 1 holds the channels"),
    Param("input", "input", "tensor", "the forward input; axis 1 holds the channels"),
    Param("mean", "mean", "tensor", "saved mean, one a channel"),
    Param("invstd", "invstd", "tensor", "saved reciprocal standard deviation, one a channel"),
    Param("weight", "weight", "tensor", "the affine weight; its value is never used", optional=True, unused=True),
    Param("inputG", "input_g", "bool", "whether to compute sumDy and sumDyXmu"),
    Param("weightG", "weight_g", "bool", "whether to compute gradWeight"),
    Param("biasG", "bias_g", "bool", "whether to compute gradBias"),
    _output("sumDy", "sum_dy", "inputG", "sum of gradOut"),
    _output("sumDyXmu", "sum_dy_xmu", "inputG", "sum of gradOut * (input - mean)"),
    _output("gradWeight", "grad_weight", "weightG", "gradient of the weight"),
    _output("gradBias", "grad_bias", "biasG", "gradient of the bias"),
    Param("workspaceSize", "workspaceSize", "out_pointer", "bytes of scratch that phase two needs"),
    Param("executor", "executor", "out_pointer", "the plan that phase two runs"),
)

_OUTPUTS = ("sumDy", "sumDyXmu", "gradWeight", "gradBias")
_SAME_FORMAT = Rule(
    "input", "have the format of {gradOut}", lambda c: c.input.format == c.gradOut.format,
    lambda c: format_name(c.input.format), (Witness({"input": {"format": Format.NHWC}}),),
    expected=lambda c: format_name(c.gradOut.format), doors=(ACLNN, C),
)  # fmt: skip
_SOME_CHANNELS = Rule(
    "input", "have channels: axis 1 must not be 0", lambda c: c.input.shape[1] != 0,
    lambda c: shape_text(c.input.shape),
    (
        Witness(
            {name: {"shape": (4, 0, 5)} for name in ("gradOut", "input")}
            | {name: {"shape": (0,)} for name in ("mean", "invstd", "weight", *_OUTPUTS)}
        ),
    ),
)  # fmt: skip


def _one_a_channel(name: str) -> Rule:
    return shape_is(name, "one element for each channel", _channels, {"shape": (2,)}, {"shape": (1, 3)}, {"shape": ()})


STEPS = (
    out_pointers(),
    Step(
        "null pointers",
        (
            *(not_null(name) for name in ("gradOut", "input", "mean", "invstd")),
            null_or_alive("weight"),
            operator_supported(),
        ),
    ),
    Step("requested outputs", tuple(not_null(name) for name in _OUTPUTS)),
    Step(
        "data types",
        (
            dtype_supported("gradOut"),
            dtype_supported("input"),
            same_dtype("input", "gradOut"),
            *(dtype_supported(name) for name in ("mean", "invstd", "weight", *_OUTPUTS)),
        ),
    ),
    Step(
        "formats",
        (
            public_format("gradOut"),
            public_format("input"),
            _SAME_FORMAT,
            *(public_format(name) for name in _OUTPUTS),
        ),
    ),
    Step(
        "ranks and shapes",
        (
            rank_between("input", 2, 8),
            shape_is("gradOut", "the shape of {input}", lambda c: tuple(c.input.shape), {"shape": (5, 3, 4)}),
            _SOME_CHANNELS,
            *(_one_a_channel(name) for name in ("mean", "invstd", "weight", *_OUTPUTS)),
            *(not_overlapping(name, 1) for name in _OUTPUTS),
        ),
    ),
)

BATCH_NORM_REDUCE = OpSpec(
    name="batch_norm_backward_reduce",
    c_name="aclnnBatchNormReduceBackward",
    header="aclnn_batch_norm_backward_reduce.h",
    folder="batch_norm_reduce",
    title="BatchNorm backward, the reduce step",
    params=PARAMS,
    steps=STEPS,
    good={
        "gradOut": tensor(F32, 4, 3, 5),
        "input": tensor(F32, 4, 3, 5),
        "mean": tensor(F32, 3),
        "invstd": tensor(F32, 3),
        "weight": tensor(F32, 3),
        "inputG": True,
        "weightG": True,
        "biasG": True,
        "sumDy": tensor(F32, 3),
        "sumDyXmu": tensor(F32, 3),
        "gradWeight": tensor(F32, 3),
        "gradBias": tensor(F32, 3),
        "workspaceSize": True,
        "executor": True,
    },
    example=Example(
        inputs={
            "gradOut": [[1, 1], [1, 2], [2, 2], [3, 3]],
            "input": [[0, 1], [2, 3], [4, 5], [6, 7]],
            "mean": [1, 1],
            "invstd": [1, 1],
            "weight": [1, 1],
            "inputG": True,
            "weightG": True,
            "biasG": True,
        },
        golden={"sumDy": [7, 8], "sumDyXmu": [21, 30], "gradWeight": [21, 30], "gradBias": [7, 8]},
        tolerance=1e-6,
    ),
)
