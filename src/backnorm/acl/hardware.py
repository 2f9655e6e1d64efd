"""What lies under the runtime: memory, copies and queues of work. The CPU's are here, the GPU's in `cuda.py`.

The runtime above knows which addresses are good, what a stream has finished and whose memory is in use; what differs
between devices is in the few functions of `Hardware`, and each of them is told, never asked to check.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..status import Status
from .memory import copy_bytes
from .messages import AclFailure
from .worker import Worker

if TYPE_CHECKING:
    from .streams import Task

#: Runs a task on a queue, and takes note where it fails.
Attempt = Callable[["Task", int], None]


class Queue(Protocol):
    """Work of one stream, in order."""

    @property
    def finished(self) -> int:
        """The number of the newest task that has ended, and all before it."""

    def put(self, task: Task) -> None:
        """Queue a task, after the one elsewhere that it names; one at a time."""

    def wait(self, number: int, seconds: float | None) -> bool:
        """Whether task `number` ended within the time."""

    def close(self) -> None:
        """No more tasks will come; those queued still run."""


class Hardware(Protocol):
    #: Where its tensors are, as plans know devices.
    tensors: str
    #: What its allocations are multiples of.
    alignment: int

    def total(self, space: str) -> int:
        """Bytes of memory."""

    def left(self, space: str) -> int | None:
        """Bytes that others have left of it, None where only our own count."""

    def allocate(self, size: int, space: str) -> tuple[int, Any]:
        """Memory: its address and what keeps it; a MemoryError where there is none."""

    def release(self, kept: Any, space: str) -> None:
        """Give memory back, when no queued work can be using it."""

    def copy(self, dst: int, src: int, count: int, dst_space: str, src_space: str, queue: int | None) -> None:
        """Copy between `device`, `host` (of ours) and `foreign` memory: on a queue, or (None) now and to the end."""

    def fill(self, address: int, value: int, count: int, queue: int | None) -> None:
        """Set bytes of device memory, likewise."""

    def open_queue(self, attempt: Attempt) -> Queue: ...

    def milliseconds(self, start: Any, end: Any) -> float:
        """Between the ends of two tasks, as its queues noted them."""


def open_hardware(name: str) -> Hardware:
    """What BACKNORM_DEVICE names, ready for work; an error, never another device, where it is not to be had."""
    if name == "cpu":
        return Cpu()
    if name == "cuda":
        from .cuda import open_cuda

        return open_cuda()
    raise AclFailure(
        Status.ACL_ERROR_FEATURE_UNSUPPORTED, f"BACKNORM_DEVICE must be cpu or cuda (default: cpu); got {name!r}"
    )


class Cpu:
    """The process's own memory; a thread for each queue."""

    tensors, alignment = "cpu", 64

    def total(self, space: str) -> int:
        return physical_memory()

    def left(self, space: str) -> int | None:
        return None

    def allocate(self, size: int, space: str) -> tuple[int, Any]:
        block = np.empty(size, np.uint8)
        return block.ctypes.data, block

    def release(self, kept: Any, space: str) -> None:
        pass  # goes with the last who holds it, queued work included

    def copy(self, dst: int, src: int, count: int, dst_space: str, src_space: str, queue: int | None) -> None:
        copy_bytes(dst, src, count, dst_space != "foreign", src_space != "foreign")

    def fill(self, address: int, value: int, count: int, queue: int | None) -> None:
        ctypes.memset(address, value, count)

    def open_queue(self, attempt: Attempt) -> Queue:
        return Worker(attempt)

    def milliseconds(self, start: float, end: float) -> float:
        return (end - start) * 1000


def physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
