"""A kernel that computes nothing: what the machine's memory can do, for the benchmark to compare with."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._lanes import add, splat
from ._native import kernel
from ._simd import load, stream, words

TASK_BYTES = 1 << 18


@kernel
def move(writes: Any) -> Any:
    """Read two arrays, TASK_BYTES of each a task, and stream their sum into a third, or keep it to itself."""

    def run(args: Any, task: Any) -> Any:
        a, b, out, size = words(args, 4)
        one = np.float32(0)
        t0, t1, t2, t3 = splat(one), splat(one), splat(one), splat(one)
        start = task * TASK_BYTES
        for at in range(start, min(size - 255, start + TASK_BYTES), 256):
            v0, v1 = add(load(one, a + at), load(one, b + at)), add(load(one, a + at + 64), load(one, b + at + 64))
            v2 = add(load(one, a + at + 128), load(one, b + at + 128))
            v3 = add(load(one, a + at + 192), load(one, b + at + 192))
            if writes:
                stream(one, out + at, v0)
                stream(one, out + at + 64, v1)
                stream(one, out + at + 128, v2)
                stream(one, out + at + 192, v3)
            else:
                t0, t1, t2, t3 = add(t0, v0), add(t1, v1), add(t2, v2), add(t3, v3)
        if not writes:  # one store a task, so that the reads are not optimized away
            stream(one, a + start, add(add(t0, t1), add(t2, t3)))

    return run
