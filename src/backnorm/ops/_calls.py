"""Calls of torch tensors and NumPy arrays by native code: what tells one call from another, and a known one run.

The functions are Python's own kind of builtin (`METH_FASTCALL`), so they are called with objects and hold the
interpreter's lock. Shapes, strides, types and addresses of tensors come from DLPack's C exchange API, `torch.Tensor`'s
table of functions. It does not tell a negated view; what does is in the tensor's dispatch keys, one word whose place
`_place_of_keys` finds by looking for values that are known. Those of arrays are in fields that NumPy's C interface
lays open.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from .. import workspace
from ..datatypes import BF16, F16, F32, NUMPY
from ..threads import Runner, team
from ._native import inline, native
from ._workers import _get, _intrinsic, _put, run_in

_i32, _i64 = ir.IntType(32), ir.IntType(64)

#: The words of a key and of a program at most, its pointers, and, if its caller runs it alone, the bytes of its
#: workspace: all on the stack. (Groups of GroupNorm that are rows need some tens of KiB: 4x64x25.)
MOST_WORDS, MOST_POINTERS = 512, 32
MOST_WORKSPACE = 1 << 16

#: What the functions know: words of the bytes that each has as its `self`.
_READ, _ARRAY, _CODE, _COUNT, _PLACES = range(0, 40, 8)
_TYPES, _TENSOR, _PARAMETER, _IMPLEMENTATION, _KEYS, _NONE, _TRUE, _FALSE, _INT, _LIST, _TUPLE, _SIZE = range(
    16, 112, 8
)
#: An object's type; a DLTensor's fields, with type and number of its device in one word, and dimensions and data type.
_TYPE = 8
_DATA, _DEVICE, _KIND, _SHAPE, _STRIDES, _OFFSET = 0, 8, 16, 24, 32, 40
#: A NumPy array's fields; the last two numbers are of 32 bits. And the one flag that counts.
_ITS_DATA, _ITS_DIMENSIONS, _ITS_SHAPE, _ITS_STRIDES, _ITS_DTYPE, _ITS_FLAGS, _WRITEABLE = 16, 24, 32, 40, 56, 64, 0x400


def _function(name: str, arguments: int) -> Any:
    """A function of Python's that takes and returns words."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_i64, [_i64] * arguments)
        return b.call(cgutils.get_or_insert_function(b.module, kind, name), args)

    def nothing(typing: Any) -> Any:
        return types.int64(), generate

    def one(typing: Any, a: Any) -> Any:
        return types.int64(types.int64), generate

    def two(typing: Any, a: Any, b: Any) -> Any:
        return types.int64(types.int64, types.int64), generate

    call: Any = (nothing, one, two)[arguments]
    call.__name__ = name
    return _intrinsic(call)


_error = _function("PyErr_Occurred", 0)
_release_lock, _take_lock = _function("PyEval_SaveThread", 0), _function("PyEval_RestoreThread", 1)
_bytes_at, _new_bytes = _function("PyBytes_AsString", 1), _function("PyBytes_FromStringAndSize", 2)
_long, _bool = _function("PyLong_AsLongLong", 1), _function("PyBool_FromLong", 1)
_list_size, _list_item = _function("PyList_Size", 1), _function("PyList_GetItem", 2)
_tuple_size, _tuple_item = _function("PyTuple_Size", 1), _function("PyTuple_GetItem", 2)


def _stack(size: int) -> Any:
    """What gives the address of that many bytes, good until the function returns."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        with b.goto_entry_block():
            memory = b.alloca(ir.ArrayType(ir.IntType(8), size))
            memory.align = 64
            return b.ptrtoint(memory, _i64)

    def stack(typing: Any) -> Any:
        return types.int64(), generate

    return _intrinsic(stack)


_new_tensor, _new_pointers = _stack(48), _stack(8 * MOST_POINTERS)
_new_words, _new_workspace = _stack(8 * MOST_WORDS), _stack(MOST_WORKSPACE)


@_intrinsic
def _read_tensor(typing: Any, function: Any, value: Any, tensor: Any) -> Any:
    """Fill a DLTensor; not 0, and an error set, where it cannot be."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_i32, [_i64, _i64])
        return b.sext(b.call(b.inttoptr(args[0], kind.as_pointer()), args[1:]), _i64)

    return types.int64(types.int64, types.int64, types.int64), generate


@inline
def _put_number(known: Any, value: Any, at: Any) -> Any:
    """Two words for an int or a bool; where the next ones go, or 0 for any other value or an error."""
    if _get(value + _TYPE) == _get(known + _INT):
        number = _long(value)
        if number == -1 and _error() != 0:
            return 0
        _put(at, 1)
        _put(at + 8, number)
    elif value == _get(known + _TRUE) or value == _get(known + _FALSE):
        _put(at, 2)
        _put(at + 8, value == _get(known + _TRUE))
    else:
        return 0
    return at + 16


