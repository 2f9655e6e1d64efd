"""Steps through kernels written in Gluon, for which Triton has no interpreter, on NumPy arrays.

Each program is a thread, so that programs can wait for each other. Memory is strict: an address outside a tensor fails,
what is copied to shared memory is NaN until it was waited for, and so is what was there before, from the moment that
the copy is asked for. Layouts are not looked at, and sums are made in another order than on a GPU.
"""

from __future__ import annotations

import builtins
import threading
import time
from copy import copy
from functools import reduce
from math import prod
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

#: Of bfloat16 the values are kept as float32, which it is a part of.
_NUMPY = {
    "int1": bool, "int32": np.int32, "int64": np.int64, "uint32": np.uint32, "uint64": np.uint64,
    "float16": np.float16, "bfloat16": np.float32, "float32": np.float32,
}  # fmt: skip
_BITS = {"float16": 16, "bfloat16": 16, "float32": 32, "int64": 64}
_LONGEST_WAIT = 60.0
_here = threading.local()


class Tensor:
    def __init__(self, values: Any, dtype: str | None = None) -> None:
        self.values = np.asarray(values)
        self.name = dtype or {"bool": "int1"}.get(self.values.dtype.name, self.values.dtype.name)

    dtype = property(lambda self: self.name)
    shape = property(lambda self: self.values.shape)
    type = SimpleNamespace(layout=None)

    def to(self, dtype: Any, bitcast: bool = False) -> Tensor:
        name = str(dtype).replace("fp", "float")  # as Triton calls its own
        if bitcast:
            return Tensor(self.values.view(_NUMPY[name]), name)
        values = self.values.astype(ml_dtypes.bfloat16) if name == "bfloat16" else self.values
        return Tensor(values.astype(_NUMPY[name]), name)

    def __getitem__(self, index: Any) -> Tensor:
        return Tensor(self.values[index], self.name)

    def __bool__(self) -> bool:
        return bool(self.values)

    def __index__(self) -> int:
        return int(self.values)

    def _with(self, other: Any, operation: str) -> Any:
        if isinstance(other, Memory):
            return NotImplemented
        with np.errstate(all="ignore"):
            return Tensor(getattr(self.values, operation)(_values(other)))


def _values(value: Any) -> Any:
    return value.values if isinstance(value, Tensor) else value


for _name in (
    "add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "mod", "lt", "le", "gt", "ge", "eq", "ne", "and", "rand",
    "or", "ror", "lshift", "rshift",
):  # fmt: skip
    _operation = f"__{_name}__"
    setattr(Tensor, _operation, lambda self, other, operation=_operation: self._with(other, operation))


class Type(str):
    """The name of a type."""

    primitive_bitwidth = property(lambda self: _BITS[self])


