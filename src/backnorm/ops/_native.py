"""From Python functions to native code: kernels, each compiled once for its constants and kept on disk."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from numba import njit, types
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc

_SOURCES = hashlib.sha256(
    b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py")))
).hexdigest()

#: Divisions by zero give Inf and NaN, as they do in the reference.
_OPTIONS: dict[str, Any] = {"error_model": "numpy", "nogil": True}

inline: Any = njit(forceinline=True, **_OPTIONS)  # a piece of kernels, compiled as if written out where it is called


def native(function: Any, *parameters: Any, result: Any = types.void) -> Any:
    """A function of these types as C code, from the cache on disk if it is there.

    Numba takes code from its cache while the function's own file is unchanged; ours are made of pieces of other files,
    so the hash of all of them takes the place of that stamp. The CPU's name and features are in Numba's key already,
    and so are the constants the function closes over.
    """
    compiled: Any = CFunc(function, (parameters, result), {}, dict(_OPTIONS))
    try:
        compiled._cache = FunctionCache(function)
        compiled._cache._cache_file._source_stamp = _SOURCES
    except (RuntimeError, AttributeError):  # nowhere to keep it; compiled anew in every process
        pass
    compiled.compile()
    return compiled


class Kernel:
    """`kernel(*constants)` is the address of native code `run(args, task)`, compiled for these constants.

    Made from a function of the constants (tags of types, switches) that returns `run`. The arguments of all the tasks
    are whole numbers at the address `args`; what a task computes depends on its number alone. A third parameter is the
    number of the thread that runs it, for a place of its own, see `_places.py`.
    """

    def __init__(self, make: Any) -> None:
        self._make = make
        self._compiled: dict[Any, Any] = {}
        self.__doc__ = make.__doc__

    def __call__(self, *constants: Any) -> int:
        key = tuple((type(constant), constant) for constant in constants)
        if key not in self._compiled:
            run = self._make(*constants)
            self._compiled[key] = native(run, *[types.int64] * run.__code__.co_argcount)
        address: int = self._compiled[key].address
        return address


kernel = Kernel
