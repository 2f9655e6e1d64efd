"""The array functions: whose arrays they take and give, defaults, out=, and how they refuse."""

from __future__ import annotations

import gc
import itertools
import pickle
import re
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import backnorm
from backnorm import AclnnError, Status, dlpack
from backnorm.accuracy import excess
from backnorm.ops.group_norm import reference as group_norm
from backnorm.ops.layer_norm import reference as layer_norm
from backnorm.spec import TensorDesc, contiguous_strides, dense_strides

RNG = np.random.default_rng(11)
TORCH_TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
NUMPY_TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def normal(*shape: int, dtype: str = "float32") -> np.ndarray:
    return RNG.standard_normal(shape).astype(NUMPY_TYPES[dtype])


def to_torch(array: np.ndarray) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def layer_norm_call(dtype: str = "float32", rows: int = 5, cols: int = 12) -> dict[str, Any]:
    return {
        "grad_out": normal(rows, cols, dtype=dtype), "input": normal(rows, cols, dtype=dtype),
        "normalized_shape": (cols,), "mean": normal(rows, 1), "rstd": normal(rows, 1), "weight": normal(cols),
    }  # fmt: skip


# --- libraries ---


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
def test_what_came_in_goes_out(dtype: str) -> None:
    call = layer_norm_call(dtype)
    from_numpy = backnorm.layer_norm_backward(**call)
    assert all(isinstance(result, np.ndarray) for result in from_numpy)
    assert from_numpy[0].dtype == NUMPY_TYPES[dtype]
    as_torch = {k: to_torch(v) if isinstance(v, np.ndarray) else v for k, v in call.items()}
    from_torch = backnorm.layer_norm_backward(**as_torch)
    assert all(isinstance(result, torch.Tensor) for result in from_torch)
    assert from_torch[0].dtype == TORCH_TYPES[dtype]
    for ours, theirs in zip(from_numpy, from_torch):
        np.testing.assert_array_equal(to_torch(ours).float().numpy(), theirs.float().numpy())


class Foreign:
    """An array of a library we do not know, with DLPack alone."""

    def __init__(self, tensor: torch.Tensor, old: bool = False) -> None:
        self.tensor, self.old = tensor, old

    def __dlpack__(self, **options: Any) -> Any:
        if self.old and options:
            raise TypeError("an exporter from before version 1")
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()

    def __array_namespace__(self) -> Any:
        return ForeignLibrary


class ForeignLibrary:
    @staticmethod
    def from_dlpack(array: Any) -> Foreign:
        return Foreign(torch.from_dlpack(array))


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("dtype", NUMPY_TYPES)
def test_dlpack_arrays_of_any_library(dtype: str, old: bool) -> None:
    call = {k: to_torch(v) if isinstance(v, np.ndarray) else v for k, v in layer_norm_call(dtype).items()}
    expected = backnorm.layer_norm_backward(**call)
    strided = call["input"].T.contiguous().T
    call["input"] = strided
    foreign = {k: Foreign(v, old) if isinstance(v, torch.Tensor) else v for k, v in call.items()}
    results = backnorm.layer_norm_backward(**foreign)
    for result, truth in zip(results, expected):
        assert isinstance(result, Foreign)
        assert result.tensor.dtype == truth.dtype
        assert torch.equal(result.tensor, truth)
    assert results[0].tensor.stride() == strided.stride()
    out = tuple(Foreign(torch.zeros_like(truth), old) for truth in expected)
    if old:  # it cannot say whether its memory may be written
        with pytest.raises(AclnnError, match="writable in place"):
            backnorm.layer_norm_backward(**foreign, out=out)
        return
    assert all(a is b for a, b in zip(backnorm.layer_norm_backward(**foreign, out=out), out))
    assert all(torch.equal(a.tensor, b) for a, b in zip(out, expected))


