"""Vectors of 16 float32 lanes for Numba kernels, over plain addresses: what they are, and their way from and to memory.
What is computed with them is in `_lanes.py`.

One logical width everywhere: LLVM makes of it one AVX-512 register, two of AVX2, or whatever the machine has, so the
bits of a result do not depend on the CPU.

Memory holds float32, float16 or bfloat16 (`_formats.py`). A *tag*, a scalar of one type for each, tells the loads and
stores which; kernels are compiled for each combination of tags they are called with.
"""

from __future__ import annotations

from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import RequireLiteralValue
from numba.extending import intrinsic, models, register_model

from ._formats import (
    _F16,
    _F32,
    LANES,
    ON_ZEN_5,
    UP_TO_ZEN_4,
    _bytes,
    _double,
    _feature,
    _float,
    _i1,
    _i16,
    _i32,
    _i64,
    _narrow,
    _narrow_mixed,
    _raw,
    _v,
    _widen,
    _widen_mixed,
    part,
)


def _intrinsic(function: Any) -> Any:
    """What Numba makes of the function is called with fewer arguments than it is written with."""
    return intrinsic(function)


class Vector(types.Type):
    """16 lanes of float32 or, for sums of sums, float64."""

    def __init__(self, element: str) -> None:
        super().__init__(name=f"{element}x{LANES}")
        self.element = element


vec, wide = Vector("float32"), Vector("float64")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Vector) -> None:
        cast(Any, super()).__init__(manager, kind, _v(_float if kind.element == "float32" else _double))


def _pointer(b: Any, address: Any, to: Any) -> Any:
    return b.inttoptr(address, to.as_pointer())


@_intrinsic
def width(typing: Any, tag: Any) -> Any:
    """Bytes of an element."""
    return types.int64(tag), lambda context, b, signature, args: _i64(_bytes(signature.args[0]))


@_intrinsic
def load(typing: Any, tag: Any, address: Any) -> Any:
    """16 elements as float32."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = signature.args[0]
        return _widen(b, kind, b.load(_pointer(b, args[1], _v(_raw(kind))), align=_bytes(kind)))

    return vec(tag, types.int64), generate


@_intrinsic
def load_mixed(typing: Any, tag: Any, address: Any) -> Any:
    """16 elements in the order of lanes that is fastest for their type, the same in all loads and stores called so."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = signature.args[0]
        return _widen_mixed(b, kind, b.load(_pointer(b, args[1], _v(_raw(kind))), align=_bytes(kind)))

    return vec(tag, types.int64), generate


def _repeat(b: Any, value: Any, lanes: int = LANES) -> Any:
    """The same in every lane."""
    undefined = ir.Constant(_v(value.type, lanes), ir.Undefined)
    first = b.insert_element(undefined, value, _i32(0))
    return b.shuffle_vector(first, undefined, ir.Constant(_v(_i32, lanes), [0] * lanes))


def _lanes_below(b: Any, count: Any, lanes: int = LANES) -> Any:
    numbers = ir.Constant(_v(_i32, lanes), list(range(lanes)))
    return b.icmp_signed("<", numbers, _repeat(b, b.trunc(count, _i32), lanes))


def _masked_load(b: Any, element: Any, name: str, pointer: Any, count: Any, lanes: int) -> Any:
    """The first `count` lanes, zeros in the others."""
    vector = _v(element, lanes)
    function = ir.FunctionType(vector, [vector.as_pointer(), _i32, _v(_i1, lanes), vector])
    masked = b.module.declare_intrinsic(f"llvm.masked.load.v{lanes}{name}.p0", (), function)
    zero, align = ir.Constant(vector, None), _i32(4 if element is _float else 2)
    return b.call(masked, [b.bitcast(pointer, vector.as_pointer()), align, _lanes_below(b, count, lanes), zero])


def _load_pairs(b: Any, pointer: Any, count: Any) -> Any:
    """The same of 16-bit elements with masks of 32 bits: pairs of them, and one that is left."""
    half = LANES // 2
    pairs = _masked_load(b, _i32, "i32", pointer, b.lshr(count, _i64(1)), half)
    before = b.block
    with b.if_then(b.trunc(count, _i1)):
        last = b.load(b.gep(b.bitcast(pointer, _i16.as_pointer()), [b.sub(count, _i64(1))]), align=2)
        numbers = ir.Constant(_v(_i32, half), list(range(half)))
        here = b.icmp_signed("==", numbers, _repeat(b, b.trunc(b.lshr(count, _i64(1)), _i32), half))
        odd = b.select(here, _repeat(b, b.zext(last, _i32), half), pairs)
        inside = b.block
    either = b.phi(pairs.type)
    either.add_incoming(pairs, before)
    either.add_incoming(odd, inside)
    return b.bitcast(either, _v(_i16))


