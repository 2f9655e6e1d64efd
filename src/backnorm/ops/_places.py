"""Memory that a task of a CPU kernel has to itself while it runs: places in the workspace, of which it takes its
thread's, which that still has in its caches, or the next that is free where threads are more than places.

Not the stack, of which a thread may have little (what `threading.stack_size` says; half a MiB on macOS). Only small
calls that were made before have all of their workspace there, see `_calls.py`.
"""

from __future__ import annotations

from typing import Any

from ._native import inline, kernel
from ._program import WORKSPACE, Place, Program
from ._simd import words
from ._views import LINE, Places
from ._workers import _get, _let_others_run, _put, _replace, _write


def free_all(program: Program, places: Places) -> None:
    """A job before those that take them."""
    program.job(_free_all(), 1, 1, *place_arguments(places))


def place_arguments(places: Places) -> tuple[Place, int, int]:
    """A kernel's, for `take_place`."""
    return Place(WORKSPACE, places.offset), places.step, places.number


@inline
def _on_a_line(address: Any) -> Any:
    """A caller's workspace may begin anywhere; words that threads exchange must not lie on two cache lines."""
    return (address + LINE - 1) // LINE * LINE


@kernel
def _free_all() -> Any:
    def run(args: Any, task: Any) -> Any:
        places, step, count = words(args, 3)
        places = _on_a_line(places)
        for i in range(count):
            _write(places + i * step, 0)
            _put(places + i * step + 8, 0)

    return run


@inline
def take_place(places: Any, step: Any, count: Any, thread: Any) -> Any:
    """The address of a place, on a cache line, until it is left."""
    places, i = _on_a_line(places), thread % count
    while not _replace(places + i * step, 0, 1):
        i = (i + 1) % count
        if i == thread % count:
            _let_others_run()
    return places + i * step + LINE


@inline
def holds(place: Any, what: Any) -> Any:
    """Whether a place has this, a number that is not 0, from a task before."""
    return _get(place - LINE + 8) == what


@inline
def mark(place: Any, what: Any) -> Any:
    """Say what a place has from now on."""
    _put(place - LINE + 8, what)


@inline
def leave_place(place: Any) -> Any:
    _write(place - LINE, 0)
