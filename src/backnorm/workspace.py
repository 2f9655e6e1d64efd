"""The memory that calls of array functions and PyTorch's operators work in."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np


class _Memory(threading.local):
    """Each thread's workspace, kept from call to call: fresh memory costs a page fault for every 4 KiB."""

    #: More than this, which only packed copies of large views need, is given back after the next call.
    LARGEST_KEPT = 256 << 20

    def __init__(self) -> None:
        self._memory, self._size, self._address = np.empty(0, np.uint8), 0, 0

    def take(self, size: int) -> int:
        """The address of that many bytes, good until the next call."""
        if self._size < size or self._size > self.LARGEST_KEPT:
            self._memory, self._size = np.empty(size + 64, np.uint8), size
            self._address = -(-self._memory.ctypes.data // 64) * 64
        return self._address


take = _Memory().take


class _GpuMemory(threading.local):
    """Each thread's workspace on each of a GPU's streams. What a stream does comes one after the other, and what two
    threads queue there may come mixed."""

    #: More than this is not kept; the calls that need it are long.
    LARGEST_KEPT = 16 << 20

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], tuple[int, int, Any]] = {}

    def take(self, size: int, device: Any) -> tuple[int, int, Any]:
        """The address of that many bytes, good for what is queued now, PyTorch's current stream, and what keeps the
        memory until it is queued."""
        torch: Any = sys.modules["torch"]
        index = device.index or 0
        stream = torch._C._cuda_getCurrentRawStream(index)
        kept = self._kept.get((index, stream))
        # A graph being captured must have memory of its own: it runs later, beside calls that are made then.
        if kept is not None and kept[0] >= size and not torch._C._cuda_isCurrentStreamCapturing():
            return kept[1], stream, None
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        address = memory.data_ptr()
        if size <= self.LARGEST_KEPT and not torch._C._cuda_isCurrentStreamCapturing():
            self._kept[index, stream] = (size, address, memory)
        return address, stream, memory


take_on_gpu = _GpuMemory().take
