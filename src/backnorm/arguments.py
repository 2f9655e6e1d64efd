"""Python values as C arguments. What is of the wrong type, or does not fit, is a TypeError with a sentence."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any


def show(value: Any) -> str:
    """A short, one-line picture of any value, however large or hostile."""
    if type(value) is int and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    try:
        return " ".join(reprlib.repr(value).split())
    except Exception:
        return f"a {type(value).__name__}"


@dataclass(frozen=True)
class Integer:
    """A check for the integers from `lowest` to `highest`; NumPy's integers count."""

    lowest: int
    highest: int

    def __call__(self, what: str, value: Any) -> int:
        try:
            number = operator.index(value)
        except Exception:
            raise TypeError(f"{what} must be an integer; got {show(value)}") from None
        if not self.lowest <= number <= self.highest:
            raise TypeError(f"{what} must be from {self.lowest} to {self.highest}; got {show(number)}")
        return number


to_int32 = Integer(-(2**31), 2**31 - 1)
to_int64 = Integer(-(2**63), 2**63 - 1)
to_uint64 = Integer(0, 2**64 - 1)


def to_bool(what: str, value: Any) -> bool:
    try:
        number = bool(value) if type(value).__name__ in ("bool", "bool_") else operator.index(value)
    except Exception:
        number = -1
    if number not in (0, 1):
        raise TypeError(f"{what} must be True or False; got {show(value)}")
    return bool(number)


def _to_tuple(what: str, words: str, value: Any) -> tuple[Any, ...]:
    try:
        if not isinstance(value, (str, bytes, Set, Mapping)):
            return tuple(value)
    except Exception:
        pass
    raise TypeError(f"{what} must be a sequence of {words}; got {show(value)}")


_SEQUENCES = (tuple, list)


def to_int_array(what: str, value: Any) -> tuple[int, ...] | None:
    """A sequence of 64-bit integers; None stays null."""
    if type(value) in _SEQUENCES and all([type(item) is int and -(2**63) <= item < 2**63 for item in value]):  # noqa: C419
        return tuple(value)  # the usual case, at once
    return None if value is None else tuple(to_int64(f"{what}[]", item) for item in _to_tuple(what, "integers", value))


def to_bool_array(what: str, value: Any) -> tuple[bool, ...] | None:
    """A sequence of bools; None stays null."""
    if type(value) in _SEQUENCES and all([type(item) is bool for item in value]):  # noqa: C419
        return tuple(value)
    return None if value is None else tuple(to_bool(f"{what}[]", item) for item in _to_tuple(what, "bools", value))


def to_float(what: str, value: Any) -> float:
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(f"{what} must be a number; got {show(value)}")
    try:
        return float(value)
    except OverflowError:
        raise TypeError(f"{what} must fit a float; got {show(value)}") from None


def to_text(what: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{what} must be a string or None; got {show(value)}")
    return value


def to_handle(what: str, value: Any) -> int:
    """A handle or an address; None is null."""
    return 0 if value is None else to_uint64(what, value)
