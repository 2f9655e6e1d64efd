"""Device memory as a table of allocations: every address is known, and every access is checked."""

from __future__ import annotations

import bisect
import ctypes
import os
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

ALIGNMENT = 64
#: Freed blocks are kept for a while, so that a stale address is told from a new allocation at the same place.
_QUARANTINE_BYTES = 64 << 20
_QUARANTINE_BLOCKS = 1024


class BadAddress(Exception):
    """An address range that is not wholly inside one live allocation; the text says why."""


class Allocation:
    """A block of memory at a real address."""

    def __init__(self, size: int, space: str) -> None:
        block = np.empty(size + ALIGNMENT, np.uint8)
        start = -block.ctypes.data % ALIGNMENT
        self.bytes: npt.NDArray[np.uint8] = block[start : start + size]
        self.address: int = self.bytes.ctypes.data
        self.size = size
        self.space = space  # device or host
        self.live = True

    def view(self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], strides: tuple[int, ...]) -> Any:
        """A NumPy view whose element at index 0 lies at `address`; strides count elements."""
        byte_strides = [stride * dtype.itemsize for stride in strides]
        return np.ndarray(shape, dtype, self.bytes.data, address - self.address, byte_strides)


class Memory:
    """The allocations of the process, by address."""

    def __init__(self) -> None:
        self._addresses: list[int] = []
        self._live: dict[int, Allocation] = {}
        self._freed: deque[Allocation] = deque()
        self._freed_bytes = 0
        self.used = 0
        self.total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    @property
    def live(self) -> list[Allocation]:
        return list(self._live.values())

    def allocate(self, size: int, space: str) -> Allocation:
        """A new block, or a MemoryError."""
        if size > self.total - self.used:
            raise MemoryError
        block = Allocation(size, space)
        self._live[block.address] = block
        bisect.insort(self._addresses, block.address)
        self.used += size
        return block

    def free(self, address: int, space: str) -> Allocation:
        """End the block that starts at the address, or raise BadAddress."""
        block = self._live.get(address)
        if block is None or block.space != space:
            raise BadAddress(self._why_not(address, space))
        del self._live[address]
        del self._addresses[bisect.bisect_left(self._addresses, address)]
        block.live = False
        self.used -= block.size
        self._freed.append(block)
        self._freed_bytes += block.size
        while self._freed and (len(self._freed) > _QUARANTINE_BLOCKS or self._freed_bytes > _QUARANTINE_BYTES):
            self._freed_bytes -= self._freed.popleft().size
        return block

    def find(self, address: int) -> Allocation | None:
        """The live block an address lies in."""
        index = bisect.bisect_right(self._addresses, address) - 1
        if index < 0:
            return None
        block = self._live[self._addresses[index]]
        return block if address < block.address + block.size else None

    def locate(self, low: int, high: int, space: str) -> Allocation:
        """The live block of the space that holds the bytes from low to just before high, or BadAddress."""
        block = self.find(low)
        if block is None or block.space != space:
            raise BadAddress(self._why_not(low, space))
        if high > block.address + block.size:
            past = high - block.address - block.size
            raise BadAddress(
                f"{low:#x} to {high:#x} reaches {past} bytes past its allocation"
                f" of {block.size} bytes at {block.address:#x}"
            )
        return block

    def _why_not(self, address: int, space: str) -> str:
        block = self.find(address)
        if block is not None and block.space != space:
            return f"{address:#x} is {block.space} memory, not {space} memory"
        if block is not None:
            return f"{address:#x} lies {address - block.address} bytes inside the allocation at {block.address:#x}"
        for freed in self._freed:
            if freed.address <= address < freed.address + freed.size:
                return f"{address:#x} was freed before"
        return f"{address:#x} is in no {space} allocation"


_libc: Any = ctypes.CDLL(None, use_errno=True)
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MS_ASYNC = 1


def is_mapped(address: int, size: int) -> bool:
    """Whether the process has memory at the address range; asks the kernel, touches nothing."""
    first = address // _PAGE * _PAGE
    if address + size > 2**63:
        return False
    msync = _libc.msync
    return bool(msync(ctypes.c_void_p(first), ctypes.c_size_t(address + size - first), _MS_ASYNC) == 0)
