"""Known calls of torch tensors: whatever a tensor is, and whatever becomes of it, they give what the long way gives."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from backnorm import functional, layer_norm_backward  # noqa: E402
from backnorm.ops import OPS  # noqa: E402

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


def _outcome(call: Any) -> Any:
    try:
        return [None if r is None else (type(r), r.shape, r.stride(), r.tolist()) for r in call()]
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


def test_threads_and_a_forked_child() -> None:
    calls = [_arguments(rows, columns) for rows in (1, 4, 7) for columns in (16, 64)]
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
