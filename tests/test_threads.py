"""Several threads, a stream each; and what a forked child finds of their locks."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from backnorm import acl
from backnorm.accuracy import excess
from backnorm.ops import OPS
from backnorm.plan import make_plan
from backnorm.spec import ARRAYS

from .calls import Good, make_values, truth
from .doors import fill, lay_out


def _call(name: str, rng: np.random.Generator) -> Good:
    op = OPS[name]
    values = {p.name: op.good[p.name] for p in op.params if p.kind != "out_pointer"}
    call = {}
    for key, value in values.items():
        if op.by_name[key].kind != "tensor":
            call[key] = value
            continue
        layout = lay_out(value.shape, np.float32, "gapped", rng)
        call[key] = layout if op.by_name[key].requested else fill(layout, make_values(key, value.shape, "plain", rng))
    return Good(op, "Ascend910B", "aclnn", call, tuple(p.name for p in op.outputs))


@pytest.mark.usefixtures("ready")
def test_four_threads_run_all_operators_a_hundred_times() -> None:
    start = threading.Barrier(4)

    def work(number: int) -> float:
        assert acl.rt.set_device(0) == 0
        default, ret = acl.rt.get_context()
        assert ret == 0
        stream, ret = acl.rt.create_stream()
        assert ret == 0
        rng = np.random.default_rng(number)
        worst = 0.0
        start.wait()
        for round_ in range(100):
            for name in OPS:
                good = _call(name, rng)
                golden, terms = truth(good)
                bases = good.run(stream)
                for output in good.writes:
                    view = good.call[output].view(bases[output])
                    worst = max(worst, excess(view, golden[output], terms[output]))
            assert acl.rt.synchronize_device() == 0
            mine, ret = acl.rt.create_context(0)
            assert ret == 0
            assert acl.rt.destroy_context(mine) == 0
            assert acl.rt.set_context(default) == 0
            # A mistake with this thread's own number in it: its message must be this thread's alone.
            wild = (number + 1) * 0x100000 + round_
            assert acl.rt.free(wild) == 107000
            message = acl.get_recent_err_msg()
            assert message is not None
            assert f"{wild:#x} is in no device allocation" in message
            assert "\n" not in message
        assert acl.rt.destroy_stream(stream) == 0
        return worst

    with ThreadPoolExecutor(4) as pool:
        assert max(pool.map(work, range(4))) <= 1


@pytest.mark.filterwarnings("ignore:.*use of fork")
def test_a_fork_waits_for_kernels_that_another_thread_makes() -> None:
    """A child would find the locks around them held by a thread it has not, and wait for ever."""
    begun = threading.Event()

    class Slow:
        def prepare(self, plan: Any) -> Any:
            begun.set()
            time.sleep(0.3)
            return print

    op = OPS["layer_norm_backward"]
    plan = replace(make_plan(op, op.good, "Any", ARRAYS), backend=Slow())
    thread = threading.Thread(target=lambda: plan.runner)
    thread.start()
    begun.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        os._exit(plan.runner is not print)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    thread.join()
