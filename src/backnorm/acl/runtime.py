"""The state of the runtime: initialization, product, devices, contexts and the table of handles."""

from __future__ import annotations

import itertools
import os
import re
import sys
import threading
import traceback
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..products import DEFAULT_PRODUCT, PRODUCTS, Product, find_product
from ..status import Status
from .hardware import Cpu, Hardware, open_hardware
from .memory import Memory
from .messages import AclFailure
from .streams import Stream

T = TypeVar("T")

DEVICE_COUNT = 1
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


@dataclass(eq=False)
class Context:
    device: int
    hardware: Hardware
    handle: int = 0
    alive: bool = True
    options: dict[int, int] = field(default_factory=dict)
    default_stream: Stream = field(init=False)

    def __post_init__(self) -> None:
        self.default_stream = Stream(self)


class _Thread(threading.local):
    context: Context | None = None


class Runtime:
    """One a process. `lock` guards every table; queued work never holds it."""

    def __init__(self) -> None:
        self._next_handle = itertools.count(0x10000, 0x10)  # never restarted: a handle's value is never reused
        self._newest_handle = 0
        self.start_over()

    def start_over(self) -> None:
        """As in a new process; a forked child has none of the streams' threads, and must call aclInit itself."""
        self.lock = threading.RLock()
        self._chosen_soc: str | None = None  # by set_soc; stronger than the environment's
        self._environment_soc: str | None = None  # as the last aclInit read it
        self._thread = _Thread()
        self.hardware: Hardware = Cpu()  # until aclInit reads BACKNORM_DEVICE
        self.state = "new"  # new, ready or finalized
        self._clear()

    def _clear(self) -> None:
        self.objects: dict[int, Any] = {}
        self.memory = Memory(self.hardware)
        self.options: dict[int, int] = {}
        self.device_uses: Counter[int] = Counter()
        self.default_contexts: dict[int, Context] = {}
        self.contexts: list[Context] = []
        self._aclnn_state = "new"
        self._created: dict[int, str] = {}

    # --- init and finalize ---

    def initialize(self, soc: str | None, device: str | None) -> None:
        with self.lock:
            if self.state == "ready":
                raise AclFailure(Status.ACL_ERROR_REPEAT_INITIALIZE, "the runtime is initialized already")
            if soc and self._chosen_soc is None:
                _require_product("BACKNORM_SOC", soc)
            self.hardware = open_hardware(device or "cpu")
            self._environment_soc = soc
            self._clear()
            self.state = "ready"

    def finalize(self) -> None:
        with self.lock:
            if self.state == "finalized":
                raise AclFailure(Status.ACL_ERROR_REPEAT_FINALIZE, "the runtime was finalized already")
            self.require_init()
            self.state = "finalized"
            streams = self.streams()
        for stream in streams:
            try:
                stream.close()
            except AclFailure as failure:  # the GPU's; the others must be ended all the same
                stream.add_fault(str(failure))
        with self.lock:
            self._report_leaks(streams)
            self.memory.close()
            for context in self.contexts:
                context.alive = False
            self._clear()

    def initialize_aclnn(self) -> None:
        if self._aclnn_state == "ready":
            raise AclFailure(Status.ACL_ERROR_REPEAT_INITIALIZE, "aclnn is initialized already")
        self._aclnn_state = "ready"

    def finalize_aclnn(self) -> None:
        if self._aclnn_state != "ready":
            raise AclFailure(Status.ACL_ERROR_REPEAT_FINALIZE, "aclnn is not initialized, or was finalized already")
        self._aclnn_state = "finalized"

    def require_init(self) -> None:
        if self.state != "ready":
            raise AclFailure(Status.ACL_ERROR_UNINITIALIZE, "call aclInit first")

    # --- product ---

    @property
    def soc(self) -> str:
        return self._chosen_soc or self._environment_soc or DEFAULT_PRODUCT

    @soc.setter
    def soc(self, name: str) -> None:
        _require_product("name", name)
        self._chosen_soc = name

    @property
    def product(self) -> Product:
        product = find_product(self.soc)
        assert product is not None
        return product

    # --- handles ---

    def register(self, thing: Any, mark: int = 0) -> int:
        """A new handle for an object; its last digit is `mark`, so that a dead one still tells what it was."""
        with self.lock:
            handle = self._newest_handle = next(self._next_handle) + mark
            self.objects[handle] = thing
            self.trace(handle)
            return handle

    def get(self, handle: int, kind: type[T]) -> T | None:
        """The live object of a handle, None where it is null, dead or of another kind."""
        thing = self.objects.get(handle)
        return thing if isinstance(thing, kind) else None

    def require(self, handle: int, kind: type[T]) -> T:
        thing = self.get(handle, kind)
        if thing is None:
            word = kind_name(kind)
            if handle == 0:
                raise AclFailure(Status.ACL_ERROR_INVALID_PARAM, f"{word} must not be null; got null")
            raise AclFailure(
                Status.ACL_ERROR_RT_INVALID_HANDLE,
                f"{word} must be a live {word}; got {handle:#x}, a destroyed or foreign handle",
            )
        return thing

    def was_made(self, handle: int, mark: int) -> bool:
        """Whether a handle with this mark was given out, dead or alive."""
        return handle % 0x10 == mark and 0x10000 <= handle <= self._newest_handle

    def drop(self, handle: int) -> None:
        with self.lock:
            self.objects.pop(handle, None)
            self._created.pop(handle, None)

    # --- contexts, devices, streams ---

    def current_context(self) -> Context:
        context = self._thread.context
        if context is None or not context.alive:
            raise AclFailure(
                Status.ACL_ERROR_RT_CONTEXT_NULL,
                "this thread has no context; call aclrtSetDevice or aclrtCreateContext",
            )
        return context

    def set_context(self, context: Context | None) -> None:
        self._thread.context = context

    def new_context(self, device: int) -> Context:
        context = Context(device, self.hardware)
        context.handle = self.register(context)
        self.contexts.append(context)
        return context

    def end_context(self, context: Context) -> None:
        """Let a context go; its streams stay, of no use but to be waited for and destroyed."""
        with self.lock:
            self.drop(context.handle)
            self.contexts.remove(context)
            context.alive = False
            context.default_stream.close(wait=False)

    def streams(self) -> list[Stream]:
        """Every stream, the contexts' default ones included."""
        with self.lock:
            made = [thing for thing in self.objects.values() if isinstance(thing, Stream)]
            return made + [context.default_stream for context in self.contexts]

    def stream(self, handle: int) -> Stream:
        """The stream of a handle in the current context; null is the default stream."""
        context = self.current_context()
        if handle == 0:
            return context.default_stream
        stream = self.require(handle, Stream)
        if stream.context is not context:
            raise AclFailure(
                Status.ACL_ERROR_RT_STREAM_CONTEXT, f"stream {handle:#x} belongs to another context than this thread's"
            )
        return stream

    def synchronize(self, streams: list[Stream], seconds: float | None = None) -> None:
        """Wait for what is queued now; a failure of that work is raised here."""
        faults = []
        for stream in streams:
            number = stream.queued
            if not stream.wait(number, seconds):
                left, limit = number - stream.finished, 1000 * (seconds or 0)
                raise AclFailure(
                    Status.ACL_ERROR_RT_STREAM_SYNC_TIMEOUT,
                    f"timeout must be long enough for the stream's work; got {limit:g} ms, and {left} tasks are left",
                )
            stream.mark_synchronized(number)
            faults += stream.take_faults()
        if faults:
            raise AclFailure(Status.ACL_ERROR_INTERNAL_ERROR, "; ".join(faults))

    # --- memory ---

    def release(self, address: int, space: str) -> None:
        """Free a block; work that still needed it fails at its stream's next synchronization."""
        with self.lock:
            block = self.memory.free(address, space)
            self._created.pop(address, None)
            for stream in self.streams():
                for name in stream.users_of(block):
                    stream.add_fault(
                        f"{name} was queued with the memory at {address:#x}, which was freed before the stream"
                        f" was synchronized"
                    )

    # --- leaks ---

    def trace(self, key: int) -> None:
        """Remember where the caller made something, for the report of leaks."""
        if os.environ.get("BACKNORM_TRACE") == "1":
            frames = [f for f in traceback.extract_stack() if not f.filename.startswith(_PACKAGE)]
            if frames:
                self._created[key] = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}"

    def _report_leaks(self, streams: list[Stream]) -> None:
        report = self._leaks(streams)
        try:
            if report and sys.stderr is not None:
                print("\n".join(report), file=sys.stderr)
        except (OSError, ValueError):
            pass  # a closed stderr is no reason not to end

    def _leaks(self, streams: list[Stream]) -> list[str]:
        leaks = [
            (kind_name(type(thing)), handle)
            for handle, thing in self.objects.items()
            if thing not in self.default_contexts.values()
        ]
        blocks = self.memory.live
        lines = [f"{word} {handle:#x}{self._where(handle)}" for word, handle in leaks]
        lines += [f"{b.space} memory {b.address:#x}, {b.size} bytes{self._where(b.address)}" for b in blocks]
        faults = [fault for stream in streams for fault in stream.take_faults()]
        report = [f"backnorm: aclFinalize: a failure no synchronize has seen: {fault}" for fault in faults]
        if lines:
            counts = Counter(word for word, _ in leaks) + Counter(f"{b.space} allocation" for b in blocks)
            summary = ", ".join(f"{n} {word}{'s' if n > 1 else ''}" for word, n in counts.items())
            traced = self._created or os.environ.get("BACKNORM_TRACE") == "1"
            hint = "" if traced else " (BACKNORM_TRACE=1 shows where they were made)"
            report.append(f"backnorm: aclFinalize: not released: {summary}{hint}")
            report += [f"  {line}" for line in lines[:50]]
            report += [f"  and {len(lines) - 50} more"] if len(lines) > 50 else []
        return report

    def _where(self, key: int) -> str:
        return f", made at {self._created[key]}" if key in self._created else ""


def kind_name(kind: type) -> str:
    """`int array` for IntArray."""
    return re.sub("(?<=[a-z])(?=[A-Z])", " ", kind.__name__).lower()


def _require_product(what: str, name: str) -> None:
    if find_product(name) is None:
        raise AclFailure(
            Status.ACL_ERROR_INVALID_PARAM,
            f"{what} must be {', '.join(PRODUCTS)}, or a chip name that starts with one; got {name!r}",
        )


runtime = Runtime()
os.register_at_fork(after_in_child=runtime.start_over)