@inline
def _put_tensor(known: Any, value: Any, at: Any, end: Any, tensor: Any) -> Any:
    """All but the data. The first word has a type in its upper half, so it is like none of other values'."""
    if _read_tensor(_get(known + _READ), value, tensor) != 0:
        return 0
    kind, shape, strides = _get(tensor + _KIND), _get(tensor + _SHAPE), _get(tensor + _STRIDES)
    dimensions = kind & 0xFFFFFFFF
    if at + 24 + 16 * dimensions > end or (strides == 0 and dimensions > 0):
        return 0
    _put(at, kind if _get(tensor + _DATA) != 0 else ~kind)  # empty, or freed, which is an error
    _put(at + 8, _get(tensor + _DEVICE))
    _put(at + 16, _get(_get(value + _get(known + _IMPLEMENTATION)) + _get(known + _KEYS)))
    at += 24
    for i in range(dimensions):
        _put(at, _get(shape + 8 * i))
        _put(at + 8, _get(strides + 8 * i))
        at += 16
    return at


@inline
def _put_array(known: Any, value: Any, at: Any, end: Any) -> Any:
    """The same of an array of one of our types."""
    ours, dtype = _get(known + _TYPES), _get(value + _ITS_DTYPE)
    dimensions = _get(value + _ITS_DIMENSIONS) & 0xFFFFFFFF
    if dtype != _get(ours) and dtype != _get(ours + 8) and dtype != _get(ours + 16):
        return 0
    if at + 24 + 16 * dimensions > end:
        return 0
    _put(at, 4)
    _put(at + 8, dimensions | (_get(value + _ITS_FLAGS) & _WRITEABLE) << 32)
    _put(at + 16, dtype)
    at += 24
    for i in range(dimensions):
        _put(at, _get(_get(value + _ITS_SHAPE) + 8 * i))
        _put(at + 8, _get(_get(value + _ITS_STRIDES) + 8 * i))
        at += 16
    return at


def _describe(self, arguments, count):  # type: ignore[no-untyped-def]
    known, tensor, start = _bytes_at(self), _new_tensor(), _new_words()
    at, end = start, start + 8 * MOST_WORDS
    for i in range(count):
        value = _get(arguments + 8 * i)
        kind = _get(value + _TYPE)
        if at == 0 or at + 16 > end:
            at = 0
        elif kind == _get(known + _TENSOR) or kind == _get(known + _PARAMETER):
            at = _put_tensor(known, value, at, end, tensor)
        elif kind == _get(known + _ARRAY):
            at = _put_array(known, value, at, end)
        elif value == _get(known + _NONE):
            _put(at, 0)
            at += 8
        elif kind == _get(known + _LIST) or kind == _get(known + _TUPLE) or kind == _get(known + _SIZE):
            is_list = kind == _get(known + _LIST)
            size = _list_size(value) if is_list else _tuple_size(value)
            _put(at, 3)
            _put(at + 8, size)
            at = at + 16 if at + 16 + 16 * size <= end else 0
            for j in range(size):
                if at != 0:
                    at = _put_number(known, _list_item(value, j) if is_list else _tuple_item(value, j), at)
        else:
            at = _put_number(known, value, at)
    if at != 0:
        return _new_bytes(start, at - start)
    return 0 if _error() != 0 else _new_bytes(start, 0)


@inline
def _run_code(known: Any, arguments: Any, memory: Any, pool: Any, threads: Any, least: Any) -> Any:
    tensor, pointers, words = _new_tensor(), _new_pointers(), _new_words()
    _put(pointers, memory)
    for i in range(_get(known + _COUNT)):
        value = _get(arguments + 8 * _get(known + _PLACES + 8 * i))
        if _get(value + _TYPE) == _get(known + _ARRAY):
            address = _get(value + _ITS_DATA)
        elif _read_tensor(_get(known + _READ), value, tensor) != 0:
            return 0
        else:
            address = _get(tensor + _DATA) + _get(tensor + _OFFSET)
        if address == 0:
            return _bool(0)
        _put(pointers + 8 + 8 * i, address)
    state = _release_lock()
    run_in(pool, _get(known + _CODE), pointers, words, threads, least)
    _take_lock(state)
    return _bool(1)


def _run_alone(self, arguments, count):  # type: ignore[no-untyped-def]
    return _run_code(_bytes_at(self), arguments, _new_workspace(), 0, 1, 1)


def _run(self, arguments, count):  # type: ignore[no-untyped-def]
    """Before the call's own arguments, the address of a workspace and what `threads.team` gives."""
    memory, pool = _long(_get(arguments)), _long(_get(arguments + 8))
    threads, least = _long(_get(arguments + 16)), _long(_get(arguments + 24))
    return _run_code(_bytes_at(self), arguments + 32, memory, pool, threads, least)


_METH_FASTCALL = 0x80


