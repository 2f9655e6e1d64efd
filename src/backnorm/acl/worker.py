"""The work of one stream on the CPU: a thread of its own does it, or whoever waits for it.

Waking a thread takes some 30 microseconds and, with the interpreter's lock, costs the one that wakes it as much: far
more than a small kernel. So who waits for a task does what has not begun yet himself; and for a while after it had
work, the thread looks for more every millisecond instead of being woken.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .streams import Task

#: Seconds between two looks, and how many looks without a new task end in sleep.
_LOOK_EVERY, _LOOKS = 0.001, 20


class Worker:
    """Tasks in the order they were put, one at a time; `attempt` does one and never raises."""

    def __init__(self, attempt: Callable[[Task, int], None]) -> None:
        self._attempt = attempt
        self._tasks: deque[Task] = deque()
        self._newest = 0
        self.finished = 0
        self._thread: threading.Thread | None = None
        self._closed = False
        #: Held by whoever does the next tasks.
        self._turn = threading.Lock()
        self._changed = threading.Condition()
        #: What the thread waits on, and how: not at all, between two looks, or asleep.
        self._bell = threading.Lock()
        self._bell.acquire()
        self._waits = self._asleep = False

    def put(self, task: Task) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="backnorm-stream", daemon=True)
            thread.start()  # may fail; nothing is queued then
            self._thread = thread
        with self._changed:
            self._tasks.append(task)
            self._newest = task.number
            if self._asleep or len(self._tasks) > 1:
                self._ring()

    def close(self) -> None:
        """No more tasks will come; those queued still run."""
        self._closed = True
        self._ring()

    def wait(self, number: int, seconds: float | None) -> bool:
        """Whether task `number` ended within the time."""
        if seconds is None and self._turn.acquire(blocking=False):
            try:
                self._run(number)
            finally:
                self._turn.release()
        if self.finished >= number:
            return True
        self._ring()
        with self._changed:
            return self._changed.wait_for(lambda: self.finished >= number, seconds)

    def _run(self, number: int | None) -> None:
        """Do what is queued, up to task `number`; the caller has the turn."""
        while self._tasks and (number is None or self.finished < number):
            task = self._tasks.popleft()
            try:
                if task.after is not None:
                    task.after.stream.wait(task.after.number, None)
                self._attempt(task, 0)
            finally:
                task.end = time.perf_counter()
                with self._changed:
                    self.finished = task.number
                    self._changed.notify_all()

    # --- the thread ---

    def _work(self) -> None:
        looks = seen = 0
        while not self._closed or self._tasks:
            if self._tasks:
                with self._turn:
                    self._run(None)
            looks, seen = (looks + 1, seen) if seen == self._newest else (0, self._newest)
            with self._changed:
                if self._tasks or self._closed:
                    continue
                self._waits, self._asleep = True, looks >= _LOOKS
            rung = self._bell.acquire(timeout=-1 if self._asleep else _LOOK_EVERY)
            with self._changed:
                if not rung and not self._waits:
                    self._bell.acquire()  # rung after all, when the time was up
                self._waits = self._asleep = False

    def _ring(self) -> None:
        with self._changed:
            if self._waits:
                self._waits = self._asleep = False
                self._bell.release()
