"""Locks that a forked child finds free: who forks waits for those that have them.

Of a parent's threads a child has only the one that forked. A lock that another held stays locked there for ever, and so
do the locks within it: Numba's and those of modules on their way in, while a kernel is made.
"""

from __future__ import annotations

import os
import threading
from typing import Any


def free_in_children(lock: Any) -> Any:
    """The same lock. Nobody who holds it may wait for one that was made so later: a fork takes the newest first."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock


#: Held while kernels are made.
preparing = free_in_children(threading.RLock())
