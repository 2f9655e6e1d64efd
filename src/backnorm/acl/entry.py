"""How a Python function becomes an acl call: arguments checked by type, failures turned into codes.

The decorated functions raise AclFailure inside; callers see outputs first and the status last.
A wrong number or type of arguments is a TypeError, and nothing else is raised.
"""

from __future__ import annotations

import functools
import inspect
import operator
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ParamSpec, TypeVar

from ..status import Status
from .messages import AclFailure, add_message
from .runtime import runtime

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class _Integer:
    lowest: int
    highest: int

    def __call__(self, what: str, value: Any) -> int:
        try:
            number = operator.index(value)
        except TypeError:
            raise TypeError(f"{what} must be an integer; got {value!r}") from None
        if not self.lowest <= number <= self.highest:
            raise TypeError(f"{what} must be from {self.lowest} to {self.highest}; got {number}")
        return number


_int32, _int64, _uint64 = _Integer(-(2**31), 2**31 - 1), _Integer(-(2**63), 2**63 - 1), _Integer(0, 2**64 - 1)


def _handle(what: str, value: Any) -> int:
    return 0 if value is None else _uint64(what, value)


def _integers(what: str, value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if isinstance(value, (str, bytes)) or not hasattr(value, "__iter__"):
        raise TypeError(f"{what} must be a sequence of integers or None; got {value!r}")
    return tuple(_int64(f"each of {what}", item) for item in value)


def _bool(what: str, value: Any) -> bool:
    return bool(_Integer(0, 1)(what, value))


def _bools(what: str, value: Any) -> tuple[bool, ...] | None:
    numbers = _integers(what, value)
    return None if numbers is None else tuple(bool(number) for number in numbers)


def _text(what: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{what} must be a string or None; got {value!r}")
    return value


#: Argument types of the acl functions; each carries its check.
Int32 = Annotated[int, _int32]
Int64 = Annotated[int, _int64]
Size = Annotated[int, _uint64]
Handle = Annotated[int | None, _handle]  # an address or a handle; None and 0 are null
IntList = Annotated[Sequence[int] | None, _integers]
Bool = Annotated[bool, _bool]
BoolList = Annotated[Sequence[bool] | None, _bools]
Text = Annotated[str | None, _text]

CONVERT: dict[str, Callable[[str, Any], Any]] = {"handle": _handle, "int64": _int64, "bool": _bool, "size": _uint64}


class Converter:
    """Binds a call's arguments to parameters and checks each; the errors are TypeErrors."""

    def __init__(
        self, function: str, signature: inspect.Signature, checks: Sequence[Callable[[str, Any], Any]]
    ) -> None:
        self.function, self.signature, self.checks = function, signature, checks
        self.words = [f"{function}: {name}" for name in signature.parameters]

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        if kwargs or len(args) != len(self.checks):
            try:
                bound = self.signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{self.function}{self.signature}: {error}") from None
            bound.apply_defaults()
            args = tuple(bound.arguments.values())
        return [check(word, value) for check, word, value in zip(self.checks, self.words, args)]


def _converter(fn: Callable[..., Any]) -> Converter:
    hints = typing.get_type_hints(fn, include_extras=True)
    plain = [param.replace(annotation=param.empty) for param in inspect.signature(fn).parameters.values()]
    checks = [hints[param.name].__metadata__[0] for param in plain]
    return Converter(fn.__name__, inspect.Signature(plain), checks)


def _c_name(fn: Callable[..., Any]) -> str:
    if fn.__name__.startswith("acl"):
        return fn.__name__
    prefix = "aclrt" if fn.__module__.endswith(".rt") else "acl"
    return prefix + "".join(word.capitalize() for word in fn.__name__.split("_"))


def attempt(function: str, work: Callable[..., T], args: Sequence[Any], failed: T, before_init: bool) -> tuple[T, int]:
    """Run an acl call: (what it gives, 0), or (failed, code) with a message."""
    try:
        if not before_init:
            runtime.require_init()
        return work(*args), 0
    except AclFailure as failure:
        add_message(f"{function}: {failure}")
        return failed, int(failure.status)
    except Exception as error:  # ours, not the caller's; still a code, as C would get
        add_message(f"{function}: internal error: {type(error).__name__}: {error}")
        return failed, int(Status.ACL_ERROR_INTERNAL_ERROR)


@typing.overload
def status_call(fn: Callable[P, None]) -> Callable[P, int]: ...
@typing.overload
def status_call(*, before_init: bool) -> Callable[[Callable[P, None]], Callable[P, int]]: ...
def status_call(fn: Any = None, *, before_init: bool = False) -> Any:
    """`ret = fn(...)`."""
    if fn is None:
        return functools.partial(status_call, before_init=before_init)
    convert, name = _converter(fn), _c_name(fn)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> int:
        return attempt(name, fn, convert(args, kwargs), None, before_init)[1]

    return call


def value_call(*failed: Any, before_init: bool = False) -> Callable[[Callable[P, Any]], Callable[P, Any]]:
    """`value, ..., ret = fn(...)`; on failure the values are `failed`."""

    def decorate(fn: Callable[P, Any]) -> Callable[P, Any]:
        convert, name = _converter(fn), _c_name(fn)

        @functools.wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> Any:
            values, ret = attempt(name, fn, convert(args, kwargs), failed, before_init)
            return (*(values if isinstance(values, tuple) else (values,)), ret)

        return call

    return decorate


def handle_call(fn: Callable[P, int]) -> Callable[P, int]:
    """`handle = fn(...)`, 0 on failure."""
    convert, name = _converter(fn), _c_name(fn)

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> int:
        return attempt(name, fn, convert(args, kwargs), 0, False)[0]

    return call
