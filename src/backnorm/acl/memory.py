"""Device memory as a table of allocations: every address is known, and every access is checked."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import os
import sys
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from .messages import AclFailure

if TYPE_CHECKING:
    from .hardware import Hardware

#: Bytes before and after every block that belong to it and to no caller: what lands there has left its allocation.
_GUARD = 64
#: Freed blocks are kept for a while, so that a stale address is told from a new allocation at the same place.
_QUARANTINE_BYTES = 64 << 20
_QUARANTINE_BLOCKS = 1024


class BadAddress(Exception):
    """An address range that may not be touched; the text says why."""


class Allocation:
    """A block of memory at a real address."""

    def __init__(self, hardware: Hardware, size: int, space: str) -> None:
        start, self.kept = hardware.allocate(size + hardware.alignment + 2 * _GUARD, space)
        self.address = -(-(start + _GUARD) // hardware.alignment) * hardware.alignment
        self.size = size
        self.space = space  # device or host
        self.live = True

    @property
    def end(self) -> int:
        return self.address + self.size


class _Blocks:
    """Blocks by address; live and freed ones never share memory, so each range finds at most its own."""

    def __init__(self) -> None:
        self.by_address: dict[int, Allocation] = {}
        self._sorted: list[int] = []

    def add(self, block: Allocation) -> None:
        self.by_address[block.address] = block
        bisect.insort(self._sorted, block.address)

    def remove(self, block: Allocation) -> None:
        del self.by_address[block.address]
        del self._sorted[bisect.bisect_left(self._sorted, block.address)]

    def meeting(self, low: int, high: int, guard: int = 0) -> Allocation | None:
        """A block that shares a byte with [low, high), its guards counted in."""
        index = bisect.bisect_left(self._sorted, high + guard) - 1
        if index < 0:
            return None
        block = self.by_address[self._sorted[index]]
        return block if low < block.end + guard else None


class Memory:
    """The allocations of the process."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._live, self._freed = _Blocks(), _Blocks()
        self._quarantine: deque[Allocation] = deque()
        self._quarantine_bytes = 0
        self.used = {"device": 0, "host": 0}

    @property
    def live(self) -> list[Allocation]:
        return list(self._live.by_address.values())

    def total(self, space: str) -> int:
        return self._hardware.total(space)

    def left(self, space: str) -> int:
        """Bytes that can still be had: freed blocks are only held back."""
        left, ours = self._hardware.left(space), self.total(space) - self.used[space]
        held = sum(block.size for block in self._quarantine if block.space == space)
        return ours if left is None else min(ours, left + held)

    def allocate(self, size: int, space: str) -> Allocation:
        """A new block, or a MemoryError."""
        if size > self.total(space) - self.used[space]:
            raise MemoryError
        try:
            block = Allocation(self._hardware, size, space)
        except MemoryError:
            if not self._quarantine:
                raise
            self._let_go(0, 0)
            block = Allocation(self._hardware, size, space)
        self._live.add(block)
        self.used[space] += size
        return block

    def free(self, address: int, space: str) -> Allocation:
        """End the block that starts at the address, or raise BadAddress."""
        block = self._live.by_address.get(address)
        if block is None or block.space != space:
            raise BadAddress(self._why_not(address, space))
        self._live.remove(block)
        self.used[space] -= block.size
        block.live = False
        self._freed.add(block)
        self._quarantine.append(block)
        self._quarantine_bytes += block.size
        self._let_go(_QUARANTINE_BLOCKS, _QUARANTINE_BYTES, keep=1)
        return block

    def _let_go(self, blocks: int, size: int, keep: int = 0) -> None:
        """Give the oldest freed blocks back, until so many blocks and bytes at most are left; the newest stay."""
        while len(self._quarantine) > keep and (len(self._quarantine) > blocks or self._quarantine_bytes > size):
            oldest = self._quarantine.popleft()
            self._freed.remove(oldest)
            self._quarantine_bytes -= oldest.size
            self._hardware.release(oldest.kept, oldest.space)

    def close(self) -> None:
        """Give everything back; a GPU that has failed takes nothing any more, and has nothing to lose."""
        for block in (*self.live, *self._quarantine):
            with contextlib.suppress(AclFailure):
                self._hardware.release(block.kept, block.space)

    def locate(self, low: int, high: int, space: str) -> Allocation:
        """The live block of the space that holds the bytes from low to just before high, or BadAddress."""
        block = self._live.by_address.get(low) or self._live.meeting(low, low + 1)
        if block is None or block.space != space:
            raise BadAddress(self._why_not(low, space))
        if high > block.address + block.size:
            check_inside(block, low, high)
        return block

    def find_host(self, low: int, high: int) -> Allocation | None:
        """The host block that holds a range, None for memory that is not ours; BadAddress where it is partly ours."""
        live = self._live.meeting(low, high, _GUARD)
        if live is None and self._freed.meeting(low, high, _GUARD) is None:
            return None
        return self.locate(low, high, "host")

    def space_of(self, address: int) -> str:
        block = self._live.meeting(address, address + 1)
        return block.space if block else "host"

    def _why_not(self, address: int, space: str) -> str:
        block = self._live.meeting(address, address + 1)
        if block is not None and block.space != space:
            return f"{address:#x} is {block.space} memory, not {space} memory"
        if block is not None:
            return f"{address:#x} lies {address - block.address} bytes inside the allocation at {block.address:#x}"
        if self._freed.meeting(address, address + 1) is not None:
            return f"{address:#x} was freed before"
        return f"{address:#x} is in no {space} allocation"


