"""A stream's thread and those who wait for it share its work."""

from __future__ import annotations

import random
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from backnorm.acl import worker
from backnorm.acl.worker import Worker


class Log:
    """Tasks that note who did them; a worker to give them to."""

    def __init__(self) -> None:
        self.done: list[tuple[int, int]] = []
        self.worker = Worker(self._attempt)
        self.newest = 0

    def _attempt(self, task: Any, queue: int) -> None:
        if task.run:
            task.run()
        self.done.append((task.number, threading.get_ident()))

    def put(self, run: Any = None) -> int:
        self.newest += 1
        self.worker.put(SimpleNamespace(number=self.newest, after=None, run=run))  # type: ignore[arg-type]
        return self.newest

    def settle(self) -> None:
        """Let the thread fall asleep."""
        time.sleep(worker._LOOK_EVERY * worker._LOOKS * 3)


@pytest.fixture
def log() -> Any:
    log = Log()
    yield log
    log.worker.close()


def finished_by_itself(log: Log) -> bool:
    deadline = time.monotonic() + 10
    while log.worker.finished < log.newest and time.monotonic() < deadline:
        time.sleep(0.0005)
    return log.worker.finished == log.newest


@pytest.mark.parametrize("asleep", [False, True])
def test_the_thread_works_though_nobody_waits(log: Log, asleep: bool) -> None:
    for _ in range(5):
        for _ in range(random.randint(1, 3)):
            log.put()
        assert finished_by_itself(log)
        if asleep:
            log.settle()
    assert [number for number, _ in log.done] == list(range(1, log.newest + 1))
    assert threading.get_ident() not in {who for _, who in log.done}


def test_who_waits_does_what_has_not_begun(log: Log) -> None:
    log.put()
    assert finished_by_itself(log)
    mine = 0
    for _ in range(50):
        number = log.put()
        assert log.worker.wait(number, None)
        mine += log.done[-1] == (number, threading.get_ident())
    assert mine > 25, "between two looks of the thread, the work is the waiter's"


def test_who_waits_does_not_more_than_asked(log: Log) -> None:
    held = threading.Event()
    first = log.put()
    log.put(lambda: held.wait(10))
    assert log.worker.wait(first, None)
    assert not log.worker.wait(log.newest, 0.01)  # with a limit, one only waits
    held.set()
    assert log.worker.wait(log.newest, 10)


def test_nothing_is_lost_or_done_twice_between_many_threads(log: Log) -> None:
    put = threading.Lock()

    def client() -> None:
        for _ in range(300):
            with put:
                number = log.put()
            if random.random() < 0.5:
                assert log.worker.wait(number, None if random.random() < 0.7 else 10)
            if random.random() < 0.02:
                time.sleep(random.random() * 0.03)

    threads = [threading.Thread(target=client) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.worker.wait(log.newest, 10)
    assert [number for number, _ in log.done] == list(range(1, 1801))


def test_the_thread_ends_with_the_last_task_after_close(log: Log) -> None:
    for pause in (False, True):
        one = Log()
        one.put(lambda: time.sleep(0.01))
        if pause:
            one.settle()
        one.worker.close()
        thread = one.worker._thread
        assert thread is not None
        thread.join(10)
        assert not thread.is_alive()
        assert one.worker.finished == 1


def test_an_interrupt_while_waiting_does_not_pass_for_success() -> None:
    from backnorm.acl.hardware import Cpu
    from backnorm.acl.runtime import Context
    from backnorm.acl.streams import Stream, Task

    stream = Stream(Context(0, Cpu()))
    stream.submit(Task("first"))
    assert stream.wait(1, None)

    def interrupt(queue: int) -> None:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt

    for number in range(2, 30):
        stream.submit(Task("aclnnTest", interrupt))
        try:
            stream.wait(number, None)
        except KeyboardInterrupt:
            break
    else:
        pytest.fail("the thread was always first")
    assert stream.take_faults() == ["aclnnTest was interrupted"]
    assert stream.finished == number
    stream.close()
