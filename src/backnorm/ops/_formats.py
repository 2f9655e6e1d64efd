"""How memory holds the lanes of a vector: float32, float16 or bfloat16, told apart by tags; and LLVM's code from the
bits of 16 elements to float32 and back, by the CPU's instructions where it has them, with the same results where not.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import config

from ..datatypes import BF16, F16, F32

LANES = 16

#: One scalar for each data type; Numba tells them apart by type.
TAGS: dict[int, Any] = {F32: np.float32(0), BF16: np.uint16(0), F16: np.int16(0)}
_F32, _BF16, _F16 = types.float32, types.uint16, types.int16

_float, _double, _half = ir.FloatType(), ir.DoubleType(), ir.HalfType()
_i1, _i16, _i32, _i64 = (ir.IntType(bits) for bits in (1, 16, 32, 64))


def _v(element: Any, lanes: int = LANES) -> Any:
    return ir.VectorType(element, lanes)


def _constant(element: Any, value: Any, lanes: int = LANES) -> Any:
    return ir.Constant(_v(element, lanes), [value] * lanes)


def part(b: Any, value: Any, start: int, lanes: int) -> Any:
    """Some lanes of a vector."""
    undefined = ir.Constant(value.type, ir.Undefined)
    return b.shuffle_vector(value, undefined, ir.Constant(_v(_i32, lanes), list(range(start, start + lanes))))


def _feature(name: str) -> bool:
    """Whether code is made for a CPU with this feature; `NUMBA_CPU_NAME=generic` has none at all."""
    settings: Any = config
    if settings.CPU_FEATURES is not None:
        return f"+{name}" in settings.CPU_FEATURES.split(",")
    return not settings.CPU_NAME and bool(llvmlite.binding.get_host_cpu_features().get(name))


#: Up to Zen 4, its own prefetchers are better left alone in float32 and on planes: BatchNorm of 65536x512 takes 8.1 to
#: 8.3 ms, and with memory asked for ahead 8.4 to 8.8; 32x64x12544 of planes in bfloat16 3.4, and 4.2. A Xeon takes
#: 11.4, and 10.7; 4.7, and 3.7. Rows of pixels in 16 bits need it on both (65536x512 on Zen 4.1 ms, without it 4.6).
#: Zen 5 is like the Xeon in this (64x256x784 of planes in float32 2.0 ms, without it 2.3).
_cpu = llvmlite.binding.get_host_cpu_name()
UP_TO_ZEN_4 = _cpu in ("znver1", "znver2", "znver3", "znver4")
ON_ZEN_5 = _cpu.startswith("znver") and not UP_TO_ZEN_4

_HALF_INSTRUCTIONS = _feature("f16c") or _feature("fullfp16")
#: AVX2 has bfloat16 in fewer instructions if the lanes are in another order, see `_from_pairs`: GroupNorm's planes take
#: 0.49 instead of 0.57 ns an element in the caches.
_PAIRS = _feature("avx2") and not _feature("avx512f")
_BFLOAT_INSTRUCTIONS = _feature("avx512bf16") and _feature("avx512dq")
if _BFLOAT_INSTRUCTIONS:
    llvmlite.binding.initialize_native_asmparser()  # llvmlite has no type for what the intrinsic returns


def _from_bfloat16(b: Any, raw: Any) -> Any:
    return b.bitcast(b.shl(b.zext(raw, _v(_i32)), _constant(_i32, 16)), _v(_float))


def _to_bfloat16(b: Any, value: Any, mixed: bool = False) -> Any:
    """The short way, and the long one for vectors with numbers that it gets wrong."""

    def packed(bits: Any) -> Any:
        return _to_pairs(b, bits) if mixed else b.trunc(b.lshr(bits, _constant(_i32, 16)), _v(_i16))

    if _BFLOAT_INSTRUCTIONS:  # 0.1 ns an element faster; takes subnormal numbers for zeros
        convert = ir.InlineAsm(ir.FunctionType(_v(_i16), [_v(_float)]), "vcvtneps2bf16 $1, $0", "=v,v")
        result = b.call(convert, [value])
        kind = ir.FunctionType(_v(_i1), [_v(_float), _i32])
        is_subnormal = b.module.declare_intrinsic("llvm.x86.avx512.fpclass.ps.512", (), kind)
        wrong = b.bitcast(b.call(is_subnormal, [value, _i32(0x20)]), _i16)
    else:  # makes infinities of some NaN
        result = packed(_round_to_bfloat16(b, value))
        low, high = (part(b, value, start, LANES // 2) for start in (0, LANES // 2))
        wrong = b.bitcast(b.fcmp_unordered("uno", low, high), ir.IntType(LANES // 2))  # in either
    before = b.block
    with b.if_then(b.icmp_unsigned("!=", wrong, wrong.type(0)), likely=False):
        quiet = b.or_(b.bitcast(value, _v(_i32)), _constant(_i32, 0x400000))
        rounded = packed(b.select(b.fcmp_unordered("uno", value, value), quiet, _round_to_bfloat16(b, value)))
        inside = b.block
    either = b.phi(_v(_i16))
    either.add_incoming(result, before)
    either.add_incoming(rounded, inside)
    return either


def _round_to_bfloat16(b: Any, value: Any) -> Any:
    """To nearest even, in the upper half: add half of the last place, less one where that place is even."""
    bits = b.bitcast(value, _v(_i32))
    odd = b.and_(b.lshr(bits, _constant(_i32, 16)), _constant(_i32, 1))
    return b.add(bits, b.add(odd, _constant(_i32, 0x7FFF)))


def _from_pairs(b: Any, raw: Any) -> Any:
    """bfloat16 in mixed order, the even ones and then the odd ones: a shift and a mask of the 32 bits they lie in."""
    half = LANES // 2
    pairs = b.bitcast(raw, _v(_i32, half))
    even, odd = b.shl(pairs, _constant(_i32, 16, half)), b.and_(pairs, _constant(_i32, 0xFFFF0000, half))
    return b.bitcast(b.shuffle_vector(even, odd, ir.Constant(_v(_i32), list(range(LANES)))), _v(_float))


def _to_pairs(b: Any, bits: Any) -> Any:
    """Back from rounded bits, whose lower half does not count."""
    half = LANES // 2
    even, odd = part(b, bits, 0, half), part(b, bits, half, half)
    upper = b.and_(odd, _constant(_i32, 0xFFFF0000, half))
    return b.bitcast(b.or_(b.lshr(even, _constant(_i32, 16, half)), upper), _v(_i16))


def _from_float16(b: Any, raw: Any) -> Any:
    if _HALF_INSTRUCTIONS:
        return b.fpext(b.bitcast(raw, _v(_half)), _v(_float))
    # Exponent and fraction in place, then 2**112 moves the bias from 15 to 127; exact, subnormals included.
    bits = b.zext(raw, _v(_i32))
    magnitude = b.shl(b.and_(bits, _constant(_i32, 0x7FFF)), _constant(_i32, 13))
    scaled = b.fmul(b.bitcast(magnitude, _v(_float)), _constant(_float, 2.0**112))
    special = b.icmp_unsigned(">=", magnitude, _constant(_i32, 0x0F800000))
    shifted = b.or_(b.bitcast(scaled, _v(_i32)), _constant(_i32, 0x7F800000))
    finite = b.select(special, shifted, b.bitcast(scaled, _v(_i32)))
    sign = b.shl(b.and_(bits, _constant(_i32, 0x8000)), _constant(_i32, 16))
    return b.bitcast(b.or_(finite, sign), _v(_float))


def _to_float16(b: Any, value: Any) -> Any:
    if _HALF_INSTRUCTIONS:
        return b.bitcast(b.fptrunc(value, _v(_half)), _v(_i16))
    bits = b.bitcast(value, _v(_i32))
    sign = b.and_(b.lshr(bits, _constant(_i32, 16)), _constant(_i32, 0x8000))
    magnitude = b.and_(bits, _constant(_i32, 0x7FFFFFFF))
    # Normal results: rebias and round to nearest even in the integer domain; a carry into Inf is right.
    odd = b.and_(b.lshr(magnitude, _constant(_i32, 13)), _constant(_i32, 1))
    rebiased = b.add(magnitude, b.add(odd, _constant(_i32, 0xFFF - (112 << 23))))
    normal = b.lshr(rebiased, _constant(_i32, 13))
    # Subnormal results: adding 0.5 puts the unit of float16's subnormals in the last place; the addition rounds.
    aligned = b.fadd(b.bitcast(magnitude, _v(_float)), _constant(_float, 0.5))
    subnormal = b.sub(b.bitcast(aligned, _v(_i32)), _constant(_i32, 0x3F000000))
    result = b.select(b.icmp_unsigned("<", magnitude, _constant(_i32, 113 << 23)), subnormal, normal)
    result = b.select(b.icmp_unsigned(">=", magnitude, _constant(_i32, 143 << 23)), _constant(_i32, 0x7C00), result)
    result = b.select(b.icmp_unsigned(">", magnitude, _constant(_i32, 0x7F800000)), _constant(_i32, 0x7E00), result)
    return b.trunc(b.or_(result, sign), _v(_i16))


def _widen(b: Any, tag: Any, raw: Any) -> Any:
    return raw if tag == _F32 else _from_bfloat16(b, raw) if tag == _BF16 else _from_float16(b, raw)


def _narrow(b: Any, tag: Any, value: Any) -> Any:
    return value if tag == _F32 else _to_bfloat16(b, value) if tag == _BF16 else _to_float16(b, value)


def _widen_mixed(b: Any, tag: Any, raw: Any) -> Any:
    return _from_pairs(b, raw) if _mixes(tag) else _widen(b, tag, raw)


def _narrow_mixed(b: Any, tag: Any, value: Any) -> Any:
    return _to_bfloat16(b, value, True) if _mixes(tag) else _narrow(b, tag, value)


def _mixes(tag: Any) -> bool:
    return bool(_PAIRS and tag == _BF16)


def _raw(tag: Any) -> Any:
    return _float if tag == _F32 else _i16


def _bytes(tag: Any) -> int:
    return 4 if tag == _F32 else 2
