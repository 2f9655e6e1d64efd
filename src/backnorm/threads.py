"""A small pool of threads for kernels that run without the interpreter's lock.

Tasks of a launch are numbered; every thread takes the next number until none is left. What a task computes depends on
its number alone, so results do not depend on how many threads there are. Safe for calls from several threads at once
(each caller works on its own launch, helpers join whoever asked first) and after fork (a child makes a new pool).
"""

from __future__ import annotations

import os
import threading
from queue import SimpleQueue
from typing import Any

import numpy as np


def _usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _initial_threads() -> int:
    text = os.environ.get("BACKNORM_NUM_THREADS", "")
    if not text:
        return _usable_cpus()
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"BACKNORM_NUM_THREADS must be a positive integer; got {text!r}")
    return int(text)


class _Launch:
    """One kernel over its tasks. `seats` are for helpers: taken one by one, withdrawn when the caller is done."""

    def __init__(self, kernel: Any, tasks: int, arguments: tuple[Any, ...], helpers: int) -> None:
        self.kernel, self.tasks, self.arguments = kernel, tasks, arguments
        self.next_task = np.zeros(1, np.int64)
        self.seats = [None] * helpers
        self.done: SimpleQueue[BaseException | None] = SimpleQueue()

    def work(self) -> None:
        self.kernel(self.next_task.ctypes.data, self.tasks, *self.arguments)

    def help(self) -> None:
        try:
            self.seats.pop()
        except IndexError:
            return
        try:
            self.work()
        except BaseException as error:
            self.done.put(error)
        else:
            self.done.put(None)


class _Pool:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.launches: SimpleQueue[_Launch] = SimpleQueue()
        self.helpers = 0

    def ensure(self, helpers: int) -> None:
        if self.helpers >= helpers:
            return
        with self.lock:
            while self.helpers < helpers:
                threading.Thread(target=self._serve, name="backnorm-worker", daemon=True).start()
                self.helpers += 1

    def _serve(self) -> None:
        while True:
            self.launches.get().help()


class _Alone(threading.local):
    """A counter of tasks for launches that need no helpers."""

    def __init__(self) -> None:
        self._counter = np.zeros(1, np.int64)
        self._address = self._counter.ctypes.data

    def next_task(self) -> int:
        self._counter[0] = 0
        return self._address


_alone = _Alone()
_pool = _Pool()
_num_threads: int | None = None


def _forget_pool() -> None:
    global _pool
    _pool = _Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def get_num_threads() -> int:
    """How many threads a call may use: BACKNORM_NUM_THREADS, or the CPUs this process may run on."""
    global _num_threads
    if _num_threads is None:
        _num_threads = _initial_threads()
    return _num_threads


def set_num_threads(threads: int) -> None:
    """Choose how many threads calls may use from now on; results do not depend on it."""
    global _num_threads
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise ValueError(f"set_num_threads: threads must be a positive integer; got {threads!r}")
    _num_threads = threads


#: Elements below which another thread costs more than it brings: waking one takes some 100 microseconds.
_ELEMENTS_A_THREAD = 1 << 18


def launch(kernel: Any, tasks: int, elements: int, *arguments: Any) -> None:
    """Run kernel(address of the next task's number, tasks, *arguments) on the caller's and the pool's threads.

    `elements` is the size of the whole work, which decides how many threads are worth waking.
    """
    helpers = min(get_num_threads(), tasks, elements // _ELEMENTS_A_THREAD) - 1
    if helpers <= 0:
        kernel(_alone.next_task(), tasks, *arguments)
        return
    work = _Launch(kernel, tasks, arguments, helpers)
    _pool.ensure(helpers)
    for _ in range(helpers):
        _pool.launches.put(work)
    work.work()
    unused = 0
    while work.seats:
        try:
            work.seats.pop()
            unused += 1
        except IndexError:
            break
    for _ in range(helpers - unused):
        error = work.done.get()
        if error is not None:
            raise error
