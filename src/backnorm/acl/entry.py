"""How a Python function becomes an acl call: arguments checked by type, failures turned into codes.

The decorated functions raise AclFailure inside; callers see outputs first and the status last.
A wrong number or type of arguments is a TypeError, and nothing else is raised.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ParamSpec, TypeVar, cast

from ..arguments import (
    Integer,
    to_bool_array,
    to_float,
    to_handle,
    to_int32,
    to_int64,
    to_int_array,
    to_text,
    to_uint64,
)
from ..status import Status
from .messages import AclFailure, add_internal_error, add_message
from .runtime import runtime

P = ParamSpec("P")
T = TypeVar("T")


#: Argument types of the acl functions; each carries its check.
Int32 = Annotated[int, to_int32]
Int64 = Annotated[int, to_int64]
Size = Annotated[int, to_uint64]
Handle = Annotated[int | None, to_handle]  # an address or a handle; None and 0 are null
IntList = Annotated[Sequence[int] | None, to_int_array]
BoolList = Annotated[Sequence[bool] | None, to_bool_array]
Text = Annotated[str | None, to_text]
Bits16 = Annotated[int, Integer(0, 2**16 - 1)]
Float = Annotated[float, to_float]


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
    params = inspect.signature(fn, eval_str=True).parameters.values()
    plain = inspect.Signature([param.replace(annotation=param.empty) for param in params])
    return Converter(fn.__name__, plain, [param.annotation.__metadata__[0] for param in params])


def _with_signature(call: T, convert: Converter) -> T:
    """Show the plain signature in help(): the inner function's annotations are not what a caller gets."""
    cast(Any, call).__signature__ = convert.signature
    return call


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
        add_internal_error(function, error)
        is_runtime = function.startswith(("aclrt", "aclInit", "aclFinalize"))  # these return an aclError
        return failed, int(Status.ACL_ERROR_INTERNAL_ERROR if is_runtime else Status.ACLNN_ERR_INNER)


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

    call.before_init = before_init  # type: ignore[attr-defined]
    return _with_signature(call, convert)


def value_call(*failed: Any, before_init: bool = False) -> Callable[[Callable[P, Any]], Callable[P, Any]]:
    """`value, ..., ret = fn(...)`; on failure the values are `failed`."""

    def decorate(fn: Callable[P, Any]) -> Callable[P, Any]:
        convert, name = _converter(fn), _c_name(fn)

        @functools.wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> Any:
            nothing = tuple(list(value) if isinstance(value, list) else value for value in failed)  # new lists
            values, ret = attempt(name, fn, convert(args, kwargs), nothing, before_init)
            return (*(values if isinstance(values, tuple) else (values,)), ret)

        call.before_init = before_init  # type: ignore[attr-defined]
        return _with_signature(call, convert)

    return decorate


def handle_call(fn: Callable[P, int]) -> Callable[P, int]:
    """`handle = fn(...)`, 0 on failure."""
    convert, name = _converter(fn), _c_name(fn)

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> int:
        return attempt(name, fn, convert(args, kwargs), 0, False)[0]

    return _with_signature(call, convert)


def pure_call(fn: Callable[P, T]) -> Callable[P, T]:
    """`value = fn(...)`: no status, no need of aclInit."""
    convert = _converter(fn)

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return cast(Callable[..., T], fn)(*convert(args, kwargs))

    return _with_signature(call, convert)
