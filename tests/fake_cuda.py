"""A stand-in for the CUDA driver over the host's memory: every function that `acl/cuda.py` calls, one thread a stream.

It is stricter than the real one where that helps: a thread without a context, an address outside its allocations and a
stream or event it never made are errors, where a GPU would fail later or not at all.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import numpy as np

from backnorm import backends, plan
from backnorm.acl import cuda
from backnorm.spec import TensorDesc

NAMES = {1: b"CUDA_ERROR_INVALID_VALUE", 2: b"CUDA_ERROR_OUT_OF_MEMORY", 100: b"CUDA_ERROR_NO_DEVICE",
         201: b"CUDA_ERROR_INVALID_CONTEXT", 400: b"CUDA_ERROR_INVALID_HANDLE", 600: b"CUDA_ERROR_NOT_READY",
         700: b"CUDA_ERROR_ILLEGAL_ADDRESS"}  # fmt: skip
MEMORY = 1 << 30


class _Point:
    """What an event was recorded at."""

    def __init__(self) -> None:
        self.passed, self.seconds = threading.Event(), 0.0

    def pass_by(self) -> None:
        self.seconds = time.perf_counter()
        self.passed.set()


class _Stream:
    def __init__(self, failures: list[Exception]) -> None:
        self.work: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._failures = failures
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while (work := self.work.get()) is not None:
            try:
                work()
            except Exception as error:
                self._failures.append(error)

    def finish(self) -> None:
        point = _Point()
        self.work.put(point.pass_by)
        point.passed.wait()


class FakeDriver:
    def __init__(self) -> None:
        self.devices = 1
        self.fail: dict[str, int] = {}  # function -> the error it gives from now on
        self.calls: list[str] = []
        self.failures: list[Exception] = []  # of queued work: waiting gives an error from then on, as with a real GPU
        self._handles = itertools.count(0x5000_0000, 8)
        self._streams: dict[int, _Stream] = {}
        self._events: dict[int, _Point | None] = {}
        self._memory: dict[int, np.ndarray] = {}
        self._pinned: dict[int, np.ndarray] = {}
        self._thread = threading.local()

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith("cu"):
            return found

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            free = ("cuInit", "cuDevice", "cuGetError", "cuCtxPush", "cuCtxPop")
            if not name.startswith(free) and not getattr(self._thread, "contexts", None):
                return 201
            return self.fail.get(name) or found(*arguments) or 0

        if name == "cuLaunchHostFunc":  # whose types the tests set
            call.argtypes = ()  # type: ignore[attr-defined]
        return call

    # --- start ---

    def cuInit(self, flags: int) -> int:
        return 0 if self.devices else 100

    def cuDeviceGetCount(self, out: Any) -> None:
        out._obj.value = self.devices

    def cuDeviceGet(self, out: Any, index: int) -> None:
        out._obj.value = index

    def cuDevicePrimaryCtxRetain(self, out: Any, device: int) -> None:
        out._obj.value = 0xC0DE

    def cuCtxPushCurrent_v2(self, context: int) -> int:
        self._thread.contexts = [*getattr(self._thread, "contexts", []), context]
        return 0 if context == 0xC0DE else 201

    def cuCtxPopCurrent_v2(self, out: Any) -> None:
        out._obj.value = self._thread.contexts.pop()

    def cuGetErrorName(self, code: int, out: Any) -> int:
        out._obj.value = NAMES.get(code)
        return 0 if code in NAMES else 1

    def cuGetErrorString(self, code: int, out: Any) -> int:
        told = repr(self.failures[0]) if self.failures else "what it means"
        out._obj.value = told.encode() if code in NAMES else None
        return 0 if code in NAMES else 1

    # --- memory ---

    def cuMemGetInfo_v2(self, free: Any, total: Any) -> None:
        total._obj.value = MEMORY
        free._obj.value = MEMORY - sum(block.size for block in self._memory.values())

    def cuMemAlloc_v2(self, out: Any, size: int) -> int:
        if size > MEMORY - sum(block.size for block in self._memory.values()):
            return 2
        block = np.empty(size + 256, np.uint8)
        out._obj.value = -(-block.ctypes.data // 256) * 256
        self._memory[out._obj.value] = block
        return 0

    def cuMemFree_v2(self, address: int) -> int:
        for stream in self._streams.values():
            stream.finish()
        return 0 if self._memory.pop(address, None) is not None else 1

    def cuMemHostAlloc(self, out: Any, size: int, flags: int) -> None:
        block = np.empty(size, np.uint8)
        out._obj.value = block.ctypes.data
        self._pinned[block.ctypes.data] = block

    def cuMemFreeHost(self, address: int) -> int:
        return 0 if self._pinned.pop(address, None) is not None else 1

    def _inside(self, address: int, count: int, blocks: dict[int, np.ndarray]) -> bool:
        ends = ((start, b.ctypes.data + b.size) for start, b in list(blocks.items()))
        return any(start <= address and address + count <= end for start, end in ends)

    def cuMemcpyAsync(self, dst: int, src: int, count: int, stream: int) -> int:
        """As CUDA does: what comes from pageable memory is read now, what goes there is waited for."""
        ours = self._memory | self._pinned
        if stream not in self._streams:
            return 400
        if not self._inside(src, count, ours):
            staged = ctypes.create_string_buffer(ctypes.string_at(src, count), count)
            self._streams[stream].work.put(lambda: ctypes.memmove(dst, staged, count))
        else:
            self._streams[stream].work.put(lambda: ctypes.memmove(dst, src, count))
        if not self._inside(dst, count, ours):
            self._streams[stream].finish()
        return 0

    def cuMemsetD8Async(self, address: int, value: int, count: int, stream: int) -> int:
        if not self._inside(address, count, self._memory) or not 0 <= value < 256:
            return 1
        return self.launch(stream, lambda: ctypes.memset(address, value, count))

    # --- streams and events ---

    def cuStreamCreate(self, out: Any, flags: int) -> int:
        out._obj.value = next(self._handles)
        self._streams[out._obj.value] = _Stream(self.failures)
        return 0 if flags == 1 else 1

    def cuStreamDestroy_v2(self, stream: int) -> int:
        self._streams.pop(stream).work.put(None)
        return 0

    def cuStreamSynchronize(self, stream: int) -> None:
        self._streams[stream].finish()

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> int:
        point = self._events[event]
        return 400 if point is None else self.launch(stream, point.passed.wait)

    def cuEventCreate(self, out: Any, flags: int) -> None:
        out._obj.value = next(self._handles)
        self._events[out._obj.value] = None

    def cuEventRecord(self, event: int, stream: int) -> int:
        if event not in self._events:
            return 400
        self._events[event] = point = _Point()
        return self.launch(stream, point.pass_by)

    def cuEventQuery(self, event: int) -> int:
        point = self._events[event]
        return 0 if point is None or point.passed.is_set() else 600

    def cuEventSynchronize(self, event: int) -> int:
        point = self._events[event]
        if point is not None:
            point.passed.wait()
        return 700 if self.failures else 0

    def cuEventElapsedTime(self, out: Any, start: int, end: int) -> int:
        points = self._events[start], self._events[end]
        if not all(point and point.passed.is_set() for point in points):
            return 600
        out._obj.value = (points[1].seconds - points[0].seconds) * 1000  # type: ignore[union-attr]
        return 0

    def cuLaunchHostFunc(self, stream: int, function: Any, data: Any) -> int:
        return self.launch(stream, lambda: function(data))

    def launch(self, stream: int, work: Callable[[], Any]) -> int:
        """Where a kernel would be launched."""
        if stream not in self._streams:
            return 400
        self._streams[stream].work.put(work)
        return 0


def _sum_in_a_tree(self: Any, values: Any) -> Any:
    """The interpreter's own adds the rows of a tile one after the other in float32, where a GPU has a tree: of 70 that
    are all alike, ten roundings instead of four."""
    axis, data = self.axis, values.handle.data
    lines = data.reshape(-1) if axis is None else np.moveaxis(data, axis, -1)
    while lines.shape[-1] > 1:
        half = lines.shape[-1] // 2  # tiles are powers of two
        lines = lines[..., :half] + lines[..., half:]
    total = lines[..., 0]
    return self.to_tensor(np.expand_dims(total, axis) if self.keep_dims else total, values.dtype)


def stand_in(monkeypatch: Any) -> Iterator[FakeDriver]:
    """Let BACKNORM_DEVICE=cuda find this driver, with the GPU's kernels in Triton's interpreter on its streams."""
    driver, one_at_a_time = FakeDriver(), threading.Lock()

    class Kernels(backends._Cuda):
        def prepare(self, plan: plan.Plan) -> backends.Runner:
            values = {  # the interpreter wants to be told that the memory is the CPU's
                name: value._replace(device="cpu") if isinstance(value, TensorDesc) else value
                for name, value in plan.call.values.items()
            }
            run = super().prepare(replace(plan, call=replace(plan.call, values=values)))

            def work(pointers: Any) -> None:
                with one_at_a_time:  # the interpreter knows one launch at a time
                    run(pointers, None)

            def launch(pointers: Any, stream: int | None) -> None:
                assert stream is not None, "the kernels were not told their stream"
                assert driver.launch(stream, lambda: work(pointers)) == 0

            return launch

    monkeypatch.setattr("triton.runtime.interpreter.ReduceOps.sum", _sum_in_a_tree)
    monkeypatch.setattr(cuda, "load_driver", lambda: driver)
    monkeypatch.setattr(cuda, "_require_kernels", lambda: None)
    monkeypatch.setattr(cuda, "_opened", None)
    monkeypatch.setitem(backends.BACKENDS, "cuda", Kernels)
    plan._make_plan.cache_clear()
    yield driver
    plan._make_plan.cache_clear()
    assert not driver.failures