class _Method(ctypes.Structure):
    """PyMethodDef."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


@cache
def _method(function: Any) -> _Method:
    compiled = native(function, *[types.int64] * 3, result=types.int64)
    method = _Method(function.__name__.encode(), compiled.address, _METH_FASTCALL, None)
    method.compiled = compiled
    return method


def compile_all() -> None:
    """Before the first call, and without PyTorch."""
    for function in (_describe, _run_alone, _run):
        _method(function)


def _builtin(function: Any, words: Sequence[int]) -> Any:
    kind = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
    new = kind(("PyCFunction_NewEx", ctypes.pythonapi))
    return new(ctypes.addressof(_method(function)), struct.pack(f"{len(words)}Q", *words), None)


def _word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


def _reader(torch: Any) -> int:
    """DLPack's function that fills a DLTensor; 0 where there is none."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    kind = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    try:
        table = kind(("PyCapsule_GetPointer", ctypes.pythonapi))(capsule, b"dlpack_exchange_api")
    except ValueError:
        return 0
    major = ctypes.c_uint32.from_address(table).value
    return _word(table + 40) if major == 1 else 0


def _place_of_keys(torch: Any) -> tuple[int, int] | None:
    """Where an object has the address of its tensor, and where that has its dispatch keys; None if not found."""
    some = torch.zeros(2, device="cpu")
    samples = some, some._neg_view(), some.to_sparse(), torch.zeros(2, device="meta")
    places = [
        (at, keys)
        for at in range(object.__basicsize__, torch.Tensor.__basicsize__, 8)
        if all(_word(id(sample) + at) == sample._cdata for sample in samples)
        for keys in range(0, 208, 8)
        if all(_word(s._cdata + keys) == torch._C._dispatch_keys(s).raw_repr() for s in samples)
    ]
    return places[0] if len(places) == 1 else None


#: The addresses of our types' objects, which live as long as this module.
_types = np.array([id(NUMPY[number]) for number in (F32, F16, BF16)], np.uint64)


@cache
def _array_type() -> int:
    """The address of NumPy's type of arrays; 0 if these are not as expected."""
    if object.__basicsize__ != 16 or sys.byteorder != "little":
        return 0
    sample = np.zeros((5, 7), np.float32)[::2, ::3]
    places = _word(id(sample) + _ITS_SHAPE), _word(id(sample) + _ITS_STRIDES)
    flags = _word(id(sample) + _ITS_FLAGS)
    sample.flags.writeable = False
    found = (
        _word(id(sample) + _ITS_DATA) == sample.ctypes.data
        and _word(id(sample) + _ITS_DIMENSIONS) & 0xFFFFFFFF == 2
        and tuple(_word(place + 8 * i) for place in places for i in range(2)) == (*sample.shape, *sample.strides)
        and _word(id(sample) + _ITS_DTYPE) == id(sample.dtype) == _types[0]
        and (flags ^ _word(id(sample) + _ITS_FLAGS)) & 0xFFFFFFFF == _WRITEABLE
    )
    return id(np.ndarray) if found else 0


@cache
def describer(torch: Any) -> Callable[..., bytes] | None:
    """A function of a call's arguments that gives bytes which tell it from all that differ in more than the data; none
    where one is no tensor, array, None, int, bool, or short tuple or list of those two. It raises a RuntimeError of
    tensors without strides or memory, an OverflowError of ints. None where this PyTorch or Python is not as expected.
    `torch` may be None: then only arrays are known."""
    read, tensor, parameter, size, places = 0, 0, 0, 0, (0, 0)
    if torch is not None:
        try:
            read, found = _reader(torch), _place_of_keys(torch)
        except Exception:  # a private function that is gone, or a mode that takes the samples for its own
            return None
        if not read or found is None or object.__basicsize__ != 16 or sys.byteorder != "little":
            return None
        tensor, parameter, size, places = id(torch.Tensor), id(torch.nn.Parameter), id(torch.Size), found
    elif not _array_type():
        return None
    others = map(id, (None, True, False, int, list, tuple))
    words = read, _array_type(), _types.ctypes.data, tensor, parameter, *places, *others, size
    describe: Callable[..., bytes] = _builtin(_describe, words)
    return describe


def runner(torch: Any, plan: Any, places: Sequence[int]) -> Callable[..., bool] | None:
    """A function of a call's arguments and results that runs a plan on those of them at these places; False, or a
    RuntimeError, where one has no memory. It does not keep the plan, which must live on. None for a plan that is not
    of the CPU, or has more words than are kept for it, and where there is no `describer` for this `torch`."""
    program, size = plan.runner, plan.workspace_bytes
    if describer(torch) is None or not isinstance(program, Runner):
        return None
    code = program.code
    if code.words > MOST_WORDS or len(places) >= MOST_POINTERS:
        return None
    words = 0 if torch is None else _reader(torch), _array_type(), code.address, len(places), *places
    run: Callable[..., bool]
    if program.alone and size <= MOST_WORKSPACE:
        run = _builtin(_run_alone, words)
        return run
    run = _builtin(_run, words)
    return lambda *values: run(workspace.take(size), *team(code.elements), *values)
