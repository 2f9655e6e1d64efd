"""Streams that really are asynchronous: a queue and a worker thread each; and events on them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING

from ..status import Status
from .memory import Allocation
from .messages import AclFailure

if TYPE_CHECKING:
    from .runtime import Context


class Task:
    """Queued work: its name, what it runs, the memory it uses, and a task elsewhere it comes after."""

    stream: Stream
    number: int

    def __init__(
        self,
        name: str,
        run: Callable[[], None] | None = None,
        uses: tuple[Allocation, ...] = (),
        after: Task | None = None,
    ) -> None:
        self.name, self.run, self.uses, self.after = name, run, uses, after
        self.seconds = 0.0  # when it ended

    @property
    def done(self) -> bool:
        return self.stream.finished >= self.number


class Stream:
    """Work runs in the order it was queued, on a thread of its own that starts with the first task."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._queue: SimpleQueue[Task | None] = SimpleQueue()
        self._worker: threading.Thread | None = None
        self._changed = threading.Condition()
        self._closed = False
        self.queued = 0
        self.finished = 0
        #: Queued work that no synchronization has covered yet; its memory must stay allocated.
        self._unsynchronized: deque[Task] = deque()
        self._faults: list[str] = []

    def submit(self, task: Task) -> Task:
        with self._changed:
            if self._closed:
                raise AclFailure(Status.ACL_ERROR_RT_INVALID_HANDLE, "the stream was destroyed")
            if self._worker is None:
                worker = threading.Thread(target=self._work, name="backnorm-stream", daemon=True)
                worker.start()  # may fail; nothing is queued then
                self._worker = worker
            self.queued += 1
            task.stream, task.number = self, self.queued
            self._unsynchronized.append(task)
            self._queue.put(task)
        return task

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            if task.after is not None:
                task.after.stream.wait(task.after.number, None)
            try:
                # A block freed too early has left a fault already.
                if task.run is not None and all(block.live for block in task.uses):
                    task.run()
            except MemoryError:
                self.add_fault(f"{task.name} ran out of memory")
            except Exception as error:
                self.add_fault(f"{task.name} failed: {type(error).__name__}: {error}")
            task.run = None  # lets go of the arrays
            task.seconds = time.perf_counter()
            with self._changed:
                self.finished = task.number
                self._changed.notify_all()

    def add_fault(self, sentence: str) -> None:
        with self._changed:
            self._faults.append(sentence)

    def take_faults(self) -> list[str]:
        with self._changed:
            faults, self._faults = self._faults, []
            return faults

    def wait(self, number: int, seconds: float | None) -> bool:
        """Whether task `number` ended within the time."""
        with self._changed:
            return self._changed.wait_for(lambda: self.finished >= number, seconds)

    def mark_synchronized(self, number: int) -> None:
        """The caller has seen everything up to task `number` end, and so what those tasks came after."""
        points = [(self, number)]
        while points:
            stream, number = points.pop()
            with stream._changed:
                while stream._unsynchronized and stream._unsynchronized[0].number <= number:
                    after = stream._unsynchronized.popleft().after
                    if after is not None:
                        points.append((after.stream, after.number))

    def users_of(self, block: Allocation) -> list[str]:
        """The names of the unsynchronized tasks that use a block."""
        with self._changed:
            return [task.name for task in self._unsynchronized if block in task.uses]

    def close(self, wait: bool = True) -> None:
        """Take no more work, and end the worker once what is queued is done."""
        with self._changed:
            worker = None if self._closed else self._worker
            self._closed = True
            if worker is not None:
                self._queue.put(None)
        if wait:
            self.wait(self.queued, None)


class Event:
    """Remembers the newest point it was recorded at."""

    def __init__(self) -> None:
        self.recorded: Task | None = None

    def record(self, stream: Stream) -> None:
        self.recorded = stream.submit(Task("aclrtRecordEvent"))