def test_lent_results_live_as_long_as_their_borrower() -> None:
    array = np.arange(4.0).astype(ml_dtypes.bfloat16)
    before = sys.getrefcount(array)
    borrowed = dlpack.lend(array, torch.from_dlpack)
    assert sys.getrefcount(array) > before
    assert borrowed.dtype == torch.bfloat16
    assert borrowed.tolist() == [0, 1, 2, 3]
    del borrowed
    gc.collect()
    assert sys.getrefcount(array) == before


def test_a_lent_result_may_outlive_everything() -> None:
    code = (
        "import torch, numpy as np, ml_dtypes; from backnorm import dlpack\n"
        "torch.kept = dlpack.lend(np.ones(3, ml_dtypes.bfloat16), torch.from_dlpack)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_dlpack_exports_that_fail_are_told_with_the_parameter() -> None:
    call = {k: to_torch(v) if isinstance(v, np.ndarray) else v for k, v in layer_norm_call().items()}
    with pytest.raises(AclnnError, match=r"mean must have a supported data type .*; got DLPack type") as caught:
        backnorm.layer_norm_backward(**{**call, "mean": Foreign(torch.zeros(5, 1).to(torch.float8_e5m2))})
    assert caught.value.parameter == "mean"
    with pytest.raises(TypeError, match="rstd must be an array that DLPack can export"):
        backnorm.layer_norm_backward(**{**call, "rstd": Foreign(torch.zeros(5, 1, requires_grad=True))})

    class Liar(Foreign):
        def __dlpack__(self, **options: Any) -> Any:
            return "capsule"

    with pytest.raises(TypeError, match="weight must be an array that DLPack can export"):
        backnorm.layer_norm_backward(**{**call, "weight": Liar(torch.zeros(12))})


def test_a_capsule_for_another_device_than_it_said_is_refused() -> None:
    class Liar(Foreign):
        def __dlpack__(self, **options: Any) -> Any:
            capsule = self.tensor.__dlpack__()
            dlpack._open(capsule).tensor.device_type = 2
            return capsule

    call = {k: to_torch(v) if isinstance(v, np.ndarray) else v for k, v in layer_norm_call().items()}
    with pytest.raises(TypeError, match="weight must be an array that DLPack can export"):
        backnorm.layer_norm_backward(**{**call, "weight": Liar(torch.zeros(12, dtype=torch.bfloat16))})


def test_a_library_that_takes_nothing_back_is_told_before_anything_is_computed() -> None:
    class Lonely(Foreign):
        def __array_namespace__(self) -> Any:
            return None

    call = {k: to_torch(v) if isinstance(v, np.ndarray) else v for k, v in layer_norm_call().items()}
    with pytest.raises(TypeError, match="must offer from_dlpack"):
        backnorm.layer_norm_backward(**{**call, "input": Lonely(call["input"])})


def test_a_negated_view_of_torch_is_read_with_its_sign() -> None:
    call = {k: to_torch(v) if isinstance(v, np.ndarray) else v for k, v in layer_norm_call().items()}
    expected = backnorm.layer_norm_backward(**{**call, "grad_out": -call["grad_out"]})
    negated = torch._neg_view(call["grad_out"])
    results = backnorm.layer_norm_backward(**{**call, "grad_out": negated})
    assert all(torch.equal(a, b) for a, b in zip(results, expected))
    with pytest.raises(AclnnError, match="writable in place"):
        backnorm.layer_norm_backward(**call, out=(negated, torch.zeros(12), torch.zeros(12)))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_torch_tensors_without_memory_are_type_errors() -> None:
    from torch._subclasses import FakeTensorMode

    freed = torch.full((5, 12), 3.0)
    freed.untyped_storage().resize_(0)
    with FakeTensorMode():
        fake = torch.zeros(5, 12)
    nested = torch.nested.nested_tensor([torch.zeros(12)] * 5, layout=torch.jagged)
    ragged = torch.nested.nested_tensor([torch.zeros(12)] * 5)
    call = {k: to_torch(v) if isinstance(v, np.ndarray) else v for k, v in layer_norm_call().items()}
    for odd in (freed, fake, nested, ragged):
        with pytest.raises(TypeError, match="input must be a dense tensor with memory of its own"):
            backnorm.layer_norm_backward(**{**call, "input": odd})


def test_masked_arrays_are_refused() -> None:
    call = layer_norm_call()
    with pytest.raises(TypeError, match="mean must be an array without a mask"):
        backnorm.layer_norm_backward(**{**call, "mean": np.ma.masked_less(call["mean"], 0)})


def test_an_output_beyond_memory_is_a_memory_error() -> None:
    one = np.broadcast_to(np.float32(1), (2**50, 2))
    rows = np.broadcast_to(np.float32(1), (2**50,))
    with pytest.raises(MemoryError, match="does not fit into memory"):
        backnorm.layer_norm_backward(one, one, (2,), rows, rows, output_mask=(True, False, False))


def test_empty_bfloat16_through_dlpack() -> None:
    empty, none = Foreign(torch.zeros(0, 4, dtype=torch.bfloat16)), Foreign(torch.zeros(0, 1))
    results = backnorm.layer_norm_backward(empty, empty, (4,), none, none)
    assert results[0].tensor.shape == (0, 4)
    assert results[1].tensor.tolist() == [0] * 4


def test_no_rows_again_and_again() -> None:
    empty, one = torch.empty(0, 64), torch.empty(0, 1)
    for _ in range(3):
        dx, dw, db = backnorm.layer_norm_backward(empty, empty, (64,), one, one, torch.ones(64), torch.ones(64))
        assert dx.shape == (0, 64)
        assert not dw.any()
        assert not db.any()


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_results_without_memory_are_refused() -> None:
    from torch._subclasses import FakeTensorMode

    call = (torch.ones(4, 64), torch.ones(4, 64), (64,), torch.ones(4, 1), torch.ones(4, 1))
    for _ in range(2):
        with FakeTensorMode(), pytest.raises(TypeError, match="must have memory; got a FakeTensor"):
            backnorm.layer_norm_backward(*call)
        backnorm.layer_norm_backward(*call)


def test_a_gradient_tape_is_neither_needed_nor_left() -> None:
    call = {k: to_torch(v) if isinstance(v, np.ndarray) else v for k, v in layer_norm_call().items()}
    call["input"].requires_grad_()
    call["weight"] = torch.nn.Parameter(call["weight"])
    results = backnorm.layer_norm_backward(**call)
    assert not any(result.requires_grad for result in results)


# --- defaults: dtype, shape and memory format of what is allocated ---


def test_layer_norm_defaults() -> None:
    call = layer_norm_call("float16")
    assert [r.dtype.name for r in backnorm.layer_norm_backward(**call)] == ["float16", "float32", "float32"]
    call["weight"] = None
    assert [r.dtype.name for r in backnorm.layer_norm_backward(**call)] == ["float16"] * 3
    call["weight"] = normal(12, dtype="float16")
    assert [r.dtype.name for r in backnorm.layer_norm_backward(**call)] == ["float16"] * 3


def test_group_norm_defaults() -> None:
    x = normal(2, 6, 4, 4, dtype="bfloat16")
    results = backnorm.group_norm_backward(x, x, normal(2, 3), normal(2, 3), None, 2, 6, 16, 3)
    assert [r.dtype.name for r in results] == ["bfloat16", "float32", "float32"]
    assert [r.shape for r in results] == [(2, 6, 4, 4), (6,), (6,)]
    weight = normal(2, 3)
    results = backnorm.group_norm_backward(x, x, normal(6), normal(2, 3), weight, 2, 6, 16, 3)
    assert [r.shape for r in results] == [(2, 6, 4, 4), (2, 3), (2, 3)]


def test_batch_norm_reduce_defaults() -> None:
    x = normal(4, 3, dtype="float16")
    mean, invstd = normal(3), normal(3, dtype="float16")
    results = backnorm.batch_norm_backward_reduce(x, x, mean, invstd)
    assert [r.dtype.name for r in results] == ["float32"] * 4
    results = backnorm.batch_norm_backward_reduce(x, x, mean, invstd, normal(3, dtype="bfloat16"))
    assert [r.dtype.name for r in results] == ["float32", "float32", "bfloat16", "bfloat16"]
    results = backnorm.batch_norm_backward_reduce(x, x, mean, invstd, None, False, True, False)
    assert [r is None for r in results] == [True, True, False, True]


@pytest.mark.parametrize("mask", list(itertools.product([True, False], repeat=3)))
def test_masked_off_outputs_are_none(mask: tuple[bool, ...]) -> None:
    call = layer_norm_call()
    whole = backnorm.layer_norm_backward(**call)
    part = backnorm.layer_norm_backward(**call, output_mask=mask)
    for wanted, one, other in zip(mask, whole, part):
        assert (other is not None) == wanted
        if wanted:
            np.testing.assert_array_equal(one, other)


def test_grad_input_takes_the_memory_format_of_input() -> None:
    for shape, order in (((2, 6, 3, 5), (0, 2, 3, 1)), ((4, 6, 1, 1), (0, 2, 3, 1)), ((1, 6, 4, 4), (0, 2, 3, 1))):
        memory = RNG.standard_normal([shape[axis] for axis in order]).astype(np.float32)
        x = memory.transpose(np.argsort(order))
        dy = normal(*shape)
        n, c, hw = shape[0], shape[1], shape[2] * shape[3]
        statistics = normal(n, 3), normal(n, 3)
        result, *_ = backnorm.group_norm_backward(dy, x, *statistics, None, n, c, hw, 3)
        assert result.strides == x.strides
        as_torch = [torch.from_numpy(a) for a in (dy, x, *statistics)]
        same, *_ = backnorm.group_norm_backward(*as_torch, None, n, c, hw, 3)
        assert same.stride() == as_torch[1].stride()
        assert same.stride() == torch.empty_like(as_torch[1]).stride()
        np.testing.assert_array_equal(same.numpy(), result)


def test_new_strides_pack_in_the_order_of_the_old() -> None:
    def packed(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
        return dense_strides(TensorDesc(shape, 0, strides))

    assert packed((4, 5), (10, 2)) == (5, 1)  # gaps closed
    assert packed((4, 5), (2, 16)) == (1, 4)  # order kept
    assert packed((4, 5), (0, 1)) == (5, 1)  # an expanded axis stays where it stands
    assert packed((4, 5), (1, 0)) == (5, 1)
    assert packed((4, 5), (-5, 1)) == (5, 1)
    assert packed((4, 1, 5), (5, 999, 1)) == (5, 999, 1)  # dense already: as it is
    assert packed((), ()) == ()
    rng = np.random.default_rng(2)
    for _ in range(500):
        shape = tuple(int(n) for n in rng.integers(2, 4, 4))
        sizes = contiguous_strides([int(n) for n in rng.permutation(shape)])
        strides = tuple(0 if rng.random() < 0.3 else int(s) for s in rng.permutation(sizes))
        like = torch.empty_strided(shape, strides)
        assert packed(shape, strides) == torch.empty_like(like).stride(), (shape, strides)
    for _ in range(500):  # equal strides too
        shape = tuple(int(n) for n in rng.integers(1, 4, 5))
        strides = tuple(int(s) for s in rng.choice([0, 1, 4, 12, 12, 36], 5))
        like = torch.empty(1000).as_strided(shape, strides)
        assert packed(shape, strides) == torch.empty_like(like).stride(), (shape, strides)


# --- values on awkward inputs ---


def test_awkward_numpy_inputs() -> None:
    call = layer_norm_call()
    expected = backnorm.layer_norm_backward(**call)

    packed = np.zeros((5, 12), dtype=[("flag", "u1"), ("x", "f4")])  # strides that are no whole elements
    packed["x"] = call["input"]
    read_only = call["grad_out"].copy()
    read_only.flags.writeable = False
    unaligned = np.frombuffer(b"\0" + call["mean"].tobytes(), np.float32, 5, 1).reshape(5, 1)
    reversed_ = call["rstd"][::-1].copy()[::-1]
    awkward = {**call, "input": packed["x"], "grad_out": read_only, "mean": unaligned, "rstd": reversed_}
    for one, other in zip(backnorm.layer_norm_backward(**awkward), expected):
        np.testing.assert_array_equal(one, other)


def test_a_single_number_is_an_array_of_rank_0() -> None:
    x = normal(1, 2, 4)
    results = backnorm.group_norm_backward(x, x, np.float32(0.5), np.float32(2), None, 1, 2, 4, 1)
    golden = group_norm.reference(
        {"gradOut": x, "input": x, "mean": 0.5, "rstd": 2.0, "N": 1, "C": 2, "HxW": 4, "group": 1}
    )
    np.testing.assert_allclose(results[0], golden["gradInput"], rtol=1e-5, atol=1e-5)


def test_integer_arguments_of_other_libraries() -> None:
    call = layer_norm_call()
    expected = backnorm.layer_norm_backward(**call)
    for shape in ([12], np.array([12]), torch.Size([12]), (np.int32(12),)):
        got = backnorm.layer_norm_backward(**{**call, "normalized_shape": shape}, output_mask=[1, np.True_, True])
        np.testing.assert_array_equal(got[0], expected[0])


def test_statistics_are_never_recomputed() -> None:
    call = layer_norm_call()
    call["mean"][:] = 100
    call["rstd"][:] = -3
    names = {"grad_out": "gradOut", "normalized_shape": "normalizedShape", "weight": "weightOptional"}
    values = {names.get(k, k): v for k, v in call.items()}
    golden, terms = layer_norm.reference(values), layer_norm.terms(values)
    for result, name in zip(backnorm.layer_norm_backward(**call), ("gradInputOut", "gradWeightOut", "gradBiasOut")):
        assert excess(result, golden[name], terms[name]) <= 1


def test_a_row_keeps_its_bits_whatever_its_neighbours() -> None:
    for cols in (5, 768, 9001):
        call = layer_norm_call(rows=40, cols=cols)
        whole, *_ = backnorm.layer_norm_backward(**call)
        for rows in (slice(0, 1), slice(7, 20), slice(39, 40)):
            part = {k: v[rows] if k in ("grad_out", "input", "mean", "rstd") else v for k, v in call.items()}
            np.testing.assert_array_equal(backnorm.layer_norm_backward(**part)[0], whole[rows])


def test_a_sample_keeps_its_bits_whatever_its_neighbours() -> None:
    x, dy, mean, rstd, w = normal(9, 6, 301), normal(9, 6, 301), normal(9, 3), normal(9, 3), normal(6)
    whole, *_ = backnorm.group_norm_backward(dy, x, mean, rstd, w, 9, 6, 301, 3)
    for n in (slice(0, 1), slice(3, 8)):
        size = len(range(9)[n])
        part, *_ = backnorm.group_norm_backward(dy[n], x[n], mean[n], rstd[n], w, size, 6, 301, 3)
        np.testing.assert_array_equal(part, whole[n])


def test_results_do_not_depend_on_layout_or_run() -> None:
    call = layer_norm_call(rows=300, cols=700)
    first = backnorm.layer_norm_backward(**call)
    transposed = {**call, "input": np.asfortranarray(call["input"]), "grad_out": np.asfortranarray(call["grad_out"])}
    for one, two, three in zip(first, backnorm.layer_norm_backward(**call), backnorm.layer_norm_backward(**transposed)):
        assert one.tobytes() == two.tobytes() == np.ascontiguousarray(three).tobytes()


# --- out= ---


def test_out_is_written_and_returned_in_any_allowed_type() -> None:
    call = layer_norm_call("float16")
    whole = backnorm.layer_norm_backward(**call)
    out = (np.full((5, 12), np.nan, np.float32), None, np.full(12, np.nan, ml_dtypes.bfloat16))
    results = backnorm.layer_norm_backward(**call, output_mask=(True, False, True), out=out)
    assert results[0] is out[0]
    assert results[1] is None
    assert results[2] is out[2]
    np.testing.assert_array_equal(out[0].astype(np.float16), whole[0])
    np.testing.assert_array_equal(out[2], whole[2].astype(ml_dtypes.bfloat16))


def test_out_where_masked_off_is_left_alone() -> None:
    spare = np.full(3, 7.0)
    results = backnorm.layer_norm_backward(
        **layer_norm_call(), output_mask=(True, False, False), out=(np.zeros((5, 12), np.float32), spare, "anything")
    )
    assert results[1:] == (None, None)
    assert (spare == 7).all()


def test_out_may_be_an_input() -> None:
    for name in ("grad_out", "input"):
        call = layer_norm_call()
        expected = backnorm.layer_norm_backward(**call)
        backnorm.layer_norm_backward(**call, out=(call[name], np.zeros(12, np.float32), np.zeros(12, np.float32)))
        np.testing.assert_array_equal(call[name], expected[0])


@pytest.mark.parametrize("cols", [12, 20_000])
@pytest.mark.parametrize("place", [1, 2])
@pytest.mark.parametrize("name", ["grad_out", "input"])
def test_column_sums_may_lie_on_an_input_of_one_row(name: str, place: int, cols: int) -> None:
    call = layer_norm_call(rows=1, cols=cols)
    call["grad_out"], call["input"] = call["grad_out"][0], call["input"][0]
    call["mean"], call["rstd"] = call["mean"][0], call["rstd"][0]
    expected = backnorm.layer_norm_backward(**call)
    out = [np.zeros(cols, np.float32) for _ in range(3)]
    out[place] = call[name]
    for one, other in zip(backnorm.layer_norm_backward(**call, out=out), expected):
        np.testing.assert_array_equal(one, other)


def test_bad_out() -> None:
    call = layer_norm_call()
    good = [np.zeros((5, 12), np.float32), np.zeros(12, np.float32), np.zeros(12, np.float32)]

    def refuse(out: Any, status: int, parameter: str, words: str) -> None:
        with pytest.raises(AclnnError, match=words) as caught:
            backnorm.layer_norm_backward(**call, out=out)
        assert (caught.value.status, caught.value.parameter) == (status, parameter)

    refuse(good[:2], 161002, "out", "must have 3 places")
    refuse([None, *good[1:]], 161001, "grad_input", "must not be null")
    refuse([good[0][:4], *good[1:]], 161002, "grad_input", r"\[5, 12\]\); got \[4, 12\]")
    refuse([good[0].astype(np.float64), *good[1:]], 161002, "grad_input", "got float64")
    refuse([good[0], np.broadcast_to(np.zeros(1, np.float32), (12,)), good[2]], 161002, "grad_weight", "writable")
    locked = good[1].copy()
    locked.flags.writeable = False
    refuse([good[0], locked, good[2]], 161002, "grad_weight", "writable")
    expanded = np.lib.stride_tricks.as_strided(np.zeros(4, np.float32), (12,), (0,))
    refuse([good[0], good[1], expanded], 161002, "grad_bias", "overlap itself")
    fields = np.zeros(12, dtype=[("flag", "u1"), ("x", "f4")])["x"]
    refuse([good[0], good[1], fields], 161002, "grad_bias", "writable in place")
    refuse([good[0], good[1], good[1]], 161002, "out", "got one twice")
    with pytest.raises(TypeError, match="out must be a tuple of 3"):
        backnorm.layer_norm_backward(**call, out=good[0])
    assert not any(array.any() for array in good)


# --- refusals ---


def test_float64_is_refused_with_what_is_supported() -> None:
    call = layer_norm_call()
    call["grad_out"] = call["grad_out"].astype(np.float64)
    with pytest.raises(AclnnError) as caught:
        backnorm.layer_norm_backward(**call)
    assert caught.value.status == Status.ACLNN_ERR_PARAM_INVALID
    assert caught.value.parameter == "grad_out"
    assert "(float32, float16 or bfloat16); got float64" in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("dtype", [">f4", "O", "datetime64[s]", "S4", [], ml_dtypes.float8_e4m3fn, np.longdouble])
def test_types_without_a_number_are_refused_by_name(dtype: Any) -> None:
    call = layer_norm_call()
    call["input"] = np.zeros((5, 12), dtype)
    name = re.escape(str(np.dtype(dtype)))
    with pytest.raises(AclnnError, match=f"input must have a supported data type .*; got {name}"):
        backnorm.layer_norm_backward(**call)


def test_torch_types_without_a_number_are_refused() -> None:
    call = {k: to_torch(v) if isinstance(v, np.ndarray) else v for k, v in layer_norm_call().items()}
    call["grad_out"] = call["grad_out"].to(torch.float8_e5m2)
    with pytest.raises(AclnnError, match=r"grad_out must have a supported data type .*; got float8_e5m2"):
        backnorm.layer_norm_backward(**call)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"grad_out": [[1.0]]}, "grad_out must be an array"),
        ({"mean": "mean"}, "mean must be an array"),
        ({"normalized_shape": 12}, "normalized_shape must be a sequence of integers"),
        ({"normalized_shape": "12"}, "normalized_shape must be a sequence of integers"),
        ({"normalized_shape": (12.0,)}, "normalized_shape.* must be an integer"),
        ({"normalized_shape": (2**63,)}, "must be from"),
        ({"output_mask": True}, "output_mask must be a sequence of bools"),
        ({"normalized_shape": {12}}, "normalized_shape must be a sequence of integers"),
        ({"normalized_shape": np.array(12)}, "normalized_shape must be a sequence of integers"),
        ({"normalized_shape": (10**5000,)}, "got an integer of 16610 bits"),
        ({"output_mask": ("yes", True, True)}, "output_mask.* must be True or False"),
        ({"weight": torch.zeros(12).to_sparse()}, "weight must be a dense tensor"),
    ],
)
def test_what_is_no_argument_at_all_is_a_type_error(change: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        backnorm.layer_norm_backward(**{**layer_norm_call(), **change})


def test_another_device_is_refused_never_replaced() -> None:
    meta = torch.zeros(5, 12, device="meta")
    statistics = torch.zeros(5, 1, device="meta")
    with pytest.raises(AclnnError, match="got meta") as caught:
        backnorm.layer_norm_backward(meta, meta, (12,), statistics, statistics)
    assert caught.value.status == Status.ACLNN_ERR_INNER_FIND_KERNEL_ERROR
    with pytest.raises(AclnnError, match=r"mean must be on the device of grad_out \(cpu\); got meta"):
        backnorm.layer_norm_backward(torch.zeros(5, 12), torch.zeros(5, 12), (12,), statistics, statistics)

    class OnGpu(Foreign):
        device = 10, 1

        def __dlpack_device__(self) -> Any:
            return self.device

    array = OnGpu(torch.zeros(5, 12))
    with pytest.raises(AclnnError, match="got rocm:1"):
        backnorm.layer_norm_backward(array, torch.zeros(5, 12), (12,), statistics, statistics)
    if not torch.cuda.is_available():  # else PyTorch looks for the memory there
        array.device = 2, 1
        with pytest.raises(AclnnError, match="got cuda:1"):
            backnorm.layer_norm_backward(array, torch.zeros(5, 12), (12,), statistics, statistics)


def test_products() -> None:
    x, statistics = normal(2, 4, 3, dtype="bfloat16"), normal(2, 2)
    backnorm.group_norm_backward(x, x, statistics, statistics, None, 2, 4, 3, 2)
    with pytest.raises(AclnnError, match="allowed on Ascend950, Any"):
        backnorm.group_norm_backward(x, x, statistics, statistics, None, 2, 4, 3, 2, product="Ascend910B")
    backnorm.group_norm_backward(x, x, statistics, statistics, None, 2, 4, 3, 2, product="Ascend950PR")
    for bad in ("Ascend4", "", None, 3):
        with pytest.raises(AclnnError, match="product must be") as caught:
            backnorm.group_norm_backward(x, x, statistics, statistics, None, 2, 4, 3, 2, product=bad)
        assert caught.value.parameter == "product"
    with pytest.raises(AclnnError) as caught:
        backnorm.group_norm_backward(x, x, statistics, statistics, None, 2, 4, 3, 2, product="Ascend310P")
    assert caught.value.status == 561003


def test_errors_survive_pickling() -> None:
    with pytest.raises(AclnnError) as caught:
        backnorm.layer_norm_backward(**{**layer_norm_call(), "mean": None})
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.status, copy.parameter, str(copy)) == (161001, "mean", str(caught.value))


