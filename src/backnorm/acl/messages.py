"""Failures of the runtime, and each thread's list of what went wrong."""

from __future__ import annotations

import contextlib
import sys
import threading

from ..status import Status


class AclFailure(Exception):
    """A call that failed: the code it returns and the sentence that explains it."""

    def __init__(self, status: Status, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class _Messages(threading.local):
    def __init__(self) -> None:
        self.newest_last: list[str] = []


_messages = _Messages()
#: A thread that never reads its messages keeps only the newest.
_KEPT = 64


def add_message(sentence: str) -> None:
    _messages.newest_last.append(sentence)
    del _messages.newest_last[:-_KEPT]


def add_internal_error(function: str, error: BaseException) -> None:
    """Our mistake, not the caller's: a message, and on stderr too, where there is one."""
    sentence = f"{function}: internal error: {type(error).__name__}: {error}"
    add_message(sentence)
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(f"backnorm: {sentence}", file=sys.stderr)


def take_messages() -> str | None:
    """This thread's messages since the last time, newest first, one a line; None when there are none."""
    lines, _messages.newest_last = _messages.newest_last, []
    return "\n".join(reversed(lines)) if lines else None
