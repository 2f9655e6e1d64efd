"""The GPU under the runtime, through the CUDA driver's library: memory, streams and events are its own.

Everything happens in the device's primary context, the one that PyTorch and Triton use too.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import deque
from ctypes import POINTER, c_char_p, c_float, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any

from ..status import Status
from .hardware import Attempt, Queue, physical_memory
from .memory import check_permission, copy_bytes
from .messages import AclFailure

if TYPE_CHECKING:
    from .streams import Task

#: The driver's functions by the names its library exports, with the types of their arguments.
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemHostAlloc": (POINTER(c_void_p), c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemsetD8Async": (c_uint64, c_ubyte, c_size_t, c_void_p),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventSynchronize": (c_void_p,),
    "cuEventElapsedTime": (POINTER(c_float), c_void_p, c_void_p),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
}

_OUT_OF_MEMORY, _NOT_READY = 2, 600
#: CUDA's errors that have a code of their own in the runtime; all others are internal errors.
_STATUSES = {
    1: Status.ACL_ERROR_RT_PARAM_INVALID,  # CUDA_ERROR_INVALID_VALUE
    _OUT_OF_MEMORY: Status.ACL_ERROR_RT_MEMORY_ALLOCATION,
    400: Status.ACL_ERROR_RT_INVALID_HANDLE,  # CUDA_ERROR_INVALID_HANDLE
    801: Status.ACL_ERROR_FEATURE_UNSUPPORTED,  # CUDA_ERROR_NOT_SUPPORTED
}
#: A stream that neither waits for CUDA's default stream nor is waited for by it.
_NON_BLOCKING = 1
#: Pinned memory that every context sees as such.
_PORTABLE = 1
#: Ended tasks are looked for once a queue that nobody waits for has grown by this many.
_TASKS_KEPT = 256


def load_driver() -> Any:
    """The driver's library with its signatures, or an OSError or AttributeError."""
    library = ctypes.CDLL("libcuda.so.1")
    for name, types in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, c_int
    return library


_opened: tuple[int, Cuda] | None = None


def open_cuda() -> Cuda:
    """The first GPU CUDA shows (CUDA_VISIBLE_DEVICES chooses), opened once; an AclFailure where any is missing."""
    global _opened
    if _opened is not None and _opened[0] != os.getpid():
        raise _unavailable("a forked child cannot use its parent's")
    if _opened is None:
        _require_kernels()
        try:
            driver = load_driver()
        except (OSError, AttributeError) as error:
            raise _unavailable(f"the CUDA driver cannot be loaded: {error}") from None
        _opened = os.getpid(), Cuda(driver)
    return _opened[1]


def _unavailable(why: str) -> AclFailure:
    return AclFailure(
        Status.ACL_ERROR_FEATURE_UNSUPPORTED, f"BACKNORM_DEVICE=cuda must name a GPU that can be used; {why}"
    )


def _require_kernels() -> None:
    try:
        import torch
        import triton  # noqa: F401
    except ImportError as error:
        raise _unavailable(f"the kernels need {error.name}: install backnorm[gpu]") from None
    if not torch.cuda.is_available():
        raise _unavailable(f"PyTorch {torch.__version__}, which the kernels need, finds no GPU")


