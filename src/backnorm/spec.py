"""The vocabulary of the contract: descriptors, parameters, rules with witnesses. Knows no operator.

An operator's `spec.py` declares its parameters and, in the order of the checks, its rules.
Validation, messages, `docs/operators.md` and the contract tests are all derived from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from .datatypes import BF16, F16, PUBLIC_FORMATS, DataType, Format, dtype_name, format_name
from .products import PRODUCTS, Product, Support
from .status import AclnnError, Status

NULLPTR = Status.ACLNN_ERR_PARAM_NULLPTR
INVALID = Status.ACLNN_ERR_PARAM_INVALID

#: The doors a call comes through: the array functions, aclnn in Python, aclnn in C.
ARRAYS, ACLNN, C = "arrays", "aclnn", "C"
DOORS = (ARRAYS, ACLNN, C)

Shape = tuple[int, ...]


class TensorDesc(NamedTuple):
    """What is known of a tensor without its data. Strides count elements."""

    shape: Shape
    dtype: int
    strides: tuple[int, ...]
    format: int = Format.ND
    device: str = "cpu"
    #: What the type is called where it comes from, for one without a number.
    foreign_dtype: str = ""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Dead:
    """A handle that was destroyed, or never was one of the kind asked for."""

    handle: int


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step = min(step * size, 2**63 - 1)  # what no memory holds needs no exact number
    return tuple(reversed(strides))


def dense_strides(desc: TensorDesc) -> tuple[int, ...]:
    """The strides of a new tensor in the memory format of this one, as torch.empty_like has it: its own where they
    leave no gaps, else packed in their order, with expanded axes (stride 0) where they stand among their neighbours."""
    innermost_first = list(reversed(range(len(desc.shape))))
    for i in range(1, len(innermost_first)):
        moving = i
        for other in reversed(range(i)):
            inner, outer = (abs(desc.strides[innermost_first[at]]) for at in (other, moving))
            # Of equal strides the smaller axis goes inside.
            larger = desc.shape[innermost_first[other]] > desc.shape[innermost_first[moving]]
            if inner > outer > 0 or (inner == outer > 0 and larger):
                innermost_first[other], innermost_first[moving] = innermost_first[moving], innermost_first[other]
                moving = other
            elif 0 < inner < outer:
                break
    step, packed = 1, [0] * len(desc.shape)
    for axis in innermost_first:
        packed[axis] = step
        step *= desc.shape[axis]
    dense = all(n == 1 or have == want for n, have, want in zip(desc.shape, desc.strides, packed))
    return desc.strides if dense else tuple(packed)


def tensor(dtype: int, *shape: int) -> TensorDesc:
    """A contiguous tensor."""
    return TensorDesc(shape, dtype, contiguous_strides(shape))


def span(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int]:
    """The lowest and highest element offset a non-empty view touches."""
    reach = [(size - 1) * stride for size, stride in zip(shape, strides)]
    return sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)


def overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two different indices of the view name the same element.

    Two indices collide when their difference d, with |d_i| < size_i and d != 0, has sum d_i * stride_i = 0. The search
    is exact, but for strides so tangled that it gives up after 100,000 steps; those count as overlapping.
    """
    if 0 in shape:
        return False
    axes = sorted((abs(stride), size) for size, stride in zip(shape, strides) if size > 1)
    reach = [0]  # reach[i]: the largest offset the i narrowest axes can make together
    for stride, size in axes:
        reach.append(reach[-1] + stride * (size - 1))
    if all(stride > reach[i] for i, (stride, _) in enumerate(axes)):
        return False  # each axis steps over everything inside it: the usual, dense case
    if math.prod(shape) > reach[-1] + 1 or axes[0][0] == 0:
        return True  # more indices than elements, or an axis that does not move at all
    steps = 0

    def meets(target: int, i: int, nonzero: bool) -> bool:
        """Whether the i narrowest axes can make `target`, with some d != 0 there or chosen before."""
        nonlocal steps
        steps += 1
        if steps > 100_000 or (target == 0 and nonzero):
            return True
        if i == 0:
            return False
        if i <= 2:
            return _two_axes_meet(axes[:i], target)
        stride, size = axes[i - 1]
        lowest = max(-(size - 1), -((reach[i - 1] - target) // stride))
        highest = min(size - 1, (reach[i - 1] + target) // stride)
        return any(meets(target - d * stride, i - 1, nonzero or d != 0) for d in range(lowest, highest + 1))

    return meets(0, len(axes), False)


def _two_axes_meet(axes: Sequence[tuple[int, int]], target: int) -> bool:
    """Whether d0 * s0 + d1 * s1 = target for some d, not all zeros, with |d_i| < size_i; d1 = 0 for one axis."""
    (s0, n0), (s1, n1) = axes[0], axes[1] if len(axes) > 1 else (1, 1)
    g = math.gcd(s0, s1)
    if target % g:
        return False
    # All solutions: d1 = first + k * (s0 / g) and d0 = (target - d1 * s1) / s0.
    step = s0 // g
    first = (target // g) * pow(s1 // g, -1, step) % step if step > 1 else 0
    # |d1| < n1 and |d0| < n0, the latter as bounds on d1.
    low = max(-(n1 - 1), -(((n0 - 1) * s0 - target) // s1))
    high = min(n1 - 1, ((n0 - 1) * s0 + target) // s1)
    d1 = low + (first - low) % step
    if target == 0 and d1 == 0:
        d1 += step  # d = 0 is no collision
    return d1 <= high


@dataclass(frozen=True)
class Requested:
    """The switch of an output: a bool parameter, or one place of a bool array."""

    parameter: str
    index: int | None = None

    def __str__(self) -> str:
        return self.parameter if self.index is None else f"{self.parameter}[{self.index}]"


@dataclass(frozen=True, eq=False)
class Param:
    """One argument: its C name, the array functions' word for it, and what it is."""

    name: str
    array_name: str
    kind: str  # tensor, int_array, bool_array, int64, bool or out_pointer
    meaning: str
    optional: bool = False
    #: A tensor whose value enters no output; its memory is never looked at.
    unused: bool = False
    #: Outputs only: what switches it on, its shape, and the dtype an array function allocates.
    requested: Requested | None = None
    shape: Callable[[Call], Shape] | None = None
    dtype: Callable[[Call], int] | None = None


Change = Mapping[str, Any]
"""Parameter -> its value in a witness; for a tensor, the descriptor fields that differ."""


@dataclass(frozen=True, eq=False)
class Witness:
    """Changes to the good call after which this rule is the first to fail, on the products it names."""

    change: Change
    products: Callable[[Support | None], bool] = lambda support: True


@dataclass(frozen=True, eq=False)
class Rule:
    """`parameter` must `must`; checked by `holds`, proved by its witnesses.

    `must` may name other parameters in braces; each door fills in its own words.
    """

    parameter: str
    must: str
    holds: Callable[[Call], bool]
    got: Callable[[Call], str]
    witnesses: tuple[Witness, ...]
    expected: Callable[[Call], str] | None = None
    status: Status = INVALID
    doors: tuple[str, ...] = DOORS
    #: The products the rule concerns.
    applies: Callable[[Support | None], bool] = lambda support: True

    def __post_init__(self) -> None:
        if not self.witnesses:
            raise ValueError(f"the rule that {self.parameter} must {self.must} has no witness")


@dataclass(frozen=True, eq=False)
class Step:
    """A group of rules that are checked together."""

    title: str
    rules: tuple[Rule, ...]


@dataclass(frozen=True, eq=False)
class Example:
    """The example call of an operator, with the float64 results it must give within `tolerance`."""

    inputs: Mapping[str, Any]
    golden: Mapping[str, Any]
    tolerance: float


@dataclass(frozen=True, eq=False, repr=False)
class OpSpec:
    """An operator: its names, parameters, steps of rules, a good call and the example."""

    name: str
    c_name: str
    header: str
    folder: str
    title: str
    params: tuple[Param, ...]
    steps: tuple[Step, ...]
    good: Mapping[str, Any]
    example: Example

    def __repr__(self) -> str:
        return f"<OpSpec {self.name}>"

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        return tuple(rule for step in self.steps for rule in step.rules)

    @cached_property
    def by_name(self) -> dict[str, Param]:
        return {param.name: param for param in self.params}

    @cached_property
    def outputs(self) -> tuple[Param, ...]:
        return tuple(param for param in self.params if param.requested)

    @cached_property
    def inputs(self) -> tuple[Param, ...]:
        """What a caller hands over: every parameter but the outputs and the out-pointers."""
        return tuple(param for param in self.params if not param.requested and param.kind != "out_pointer")

    def products(self, rule: Rule) -> Iterator[Product]:
        """The products on which a call can break the rule."""
        reachable_everywhere = self.rules.index(rule) <= self.rules.index(self._support_rule)
        for product in PRODUCTS.values():
            support = product.operators.get(self.name)
            if rule.applies(support) and (support is not None or reachable_everywhere):
                yield product

    @cached_property
    def _support_rule(self) -> Rule:
        return next(rule for rule in self.rules if rule.status is Status.ACLNN_ERR_INNER_FIND_KERNEL_ERROR)

    def changed(self, *changes: Change) -> dict[str, Any]:
        """The good call's values with the changes applied."""
        values = dict(self.good)
        for change in changes:
            for name, new in change.items():
                values[name] = change_tensor(values[name], new) if isinstance(new, Mapping) else new
        return values


def change_tensor(desc: TensorDesc, fields: Mapping[str, Any]) -> TensorDesc:
    """The descriptor with some fields replaced; a new shape is contiguous unless it brings strides."""
    if "shape" in fields and "strides" not in fields:
        fields = {**fields, "strides": contiguous_strides(fields["shape"])}
    return desc._replace(**fields)


@dataclass(frozen=True)
class Call:
    """One call under one product: every argument by C name, as descriptors and numbers."""

    op: OpSpec
    values: Mapping[str, Any]
    product: Product
    #: How the product runs the operator; rules after the one that asks for it may take it for granted.
    support: Any = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "support", self.product.operators.get(self.op.name))

    def __getattr__(self, name: str) -> Any:
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(name) from None

    def requests(self, param: Param) -> bool:
        if param.requested is None:
            return False
        switch, index = self.values[param.requested.parameter], param.requested.index
        if index is None:
            return bool(switch)
        return isinstance(switch, tuple) and index < len(switch) and bool(switch[index])

    def present(self, name: str) -> bool:
        """Whether a tensor takes part: an input that was given, or an output that was asked for."""
        param = self.op.by_name[name]
        if param.requested and not self.requests(param):
            return False
        return isinstance(self.values[name], TensorDesc)

    def first_broken(self) -> Rule | None:
        for rule in self.op.rules:
            if rule.applies(self.support) and not rule.holds(self):
                return rule
        return None

    def error(self, rule: Rule, door: str) -> AclnnError:
        """The sentence for a broken rule: parameter, expectation, what came, and the way out if there is one."""
        words = {p.name: p.array_name if door == ARRAYS else p.name for p in self.op.params}
        function = f"{self.op.name}: " if door == ARRAYS else ""  # the runtime puts its own name before a message
        expected = f" ({rule.expected(self)})" if rule.expected else ""
        parameter = words.get(rule.parameter, rule.parameter)
        sentence = f"{function}{parameter} must {rule.must.format_map(words)}{expected}; got {rule.got(self)}"
        allowed = [p.name for p in PRODUCTS.values() if Call(self.op, self.values, p).first_broken() is None]
        if allowed:
            how = "pass product=" if door == ARRAYS else "see BACKNORM_SOC"
            sentence += f"; allowed on {', '.join(allowed)}; {how}"
            sentence += f'"{allowed[0]}"' if door == ARRAYS else ""
        return AclnnError(rule.status, parameter, sentence)


# --- the kinds of rules ---------------------------------------------------------------------------------------------


def shape_text(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def listing(words: Sequence[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def only_without_bfloat16(support: Support | None) -> bool:
    return support is not None and not support.bfloat16


def out_pointers() -> Step:
    """Step 0: the two out-pointers, which only C can leave out."""

    def given(name: str) -> Rule:
        return Rule(
            name, "not be null", lambda c: bool(c.values[name]), lambda c: "null",
            (Witness({name: False}),), status=NULLPTR, doors=(C,),
        )  # fmt: skip

    return Step("out-pointers", (given("workspaceSize"), given("executor")))


def not_null(name: str) -> Rule:
    def got(c: Call) -> str:
        value = c.values[name]
        return "null" if value is None else f"{value.handle:#x}, a destroyed or foreign handle"

    def holds(c: Call) -> bool:
        param = c.op.by_name[name]
        if param.requested and not c.requests(param):
            return True
        return c.values[name] is not None and not isinstance(c.values[name], Dead)

    return Rule(name, "not be null", holds, got, (Witness({name: None}),), status=NULLPTR)


def null_or_alive(name: str) -> Rule:
    """An optional tensor may be left out, but not be a handle that is no longer one."""
    return Rule(
        name, "be null or a live tensor", lambda c: not isinstance(c.values[name], Dead),
        lambda c: f"{c.values[name].handle:#x}, a destroyed or foreign handle",
        (Witness({name: Dead(0xDEAD)}),), status=NULLPTR, doors=(ACLNN, C),
    )  # fmt: skip


def operator_supported() -> Rule:
    return Rule(
        "operator", "exist on the product", lambda c: c.support is not None, lambda c: f"product {c.product.name}",
        (Witness({}),), status=Status.ACLNN_ERR_INNER_FIND_KERNEL_ERROR, applies=lambda support: support is None,
    )  # fmt: skip


def length_is(name: str, length: int) -> Rule:
    return Rule(
        name, f"have exactly {length} places", lambda c: len(c.values[name]) == length,
        lambda c: f"{len(c.values[name])}",
        (Witness({name: (True,) * (length - 1)}), Witness({name: (True,) * (length + 1)}), Witness({name: ()})),
    )  # fmt: skip


def _on_tensor(
    name: str,
    must: str,
    holds: Callable[[Call, TensorDesc], bool],
    got: Callable[[TensorDesc], str],
    *changes: Change | Witness,
    **more: Any,
) -> Rule:
    """A rule on a tensor that holds when the tensor takes no part; plain changes become witnesses."""
    witnesses = tuple(w if isinstance(w, Witness) else Witness({name: w}) for w in changes)
    return Rule(
        name, must, lambda c: not c.present(name) or holds(c, c.values[name]),
        lambda c: got(c.values[name]), witnesses, **more,
    )  # fmt: skip


def _dtype_text(desc: TensorDesc) -> str:
    return desc.foreign_dtype or dtype_name(desc.dtype)


def dtype_supported(name: str) -> Rule:
    return _on_tensor(
        name, "have a supported data type", lambda c, t: t.dtype in c.support.dtypes, _dtype_text,
        {"dtype": DataType.INT32}, {"dtype": DataType.DOUBLE},
        Witness({name: {"dtype": BF16}}, only_without_bfloat16),
        expected=lambda c: listing([dtype_name(d) for d in c.support.dtypes]),
    )  # fmt: skip


def same_dtype(name: str, other: str) -> Rule:
    return _on_tensor(
        name, f"have the data type of {{{other}}}", lambda c, t: t.dtype == c.values[other].dtype, _dtype_text,
        {"dtype": F16}, expected=lambda c: dtype_name(c.values[other].dtype),
    )  # fmt: skip


def rank_between(name: str, lowest: int, highest: int) -> Rule:
    too_low: list[Change] = [{"shape": (2,) * (lowest - 1)}] if lowest > 0 else []
    return _on_tensor(
        name, f"have {lowest} to {highest} axes", lambda c, t: lowest <= len(t.shape) <= highest,
        lambda t: f"{len(t.shape)} axes, shape {shape_text(t.shape)}",
        {"shape": (2,) * (highest + 1)}, *too_low,
    )  # fmt: skip


def shape_is(name: str, words: str, shape: Callable[[Call], Shape], *witnesses: Change) -> Rule:
    return _on_tensor(
        name, f"have {words}", lambda c, t: t.shape == shape(c), lambda t: shape_text(t.shape),
        *witnesses, expected=lambda c: shape_text(shape(c)),
    )  # fmt: skip


def count_is(name: str, words: str, count: Callable[[Call], int], *witnesses: Change) -> Rule:
    return _on_tensor(
        name, f"hold {words}", lambda c, t: t.numel == count(c), lambda t: f"{t.numel}, shape {shape_text(t.shape)}",
        *witnesses, expected=lambda c: f"{count(c)} elements",
    )  # fmt: skip


def not_overlapping(name: str, axes: int) -> Rule:
    """`axes`: how many the good call's tensor has, for the witness with strides 0."""
    return _on_tensor(
        name, "not overlap itself: each of its elements needs memory of its own",
        lambda c, t: not overlaps_itself(t.shape, t.strides),
        lambda t: f"shape {shape_text(t.shape)} with strides {shape_text(t.strides)}",
        {"strides": (0,) * axes},
    )  # fmt: skip


def public_format(name: str) -> Rule:
    return _on_tensor(
        name, "have a public format", lambda c, t: t.format in PUBLIC_FORMATS, lambda t: format_name(t.format),
        {"format": Format.NC1HWC0}, {"format": Format.FRACTAL_NZ}, {"format": Format.UNDEFINED}, {"format": 77},
        expected=lambda c: listing([f.name for f in sorted(PUBLIC_FORMATS)]), doors=(ACLNN, C),
    )  # fmt: skip


def number_rule(name: str, must: str, holds: Callable[[Call], bool], *changes: Change, **more: Any) -> Rule:
    """A rule on an integer or an array of integers."""

    def got(c: Call) -> str:
        value = c.values[name]
        return shape_text(value) if isinstance(value, tuple) else str(value)

    return Rule(name, must, holds, got, tuple(Witness(change) for change in changes), **more)
