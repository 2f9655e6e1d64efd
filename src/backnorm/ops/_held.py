"""What kernels in Gluon, Triton's lower level, have in common: they hold tiles in shared memory, which Triton's loops
cannot."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from . import _exchange
from ._tiles import TILES_OF_A_RUN

RUN = gl.constexpr(TILES_OF_A_RUN)
add_pairs, pack, unpack = (gluon.jit(f.fn) for f in (_exchange.add_pairs, _exchange.pack, _exchange.unpack))
#: Newer versions of Triton have another name for it.
fetch = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
#: Whether this version of Triton reads and writes shared memory at any place. Before, a view of it may begin there.
GATHERS = gl.constexpr(hasattr(gl.shared_memory_descriptor, "gather"))


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


@gluon.jit
def each_in_float32(t):
    """Of elements that are not side by side."""
    if t.dtype == gl.bfloat16:
        move: gl.constexpr = "{ .reg .b16 zero; mov.b16 zero, 0; mov.b32 $0, {zero, $1}; }"
        return gl.inline_asm_elementwise(move, "=r,h", [t], dtype=gl.float32, is_pure=True, pack=1)
    else:  # noqa: RET505
        return t.to(gl.float32)


@gluon.jit
def _view(slots, slot, first, place):
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    elements = slots._reinterpret(slots.dtype, [slots.shape[0] * slots.shape[1], 1], FLAT)
    here = elements.index(slot * slots.shape[1] + first)
    return here._reinterpret(slots.dtype, [place.shape[0], place.shape[1]], PLAIN)


@gluon.jit
def read_at(slots, slot, first, place):
    """Elements of a slot from `first` on; `place` is 0, 1, ... row by row."""
    if GATHERS:
        at = gl.reshape(first + place, [place.shape[0] * place.shape[1]])
        return gl.reshape(slots.index(slot).gather(at, 0), [place.shape[0], place.shape[1]])
    else:  # noqa: RET505
        return _view(slots, slot, first, place).load(place.type.layout)


@gluon.jit
def write_at(slots, slot, first, place, value):
    if GATHERS:
        at = gl.reshape(first + place, [place.shape[0] * place.shape[1]])
        slots.index(slot).scatter(gl.reshape(value, [place.shape[0] * place.shape[1]]), at, 0)
    else:
        _view(slots, slot, first, place).store(value)


@gluon.constexpr_function
def columns_layout(down, warps):
    """Of `down` times 32 * warps elements. Lanes are in reverse: in their order, Triton reads float32 with ldmatrix,
    which takes no addresses but multiples of 16."""
    registers = [[1 << bit, 0] for bit in range(down.bit_length() - 1)]
    lanes, rest = [[0, 16 >> bit] for bit in range(5)], [[0, 32 << bit] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, rest, [], [down, 32 * warps])


@gluon.jit
def places_of(BLOCKS: gl.constexpr):
    """0, 1, ... of each of the blocks: how many elements for each thread, and in the blocks before."""
    WARPS: gl.constexpr = gl.num_warps()
    places = ()
    for block in gl.static_range(len(BLOCKS)):
        down = gl.arange(0, BLOCKS[block][0], layout=gl.SliceLayout(1, columns_layout(BLOCKS[block][0], WARPS)))
        across = gl.arange(0, 32 * WARPS, layout=gl.SliceLayout(0, columns_layout(BLOCKS[block][0], WARPS)))
        places = places + (down[:, None] * (32 * WARPS) + across[None, :],)  # noqa: RUF005 (Gluon's tuples)
    return places


@gluon.jit
def shift_of(ptr, at):
    """Elements between a multiple of 16 bytes and this one."""
    BYTES: gl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
    return ((ptr + at).to(gl.int64) % 16 // BYTES).to(gl.int32)


@gluon.jit
def fetch_run(slots, slot, ptr, at, count):
    """`count` elements from place `at` on into a slot, after those of the first vector that come before; zeros after
    the last vector."""
    VECTOR: gl.constexpr = 128 // ptr.dtype.element_ty.primitive_bitwidth
    shift = shift_of(ptr, at)
    place = gl.arange(0, slots.shape[1], layout=gl.BlockedLayout([VECTOR], [32], [gl.num_warps()], [0]))
    reads = place // VECTOR * VECTOR < gl.where(count > 0, shift + count, 0)
    fetch(slots.index(slot), gl.multiple_of(ptr + (at - shift), 16) + place, reads)


@gluon.jit
def write_run(slots, slot, ptr, at, count):
    """The same back: whole vectors, and element by element what is left at both ends."""
    VECTOR: gl.constexpr = 128 // ptr.dtype.element_ty.primitive_bitwidth
    LANES: gl.constexpr = 32 * gl.num_warps()
    VECTORS: gl.constexpr = gl.BlockedLayout([VECTOR], [32], [gl.num_warps()], [0])
    shift = shift_of(ptr, at)
    start, end = ptr + (at - shift), shift + count
    place = gl.arange(0, slots.shape[1], layout=VECTORS)
    first = place // VECTOR * VECTOR
    whole = (first >= shift) & (first + VECTOR <= end)
    gl.store(gl.multiple_of(start, 16) + place, slots.index(slot).load(VECTORS), mask=whole)
    lane = gl.arange(0, LANES, layout=gl.SliceLayout(0, columns_layout(1, gl.num_warps())))[None, :]
    head = (lane >= shift) & (lane < gl.where(shift > 0, gl.minimum(VECTOR, end), 0))
    gl.store(start + lane, read_at(slots, slot, 0, lane), mask=head)
    last, back = (end - 1) // VECTOR * VECTOR, gl.maximum(end - LANES, 0)
    behind = back + lane
    tail = (behind >= gl.maximum(last, shift)) & (behind < gl.where(last + VECTOR > end, end, 0))
    gl.store(start + behind, read_at(slots, slot, back, lane), mask=tail)
