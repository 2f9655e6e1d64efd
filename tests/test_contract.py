"""Every rule's witness gives its code, through every door that can express it, on every product it concerns."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

import backnorm
from backnorm import acl, aclnn
from backnorm.datatypes import BF16, F16, F32, NUMPY, PUBLIC_FORMATS, DataType, Format, dtype_name
from backnorm.ops import OPS
from backnorm.products import PRODUCTS, Support, find_product
from backnorm.spec import ACLNN, ARRAYS, Call, Dead, OpSpec, Rule, TensorDesc, Witness, overlaps_itself, tensor
from backnorm.status import Status

from .doors import Client

BY_FOLDER = {op.folder: op for op in OPS.values()}
ALL_OPS = pytest.mark.parametrize("op", OPS.values(), ids=OPS)
NULL, BAD = Status.ACLNN_ERR_PARAM_NULLPTR, Status.ACLNN_ERR_PARAM_INVALID


def _array(desc: TensorDesc) -> np.ndarray:
    item = NUMPY[desc.dtype]
    reach = sum((n - 1) * s for n, s in zip(desc.shape, desc.strides)) + 1 if 0 not in desc.shape else 0
    base = np.ones(reach, item)
    return np.ndarray(desc.shape, item, base, 0, [s * item.itemsize for s in desc.strides])


def call_arrays(op: OpSpec, values: Mapping[str, Any], product: str) -> tuple[int, str]:
    given = {n: _array(v) if isinstance(v, TensorDesc) else v for n, v in values.items()}
    arguments = {p.array_name: given[p.name] for p in op.inputs}
    try:
        getattr(backnorm, op.name)(**arguments, out=tuple(given[p.name] for p in op.outputs), product=product)
    except backnorm.AclnnError as error:
        refused = error
    else:
        return 0, ""
    assert isinstance(refused, ValueError)
    assert refused.parameter in str(refused)
    return int(refused.status), str(refused)


def call_aclnn(op: OpSpec, values: Mapping[str, Any], product: str) -> tuple[int, str]:
    assert acl.set_soc(product) == 0
    with Client() as client:
        handles = {}
        for param in op.params:
            value = values[param.name]
            if param.kind == "out_pointer":
                continue
            if isinstance(value, TensorDesc):
                handles[param.name] = acl.create_tensor(
                    value.shape, value.dtype, value.strides, 0, value.format, value.shape, None
                )
                client.release.append((acl.destroy_tensor, handles[param.name]))
            elif isinstance(value, Dead):
                handles[param.name] = acl.create_tensor([2], 0, None, 0, 2, [2], None)
                assert acl.destroy_tensor(handles[param.name]) == 0
            elif param.kind == "bool_array" and value is not None:
                handles[param.name] = acl.create_bool_array(value)
                client.release.append((acl.destroy_bool_array, handles[param.name]))
            else:
                handles[param.name] = client.handle(value)
        size, executor, ret = getattr(aclnn, f"{op.c_name}GetWorkspaceSize")(**handles)
        message = acl.get_recent_err_msg()
        if ret:
            assert (size, executor) == (0, 0)
            assert message is not None
            assert "\n" not in message
            return ret, message
        assert executor
        assert message is None
        assert acl.destroy_acl_op_executor(executor) == 0
    return 0, ""


DOORS = {ARRAYS: call_arrays, ACLNN: call_aclnn}


def sentence(op: OpSpec, rule: Rule, door: str) -> str:
    words = {p.name: p.array_name if door == ARRAYS else p.name for p in op.params}
    return f"{words.get(rule.parameter, rule.parameter)} must {rule.must.format_map(words)}"


def witnesses(op: OpSpec) -> Iterator[tuple[Rule, Witness, str]]:
    for rule in op.rules:
        for product in op.products(rule):
            for witness in rule.witnesses:
                if witness.products(product.operators.get(op.name)):
                    yield rule, witness, product.name


@ALL_OPS
@pytest.mark.usefixtures("ready")
def test_each_witness_breaks_its_rule_first_at_every_door(op: OpSpec) -> None:
    proved = set()
    for rule, witness, product in witnesses(op):
        values = op.changed(witness.change)
        assert Call(op, values, PRODUCTS[product]).first_broken() is rule
        for door in set(rule.doors) & set(DOORS):
            status, message = DOORS[door](op, values, product)
            assert status == rule.status, (rule.must, door, product, message)
            assert sentence(op, rule, door) in message
            assert "; got " in message
        proved.add(rule)
    assert proved == set(op.rules)


@ALL_OPS
@pytest.mark.usefixtures("ready")
def test_the_good_call_passes_wherever_the_operator_exists(op: OpSpec) -> None:
    for product in PRODUCTS.values():
        expected = 0 if op.name in product.operators else Status.ACLNN_ERR_INNER_FIND_KERNEL_ERROR
        for door in DOORS.values():
            assert door(op, op.good, product.name)[0] == expected


def _merge(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any] | None:
    """Both changes at once; None where they change the same thing."""
    merged = dict(first)
    for name, new in second.items():
        old = merged.get(name)
        if name not in merged:
            merged[name] = new
        elif isinstance(old, Mapping) and isinstance(new, Mapping) and not old.keys() & new.keys():
            merged[name] = {**old, **new}
            if {"shape", "strides"} <= merged[name].keys():
                return None  # the strides are made for the other shape
        else:
            return None
    return merged


@ALL_OPS
@pytest.mark.usefixtures("ready")
def test_of_two_broken_rules_the_earlier_wins(op: OpSpec) -> None:
    tried = skipped = 0
    for product in PRODUCTS:
        pairs = itertools.combinations([w for w in witnesses(op) if w[2] == product], 2)
        for (earlier, one, _), (later, other, _) in pairs:
            change = _merge(one.change, other.change)
            if earlier is later or change is None:
                continue
            values = op.changed(change)
            if earlier.holds(Call(op, values, PRODUCTS[product])):
                skipped += 1  # the second change mended the first
                continue
            tried += 1
            broken = Call(op, values, PRODUCTS[product]).first_broken()
            assert broken is earlier, (earlier.must, later.must, one.change, other.change)
            if ACLNN in earlier.doors:
                status, message = call_aclnn(op, values, product)
                assert status == earlier.status
                assert sentence(op, earlier, ACLNN) in message
    assert tried > 3000
    assert skipped < tried / 20


def test_a_rule_without_a_witness_does_not_construct() -> None:
    with pytest.raises(ValueError, match="has no witness"):
        Rule("x", "be good", lambda c: True, lambda c: "", ())


# --- facts of the contract, written down a second time: the order, the codes and the products by hand ----------------


@pytest.mark.parametrize(
    ("folder", "titles"),
    [
        (
            "layer_norm",
            ["out-pointers", "null pointers", "mask", "requested outputs", "data types", "ranks and shapes"],
        ),
        (
            "group_norm",
            ["out-pointers", "null pointers", "mask", "requested outputs", "data types", "sizes and limits",
             "ranks, counts and shapes"],
        ),
        (
            "batch_norm_reduce",
            ["out-pointers", "null pointers", "requested outputs", "data types", "formats", "ranks and shapes"],
        ),
    ],
)  # fmt: skip
def test_steps_come_in_the_documented_order(folder: str, titles: list[str]) -> None:
    assert [step.title for step in BY_FOLDER[folder].steps] == titles


@pytest.mark.parametrize(
    ("folder", "changes", "status"),
    [
        # null inputs before the mask's length, that before null outputs, those before dtypes, those before shapes
        ("layer_norm", {"input": None, "outputMask": (True,)}, NULL),
        ("layer_norm", {"outputMask": (True, True), "gradInputOut": None}, BAD),
        ("layer_norm", {"gradBiasOut": None, "gradOut": {"dtype": DataType.INT32}}, NULL),
        ("group_norm", {"outputMask": None, "group": 0}, NULL),
        ("group_norm", {"group": 0, "gradInput": None}, NULL),
        ("batch_norm_reduce", {"sumDy": None, "gradOut": {"format": Format.NC1HWC0}}, NULL),
        # optional inputs
        ("layer_norm", {"weightOptional": None, "biasOptional": None}, 0),
        ("group_norm", {"gamma": None}, 0),
        ("batch_norm_reduce", {"weight": None}, 0),
        # decided: mean and rstd of any type, by count; outputs of any type
        ("layer_norm", {"mean": {"dtype": F16}, "rstd": {"dtype": BF16}, "gradInputOut": {"dtype": BF16}}, 0),
        ("layer_norm", {"mean": {"shape": (2,)}, "rstd": {"shape": (2,)}}, 0),
        ("layer_norm", {"biasOptional": {"dtype": F16}, "gradWeightOut": {"dtype": F16}}, 0),
        ("batch_norm_reduce", {"mean": {"dtype": BF16}, "sumDy": {"dtype": F16}, "gradBias": {"dtype": BF16}}, 0),
        # all of the last axes must match, not the last alone
        ("layer_norm", {"normalizedShape": (2, 4)}, BAD),
        # GN: shapes of gradOut and input may differ
        ("group_norm", {"gradOut": {"shape": (48,)}}, 0),
        # BNR: statistics have exactly C elements on one axis; tags of the statistics are not read
        ("batch_norm_reduce", {"mean": {"shape": (1, 3)}}, BAD),
        ("batch_norm_reduce", {"mean": {"format": 99}, "invstd": {"format": 3}, "weight": {"format": 29}}, 0),
        ("layer_norm", {"gradOut": {"format": 99}, "gradInputOut": {"format": 29}}, 0),
    ],
)
@pytest.mark.usefixtures("ready")
def test_documented_cases(folder: str, changes: dict[str, Any], status: int) -> None:
    op = BY_FOLDER[folder]
    assert call_aclnn(op, op.changed(changes), "Ascend910B")[0] == status


@pytest.mark.usefixtures("ready")
def test_masked_off_outputs_are_not_looked_at() -> None:
    for folder, mask in (("layer_norm", {"outputMask": (True, False, False)}), ("batch_norm_reduce", {"biasG": False})):
        op = BY_FOLDER[folder]
        last = op.outputs[-1].name
        for junk in (None, Dead(1), tensor(DataType.STRING, 9, 9)):
            assert call_aclnn(op, op.changed(mask, {last: junk}), "Ascend910B")[0] == 0


def test_products_by_hand() -> None:
    """The table of products, written down a second time: data types of LN, GN and BN reduce; None where missing."""
    full, half = {"float32", "float16", "bfloat16"}, {"float32", "float16"}
    rows = {
        "Ascend950": (full, full, full), "Ascend910_93": (full, full, full), "Ascend910B": (full, full, full),
        "Ascend910": (half, half, half), "Ascend310P": (half, None, None), "Ascend310B": (None, None, None),
        "Any": (full, full, full),
    }  # fmt: skip
    assert set(rows) == set(PRODUCTS)
    for name, cells in rows.items():
        for op, cell in zip(OPS.values(), cells):
            support = PRODUCTS[name].operators.get(op.name)
            assert (None if support is None else {dtype_name(d) for d in support.dtypes}) == cell, (name, op.name)


def test_numbers_by_hand() -> None:
    """Enum numbers of the interface, written down a second time."""
    dtypes = "FLOAT 0 FLOAT16 1 INT8 2 INT32 3 UINT8 4 INT16 6 UINT16 7 UINT32 8 INT64 9 UINT64 10 DOUBLE 11 BOOL 12"
    dtypes += " STRING 13 COMPLEX64 16 COMPLEX128 17 BF16 27"
    words = dtypes.split()
    assert {d.name: int(d) for d in DataType if d >= 0} == dict(zip(words[::2], map(int, words[1::2])))
    formats = (
        "NCHW 0 NHWC 1 ND 2 NC1HWC0 3 FRACTAL_Z 4 HWCN 16 NDHWC 27 FRACTAL_NZ 29 NCDHW 30 NDC1HWC0 32 NC 35 NCL 47"
    )
    words = formats.split()
    assert {f.name: int(f) for f in Format if f >= 0} == dict(zip(words[::2], map(int, words[1::2])))
    assert {int(f) for f in PUBLIC_FORMATS} == {2, 0, 1, 16, 27, 30, 35, 47}
    assert (acl.ACL_MEMCPY_HOST_TO_HOST, acl.ACL_MEMCPY_DEFAULT, acl.ACL_MEMCPY_HOST_TO_BUF_TO_DEVICE) == (0, 4, 5)
    assert (acl.ACL_DEVICE, acl.ACL_HOST) == (0, 1)
    assert (acl.ACL_MEM_MALLOC_HUGE_FIRST, acl.ACL_MEM_MALLOC_NORMAL_ONLY) == (0, 2)
    names = {
        561101: "CREATE_EXECUTOR",
        561103: "NULLPTR",
        561107: "OPP_PATH_NOT_FOUND",
        561119: "STATIC_BLOCK_DIM_INVALID",
    }
    for code, name in names.items():
        assert Status(code).name == f"ACLNN_ERR_INNER_{name}"
    assert [int(s) for s in Status if 561104 <= s <= 561119] == list(range(561104, 561120))


@pytest.mark.parametrize(
    ("folder", "changes", "status"),
    [
        ("layer_norm", {"rstd": None}, NULL), ("layer_norm", {"mean": {"shape": (2,) * 9}}, BAD),
        ("layer_norm", {"input": {"shape": (2,) * 9}, "gradOut": {"shape": (2,) * 9}}, BAD),
        ("layer_norm", {"biasOptional": {"dtype": DataType.INT8}}, BAD),
        ("layer_norm", {"biasOptional": {"shape": (4,)}}, BAD),
        ("layer_norm", {"weightOptional": {"shape": (12,)}}, BAD),
        ("layer_norm", {"weightOptional": {"dtype": F16}}, BAD),
        ("layer_norm", {"input": {"dtype": F16}}, BAD), ("layer_norm", {"rstd": {"shape": (2,)}}, BAD),
        ("layer_norm", {"weightOptional": Dead(7)}, NULL), ("layer_norm", {"biasOptional": Dead(7)}, NULL),
        ("layer_norm", {"gradInputOut": {"strides": (0, 4, 1)}}, BAD),
        ("group_norm", {"rstd": None}, NULL), ("group_norm", {"rstd": {"dtype": F16}}, BAD),
        ("group_norm", {"gamma": {"dtype": F16}}, BAD), ("group_norm", {"gradInput": {"dtype": F16}}, BAD),
        ("group_norm", {"gradBetaOut": {"strides": (0,)}}, BAD), ("group_norm", {"HxW": -1}, BAD),
        ("group_norm", {"gamma": {"shape": (5,)}}, BAD), ("group_norm", {"gamma": Dead(7)}, NULL),
        ("group_norm", {"gradGammaOut": {"shape": (1, 6)}}, BAD), ("group_norm", {"group": 4}, BAD),
        ("group_norm", {"mean": {"shape": (1,) * 7 + (2, 3)}}, BAD),
        ("batch_norm_reduce", {"input": {"format": Format.NHWC}}, BAD),
        ("batch_norm_reduce", {"gradOut": {"shape": (4, 3, 6)}}, BAD),
        ("batch_norm_reduce", {"weight": {"dtype": DataType.INT8}}, BAD),
        ("batch_norm_reduce", {"weight": {"shape": (1,)}}, BAD),
        ("batch_norm_reduce", {"gradBias": {"format": Format.FRACTAL_Z}}, BAD),
        ("batch_norm_reduce", {"gradOut": {"shape": (3,) * 9}, "input": {"shape": (3,) * 9}}, BAD),
        ("batch_norm_reduce", {"gradOut": {"shape": (3,) * 8}, "input": {"shape": (3,) * 8}}, 0),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("ready")
def test_rules_by_hand(folder: str, changes: dict[str, Any], status: int) -> None:
    """One case for each rule, so that a rule that is lost from a spec is missed."""
    op = BY_FOLDER[folder]
    assert call_aclnn(op, op.changed(changes), "Ascend910B")[0] == status


@pytest.mark.usefixtures("ready")
def test_a_missing_operator_is_told_after_null_pointers_and_before_all_else() -> None:
    op = BY_FOLDER["group_norm"]
    assert call_aclnn(op, op.changed({"rstd": None}), "Ascend310P")[0] == NULL
    assert call_aclnn(op, op.changed({"outputMask": (True,)}), "Ascend310P")[0] == 561003


GN_TYPES = {
    (F32, F32): "all", (F16, F16): "all", (BF16, BF16): "bfloat16",
    (F16, F32): "mixed", (BF16, F32): "mixed",
    (F32, F16): "none", (F32, BF16): "none", (F16, BF16): "none", (BF16, F16): "none",
}  # fmt: skip


@pytest.mark.usefixtures("ready")
def test_group_norm_types_by_product() -> None:
    op = BY_FOLDER["group_norm"]
    allowed = {
        "Ascend950": {"all", "bfloat16", "mixed"},
        "Ascend910_93": {"all", "bfloat16"},
        "Ascend910B": {"all", "bfloat16"},
        "Ascend910": {"all"},
        "Any": {"all", "bfloat16", "mixed"},
    }
    for (data, mean), kind in GN_TYPES.items():
        change = {name: {"dtype": data} for name in ("gradOut", "input", "gradInput")}
        change |= {name: {"dtype": mean} for name in ("mean", "rstd", "gamma", "gradGammaOut", "gradBetaOut")}
        for product, kinds in allowed.items():
            for door in DOORS.values():
                assert door(op, op.changed(change), product)[0] == (0 if kind in kinds else BAD), (data, mean, product)


@pytest.mark.usefixtures("ready")
def test_group_norm_limits_by_product() -> None:
    op = BY_FOLDER["group_norm"]
    rows = {  # C, group -> products that refuse it
        (240_001, 240_001): {"Ascend910B", "Ascend910_93"},
        (240_000, 240_000): set(),
        (8001, 1): {"Ascend910B", "Ascend910_93", "Ascend950"},
        (8000, 1): set(),
    }
    for (channels, group), refused in rows.items():
        change: dict[str, Any] = {"N": 0, "C": channels, "group": group}
        change |= {name: {"shape": (0,)} for name in ("gradOut", "input", "mean", "rstd", "gradInput")}
        change |= {name: {"shape": (channels,)} for name in ("gamma", "gradGammaOut", "gradBetaOut")}
        for product in ("Ascend950", "Ascend910_93", "Ascend910B", "Ascend910", "Any"):
            expected = BAD if product in refused else 0
            assert call_aclnn(op, op.changed(change), product)[0] == expected, (channels, group, product)


@pytest.mark.usefixtures("ready")
def test_the_message_names_the_way_out() -> None:
    op = BY_FOLDER["group_norm"]
    half = {name: {"dtype": F16} for name in ("gradOut", "input", "gradInput")}
    _, message = call_aclnn(op, op.changed(half), "Ascend910B")
    assert "mean must have a data type that goes with gradOut (float16 beside float16); got float32" in message
    assert "allowed on Ascend950, Any; see BACKNORM_SOC" in message
    _, message = call_arrays(op, op.changed(half), "Ascend910B")
    assert 'allowed on Ascend950, Any; pass product="Ascend950"' in message


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("Ascend910B2", "Ascend910B"), ("Ascend910_9391", "Ascend910_93"), ("Ascend910A", "Ascend910"),
        ("Ascend310P3", "Ascend310P"), ("Ascend950PR_9589", "Ascend950"), ("Any", "Any"), ("Anything", None),
        ("Ascend310", None), ("ascend910b", None), ("", None), ("Ascend91", None),
    ],
)  # fmt: skip
def test_chip_names_map_to_the_longest_profile(name: str, profile: str | None) -> None:
    found = find_product(name)
    assert (found.name if found else None) == profile


def test_a_dead_handle_equals_nothing_else() -> None:
    assert Dead(5) != (5,)


def test_support_lists_bfloat16_only_where_it_exists() -> None:
    assert BF16 in Support().dtypes
    assert BF16 not in Support(bfloat16=False).dtypes


def test_overlap_agrees_with_counting_the_elements() -> None:
    rng = np.random.default_rng(7)
    seen = {True: 0, False: 0}
    for _ in range(20_000):
        rank = int(rng.integers(0, 5))
        shape = [int(n) for n in rng.integers(0, 5, rank)]
        strides = [int(s) for s in rng.integers(-12, 13, rank)]
        offsets = sum((np.arange(n).reshape([-1 if j == i else 1 for j in range(rank)]) * s
                       for i, (n, s) in enumerate(zip(shape, strides))), np.zeros(shape, int))  # fmt: skip
        truth = np.unique(offsets).size != offsets.size
        assert overlaps_itself(shape, strides) == truth, (shape, strides)
        seen[truth] += 1
    assert min(seen.values()) > 2000


def test_overlap_of_huge_views_is_decided_at_once() -> None:
    prime = 10**9 + 7
    assert not overlaps_itself((10**9, 10**9), (prime, 10**9 + 9))
    assert overlaps_itself((2 * 10**9, 2 * 10**9), (prime, 10**9 + 9))
    overlaps_itself((97,) * 8, [prime + 2 * i * i for i in range(8)])  # gives up in bounded time
