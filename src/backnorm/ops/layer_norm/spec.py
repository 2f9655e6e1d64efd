"""aclnnLayerNormBackward: gradients of LayerNorm from saved statistics."""

from __future__ import annotations

from math import prod

from ...datatypes import BF16, F16, F32, DataType, dtype_name
from ...spec import (
    Call,
    Change,
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
    shape_text,
    tensor,
)


def _rows_shape(c: Call) -> Shape:
    shape: Shape = c.input.shape
    return shape[: len(shape) - len(c.normalizedShape)]


def _normalized_shape(c: Call) -> Shape:
    return tuple(c.normalizedShape)


def _input_shape(c: Call) -> Shape:
    return tuple(c.input.shape)


def _weight_dtype(c: Call) -> int:
    return int((c.weightOptional or c.input).dtype)


def _output(name: str, array_name: str, index: int, meaning: str) -> Param:
    is_input = index == 0
    return Param(
        name, array_name, "tensor", meaning, requested=Requested("outputMask", index),
        shape=_input_shape if is_input else _normalized_shape,
        dtype=(lambda c: int(c.input.dtype)) if is_input else _weight_dtype,
    )  # fmt: skip


PARAMS = (
    Param("gradOut", "grad_out", "tensor", "gradient of the forward output"),
    Param("input", "input", "tensor", "the forward input, [A…, R…]"),
    Param("normalizedShape", "normalized_shape", "int_array", "the normalized axes [R…]"),
    Param("mean", "mean", "tensor", "saved mean, one a row"),
    Param("rstd", "rstd", "tensor", "saved reciprocal standard deviation, one a row"),
    Param("weightOptional", "weight", "tensor", "the affine weight; 1 where absent", optional=True),
    Param("biasOptional", "bias", "tensor", "the affine bias; its value is never used", optional=True, unused=True),
    Param("outputMask", "output_mask", "bool_array", "which of the three outputs to compute"),
    _output("gradInputOut", "grad_input", 0, "gradient of the input"),
    _output("gradWeightOut", "grad_weight", 1, "gradient of the weight"),
    _output("gradBiasOut", "grad_bias", 2, "gradient of the bias"),
    Param("workspaceSize", "workspaceSize", "out_pointer", "bytes of scratch that phase two needs"),
    Param("executor", "executor", "out_pointer", "the plan that phase two runs"),
)


def _weight_dtype_rule() -> Rule:
    def allowed(c: Call) -> list[int]:
        return sorted({F32, c.input.dtype})

    return Rule(
        "weightOptional", "be float32 or have the data type of {input}",
        lambda c: not c.present("weightOptional") or c.weightOptional.dtype in allowed(c),
        lambda c: dtype_name(c.weightOptional.dtype),
        (
            Witness({"weightOptional": {"dtype": DataType.INT32}}),
            Witness({"weightOptional": {"dtype": F16}}),
            Witness({"weightOptional": {"dtype": BF16}}),
        ),
        expected=lambda c: listing([dtype_name(d) for d in allowed(c)]),
    )  # fmt: skip


_LENGTH = number_rule(
    "normalizedShape", "name 1 to all of the axes of {input}",
    lambda c: 1 <= len(c.normalizedShape) <= len(c.input.shape),
    {"normalizedShape": ()}, {"normalizedShape": (2, 3, 4, 5)},
    expected=lambda c: f"1 to {len(c.input.shape)} sizes",
)  # fmt: skip
_TRAILING = number_rule(
    "normalizedShape", "equal the last axes of {input}",
    lambda c: tuple(c.normalizedShape) == c.input.shape[len(c.input.shape) - len(c.normalizedShape):],
    {"normalizedShape": (3, 5)}, {"normalizedShape": (1,)}, {"normalizedShape": (2, 4)},
    {"normalizedShape": (-3, -4)},
    expected=lambda c: shape_text(c.input.shape[len(c.input.shape) - len(c.normalizedShape):]),
)  # fmt: skip


def _normalized(name: str, *witnesses: Change) -> Rule:
    return shape_is(name, "exactly {normalizedShape}", _normalized_shape, *witnesses)


_REQUIRED = ("gradOut", "input", "normalizedShape", "mean", "rstd", "outputMask")
_OUTPUTS = ("gradInputOut", "gradWeightOut", "gradBiasOut")

STEPS = (
    out_pointers(),
    Step(
        "null pointers",
        (
            *(not_null(name) for name in _REQUIRED),
            null_or_alive("weightOptional"),
            null_or_alive("biasOptional"),
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
            dtype_supported("mean"),
            dtype_supported("rstd"),
            _weight_dtype_rule(),
            dtype_supported("biasOptional"),
            *(dtype_supported(name) for name in _OUTPUTS),
        ),
    ),
    Step(
        "ranks and shapes",
        (
            rank_between("input", 1, 8),
            shape_is("gradOut", "the shape of {input}", _input_shape, {"shape": (2, 4, 3)}, {"shape": (2, 3)}),
            _LENGTH,
            _TRAILING,
            rank_between("mean", 1, 8),
            count_is("mean", "one element for each row", lambda c: prod(_rows_shape(c)), {"shape": (3, 1, 1)}),
            shape_is("rstd", "the shape of {mean}", lambda c: c.mean.shape, {"shape": (2,)}, {"shape": (3, 1, 1)}),
            _normalized("weightOptional", {"shape": (12,)}, {"shape": (4, 3)}),
            _normalized("biasOptional", {"shape": (12,)}, {"shape": (4,)}),
            shape_is("gradInputOut", "the shape of {input}", _input_shape, {"shape": (2, 12)}),
            _normalized("gradWeightOut", {"shape": (1, 3, 4)}),
            _normalized("gradBiasOut", {"shape": (12,)}),
            not_overlapping("gradInputOut", 3),
            not_overlapping("gradWeightOut", 2),
            not_overlapping("gradBiasOut", 2),
        ),
    ),
)  # fmt: skip

LAYER_NORM = OpSpec(
    name="layer_norm_backward",
    c_name="aclnnLayerNormBackward",
    header="aclnn_layer_norm_backward.h",
    folder="layer_norm",
    title="LayerNorm backward",
    params=PARAMS,
    steps=STEPS,
    good={
        "gradOut": tensor(F32, 2, 3, 4),
        "input": tensor(F32, 2, 3, 4),
        "normalizedShape": (3, 4),
        "mean": tensor(F32, 2, 1, 1),
        "rstd": tensor(F32, 2, 1, 1),
        "weightOptional": tensor(F32, 3, 4),
        "biasOptional": tensor(F32, 3, 4),
        "outputMask": (True, True, True),
        "gradInputOut": tensor(F32, 2, 3, 4),
        "gradWeightOut": tensor(F32, 3, 4),
        "gradBiasOut": tensor(F32, 3, 4),
        "workspaceSize": True,
        "executor": True,
    },
    example=Example(
        inputs={
            "gradOut": [[2, 3], [4, 5]],
            "input": [[2, 3], [4, 5]],
            "normalizedShape": (2,),
            "mean": [[2], [3]],
            "rstd": [[4], [5]],
            "weightOptional": [1, 1],
            "biasOptional": [0, 0],
            "outputMask": (True, True, True),
        },
        golden={
            "gradInputOut": [[-2, -94], [-877.5, -1747.5]],
            "gradWeightOut": [20, 62],
            "gradBiasOut": [6, 8],
        },
        tolerance=1e-6,
    ),
)
