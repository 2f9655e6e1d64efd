"""The pool's native side: helper threads that wait without the interpreter, and programs of kernels run over them.

The pool is a block of memory. Its first words, each on a cache line of its own where threads meet:

    seats     how many more helpers the running job takes; a helper takes one before it looks at the job
    finished  how many helpers are done with the job
    sleepers  how many helpers wait on the condition; others look at `seats` in a loop for a while
    busy      1 while a caller has the helpers; another caller then works alone
    job       function, arguments, the tasks' first and end, how many ranges they are divided into, whether each is
              done from its end
    stop      1 when the helpers shall return
    parallel  0, or the function of an OpenMP runtime by whose threads the pool is served for one program at a time
    ranges    the next task of each; a thread begins with its own, the same in every job, and then helps the others, so
              that the next job's tasks find in its core's caches what the last one's left there

A program is a block of whole numbers, see `_program.py`.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ._native import inline, native
from ._views import LINE

_i32, _i64 = ir.IntType(32), ir.IntType(64)

SEATS, FINISHED, SLEEPERS, BUSY, JOB, STOP, SPINS = (LINE * i for i in range(7))
_FUNCTION, _ARGS, _FIRST, _END, _RANGES, _BACKWARDS = (JOB + 8 * i for i in range(6))
MUTEX, CONDITION, PARALLEL, RANGES = LINE * 7, LINE * 9, LINE * 11, LINE * 12
MOST_RANGES = 16
POOL_BYTES = RANGES + MOST_RANGES * LINE


def _intrinsic(function: Any) -> Any:
    return intrinsic(function)


def _word(b: Any, address: Any) -> Any:
    return b.inttoptr(address, _i64.as_pointer())


@_intrinsic
def _read(typing: Any, address: Any) -> Any:
    """What another thread may be writing."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.load_atomic(_word(b, args[0]), "seq_cst", 8)

    return types.int64(types.int64), generate