def check_inside(block: Allocation, low: int, high: int) -> None:
    """Raise BadAddress where a range leaves the block."""
    if low < block.address:
        raise BadAddress(
            f"{low:#x} to {high:#x} starts {block.address - low} bytes before its allocation at {block.address:#x}"
        )
    if high > block.end:
        raise BadAddress(
            f"{low:#x} to {high:#x} reaches {high - block.end} bytes past its allocation"
            f" of {block.size} bytes at {block.address:#x}"
        )


# --- memory of the process that is not ours -------------------------------------------------------------------------

_libc: Any = ctypes.CDLL(None, use_errno=True)
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MS_ASYNC = 1


class _Range(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def is_mapped(address: int, size: int) -> bool:
    """Whether the process has memory at the address range; asks the kernel, touches nothing."""
    first = address // _PAGE * _PAGE
    if address + size > 2**63:
        return False
    return bool(_libc.msync(ctypes.c_void_p(first), ctypes.c_size_t(address + size - first), _MS_ASYNC) == 0)


def _permits(low: int, high: int, right: str) -> bool:
    """Whether every page of a range may be read or written, so that a copy is made wholly or not at all."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            bounds, rights = line.split(maxsplit=2)[:2]
            start, end = (int(bound, 16) for bound in bounds.split("-"))
            if start <= low < end:
                if right not in rights:
                    return False
                low = end
                if low >= high:
                    return True
    return False


def check_permission(address: int, count: int, right: str) -> None:
    """Raise BadAddress where foreign memory may not be read (r) or written (w)."""
    if not _permits(address, address + count, right):
        raise BadAddress(f"host memory at {address:#x} cannot be {'written' if right == 'w' else 'read'}")


def _transfer(function: str, ours: int, foreign: int, count: int) -> None:
    """Let the kernel move bytes between memory of ours and foreign memory: a bad page is an error, not a signal."""
    writing = function == "process_vm_writev"
    right = "w" if writing else "r"
    # Within one page the kernel does all or nothing by itself; reading the map can take it most of a millisecond.
    in_one_page = foreign % _PAGE + count <= _PAGE
    if not in_one_page:
        check_permission(foreign, count, right)
    moved = 0
    while moved < count:
        left = count - moved
        local, remote = _Range(ours + moved, left), _Range(foreign + moved, left)
        done = getattr(_libc, function)(os.getpid(), ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        if done < 0 and ctypes.get_errno() in (errno.ENOSYS, errno.EPERM):  # forbidden in some sandboxes
            if in_one_page:
                check_permission(foreign, count, right)
            dst, src = (foreign, ours) if writing else (ours, foreign)
            ctypes.memmove(dst, src, count)
            return
        if done <= 0:
            raise BadAddress(f"host memory at {foreign + moved:#x} cannot be {'written' if writing else 'read'}")
        moved += done


def copy_bytes(dst: int, src: int, count: int, dst_is_ours: bool, src_is_ours: bool) -> None:
    """memmove that survives foreign memory which is gone, or may not be read or written."""
    if sys.platform != "linux" or (dst_is_ours and src_is_ours):
        ctypes.memmove(dst, src, count)
    elif dst_is_ours:
        _transfer("process_vm_readv", dst, src, count)
    elif src_is_ours:
        _transfer("process_vm_writev", src, dst, count)
    else:
        bounce = np.empty(count, np.uint8)
        _transfer("process_vm_readv", bounce.ctypes.data, src, count)
        _transfer("process_vm_writev", bounce.ctypes.data, dst, count)
