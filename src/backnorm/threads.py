"""How many threads a call may use, and the pool they come from.

Helpers are Python threads that never hold the interpreter's lock while they wait or work (`ops/_workers.py`): after a
job they look for the next one for a moment, then sleep. Tasks of a job are numbered, and what a task computes depends
on its number alone, so results do not depend on how many threads there are. One caller at a time has the helpers; who
calls meanwhile works alone. A forked child makes a pool of its own.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .forks import preparing


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


#: Elements below which another thread costs more than it brings: a helper that looks joins within a microsecond, one
#: that sleeps takes its caller some 5 microseconds to wake.
_ELEMENTS_A_THREAD = 1 << 14
#: How often a helper looks for work before it sleeps: some 100 microseconds, the time between two calls.
_LOOKS = 2000


class _Pool:
    def __init__(self) -> None:
        from .ops import _workers

        self._lock = threading.Lock()
        self._helpers: list[threading.Thread] = []
        self._code = _workers
        self._memory = np.zeros(_workers.POOL_BYTES + 64, np.uint8)
        self.address = -(-self._memory.ctypes.data // 64) * 64
        c = ctypes.CDLL(None)
        c.pthread_mutex_init(ctypes.c_void_p(self.address + _workers.MUTEX), None)
        c.pthread_cond_init(ctypes.c_void_p(self.address + _workers.CONDITION), None)
        self._wake_all = c.pthread_cond_broadcast

    def ensure(self, helpers: int) -> None:
        if len(self._helpers) >= helpers:
            return
        with self._lock:
            # A helper that looks takes a CPU from whoever else would use it: not where there is none to spare.
            self._set(self._code.SPINS, _LOOKS if helpers < _usable_cpus() else 0)
            while len(self._helpers) < helpers:
                serve = self._code.serve.ctypes
                arguments = self.address, len(self._helpers) + 1
                helper = threading.Thread(target=serve, args=arguments, name="backnorm-worker", daemon=True)
                helper.start()
                self._helpers.append(helper)

    def team(self, elements: int, threads: int) -> tuple[int, int]:
        """The address of a pool, and how many of these threads it has for so much work."""
        self.ensure(threads - 1)  # which of them are worth waking is seen job by job
        return self.address, threads

    def stop(self) -> None:
        """Let the helpers return: native code must not be running when the interpreter takes it away."""
        self._set(self._code.STOP, 1)
        while any(helper.is_alive() for helper in self._helpers):
            self._wake_all(ctypes.c_void_p(self.address + self._code.CONDITION))
            for helper in self._helpers:
                helper.join(0.001)

    def _set(self, word: int, value: int) -> None:
        ctypes.c_int64.from_address(self.address + word).value = value


class _OpenMP:
    """The threads of an OpenMP runtime that another library uses, PyTorch's: they look for work for milliseconds after
    each of its calls, and threads of our own would get no CPU beside them. Small programs the caller runs alone."""

    def __init__(self, library: str, most: Callable[[], int]) -> None:
        self._library = ctypes.CDLL(library)
        parallel = ctypes.cast(self._library.GOMP_parallel, ctypes.c_void_p).value or 0
        self._most, self._memory = most, _TeamMemory(parallel)

    def team(self, elements: int, threads: int) -> tuple[int, int]:
        return self._memory.address, min(threads, self._most(), elements // _ELEMENTS_A_THREAD)

    def stop(self) -> None:
        """They are not ours."""


class _TeamMemory(threading.local):
    """Each caller's pool, for the call its team is at."""

    def __init__(self, parallel: int) -> None:
        from .ops import _workers

        self._memory = np.zeros(_workers.TEAM_BYTES + 64, np.uint8)
        self.address = -(-self._memory.ctypes.data // 64) * 64
        for word, value in ((_workers.PARALLEL, parallel), (_workers.JOIN, _workers.join_team.address)):
            ctypes.c_uint64.from_address(self.address + word).value = value


class _Words(threading.local):
    """Each thread's memory for the numbers of the program it runs."""

    def __init__(self) -> None:
        self.take(512)

    def take(self, count: int) -> None:
        self._memory = np.zeros(count, np.int64)
        self.buffer: Any = self._memory.data.cast("B")
        self.address, self.count = self._memory.ctypes.data, count


_words = _Words()
_pool: _Pool | _OpenMP | None = None
_pool_lock = threading.Lock()
#: Kept, since a call may be under way that has their addresses.
_stopped: list[_Pool | _OpenMP] = []
_num_threads: int | None = None
#: An OpenMP runtime's threads stay with the parent; to ask for them in the child hangs.
_forked = False


def _get_pool() -> _Pool | _OpenMP:
    global _pool
    with preparing, _pool_lock:
        if _pool is None:
            _pool = _Pool()
        return _pool


def use_openmp(library: str, most: Callable[[], int]) -> None:
    """From now on run calls on the threads of the OpenMP runtime in this file, at most as many as `most()` says.

    A forked child, where such a runtime may not be used, has threads of its own again. AttributeError where it is none.
    """
    global _pool
    with _pool_lock:
        if not isinstance(_pool, _OpenMP) and not _forked:
            ours, _pool = _pool, _OpenMP(library, most)
            if ours is not None:
                ours.stop()
                _stopped.append(ours)


def _forget_pool() -> None:
    global _pool, _pool_lock, _forked
    if _pool is not None:
        _stopped.append(_pool)
    _pool, _pool_lock, _forked = None, threading.Lock(), True


@atexit.register
def _stop_pool() -> None:
    if _pool is not None:
        _pool.stop()


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


_pack = [struct.Struct(f"{count}q").pack_into for count in range(32)]


def team(elements: int) -> tuple[int, int, int]:
    """Who runs a program whose largest job has so many elements, as native code is told: the address of a pool, how
    many threads, and for how many elements one more is worth waking."""
    pool = _pool or _get_pool()
    address, threads = pool.team(elements, _num_threads or get_num_threads())
    return address, threads, _ELEMENTS_A_THREAD


def run(code: Any, pointers: Sequence[int]) -> None:
    """Run a program (`Program.code()`) with the address of the workspace and those of its tensors."""
    from .ops._workers import run as run_native

    places = len(pointers)
    if _words.count < code.words:
        _words.take(2 * code.words)
    _pack[places](_words.buffer, 0, *pointers)
    words = _words.address
    pool, threads, least = team(code.elements)
    run_native.ctypes(pool, code.address, words, words + 8 * places, threads, least)


class Runner:
    """A program, to be run with the addresses of its workspace and tensors."""

    def __init__(self, code: Any) -> None:
        self.code = code
        #: Whether its caller runs it without other threads.
        self.alone = code.elements < 2 * _ELEMENTS_A_THREAD

    def __call__(self, pointers: Sequence[int], stream: int | None) -> None:
        run(self.code, pointers)
