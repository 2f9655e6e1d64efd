"""A kernel that computes nothing: what the machine's memory can do, for the benchmark to compare with."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._simd import add, load, splat, stream, take_task
from ._sums import kernel


@kernel
def move(next_task: Any, tasks: Any, a: Any, b: Any, out: Any, size: Any) -> Any:
    """Read two arrays, 256 KiB of each a task, and stream their sum into a third unless it is None."""
    one = np.float32(0)
    while True:
        task = take_task(next_task)
        if task >= tasks:
            return
        total = splat(one)
        start = task << 18
        for at in range(start, min(size - 63, start + (1 << 18)), 64):
            value = add(load(one, a + at), load(one, b + at))
            if out is not None:
                stream(one, out + at, value)
            else:
                total = add(total, value)
        if out is None:
            stream(one, a + start, total)  # one store a task, so that the reads are not optimized away
