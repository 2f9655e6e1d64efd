"""Sums that programs of one launch exchange while they run.

A row or group too large for one program is shared by some, all of which run at a time. Each writes its two float32 sums
as one word of 64 bits, so that a word is either there or not (EMPTY), and no order of writes matters. Others look for
it one step later, when it has long arrived: waiting for it at once cost more than reading the tensors a second time.
(Held pixels of large images, whose parts fill shared memory, wait: other programs of the multiprocessor go on.) Where
the programs cannot all run at a time, or in Triton's interpreter, a launch writes all words and a second reads them,
with the same kernel and, where rows or planes begin on 16 bytes, the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pack(a, b):
    """Two sums as a word. No sum is the word EMPTY: arithmetic makes no NaN with all bits set."""
    low, high = a.to(tl.uint32, bitcast=True).to(tl.uint64), b.to(tl.uint32, bitcast=True).to(tl.uint64)
    return (high << 32 | low).to(tl.int64, bitcast=True)


@triton.jit
def unpack(word):
    both = word.to(tl.uint64, bitcast=True)
    a, b = (both & 0xFFFFFFFF).to(tl.uint32), (both >> 32).to(tl.uint32)
    return a.to(tl.float32, bitcast=True), b.to(tl.float32, bitcast=True)


@triton.jit
def wait(ptr, place, AWAITED: tl.constexpr):
    """Words; AWAITED: once others have written them. The loop is the assembler's: Triton copies nothing ahead in loops
    with loops. (Looking for the words a step earlier, before the sums, found few of them there: 136 against 120
    microseconds for LayerNorm of 4096 x 16384 in bfloat16.)"""
    if AWAITED:
        return tl.inline_asm_elementwise(
            """{
            .reg .pred empty;
            again:
            ld.relaxed.gpu.global.b64 $0, [$1];
            setp.eq.s64 empty, $0, -1;
            @empty bra again;
            }""",
            "=&l,l", [(ptr + place).to(tl.int64)], tl.int64, False, 1,
        )  # fmt: skip
    else:  # noqa: RET505 (Triton wants both branches to return)
        return tl.load(ptr + place)


@triton.jit
def add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def both(mask, flag):
    """A mask where a flag is set. (The interpreter makes other numbers of mask & flag.)"""
    return (mask & flag) != 0