@_intrinsic
def load_part(typing: Any, tag: Any, address: Any, count: Any) -> Any:
    """The first `count` elements, zeros in the other lanes; touches no other memory."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind, count = signature.args[0], args[2]
        pointer = _pointer(b, args[1], _v(_raw(kind)))
        if kind == _F32:
            raw = _masked_load(b, _float, "f32", pointer, count, LANES)
        elif _feature("avx512bw"):
            raw = _masked_load(b, _i16, "i16", pointer, count, LANES)
        else:  # LLVM would load one by one, with a jump before each
            raw = _load_pairs(b, pointer, count)
        return _widen(b, kind, raw)

    return vec(tag, types.int64, types.int64), generate


def _emit_store(b: Any, kind: Any, address: Any, raw: Any, streaming: bool) -> None:
    align = _bytes(kind) * (LANES if streaming else 1)
    if streaming and kind == _F16 and _feature("f16c"):
        # LLVM sees through the bits to <16 x half>, of which it stores none past the caches.
        register = "v" if _feature("avx512f") else "x"
        raw = b.asm(ir.FunctionType(raw.type, [raw.type]), "", f"={register},0", [raw], False)
    store = b.store(raw, _pointer(b, address, raw.type), align=align)
    if streaming:
        store.set_metadata("nontemporal", b.module.add_metadata([_i32(1)]))


@_intrinsic
def store(typing: Any, tag: Any, address: Any, value: Any) -> Any:
    """16 elements, each rounded once to nearest even."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = signature.args[0]
        _emit_store(b, kind, args[1], _narrow(b, kind, args[2]), False)
        return context.get_dummy_value()

    return types.none(tag, types.int64, vec), generate


@_intrinsic
def stream(typing: Any, tag: Any, address: Any, value: Any) -> Any:
    """The same past the caches; the address must be a multiple of the vector's bytes."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = signature.args[0]
        _emit_store(b, kind, args[1], _narrow(b, kind, args[2]), True)
        return context.get_dummy_value()

    return types.none(tag, types.int64, vec), generate


def _store_or_stream(narrow: Any) -> Any:
    def operation(typing: Any, tag: Any, address: Any, value: Any, past_caches: Any) -> Any:
        """16 elements past the caches, if asked to: the address must then be a multiple of the vector's bytes."""

        def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
            kind = signature.args[0]
            raw = narrow(b, kind, args[2])
            with b.if_else(b.icmp_signed("!=", args[3], _i64(0))) as (then, otherwise):
                with then:
                    _emit_store(b, kind, args[1], raw, True)
                with otherwise:
                    _emit_store(b, kind, args[1], raw, False)
            return context.get_dummy_value()

        return types.none(tag, types.int64, vec, types.int64), generate

    return _intrinsic(operation)


store_or_stream, store_or_stream_mixed = _store_or_stream(_narrow), _store_or_stream(_narrow_mixed)


def _masked_store(b: Any, kind: Any, address: Any, raw: Any, count: Any) -> None:
    name = f"llvm.masked.store.v{LANES}{'f32' if kind == _F32 else 'i16'}.p0"
    pointer = _pointer(b, address, raw.type)
    function = ir.FunctionType(ir.VoidType(), [raw.type, pointer.type, _i32, _v(_i1)])
    masked = b.module.declare_intrinsic(name, (), function)
    b.call(masked, [raw, pointer, _i32(_bytes(kind)), _lanes_below(b, count)])


def _store_parts(b: Any, kind: Any, address: Any, raw: Any, count: Any) -> None:
    """16, 8, 4, 2 and 1 elements, as the count is made of them: AVX2 has no masks of 16 bits, and slow ones of 32."""
    for lanes in (16, 8, 4, 2, 1):
        some = b.and_(count, _i64(lanes))
        taken, low = b.icmp_signed("!=", some, _i64(0)), part(b, raw, 0, lanes)
        with b.if_then(taken):
            b.store(low, _pointer(b, address, low.type), align=_bytes(kind))
        address = b.add(address, b.mul(some, _i64(_bytes(kind))))
        if lanes < LANES:
            raw = b.select(taken, part(b, raw, lanes, lanes), low)