def test_nothing_is_written_when_a_call_is_refused() -> None:
    call = layer_norm_call()
    out = tuple(np.full(s, 7, np.float32) for s in ((5, 12), (12,), (11,)))
    with pytest.raises(AclnnError):
        backnorm.layer_norm_backward(**call, out=out)
    assert all((array == 7).all() for array in out)


def test_importing_is_light() -> None:
    heavy = "{'torch', 'numba', 'triton', 'rich'}"
    code = f"import sys, backnorm, backnorm.acl, backnorm.aclnn; print(*{heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_a_call_of_torch_tensors_again_does_the_same() -> None:
    """The second call of a kind takes a shorter way."""
    rng = np.random.default_rng(3)

    def arguments() -> list[Any]:
        dy, x, w = (torch.tensor(rng.standard_normal(shape).astype(np.float32)) for shape in ((5, 7), (5, 7), 7))
        mean, rstd = (torch.tensor(rng.standard_normal((5, 1)).astype(np.float32)) for _ in "mr")
        return [dy, x, (7,), mean, rstd, w]

    for _ in range(3):
        first = arguments()
        arrays = [value.numpy() if hasattr(value, "numpy") else value for value in first]
        expected = backnorm.layer_norm_backward(*arrays)
        out = (torch.full((5, 7), np.nan), None, torch.full((7,), np.nan))
        results = backnorm.layer_norm_backward(*first)
        for result, array in zip(results, expected):
            assert np.array_equal(result.numpy(), array)
        dx, nothing, db = backnorm.layer_norm_backward(*first, None, (True, False, True), out=out)
        assert dx is out[0]
        assert nothing is None
        assert db is out[2]
        assert np.array_equal(dx.numpy(), expected[0])
        assert np.array_equal(db.numpy(), expected[2])
    freed = arguments()
    freed[1].untyped_storage().resize_(0)
    with pytest.raises(TypeError, match="memory was freed"):
        backnorm.layer_norm_backward(*freed)
    with pytest.raises((TypeError, AclnnError), match="normalized_shape"):
        backnorm.layer_norm_backward(*first[:2], (7.0,), *first[3:])
    with pytest.raises(TypeError, match="dense tensor"):
        torch.vmap(lambda dy: backnorm.layer_norm_backward(dy, *first[1:])[0])(torch.randn(2, 5, 7))
