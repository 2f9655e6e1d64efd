"""Our CPU kernels on the threads PyTorch already has.

PyTorch's OpenMP threads look for work for milliseconds after each of its calls. In a model, where its calls and ours
take turns, threads of our own would share the CPUs with them: a LayerNorm backward of 2048 x 256 takes twice as long.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from .. import threads


@cache
def adopt() -> None:
    """Run on PyTorch's threads from now on, where its OpenMP runtime is found; else ours stay in use."""
    library = _find_library()
    if library is not None:
        try:
            threads.use_openmp(library, torch.get_num_threads)
        except (OSError, AttributeError):  # no runtime of a kind we know
            return


def _find_library() -> str | None:
    """The OpenMP runtime in this process that came with torch, or the only one there is."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[5] for line in lines if line.count("/")}
    found = sorted(path for path in paths if Path(path).name.startswith(("libgomp", "libiomp5", "libomp")))
    home = Path(torch.__file__).parent
    beside = [path for path in found if Path(path).parent in (home / "lib", home.parent / "torch.libs")]
    candidates = beside or found
    return candidates[0] if len(candidates) == 1 else None
