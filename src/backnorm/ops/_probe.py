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
        t0, t1, t2, t3 = splat(one), splat(one), splat(one), splat(one)
        start = task << 18
        for at in range(start, min(size - 255, start + (1 << 18)), 256):
            v0, v1 = add(load(one, a + at), load(one, b + at)), add(load(one, a + at + 64), load(one, b + at + 64))
            v2 = add(load(one, a + at + 128), load(one, b + at + 128))
            v3 = add(load(one, a + at + 192), load(one, b + at + 192))
            if out is not None:
                stream(one, out + at, v0)
                stream(one, out + at + 64, v1)
                stream(one, out + at + 128, v2)
                stream(one, out + at + 192, v3)
            else:
                t0, t1, t2, t3 = add(t0, v0), add(t1, v1), add(t2, v2), add(t3, v3)
        if out is None:  # one store a task, so that the reads are not optimized away
            stream(one, a + start, add(add(t0, t1), add(t2, t3)))
