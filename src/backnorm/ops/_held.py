"""What kernels in Gluon, Triton's lower level, have in common: they hold tiles in shared memory, which Triton's loops
cannot."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from . import _exchange

add_pairs, pack, unpack = (gluon.jit(f.fn) for f in (_exchange.add_pairs, _exchange.pack, _exchange.unpack))
#: Newer versions of Triton have another name for it.
fetch = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def statistics(mean_ptr, rstd_ptr, at, there):
    mean, rstd = gl.load(mean_ptr + at, mask=there, other=0.0), gl.load(rstd_ptr + at, mask=there, other=0.0)
    return mean.to(gl.float32), rstd.to(gl.float32)


@gluon.jit
def in_float32(t):
    """(Triton takes three instructions for two numbers of bfloat16, not two.)"""
    if t.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [t], dtype=gl.float32, is_pure=True, pack=2
        )
    else:  # noqa: RET505 (Gluon wants all branches to return)
        return t.to(gl.float32)
