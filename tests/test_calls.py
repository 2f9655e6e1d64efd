"""Known calls of torch tensors and NumPy arrays: whatever these are, and whatever becomes of them, they give what the
long way gives.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")

from backnorm import batch_norm_backward_reduce, functional, layer_norm_backward  # noqa: E402
from backnorm.ops import OPS, _calls  # noqa: E402

LN = OPS["layer_norm_backward"]


class Subclass(torch.Tensor):  # type: ignore[misc]
    pass


def _freed(tensor: Any) -> Any:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


ODD: dict[str, Any] = {
    "plain": lambda t: t,
    "negated": lambda t: t._neg_view(),
    "imaginary": lambda t: torch.complex(t, t).conj().imag,
    "conjugate": lambda t: torch.complex(t, t).conj(),
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "opaque": lambda t: t.to_mkldnn(),
    "zero": lambda t: torch._efficientzerotensor(t.shape),
    "functional": lambda t: torch._to_functional_tensor(t),
    "lazy": lambda t: torch._lazy_clone(t),
    "freed": _freed,
    "parameter": lambda t: torch.nn.Parameter(t.clone()),
    "subclass": lambda t: t.clone().as_subclass(Subclass),
    "strided": lambda t: torch.stack([t, t], -1)[..., 0],
    "half": lambda t: t.half(),
    "many dimensions": lambda t: t.reshape((1,) * 60 + tuple(t.shape)),
    "numpy": lambda t: t.numpy(),
    "none": lambda t: None,
}


def _arguments(rows: int = 4, columns: int = 64) -> list[Any]:
    made = torch.Generator().manual_seed(rows * 1000 + columns)
    dy, x, mean, rstd, weight, bias = (
        torch.randn(shape, generator=made)
        for shape in ((rows, columns), (rows, columns), (rows, 1), (rows, 1), columns, columns)
    )
    return [dy, x, [columns], mean, rstd, weight, bias, (True, True, True)]


def _strides(result: Any) -> Any:
    return (result.strides, result.dtype) if isinstance(result, np.ndarray) else result.stride()


def _outcome(call: Any) -> Any:
    try:
        return [None if r is None else (type(r), r.shape, _strides(r), r.tolist()) for r in call()]
    except Exception as error:
        return type(error), str(error)


def _check(arguments: list[Any]) -> None:
    expected = _outcome(lambda: functional._run_anew(LN, tuple(arguments), None, "Any")[1])
    for _ in range(3):
        assert _outcome(lambda: layer_norm_backward(*arguments)) == expected


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("kind", ODD)
def test_odd_tensors_do_not_pass_for_known_ones(kind: str, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = _arguments()
    _check(arguments)
    assert functional._describe is not None
    if not native:
        monkeypatch.setattr("backnorm.ops._calls.describer", lambda torch: None)
        monkeypatch.setattr(functional, "_describe", None)
        _check(arguments)
    for place in (0, 1, 3, 5):  # bias is not read
        _check([*arguments[:place], ODD[kind](arguments[place]), *arguments[place + 1 :]])


@pytest.mark.parametrize("shape", [(64,), torch.Size([64]), [64.0], [True], [2**70], [-1], 64, "a", list(range(4000))])
def test_other_arguments(shape: Any) -> None:
    arguments = _arguments()
    _check(arguments)
    _check([*arguments[:2], shape, *arguments[3:]])


def test_no_rows_twice() -> None:
    _check(_arguments(rows=0))
    _check(_numpy_arguments(rows=0))


def test_a_tensor_that_changes() -> None:
    arguments = _arguments()
    x = arguments[1]
    changes = (
        lambda: x.set_(torch.randn(64, 4).t()),
        lambda: setattr(x, "data", torch.randn(4, 64)._neg_view()),
        lambda: setattr(x, "data", torch.randn(4, 64)),
        lambda: x.resize_(2, 64),
        lambda: x.resize_(4, 64).normal_(),
        lambda: torch.utils.swap_tensors(x, torch.randn(4, 64)._neg_view()),
    )
    _check(arguments)
    for change in changes:
        change()
        _check(arguments)


class Subarray(np.ndarray[Any, Any]):
    pass


def _read_only(array: Any) -> Any:
    array = array.copy()
    array.flags.writeable = False
    return array


def _in_records(array: Any) -> Any:
    records = np.zeros(array.shape, np.dtype([("pad", np.uint8), ("value", np.float32)]))
    records["value"] = array
    return records["value"]


ODD_ARRAYS: dict[str, Any] = {
    "plain": lambda a: a,
    "reversed": lambda a: a[::-1],
    "transposed": lambda a: np.asfortranarray(a),
    "strided": lambda a: np.repeat(a, 2, -1)[..., ::2],
    "repeated": lambda a: np.broadcast_to(a.ravel()[:1].reshape((1,) * a.ndim), a.shape),
    "in records": _in_records,
    "read-only": _read_only,
    "subclass": lambda a: a.view(Subarray),
    "masked": lambda a: np.ma.masked_array(a),
    "other order of bytes": lambda a: a.astype(a.dtype.newbyteorder()),
    "type with a name": lambda a: a.astype(np.dtype(np.float32, metadata={"name": "x"})),
    "half": lambda a: a.astype(np.float16),
    "brain": lambda a: a.astype(ml_dtypes.bfloat16),
    "double": lambda a: a.astype(np.float64),
    "integers": lambda a: a.view(np.int32),
    "many dimensions": lambda a: a.reshape((1,) * 60 + a.shape),
    "torch": torch.from_numpy,
    "list": lambda a: a.tolist(),
    "none": lambda a: None,
}


def _numpy_arguments(rows: int = 4, columns: int = 64) -> list[Any]:
    return [value.numpy() if isinstance(value, torch.Tensor) else value for value in _arguments(rows, columns)]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("kind", ODD_ARRAYS)
def test_odd_arrays_do_not_pass_for_known_ones(kind: str, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr("backnorm.ops._calls.describer", lambda torch: None)
        monkeypatch.setattr(functional, "_describe", None)
    arguments = _numpy_arguments()
    _check(arguments)
    _check(arguments)  # the first call of all is not kept
    assert (functional._key(LN, tuple(arguments), None, "Any") in functional._known) == native
    for place in (0, 1, 3, 5):
        _check([*arguments[:place], ODD_ARRAYS[kind](arguments[place]), *arguments[place + 1 :]])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_arrays_of_every_type_are_known(dtype: Any) -> None:
    """And results that are not contiguous have the strides of the first ones."""
    dy, x, columns, mean, rstd, weight, *rest = _numpy_arguments()
    for order in ("C", "F"):
        arguments = [np.asarray(dy, dtype), np.asarray(x, dtype, order=order), columns, mean, rstd, weight, *rest]
        _check(arguments)
        assert functional._key(LN, tuple(arguments), None, "Any") in functional._known


def test_a_row_with_strides_of_its_own() -> None:
    arguments = [value[:1] if np.ndim(value) == 2 else value for value in _numpy_arguments()]
    arguments[1] = np.lib.stride_tricks.as_strided(arguments[1], (1, 64), (4000, 4))
    _check(arguments)


@pytest.mark.parametrize("library", [_arguments, _numpy_arguments])
@pytest.mark.parametrize("changed", ["output_mask", "out"])
def test_arguments_that_change_while_a_call_runs(library: Any, changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was run is not kept for the arguments as they are afterwards."""
    arguments = library()
    _check(arguments)
    *plain, _ = arguments
    mask = [True, True, True]
    results = layer_norm_backward(*plain, mask)
    out = [result * 0 for result in results]
    run_anew = functional._run_anew

    def run_and_change(*call: Any) -> Any:
        done = run_anew(*call)
        if changed == "out":
            out[0] = out[0][:1]
        else:
            mask[0] = False
        return done

    functional._known.clear()
    monkeypatch.setattr(functional, "_run_anew", run_and_change)
    layer_norm_backward(*plain, mask, out=out if changed == "out" else None)
    monkeypatch.undo()
    if changed == "out":
        with pytest.raises(functional.AclnnError, match="grad_input must have the shape of input"):
            layer_norm_backward(*plain, mask, out=out)
    else:
        assert layer_norm_backward(*plain, mask)[0] is None


