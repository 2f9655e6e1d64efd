"""What CPU kernels compute with vectors of `_simd.py`: the same bits on every CPU. `fma` rounds once on all of them, in
software where it must.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import RequireLiteralValue

from ._formats import LANES, _constant, _double, _feature, _float, _i16, _i32, _i64, _v, part
from ._simd import _intrinsic, _lanes_below, _pointer, _repeat, vec, wide


def _binary(instruction: str) -> Any:
    """Of two vectors of a kind."""

    def operation(typing: Any, a: Any, c: Any) -> Any:
        return a(a, a), lambda context, b, signature, args: getattr(b, instruction)(args[0], args[1])

    operation.__name__ = instruction
    return _intrinsic(operation)


add, sub, mul = _binary("fadd"), _binary("fsub"), _binary("fmul")


@_intrinsic
def fma(typing: Any, a: Any, c: Any, d: Any) -> Any:
    """a * c + d, rounded once."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        vector = _v(_float)
        function = ir.FunctionType(vector, [vector] * 3)
        return b.call(b.module.declare_intrinsic(f"llvm.fma.v{LANES}f32", (), function), args)

    return vec(vec, vec, vec), generate


@_intrinsic
def splat(typing: Any, value: Any) -> Any:
    """The same float32 in every lane."""
    return vec(types.float32), lambda context, b, signature, args: _repeat(b, args[0])


@_intrinsic
def keep(typing: Any, value: Any, count: Any) -> Any:
    """Zeros in the lanes from `count` on, whatever they held."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.select(_lanes_below(b, args[1]), args[0], _constant(_float, 0.0))

    return vec(vec, types.int64), generate


@_intrinsic
def choose(typing: Any, here: Any, beyond: Any, count: Any) -> Any:
    """The first `count` lanes of one vector, the others of another."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.select(_lanes_below(b, args[2]), args[0], args[1])

    return vec(vec, vec, types.int64), generate


def _from_lane(b: Any, count: Any, lanes: int) -> Any:
    """Numbers of lanes from `count` on."""
    return b.add(ir.Constant(_v(_i32, lanes), list(range(lanes))), _repeat(b, b.trunc(count, _i32), lanes))


def _slide_avx512(b: Any, before: Any, after: Any, count: Any) -> Any:
    kind = ir.FunctionType(_v(_float), [_v(_float), _v(_i32), _v(_float)])
    permute = b.module.declare_intrinsic("llvm.x86.avx512.vpermi2var.ps.512", (), kind)
    return b.call(permute, [before, _from_lane(b, count, LANES), after])


def _slide_avx2(b: Any, before: Any, after: Any, count: Any) -> Any:
    """By way of three vectors of 8 lanes in a row, rotated each, that hold the result."""
    lanes, eight = LANES // 2, _constant(_i32, 8, 8)
    parts = [part(b, value, start, lanes) for value in (before, after) for start in (0, lanes)]
    further = b.icmp_signed(">=", count, _i64(lanes))
    rotation = _from_lane(b, b.and_(count, _i64(lanes - 1)), lanes)
    kind = ir.FunctionType(_v(_float, lanes), [_v(_float, lanes), _v(_i32, lanes)])
    rotate = b.module.declare_intrinsic("llvm.x86.avx2.permps", (), kind)
    rotated = [b.call(rotate, [b.select(further, parts[i + 1], parts[i]), rotation]) for i in range(3)]
    here = b.icmp_signed("<", rotation, eight)
    low, high = (b.select(here, rotated[i], rotated[i + 1]) for i in range(2))
    return b.shuffle_vector(low, high, ir.Constant(_v(_i32), list(range(LANES))))


def _slide_in_memory(b: Any, before: Any, after: Any, count: Any) -> Any:
    place = cgutils.alloca_once(b, _v(_float), 2)
    b.store(before, place, align=4)
    b.store(after, b.gep(place, [_i32(1)]), align=4)
    element = b.gep(b.bitcast(place, _float.as_pointer()), [count])
    return b.load(b.bitcast(element, _v(_float).as_pointer()), align=4)