class Memory:
    """Addresses in a flat array, whose first is a multiple of 16 bytes."""

    def __init__(self, array: Any, dtype: str, at: Any = 0) -> None:
        self.array, self.name, self.at = array, Type(dtype), at

    dtype = property(lambda self: SimpleNamespace(element_ty=self.name))

    def __add__(self, offset: Any) -> Memory:
        return Memory(self.array, self.name, self.at + np.asarray(_values(offset), np.int64))

    def to(self, dtype: Any) -> Memory:
        return self

    def __mod__(self, divisor: int) -> Tensor:
        return Tensor(np.int64(self.at * (_BITS[self.name] // 8)) % divisor)

    def _places(self, mask: Any) -> tuple[Any, Any]:
        at, keep = np.broadcast_arrays(self.at, True if mask is None else _values(mask))
        assert ((at >= 0) & (at < self.array.size))[keep].all(), "an address outside of its tensor"
        return np.where(keep, at, 0), keep

    def load(self, mask: Any = None, other: Any = 0) -> Tensor:
        at, keep = self._places(mask)
        return Tensor(np.where(keep, self.array[at], np.asarray(other, self.array.dtype)), self.name)

    def store(self, value: Any, mask: Any = None) -> None:
        at, keep = self._places(mask)
        self.array[at[keep]] = np.broadcast_to(_values(value), at.shape)[keep]


class Slots:
    """Tiles in shared memory, and those on their way."""

    def __init__(self, dtype: str, shape: Any, layout: Any) -> None:
        self.dtype, self.shape, self._at = dtype, list(shape), 0
        self._memory = np.full(prod(shape), np.nan, _NUMPY[dtype])

    @property
    def array(self) -> Any:
        flat = self._memory[self._at : self._at + prod(self.shape)]
        assert flat.size == prod(self.shape), "a view that ends outside of its memory"
        return flat.reshape(self.shape)

    def index(self, i: Any) -> Slots:
        return self._part(int(i) * prod(self.shape[1:]), self.shape[1:])

    def slice(self, start: Any, length: int, axis: int) -> Slots:
        assert axis == 0
        return self._part(int(start) * prod(self.shape[1:]), [length, *self.shape[1:]])

    def _reinterpret(self, dtype: str, shape: Any, layout: Any) -> Slots:
        assert dtype == self.dtype
        return self._part(0, shape)

    def _part(self, after: int, shape: Any) -> Slots:
        part = copy(self)
        part._at, part.shape = self._at + after, list(shape)
        return part

    def load(self, layout: Any) -> Tensor:
        return Tensor(self.array.copy(), self.dtype)

    def store(self, value: Any) -> None:
        self.array[...] = _values(value)


class NewSlots(Slots):
    """As newer versions of Triton have them: read and written at any place, and without views past their end."""

    def _reinterpret(self, dtype: str, shape: Any, layout: Any) -> Slots:
        raise AssertionError("not in this version")

    def gather(self, places: Tensor, axis: int) -> Tensor:
        assert (places.values >= 0).all()
        assert (places.values < self.shape[axis]).all()
        return Tensor(self.array[places.values], self.dtype)

    def scatter(self, value: Tensor, places: Tensor, axis: int) -> None:
        assert (places.values >= 0).all()
        assert (places.values < self.shape[axis]).all()
        self.array[places.values] = value.values


def _fetch(slot: Slots, source: Memory, mask: Any) -> None:
    tile = source.load(mask).values
    slot.array[...] = np.nan
    _here.copies.append((slot.array, tile))


def _commit() -> None:
    _here.groups.append(_here.copies)
    _here.copies = []


def _wait_group(count: int) -> None:
    while len(_here.groups) > count:
        for slot, tile in _here.groups.pop(0):
            slot[...] = tile


def _assembly(text: str, operands: str, arguments: Any, dtype: Any, is_pure: bool, pack: int) -> Tensor:
    (argument,) = arguments
    if "shl.b32" in text or "mov.b32" in text:
        return Tensor(argument.values, "float32")
    assert text.count("ld.relaxed.gpu") == pack, "a thread's words are looked at together"
    end = time.monotonic() + _LONGEST_WAIT
    while ((words := argument.load()).values == -1).any():
        assert time.monotonic() < end, "words that nobody writes are waited for"
        assert not _here.errors, "another program failed"
        time.sleep(0)
    return words


def _reduce(tensors: tuple[Tensor, ...], axis: int, combine: Any) -> Any:
    parts = [tuple(Tensor(t.values.take(i, axis), t.name) for t in tensors) for i in range(tensors[0].shape[axis])]
    return reduce(lambda left, right: combine(*left, *right), parts)


def _where(mask: Any, a: Any, b: Any) -> Tensor:
    first = np.asarray(_values(a))
    return Tensor(np.where(_values(mask), first, np.asarray(_values(b), first.dtype)))


def _range(*bounds: Any) -> Any:
    """Of a kernel's loop, whose variable is a number of Gluon's."""
    return (Tensor(np.int32(i)) for i in range(*bounds))


def _multiple_of(value: Any, factor: int) -> Any:
    assert (np.asarray(_values(value % factor)) == 0).all(), "the compiler would be told what is not so"
    return value


def _language(slots: type[Slots]) -> SimpleNamespace:
    return SimpleNamespace(
        **{name: name for name in _NUMPY},
        constexpr=lambda value: value, num_warps=lambda: _here.num_warps, program_id=lambda axis: Tensor(_here.program),
        num_programs=lambda axis: Tensor(_here.programs),
        arange=lambda start, end, layout: Tensor(np.arange(start, end, dtype=np.int32)),
        zeros=lambda shape, dtype, layout: Tensor(np.zeros(shape, _NUMPY[dtype]), dtype),
        full=lambda shape, value, dtype, layout: Tensor(np.full(shape, value, _NUMPY[dtype]), dtype),
        zeros_like=lambda t: Tensor(np.zeros_like(t.values), t.name),
        where=_where,
        minimum=lambda a, b: Tensor(np.minimum(_values(a), _values(b))),
        maximum=lambda a, b: Tensor(np.maximum(_values(a), _values(b))),
        sum=lambda t, axis: Tensor(t.values.sum(axis)), reduce=_reduce,
        reshape=lambda t, shape: Tensor(t.values.reshape(shape), t.name),
        broadcast=lambda a, b: tuple(Tensor(values) for values in np.broadcast_arrays(a.values, b.values)),
        convert_layout=lambda t, layout: t, multiple_of=_multiple_of,
        load=lambda place, mask=None, other=0: place.load(mask, other),
        store=lambda place, value, mask=None: place.store(value, mask), inline_asm_elementwise=_assembly,
        BlockedLayout=lambda *_: None, SliceLayout=lambda *_: None, SwizzledSharedLayout=lambda *_: None,
        DistributedLinearLayout=lambda *_: None, static_range=range, allocate_shared_memory=slots,
        shared_memory_descriptor=slots,
    )  # fmt: skip


def load(source: str, package: str, slots: type[Slots] = Slots, **others: ModuleType) -> ModuleType:
    """A module of Gluon kernels whose functions run here, with others of its package that were loaded so."""
    gluon = SimpleNamespace(jit=lambda function: function, constexpr_function=lambda makes_a_layout: lambda *_: None)
    stand_ins: dict[str, Any] = {
        **others,
        "triton.experimental": SimpleNamespace(gluon=gluon),
        "triton.experimental.gluon": SimpleNamespace(language=_language(slots)),
        "triton.experimental.gluon.language.nvidia.ampere": SimpleNamespace(
            async_copy=SimpleNamespace(async_load=_fetch, commit_group=_commit, wait_group=_wait_group)
        ),
    }

    def import_here(name: str, *arguments: Any) -> Any:
        return stand_ins.get(name) or builtins.__import__(name, *arguments)

    module = ModuleType("kernels")
    module.__dict__.update(
        {"__package__": package, "__builtins__": {**vars(builtins), "__import__": import_here, "range": _range}}
    )
    exec(compile(source, "kernels.py", "exec"), module.__dict__)
    return module


def launch(kernel: Any, programs: int, arguments: Any, constants: dict[str, Any], num_warps: int) -> None:
    """All programs at a time."""
    errors: list[BaseException] = []

    def run(program: int) -> None:
        _here.program, _here.programs, _here.num_warps = np.int32(program), np.int32(programs), num_warps
        _here.errors = errors
        _here.copies, _here.groups = [], []
        try:
            kernel(*arguments, **constants)
            assert not _here.copies, "copies that belong to no group"
        except BaseException as error:  # told to the caller, below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(program,), daemon=True) for program in range(programs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