@_intrinsic
def store_part(typing: Any, tag: Any, address: Any, value: Any, count: Any) -> Any:
    """The first `count` elements; touches no other memory."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = signature.args[0]
        way = _masked_store if _feature("avx512bw") else _store_parts
        way(b, kind, args[1], _narrow(b, kind, args[2]), args[3])
        return context.get_dummy_value()

    return types.none(tag, types.int64, vec, types.int64), generate


@_intrinsic
def load_one(typing: Any, address: Any) -> Any:
    """One float32."""
    return types.float32(types.int64), lambda context, b, signature, args: b.load(_pointer(b, args[0], _float))


@_intrinsic
def store_one(typing: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.store(args[1], _pointer(b, args[0], _float))
        return context.get_dummy_value()

    return types.none(types.int64, types.float32), generate


@_intrinsic
def load_double(typing: Any, address: Any) -> Any:
    """One float64."""
    return types.float64(types.int64), lambda context, b, signature, args: b.load(_pointer(b, args[0], _double))


@_intrinsic
def store_double(typing: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.store(args[1], _pointer(b, args[0], _double))
        return context.get_dummy_value()

    return types.none(types.int64, types.float64), generate


@_intrinsic
def words(typing: Any, address: Any, count: Any) -> Any:
    """`count` (a literal) whole numbers from memory: the arguments of a kernel."""
    if not isinstance(count, types.IntegerLiteral):
        raise RequireLiteralValue("count must be a literal")
    result = types.UniTuple(types.int64, count.literal_value)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        first = _pointer(b, args[0], _i64)
        values = [b.load(b.gep(first, [_i64(i)])) for i in range(signature.return_type.count)]
        return context.make_tuple(b, signature.return_type, values)

    return result(types.int64, count), generate


@_intrinsic
def load_scalar(typing: Any, tag: Any, address: Any) -> Any:
    """One element as float32."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = signature.args[0]
        raw = b.load(_pointer(b, args[1], _raw(kind)), align=_bytes(kind))
        if kind == _F32:
            return raw
        vector = b.insert_element(ir.Constant(_v(_i16), None), raw, _i32(0))
        return b.extract_element(_widen(b, kind, vector), _i32(0))

    return types.float32(tag, types.int64), generate


@_intrinsic
def store_scalar(typing: Any, tag: Any, address: Any, value: Any) -> Any:
    """One element, rounded once to nearest even."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind, value = signature.args[0], args[2]
        if kind != _F32:
            vector = b.insert_element(ir.Constant(_v(_float), None), value, _i32(0))
            value = b.extract_element(_narrow(b, kind, vector), _i32(0))
        b.store(value, _pointer(b, args[1], value.type), align=_bytes(kind))
        return context.get_dummy_value()

    return types.none(tag, types.int64, types.float32), generate


@_intrinsic
def copy_scalar(typing: Any, tag: Any, target: Any, source: Any) -> Any:
    """One element, its bits as they are."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = ir.IntType(8 * _bytes(signature.args[0]))
        b.store(b.load(_pointer(b, args[2], kind)), _pointer(b, args[1], kind))
        return context.get_dummy_value()

    return types.none(tag, types.int64, types.int64), generate


def _prefetch(locality: int) -> Any:
    def operation(typing: Any, address: Any) -> Any:
        """Ask for a cache line to read; any address will do."""

        def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
            pointer = _pointer(b, args[0], ir.IntType(8))
            function = ir.FunctionType(ir.VoidType(), [pointer.type, _i32, _i32, _i32])
            fetch = b.module.declare_intrinsic("llvm.prefetch.p0", (), function)
            b.call(fetch, [pointer, _i32(0), _i32(locality), _i32(1)])
            return context.get_dummy_value()

        return types.none(types.int64), generate

    return _intrinsic(operation)


#: Into which cache: see AHEAD in _views.py. What is read `once`, or the next time from the L1 cache, Zen 5 need not put
#: into the L2 cache: BatchNorm's pixels come at 0.97 instead of 0.94 of the probe's speed, LayerNorm's rows of 1024
#: columns in float32 at 0.87 instead of 0.85. What is read twice must be there: 1x128x262144 of GroupNorm in bfloat16
#: would take 4.0 instead of 3.1 ms.
prefetch = _prefetch(2 if UP_TO_ZEN_4 else 3)
prefetch_once = _prefetch(0) if ON_ZEN_5 else prefetch