@_intrinsic
def slide(typing: Any, before: Any, after: Any, count: Any) -> Any:
    """16 lanes of both, one after the other, from lane `count` (0 to 16) on."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        way = _slide_avx512 if _feature("avx512f") else _slide_avx2 if _feature("avx2") else _slide_in_memory
        asked, (_, after, count) = b.block, args
        with b.if_then(b.icmp_signed("!=", count, _i64(LANES))):  # else all of the second, as it is
            value = way(b, *args)
            inside = b.block
        either = b.phi(_v(_float))
        either.add_incoming(after, asked)
        either.add_incoming(value, inside)
        return either

    return vec(vec, vec, types.int64), generate


@_intrinsic
def settle(typing: Any, value: Any) -> Any:
    """The same vector, computed here and not put off, as LLVM does with what is needed only after the next branch:
    131072 rows of 64 columns take 1.28 instead of 1.42 ms in float16. It has a meaning with AVX-512 only."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        if not _feature("avx512f"):
            return args[0]
        return b.asm(ir.FunctionType(_v(_float), [_v(_float)]), "", "=v,0", [args[0]], True)

    return vec(vec), generate


@_intrinsic
def all_finite(typing: Any, value: Any) -> Any:
    """Whether no lane is NaN or an infinity."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        nothing = b.fcmp_ordered("oeq", b.fsub(args[0], args[0]), _constant(_float, 0.0))
        return b.icmp_unsigned("==", b.bitcast(nothing, _i16), _i16(0xFFFF))

    return types.boolean(vec), generate


@_intrinsic
def sum_lanes(typing: Any, value: Any) -> Any:
    """The sum of the lanes, in their type: halves onto halves."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        value, lanes = args[0], LANES
        while lanes > 1:
            lanes //= 2
            value = b.fadd(part(b, value, 0, lanes), part(b, value, lanes, lanes))
        return b.extract_element(value, _i32(0))

    return (types.float32 if value == vec else types.float64)(value), generate


@_intrinsic
def fold(typing: Any, a: Any, c: Any) -> Any:
    """The halves of a vector, one added to the other, and behind them those of another vector."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        half = LANES // 2
        first = [start + lane for start in (0, LANES) for lane in range(half)]
        low, high = (ir.Constant(_v(_i32), [lane + shift for lane in first]) for shift in (0, half))
        return b.fadd(b.shuffle_vector(*args, low), b.shuffle_vector(*args, high))

    return vec(vec, vec), generate


@_intrinsic
def sum_folded(typing: Any, address: Any, count: Any) -> Any:
    """Of 8 vectors that `fold` made of two each, one after the other in memory: the sum of every first one in the lower
    8 lanes, of every second one in the upper 8, each added up as by `sum_lanes`. Zeros for those from `count` on,
    whatever they held."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        half = LANES // 2
        values = [b.load(_pointer(b, b.add(args[0], _i64(64 * i)), _v(_float)), align=4) for i in range(half)]
        while half > 1:
            half //= 2
            lanes = [lane for lane in range(2 * LANES) if lane % (2 * half) < half]
            if half == 1:  # they take turns until now
                lanes = lanes[::2] + lanes[1::2]
            low, high = (ir.Constant(_v(_i32), [lane + shift for lane in lanes]) for shift in (0, half))
            pairs = zip(values[::2], values[1::2])
            values = [b.fadd(b.shuffle_vector(v, w, low), b.shuffle_vector(v, w, high)) for v, w in pairs]
        numbers = ir.Constant(_v(_i32), [*range(LANES // 2)] * 2)
        there = b.icmp_signed("<", numbers, _repeat(b, b.trunc(args[1], _i32)))
        return b.select(there, values[0], _constant(_float, 0.0))

    return vec(types.int64, types.int64), generate


@_intrinsic
def add_lane(typing: Any, value: Any, further: Any) -> Any:
    """To each of the lanes of both halves, each a ring, the one that is so much further (a literal)."""
    if not isinstance(further, types.IntegerLiteral):
        raise RequireLiteralValue("further must be a literal")

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        half, step = LANES // 2, signature.args[1].literal_value
        lanes = [start + (lane + step) % half for start in (0, half) for lane in range(half)]
        return b.fadd(args[0], b.shuffle_vector(args[0], args[0], ir.Constant(_v(_i32), lanes)))

    return wide(wide, further), generate


@_intrinsic
def zeros_wide(typing: Any) -> Any:
    return wide(), lambda context, b, signature, args: _constant(_double, 0.0)


@_intrinsic
def widen(typing: Any, value: Any) -> Any:
    return wide(vec), lambda context, b, signature, args: b.fpext(args[0], _v(_double))


@_intrinsic
def narrow(typing: Any, value: Any) -> Any:
    return vec(wide), lambda context, b, signature, args: b.fptrunc(args[0], _v(_float))
