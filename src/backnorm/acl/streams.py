"""Streams that really are asynchronous: numbered tasks on a queue of the hardware, and events on them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..status import Status
from .memory import Allocation
from .messages import AclFailure

if TYPE_CHECKING:
    from .runtime import Context


class Task:
    """Queued work: its name, what it does (on a queue of the hardware), the memory it uses, and a task elsewhere which
    it comes after."""

    stream: Stream
    number: int
    #: When it ended, as the hardware notes it.
    end: Any

    def __init__(
        self,
        name: str,
        run: Callable[[int], None] | None = None,
        uses: tuple[Allocation, ...] = (),
        after: Task | None = None,
    ) -> None:
        self.name, self.run, self.uses, self.after = name, run, uses, after

    @property
    def done(self) -> bool:
        return self.stream.finished >= self.number


class Stream:
    """Work runs in the order it was queued."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._lock = threading.RLock()
        self._queue = context.hardware.open_queue(self._attempt)
        self._closed = False
        self.queued = 0
        #: Queued work that no synchronization has covered yet; its memory must stay allocated.
        self._unsynchronized: deque[Task] = deque()
        self._faults: list[str] = []

    @property
    def finished(self) -> int:
        return self._queue.finished

    def submit(self, task: Task) -> Task:
        with self._lock:
            if self._closed:
                raise AclFailure(Status.ACL_ERROR_RT_INVALID_HANDLE, "the stream was destroyed")
            task.stream, task.number = self, self.queued + 1
            self._queue.put(task)  # may fail; nothing is queued then
            self.queued += 1
            self._unsynchronized.append(task)
        return task

    def _attempt(self, task: Task, queue: int) -> None:
        try:
            # A block freed too early has left a fault already.
            if task.run is not None and all(block.live for block in task.uses):
                task.run(queue)
        except MemoryError:
            self.add_fault(f"{task.name} ran out of memory")
        except Exception as error:
            self.add_fault(f"{task.name} failed: {type(error).__name__}: {error}")
        except BaseException:  # Ctrl-C, where the thread that waits does the work
            self.add_fault(f"{task.name} was interrupted")
            raise
        task.run = None  # lets go of the arrays

    def add_fault(self, sentence: str) -> None:
        with self._lock:
            self._faults.append(sentence)

    def take_faults(self) -> list[str]:
        with self._lock:
            faults, self._faults = self._faults, []
            return faults

    def wait(self, number: int, seconds: float | None) -> bool:
        """Whether task `number` ended within the time."""
        return self._queue.wait(number, seconds)

    def mark_synchronized(self, number: int) -> None:
        """The caller has seen everything up to task `number` end, and so what those tasks came after."""
        points = [(self, number)]
        while points:
            stream, number = points.pop()
            with stream._lock:
                while stream._unsynchronized and stream._unsynchronized[0].number <= number:
                    after = stream._unsynchronized.popleft().after
                    if after is not None:
                        points.append((after.stream, after.number))

    def users_of(self, block: Allocation) -> list[str]:
        """The names of the unsynchronized tasks that use a block."""
        with self._lock:
            return [task.name for task in self._unsynchronized if block in task.uses]

    def close(self, wait: bool = True) -> None:
        """Take no more work; what is queued still runs."""
        with self._lock:
            closed, self._closed = self._closed, True
            if not closed:
                self._queue.close()
        if wait:
            self.wait(self.queued, None)


class Event:
    """Remembers the newest point it was recorded at."""

    def __init__(self) -> None:
        self.recorded: Task | None = None

    def record(self, stream: Stream) -> None:
        self.recorded = stream.submit(Task("aclrtRecordEvent"))
