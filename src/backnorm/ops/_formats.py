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


def _constant(element: Any, value: Any) -> Any:
    return ir.Constant(_v(element), [value] * LANES)


def _feature(name: str) -> bool:
    """Whether code is made for a CPU with this feature; `NUMBA_CPU_NAME=generic` has none at all."""
    settings: Any = config
    if settings.CPU_FEATURES is not None:
        return f"+{name}" in settings.CPU_FEATURES.split(",")
    return not settings.CPU_NAME and bool(llvmlite.binding.get_host_cpu_features().get(name))


_HALF_INSTRUCTIONS = _feature("f16c") or _feature("fullfp16")
_BFLOAT_INSTRUCTIONS = _feature("avx512bf16") and _feature("avx512dq")
if _BFLOAT_INSTRUCTIONS:
    llvmlite.binding.initialize_native_asmparser()  # llvmlite has no type for what the intrinsic returns


def _from_bfloat16(b: Any, raw: Any) -> Any:
    return b.bitcast(b.shl(b.zext(raw, _v(_i32)), _constant(_i32, 16)), _v(_float))


def _to_bfloat16(b: Any, value: Any) -> Any:
    """By the CPU's instruction, 0.1 ns an element faster, but for subnormal numbers, which it takes for zeros."""
    if not _BFLOAT_INSTRUCTIONS:
        return _round_to_bfloat16(b, value)
    convert = ir.InlineAsm(ir.FunctionType(_v(_i16), [_v(_float)]), "vcvtneps2bf16 $1, $0", "=v,v")
    result = b.call(convert, [value])
    kind = ir.FunctionType(_v(_i1), [_v(_float), _i32])
    is_subnormal = b.module.declare_intrinsic("llvm.x86.avx512.fpclass.ps.512", (), kind)
    mask = b.bitcast(b.call(is_subnormal, [value, _i32(0x20)]), _i16)
    before = b.block
    with b.if_then(b.icmp_unsigned("!=", mask, _i16(0)), likely=False):
        rounded = _round_to_bfloat16(b, value)
        inside = b.block
    either = b.phi(_v(_i16))
    either.add_incoming(result, before)
    either.add_incoming(rounded, inside)
    return either


def _round_to_bfloat16(b: Any, value: Any) -> Any:
    """Round to nearest even: add half of the last place, less one where that place is even. NaN stays NaN, quiet."""
    bits = b.bitcast(value, _v(_i32))
    high = b.lshr(bits, _constant(_i32, 16))
    odd = b.and_(high, _constant(_i32, 1))
    rounded = b.lshr(b.add(bits, b.add(odd, _constant(_i32, 0x7FFF))), _constant(_i32, 16))
    quiet = b.or_(high, _constant(_i32, 0x40))
    return b.trunc(b.select(b.fcmp_unordered("uno", value, value), quiet, rounded), _v(_i16))


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


def _raw(tag: Any) -> Any:
    return _float if tag == _F32 else _i16


def _bytes(tag: Any) -> int:
    return 4 if tag == _F32 else 2
