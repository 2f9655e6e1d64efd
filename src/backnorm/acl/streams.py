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
            self.queued += 1
            task.stream, task.number = self, self.queued
            self._unsynchronized.append(task)
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="backnorm-stream", daemon=True)
                self._worker.start()
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
        seen = []
        with self._changed:
            while self._unsynchronized and self._unsynchronized[0].number <= number:
                seen.append(self._unsynchronized.popleft())
        for task in seen:
            if task.after is not None:
                task.after.stream.mark_synchronized(task.after.number)

    def users_of(self, block: Allocation) -> list[str]:
        """The names of the unsynchronized tasks that use a block."""
        with self._changed:
            return [task.name for task in self._unsynchronized if block in task.uses]

    def close(self) -> None:
        """Take no more work, and end the worker once what is queued is done."""
        with self._changed:
            self._closed = True
            worker = self._worker
            if worker is not None:
                self._queue.put(None)
        if worker is not None:
            worker.join()


class Event:
    """Remembers the newest point it was recorded at."""

    def __init__(self) -> None:
        self.recorded: Task | None = None

    def record(self, stream: Stream) -> None:
        self.recorded = stream.submit(Task("aclrtRecordEvent"))