class Cuda:
    """One GPU. The driver's calls are by name: `self._call("cuMemFree_v2", address)`."""

    tensors, alignment = "cuda:0", 256

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self._events: list[int] = []  # those no mark holds
        try:
            self._call("cuInit", 0)
            if self._out(c_int, "cuDeviceGetCount") == 0:
                raise _unavailable("CUDA finds none")
            self.context = self._out(c_void_p, "cuDevicePrimaryCtxRetain", self._out(c_int, "cuDeviceGet", 0))
            self._ours = _Current(self)
            with self._ours:
                #: What is not queued by a caller runs here, and is waited for.
                self._now = self._out(c_void_p, "cuStreamCreate", _NON_BLOCKING)
            self._total = self._memory()[1]
        except AclFailure as failure:
            if failure.status is Status.ACL_ERROR_FEATURE_UNSUPPORTED:
                raise
            raise _unavailable(str(failure)) from None

    # --- calls ---

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self.driver, name)(*arguments)
        if code:
            raise self._failure(name, code)

    def _out(self, kind: Any, name: str, *arguments: Any) -> Any:
        """What a call writes to its first argument."""
        value = kind()
        self._call(name, ctypes.byref(value), *arguments)
        return value.value

    def _failure(self, name: str, code: int) -> AclFailure:
        texts = []
        for ask in (self.driver.cuGetErrorName, self.driver.cuGetErrorString):
            text = c_char_p()
            texts.append(text.value.decode() if ask(code, ctypes.byref(text)) == 0 and text.value else "unknown error")
        status = _STATUSES.get(code, Status.ACL_ERROR_INTERNAL_ERROR)
        return AclFailure(status, f"CUDA's {name} failed: {texts[0]} ({code}), {texts[1]}")

    # --- memory ---

    def total(self, space: str) -> int:
        return physical_memory() if space == "host" else self._total

    def left(self, space: str) -> int | None:
        return None if space == "host" else self._memory()[0]

    def _memory(self) -> tuple[int, int]:
        free, total = c_size_t(), c_size_t()
        with self._ours:
            self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def allocate(self, size: int, space: str) -> tuple[int, Any]:
        try:
            with self._ours:
                if space == "host":
                    address = self._out(c_void_p, "cuMemHostAlloc", size, _PORTABLE)
                else:
                    address = self._out(c_uint64, "cuMemAlloc_v2", size)
        except AclFailure as failure:
            if failure.status is Status.ACL_ERROR_RT_MEMORY_ALLOCATION:
                raise MemoryError from None
            raise
        return address, address

    def release(self, kept: Any, space: str) -> None:
        with self._ours:  # waits for the GPU where it must
            self._call("cuMemFreeHost" if space == "host" else "cuMemFree_v2", kept)

    def copy(self, dst: int, src: int, count: int, dst_space: str, src_space: str, queue: int | None) -> None:
        if src_space == "foreign":
            check_permission(src, count, "r")
        if dst_space == "foreign":
            check_permission(dst, count, "w")
        if queue is None and "device" not in (dst_space, src_space):
            copy_bytes(dst, src, count, dst_space != "foreign", src_space != "foreign")
            return
        with self._ours:
            self._call("cuMemcpyAsync", dst, src, count, self._now if queue is None else queue)
            if queue is None:
                self._call("cuStreamSynchronize", self._now)

    def fill(self, address: int, value: int, count: int, queue: int | None) -> None:
        with self._ours:
            self._call("cuMemsetD8Async", address, value & 0xFF, count, self._now if queue is None else queue)
            if queue is None:
                self._call("cuStreamSynchronize", self._now)

    # --- streams and events ---

    def open_queue(self, attempt: Attempt) -> Queue:
        return _Stream(self, attempt)

    def milliseconds(self, start: _Mark, end: _Mark) -> float:
        with self._ours:
            return float(self._out(c_float, "cuEventElapsedTime", start.event, end.event))


class _Current:
    """Our context as the thread's, for a while: whoever else uses CUDA finds his own again."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda

    def __enter__(self) -> None:
        self._cuda._call("cuCtxPushCurrent_v2", self._cuda.context)

    def __exit__(self, *_: object) -> None:
        self._cuda._out(c_void_p, "cuCtxPopCurrent_v2")


class _Mark:
    """A point in a stream; its event is used again once nobody remembers the point."""

    def __init__(self, cuda: Cuda, stream: int) -> None:
        self._events = cuda._events
        try:
            self.event = self._events.pop()
        except IndexError:
            self.event = cuda._out(c_void_p, "cuEventCreate", 0)
        cuda._call("cuEventRecord", self.event, stream)

    def __del__(self) -> None:
        if hasattr(self, "event"):
            self._events.append(self.event)


class _Stream:
    """A stream of the GPU. Tasks queue their work on it as they come, each followed by a mark."""

    def __init__(self, cuda: Cuda, attempt: Attempt) -> None:
        self._cuda, self._attempt = cuda, attempt
        self._lock = threading.Lock()
        self._marks: deque[tuple[int, _Mark]] = deque()
        self._finished = 0
        with cuda._ours:
            self._stream = cuda._out(c_void_p, "cuStreamCreate", _NON_BLOCKING)

    @property
    def finished(self) -> int:
        with self._lock:
            while self._marks and self._passed(self._marks[0][1]):
                self._finished = self._marks.popleft()[0]
            return self._finished

    def _passed(self, mark: _Mark) -> bool:
        with self._cuda._ours:
            code = self._cuda.driver.cuEventQuery(mark.event)
        if code not in (0, _NOT_READY):
            raise self._cuda._failure("cuEventQuery", code)
        return bool(code == 0)

    def put(self, task: Task) -> None:
        with self._cuda._ours:
            if task.after is not None:
                self._cuda._call("cuStreamWaitEvent", self._stream, task.after.end.event, 0)
            self._attempt(task, self._stream)
            task.end = _Mark(self._cuda, self._stream)
        with self._lock:
            self._marks.append((task.number, task.end))
        if len(self._marks) % _TASKS_KEPT == 0:
            _ = self.finished

    def wait(self, number: int, seconds: float | None) -> bool:
        with self._lock:
            mark = next((mark for at, mark in self._marks if at >= number), None)
        if mark is None:
            return True
        if seconds is None:
            with self._cuda._ours:
                self._cuda._call("cuEventSynchronize", mark.event)
        else:
            end = time.monotonic() + seconds
            while not self._passed(mark):
                if time.monotonic() >= end:
                    return False
                time.sleep(0.0002)
        with self._lock:
            while self._marks and self._marks[0][0] <= number:
                self._finished = self._marks.popleft()[0]
        return True

    def close(self) -> None:
        with self._cuda._ours:
            self._cuda._call("cuStreamDestroy_v2", self._stream)