def test_a_torch_that_native_code_cannot_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """But NumPy it can."""
    describer = _calls.describer
    monkeypatch.setattr(_calls, "describer", lambda torch: None if torch is not None else describer(None))
    monkeypatch.setattr(_calls, "_reader", lambda torch: 0)
    monkeypatch.setattr(functional, "_describe", None)
    functional._known.clear()
    for _ in range(3):
        _check(_numpy_arguments())
        _check(_arguments())
    functional._known.clear()


def test_results_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A known call says so in the same words as a first one."""

    def none_left(*_: Any, **__: Any) -> Any:
        raise MemoryError("numpy's words")

    monkeypatch.setattr(functional, "_new_array", lambda like: none_left)
    functional._known.clear()
    arguments = _numpy_arguments(rows=5)
    for _ in range(2):
        layer_norm_backward(*arguments)
    assert functional._key(LN, tuple(arguments), None, "Any") in functional._known
    monkeypatch.setattr("backnorm.arrays.np.empty", none_left)
    with pytest.raises(MemoryError, match="an output of shape"):
        layer_norm_backward(*arguments)
    monkeypatch.undo()
    functional._known.clear()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of assigning to these attributes
def test_an_array_that_changes() -> None:
    arguments = _numpy_arguments()
    x = arguments[1] = arguments[1].copy()
    changes = (
        lambda: setattr(x, "shape", (64, 4)),
        lambda: setattr(x, "shape", (4, 64)),
        lambda: setattr(x, "dtype", np.int32),
        lambda: setattr(x, "dtype", np.float32),
        lambda: x.resize(2, 64, refcheck=False),
        lambda: x.resize(4, 64, refcheck=False),
    )
    _check(arguments)
    for change in changes:
        change()
        _check(arguments)


def test_arrays_to_write_into() -> None:
    """Known ones get the same numbers, read-only ones the same error."""
    arguments = _numpy_arguments()
    expected = layer_norm_backward(*arguments)
    for _ in range(3):
        out = tuple(np.full_like(result, np.nan) for result in expected)
        results = layer_norm_backward(*arguments, out=out)
        assert all(given is result for given, result in zip(out, results))
        assert all((result == wanted).all() for result, wanted in zip(results, expected))
    out[1].flags.writeable = False
    for _ in range(2):
        out[0][:], out[2][:] = 7, 7
        with pytest.raises(functional.AclnnError, match="grad_weight must be writable"):
            layer_norm_backward(*arguments, out=out)
        assert (out[0] == 7).all()
        assert (out[2] == 7).all()


def test_calls_too_large_for_the_short_way() -> None:
    """They are known too, but run on the pool."""
    for library in (np.asarray, torch.as_tensor):
        rng = np.random.default_rng(0)
        dy, x = (library(rng.standard_normal((300, 70, 9), np.float32)) for _ in "dx")
        mean, invstd = (library(rng.standard_normal(70, np.float32)) for _ in "mi")
        first = _outcome(lambda: batch_norm_backward_reduce(dy, x, mean, invstd))  # noqa: B023
        for _ in range(2):
            assert _outcome(lambda: batch_norm_backward_reduce(dy, x, mean, invstd)) == first  # noqa: B023


@pytest.mark.parametrize("library", [_arguments, _numpy_arguments])
def test_threads_and_a_forked_child(library: Any) -> None:
    calls = [library(rows, columns) for rows in (1, 4, 7) for columns in (16, 64)]
    expected = [_outcome(lambda: layer_norm_backward(*call)) for call in calls]  # noqa: B023
    wrong = []

    def work(first: int) -> None:
        for i in range(300):
            at = (first + i) % len(calls)
            if _outcome(lambda: layer_norm_backward(*calls[at])) != expected[at]:  # noqa: B023
                wrong.append(at)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    child = os.fork()
    if child == 0:
        os._exit(int(_outcome(lambda: layer_norm_backward(*calls[3])) != expected[3]))
    assert os.waitpid(child, 0)[1] == 0