@_intrinsic
def _write(typing: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.store_atomic(args[1], _word(b, args[0]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), generate


@_intrinsic
def _add(typing: Any, address: Any, value: Any) -> Any:
    """Adds, and gives what was there before."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.atomic_rmw("add", _word(b, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@_intrinsic
def _exchange(typing: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.atomic_rmw("xchg", _word(b, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@_intrinsic
def _replace(typing: Any, address: Any, old: Any, new: Any) -> Any:
    """Whether the word was `old` and is now `new`."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.extract_value(b.cmpxchg(_word(b, args[0]), args[1], args[2], "seq_cst", "seq_cst"), 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


@_intrinsic
def _get(typing: Any, address: Any) -> Any:
    return types.int64(types.int64), lambda context, b, signature, args: b.load(_word(b, args[0]))


@_intrinsic
def _put(typing: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.store(args[1], _word(b, args[0]))
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), generate


@_intrinsic
def _call(typing: Any, function: Any, args_at: Any, task: Any, thread: Any) -> Any:
    """Most kernels have no parameter for the thread; one more argument, in a register, does them nothing."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_i64, _i64, _i64])
        b.call(b.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64, types.int64), generate


def _posix(name: str, arguments: int) -> Any:
    """A function of the C library that takes addresses."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        function = ir.FunctionType(_i32, [_i64] * arguments)
        for known in b.module.functions:
            if known.name == name:
                break
        else:
            known = ir.Function(b.module, function, name)
        b.call(known, args)
        return context.get_dummy_value()

    def nothing(typing: Any) -> Any:
        return types.none(), generate

    def one(typing: Any, a: Any) -> Any:
        return types.none(types.int64), generate

    def two(typing: Any, a: Any, b: Any) -> Any:
        return types.none(types.int64, types.int64), generate

    call: Any = (nothing, one, two)[arguments]

    call.__name__ = name
    return _intrinsic(call)


_lock, _unlock = _posix("pthread_mutex_lock", 1), _posix("pthread_mutex_unlock", 1)
_wait, _wake_all = _posix("pthread_cond_wait", 2), _posix("pthread_cond_broadcast", 1)
_let_others_run = _posix("sched_yield", 0)


@_intrinsic
def _pause(typing: Any) -> Any:
    """A moment that leaves the core to its other thread."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        if platform.machine() in ("x86_64", "AMD64"):
            b.call(b.module.declare_intrinsic("llvm.x86.sse2.pause", (), ir.FunctionType(ir.VoidType(), [])), [])
        elif platform.machine() in ("aarch64", "arm64"):
            hint = b.module.declare_intrinsic("llvm.aarch64.hint", (), ir.FunctionType(ir.VoidType(), [_i32]))
            b.call(hint, [_i32(1)])
        return context.get_dummy_value()

    return types.none(), generate


@inline
def _start_of_range(index: Any, ranges: Any, first: Any, end: Any) -> Any:
    return first + (end - first) * index // ranges


@inline
def _take_tasks(pool: Any, thread: Any) -> Any:
    function, args, first, end = _read(pool + _FUNCTION), _read(pool + _ARGS), _read(pool + _FIRST), _read(pool + _END)
    ranges, backwards = _read(pool + _RANGES), _read(pool + _BACKWARDS)
    for i in range(ranges):
        index = (thread + i) % ranges
        place, start = pool + RANGES + index * LINE, _start_of_range(index, ranges, first, end)
        last = _start_of_range(index + 1, ranges, first, end)
        while _read(place) < last:
            task = _add(place, 1)
            if task < last:
                _call(function, args, start + last - 1 - task if backwards else task, thread)


def _serve(pool, thread):  # type: ignore[no-untyped-def]
    """A helper's life: wait for seats, first looking, then asleep; take one; work. The caller is thread 0."""
    spins = 0
    while _read(pool + STOP) == 0:
        seats = _read(pool + SEATS)
        if seats > 0:
            if _replace(pool + SEATS, seats, seats - 1):
                _take_tasks(pool, thread)
                _add(pool + FINISHED, 1)
                spins = 0
        elif spins < _read(pool + SPINS):
            _pause()
            spins += 1
        else:
            _lock(pool + MUTEX)
            _add(pool + SLEEPERS, 1)
            while _read(pool + SEATS) <= 0 and _read(pool + STOP) == 0:
                _wait(pool + CONDITION, pool + MUTEX)
            _add(pool + SLEEPERS, -1)
            _unlock(pool + MUTEX)
            spins = 0


@inline
def _wake_sleepers(pool: Any) -> Any:
    if _read(pool + SLEEPERS) > 0:
        _lock(pool + MUTEX)
        _wake_all(pool + CONDITION)
        _unlock(pool + MUTEX)


@inline
def _run_job(pool: Any, helpers: Any, function: Any, args: Any, first: Any, last: Any, backwards: Any) -> Any:
    """Tasks from `first` to `last` on the caller's thread and up to `helpers` others; returns when all are done."""
    if helpers <= 0:
        for task in range(first, last):
            _call(function, args, first + last - 1 - task if backwards else task, 0)
        return
    _write(pool + _FUNCTION, function)
    _write(pool + _ARGS, args)
    _write(pool + _FIRST, first)
    _write(pool + _END, last)
    _write(pool + _BACKWARDS, backwards)
    ranges = min(helpers + 1, MOST_RANGES)
    _write(pool + _RANGES, ranges)
    for index in range(ranges):
        _write(pool + RANGES + index * LINE, _start_of_range(index, ranges, first, last))
    _write(pool + FINISHED, 0)
    _write(pool + SEATS, helpers)
    _wake_sleepers(pool)
    _take_tasks(pool, 0)
    joined = helpers - _exchange(pool + SEATS, 0)
    looks = 0
    while _read(pool + FINISHED) < joined:
        looks += 1
        if looks < 4096:
            _pause()
        else:  # more threads than CPUs: the one that is waited for may be waiting for this one's
            _let_others_run()


@inline
def _run_program(pool: Any, program: Any, pointers: Any, words: Any, threads: Any, least: Any) -> Any:
    """Run a program: its arguments are copied to `words`, with the pointers added where it says so.

    `least`: elements for which another thread is worth waking.
    """
    count, relocations, jobs = _get(program), _get(program + 8), _get(program + 16)
    at = program + 24
    for i in range(count):
        _put(words + 8 * i, _get(at + 8 * i))
    at += 8 * count
    for _ in range(relocations):
        place = words + 8 * _get(at)
        _put(place, _get(place) + _get(pointers + 8 * _get(at + 8)))
        at += 16
    mine = threads > 1 and _replace(pool + BUSY, 0, 1)
    for _ in range(jobs):
        function, first, last, elements = _get(at), _get(at + 8), _get(at + 16), _get(at + 24)
        helpers = min(threads, last - first, elements // least) - 1 if mine else 0
        _run_job(pool, helpers, function, words + 8 * _get(at + 32), first, last, _get(at + 40))
        at += 48
    if mine:
        _write(pool + BUSY, 0)


#: Of a pool that OpenMP's threads serve, a *team*: what each of them calls, which one comes first, and what it runs.
JOIN, _TEAM_FIRST, _TEAM_ARGUMENTS = PARALLEL + 8, POOL_BYTES, POOL_BYTES + LINE
TEAM_BYTES = POOL_BYTES + 2 * LINE


@_intrinsic
def _call_parallel(typing: Any, function: Any, join: Any, team: Any, threads: Any) -> Any:
    """GOMP_parallel: the function `join` on that many threads; returns when all are done."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_i64, _i64, _i32, _i32])
        function, join, team, threads = args
        b.call(b.inttoptr(function, kind.as_pointer()), [join, team, b.trunc(threads, _i32), _i32(0)])
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64, types.int64), generate


@inline
def run_in(pool: Any, program: Any, pointers: Any, words: Any, threads: Any, least: Any) -> Any:
    """The same by whichever threads the pool has. With 1 for `threads` the caller works alone, and needs no pool."""
    if threads <= 1 or _get(pool + PARALLEL) == 0:
        _run_program(pool, program, pointers, words, threads, least)
        return
    _put(pool + STOP, 0)
    _put(pool + _TEAM_FIRST, 0)
    _put(pool + _TEAM_ARGUMENTS, program)
    _put(pool + _TEAM_ARGUMENTS + 8, pointers)
    _put(pool + _TEAM_ARGUMENTS + 16, words)
    _put(pool + _TEAM_ARGUMENTS + 24, threads)
    _put(pool + _TEAM_ARGUMENTS + 32, least)
    _call_parallel(_get(pool + PARALLEL), _get(pool + JOIN), pool, threads)


def _run(pool, program, pointers, words, threads, least):  # type: ignore[no-untyped-def]
    run_in(pool, program, pointers, words, threads, least)


def _join_team(team):  # type: ignore[no-untyped-def]
    """What each of a team's threads does, called by all at once: the first runs the program, the others help."""
    thread = _add(team + _TEAM_FIRST, 1)
    if thread == 0:
        at = team + _TEAM_ARGUMENTS
        _run_program(team, _get(at), _get(at + 8), _get(at + 16), _get(at + 24), _get(at + 32))
        _write(team + STOP, 1)
        return
    looks = 0
    while _read(team + STOP) == 0:
        seats = _read(team + SEATS)
        if seats > 0:
            if _replace(team + SEATS, seats, seats - 1):
                _take_tasks(team, thread)
                _add(team + FINISHED, 1)
                looks = 0
        elif looks < 4096:
            _pause()
            looks += 1
        else:
            _let_others_run()


serve = native(_serve, types.int64, types.int64)
run = native(_run, *[types.int64] * 6)
join_team = native(_join_team, types.int64)