@_intrinsic
def base(typing: Any, address: Any) -> Any:
    """The same address, but LLVM does not know what it is the sum of.

    In a loop it then keeps a register for each and one offset for all, in place of more counters than there are
    registers.
    """

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.asm(ir.FunctionType(_i64, [_i64]), "", "=r,0", [args[0]], False)

    return types.int64(types.int64), generate


@_intrinsic
def scratch(typing: Any, size: Any) -> Any:
    """Memory of a kernel's own, on a cache line, for as long as it runs; `size` is a literal."""
    if not isinstance(size, types.IntegerLiteral):
        raise RequireLiteralValue("size must be a literal")

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        count = signature.args[0].literal_value // 64
        place = cgutils.alloca_once(b, _v(_float), count)
        place.align = 64
        return b.ptrtoint(place, _i64)

    return types.int64(size), generate


@_intrinsic
def load_line(typing: Any, address: Any) -> Any:
    """64 bytes of any type, as they are."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.load(_pointer(b, args[0], _v(_float)), align=1)

    return vec(types.int64), generate


@_intrinsic
def stream_line(typing: Any, address: Any, value: Any) -> Any:
    """64 bytes past the caches; the address must be a multiple of 64."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        _emit_store(b, _F32, args[0], args[1], True)
        return context.get_dummy_value()

    return types.none(types.int64, vec), generate


@_intrinsic
def copy_bytes(typing: Any, target: Any, source: Any, count: Any) -> Any:
    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8)
        cgutils.raw_memcpy(b, _pointer(b, args[0], byte), _pointer(b, args[1], byte), args[2], 1)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64), generate


@_intrinsic
def store_wide(typing: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.store(args[1], _pointer(b, args[0], _v(_double)), align=8)
        return context.get_dummy_value()

    return types.none(types.int64, wide), generate


@_intrinsic
def load_wide(typing: Any, address: Any) -> Any:
    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.load(_pointer(b, args[0], _v(_double)), align=8)

    return wide(types.int64), generate


def _masked_doubles(b: Any, lanes: int, count: Any) -> tuple[Any, Any, Any, Any]:
    """Types and arguments that masked loads and stores of float64 share."""
    vector = _v(_double, lanes)
    return vector, f"v{lanes}f64.p0", _i32(8), _lanes_below(b, count, lanes)


@_intrinsic
def load_wide_part(typing: Any, address: Any, count: Any) -> Any:
    """The first `count` float64, zeros in the other lanes; touches no other memory."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        vector, name, align, mask = _masked_doubles(b, LANES, args[1])
        pointer = _pointer(b, args[0], vector)
        kind = ir.FunctionType(vector, [pointer.type, align.type, mask.type, vector])
        masked = b.module.declare_intrinsic(f"llvm.masked.load.{name}", (), kind)
        return b.call(masked, [pointer, align, mask, ir.Constant(vector, None)])

    return wide(types.int64, types.int64), generate


@_intrinsic
def load_twice(typing: Any, address: Any, count: Any) -> Any:
    """The first `count` of 8 float32, zeros in the other lanes, in both halves; touches no other memory."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        half = LANES // 2
        part = _masked_load(b, _float, "f32", _pointer(b, args[0], _v(_float, half)), args[1], half)
        return b.shuffle_vector(part, part, ir.Constant(_v(_i32), [*range(half)] * 2))

    return vec(types.int64, types.int64), generate


@_intrinsic
def load_halves(typing: Any, low: Any, high: Any) -> Any:
    """8 float64 from one place and 8 from another."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        parts = [b.load(_pointer(b, place, _v(_double, LANES // 2)), align=8) for place in args]
        return b.shuffle_vector(*parts, ir.Constant(_v(_i32), list(range(LANES))))

    return wide(types.int64, types.int64), generate


@_intrinsic
def store_halves(typing: Any, value: Any, low: Any, high: Any, count: Any) -> Any:
    """The first `count` of the lower 8 lanes and of the upper 8 to two places; touches no other memory."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        half = LANES // 2
        vector, name, align, mask = _masked_doubles(b, half, args[3])
        for start, address in ((0, args[1]), (half, args[2])):
            pointer = _pointer(b, address, vector)
            kind = ir.FunctionType(ir.VoidType(), [vector, pointer.type, align.type, mask.type])
            masked = b.module.declare_intrinsic(f"llvm.masked.store.{name}", (), kind)
            b.call(masked, [part(b, args[0], start, half), pointer, align, mask])
        return context.get_dummy_value()

    return types.none(wide, types.int64, types.int64, types.int64), generate
