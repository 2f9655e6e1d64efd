"""The runtime's `aclrt` functions, pyACL style: outputs first, the status last, integers for handles."""

from __future__ import annotations

from collections.abc import Callable

from ..status import Status
from . import constants
from .entry import Handle, Int32, Int64, Size, status_call, value_call
from .memory import Allocation, BadAddress, is_mapped
from .messages import AclFailure
from .runtime import DEVICE_COUNT, Context, runtime
from .streams import Event, Stream, Task

INVALID_PARAM, RT_INVALID = Status.ACL_ERROR_INVALID_PARAM, Status.ACL_ERROR_RT_PARAM_INVALID

#: Where a copy of each kind comes from and goes to; ACL_MEMCPY_DEFAULT asks the addresses.
_SPACES = {
    constants.ACL_MEMCPY_HOST_TO_HOST: ("host", "host"),
    constants.ACL_MEMCPY_HOST_TO_DEVICE: ("host", "device"),
    constants.ACL_MEMCPY_DEVICE_TO_HOST: ("device", "host"),
    constants.ACL_MEMCPY_DEVICE_TO_DEVICE: ("device", "device"),
    constants.ACL_MEMCPY_DEFAULT: (None, None),
    constants.ACL_MEMCPY_HOST_TO_BUF_TO_DEVICE: ("host", "device"),
}
#: The system parameters and the values each takes.
_OPTIONS = {constants.ACL_OPT_DETERMINISTIC: range(4)}

#: The version of the runtime interface these functions follow.
_VERSION = (1, 13, 0)


def _null(what: str) -> AclFailure:
    return AclFailure(INVALID_PARAM, f"{what} must not be null; got null")


# --- devices ----------------------------------------------------------------------------------------------------------


def _check_device(device_id: int) -> None:
    if not 0 <= device_id < DEVICE_COUNT:
        raise AclFailure(
            Status.ACL_ERROR_RT_INVALID_DEVICEID,
            f"deviceId must be from 0 to {DEVICE_COUNT - 1}; got {device_id}",
        )


@status_call
def set_device(device_id: Int32) -> None:
    """Give this thread the device and its default context."""
    _check_device(device_id)
    with runtime.lock:
        runtime.device_uses[device_id] += 1
        if device_id not in runtime.default_contexts:
            runtime.default_contexts[device_id] = runtime.new_context(device_id)
        runtime.set_context(runtime.default_contexts[device_id])


@status_call
def reset_device(device_id: Int32) -> None:
    """Wait for the device's work; the last reset of as many sets ends its default context."""
    _check_device(device_id)
    with runtime.lock:
        runtime.device_uses[device_id] = max(0, runtime.device_uses[device_id] - 1)
        streams = [stream for stream in runtime.streams() if stream.context.device == device_id]
        if not runtime.device_uses[device_id] and device_id in runtime.default_contexts:
            runtime.end_context(runtime.default_contexts.pop(device_id))
    runtime.synchronize(streams)


@value_call(0)
def get_device() -> int:
    return runtime.current_context().device


@value_call(0)
def get_device_count() -> int:
    return DEVICE_COUNT


@value_call(0)
def get_run_mode() -> int:
    return constants.ACL_HOST


@value_call(0, 0)
def get_mem_info(attr: Int32) -> tuple[int, int]:
    """(free, total) bytes of device memory, whatever the kind of memory asked for."""
    runtime.current_context()
    return runtime.memory.left("device"), runtime.memory.total("device")


@value_call(0, 0, 0, before_init=True)
def get_version() -> tuple[int, int, int]:
    return _VERSION


@status_call
def synchronize_device() -> None:
    context = runtime.current_context()
    runtime.synchronize([stream for stream in runtime.streams() if stream.context.device == context.device])


def get_soc_name() -> str:
    """The product's name as it was set."""
    return runtime.soc


# --- contexts ---------------------------------------------------------------------------------------------------------


@value_call(0)
def create_context(device_id: Int32) -> int:
    """A new context, which becomes this thread's."""
    _check_device(device_id)
    with runtime.lock:
        context = runtime.new_context(device_id)
        runtime.set_context(context)
        return context.handle


@status_call
def destroy_context(context: Handle) -> None:
    with runtime.lock:
        found = runtime.require(context or 0, Context)
        if found in runtime.default_contexts.values():
            raise AclFailure(INVALID_PARAM, f"context {context:#x} is a device's default; aclrtResetDevice ends it")
        streams = [stream for stream in runtime.streams() if stream.context is found]
        runtime.end_context(found)
    runtime.synchronize(streams)


@status_call
def set_current_context(context: Handle) -> None:
    runtime.set_context(runtime.require(context or 0, Context))


@value_call(0)
def get_current_context() -> int:
    return runtime.current_context().handle


set_context, get_context = set_current_context, get_current_context

# --- streams ----------------------------------------------------------------------------------------------------------


@value_call(0)
def create_stream() -> int:
    return runtime.register(Stream(runtime.current_context()))


@value_call(0)
def create_stream_with_config(priority: Int64, flag: Int64) -> int:
    """As create_stream: there is one priority, and every stream launches fast."""
    return runtime.register(Stream(runtime.current_context()))


@status_call
def destroy_stream(stream: Handle) -> None:
    """Wait for the stream's work and end it; a failure that no synchronize has seen comes back here."""
    with runtime.lock:
        found = runtime.require(stream or 0, Stream)
        if found.context.alive:
            runtime.stream(stream or 0)
        runtime.drop(stream or 0)
    found.close()
    runtime.synchronize([found])


@status_call
def synchronize_stream(stream: Handle) -> None:
    runtime.synchronize([runtime.stream(stream or 0)])


@status_call
def synchronize_stream_with_timeout(stream: Handle, timeout: Int32) -> None:
    """Wait at most `timeout` milliseconds; -1 waits for ever."""
    if timeout < -1:
        raise AclFailure(RT_INVALID, f"timeout must be -1 or more; got {timeout}")
    runtime.synchronize([runtime.stream(stream or 0)], None if timeout == -1 else timeout / 1000)


@value_call(0)
def stream_query(stream: Handle) -> int:
    found = runtime.stream(stream or 0)
    finished = found.finished
    if finished < found.queued:
        return constants.ACL_STREAM_STATUS_NOT_READY
    found.mark_synchronized(finished)
    return constants.ACL_STREAM_STATUS_COMPLETE


# --- events -----------------------------------------------------------------------------------------------------------


@value_call(0)
def create_event() -> int:
    runtime.current_context()
    return runtime.register(Event())


@value_call(0)
def create_event_with_flag(flag: Int64) -> int:
    """As create_event: every event can be waited for and timed."""
    runtime.current_context()
    return runtime.register(Event())


@status_call
def record_event(event: Handle, stream: Handle) -> None:
    runtime.require(event or 0, Event).record(runtime.stream(stream or 0))


@status_call
def synchronize_event(event: Handle) -> None:
    """Wait for the point the event was recorded at; an event that never was is complete."""
    point = runtime.require(event or 0, Event).recorded
    if point is not None:
        point.stream.wait(point.number, None)
        point.stream.mark_synchronized(point.number)


def _is_complete(event: int | None) -> bool:
    point = runtime.require(event or 0, Event).recorded
    if point is None:
        return True
    if point.done:
        point.stream.mark_synchronized(point.number)
    return point.done


@value_call(0)
def query_event(event: Handle) -> int:
    return constants.ACL_EVENT_STATUS_COMPLETE if _is_complete(event) else constants.ACL_EVENT_STATUS_NOT_READY


@value_call(0)
def query_event_status(event: Handle) -> int:
    if _is_complete(event):
        return constants.ACL_EVENT_RECORDED_STATUS_COMPLETE
    return constants.ACL_EVENT_RECORDED_STATUS_NOT_READY


@value_call(0.0)
def event_elapsed_time(start_event: Handle, end_event: Handle) -> float:
    """Milliseconds between two points that have both been passed."""
    points = [runtime.require(event or 0, Event).recorded for event in (start_event, end_event)]
    for word, point in zip(("startEvent", "endEvent"), points):
        if point is None or not point.done:
            state = "was never recorded" if point is None else "has not been reached yet"
            raise AclFailure(RT_INVALID, f"{word} must be a recorded, completed event; it {state}")
    start, end = (point.end for point in points if point)
    return runtime.hardware.milliseconds(start, end)


@status_call
def stream_wait_event(stream: Handle, event: Handle) -> None:
    """Hold back what the stream is given from now on until the event's point; queued, not waited for."""
    point = runtime.require(event or 0, Event).recorded
    found = runtime.stream(stream or 0)
    if point is not None:
        found.submit(Task("aclrtStreamWaitEvent", after=point))


@status_call
def destroy_event(event: Handle) -> None:
    with runtime.lock:
        runtime.require(event or 0, Event)
        runtime.drop(event or 0)


# --- memory -----------------------------------------------------------------------------------------------------------


def _allocate(size: int, space: str) -> int:
    if size == 0:
        raise AclFailure(INVALID_PARAM, "size must be positive; got 0")
    with runtime.lock:
        try:
            address = runtime.memory.allocate(size, space).address
        except (MemoryError, ValueError, OverflowError):
            raise AclFailure(
                Status.ACL_ERROR_RT_MEMORY_ALLOCATION,
                f"size must fit the {runtime.memory.left(space)} bytes left; got {size}",
            ) from None
        runtime.trace(address)
        return address


def _free(address: int | None, space: str) -> None:
    word = "devPtr" if space == "device" else "hostPtr"
    if not address:
        raise _null(word)
    try:
        runtime.release(address, space)
    except BadAddress as reason:
        raise AclFailure(RT_INVALID, f"{word} must be the start of a live {space} allocation: {reason}") from None


@value_call(0)
def malloc(size: Size, policy: Int32) -> int:
    """Device memory, aligned to 64 bytes or more. The policies differ in nothing here."""
    if policy not in (0, 1, 2):
        raise AclFailure(INVALID_PARAM, f"policy must be 0, 1 or 2; got {policy}")
    runtime.current_context()
    return _allocate(size, "device")


@status_call
def free(dev_ptr: Handle) -> None:
    _free(dev_ptr, "device")


@value_call(0)
def malloc_host(size: Size) -> int:
    return _allocate(size, "host")


@status_call
def free_host(host_ptr: Handle) -> None:
    _free(host_ptr, "host")


def _side(word: str, address: int, count: int, space: str | None) -> Allocation | None:
    """Check one side of a copy; the block it lies in, None for host memory that is not ours.

    `space` None takes what the address says. Host memory of ours is held to its bounds like the device's;
    other host memory must be mapped, and must not run into ours.
    """
    space = space or runtime.memory.space_of(address)
    try:
        if space == "device":
            return runtime.memory.locate(address, address + count, space)
        block = runtime.memory.find_host(address, address + count)
    except BadAddress as reason:
        raise AclFailure(RT_INVALID, f"{word} must lie inside one live {space} allocation: {reason}") from None
    if block is None and not is_mapped(address, count):
        raise AclFailure(RT_INVALID, f"{word} must be memory of this process; got {address:#x} for {count} bytes")
    return block


Work = tuple[Callable[[int | None], None], tuple[Allocation, ...]]
"""What a copy or fill does, on a queue or (None) at once, and the memory of ours it uses."""


def _check_copy(dst: int | None, dest_max: int, src: int | None, count: int, kind: int) -> Work:
    """Every mistake but a page that may not be touched is found here, before anything moves."""
    runtime.current_context()
    if kind not in _SPACES:
        raise AclFailure(INVALID_PARAM, f"kind must be from 0 to 5; got {kind}")
    if count == 0:
        return (lambda queue: None), ()
    if not dst or not src:
        raise _null("src" if dst else "dst")
    if count > dest_max:
        raise AclFailure(RT_INVALID, f"count must not exceed destMax ({dest_max}); got {count}")
    from_space, to_space = _SPACES[kind]
    to, source = _side("dst", dst, count, to_space), _side("src", src, count, from_space)

    dst_space, src_space = (block.space if block else "foreign" for block in (to, source))

    def move(queue: int | None) -> None:
        runtime.hardware.copy(dst, src, count, dst_space, src_space, queue)

    return move, tuple(block for block in (to, source) if block)


@status_call
def memcpy(dst: Handle, dest_max: Size, src: Handle, count: Size, kind: Int32) -> None:
    """Copy now; does not wait for any stream."""
    with runtime.lock:
        move, _ = _check_copy(dst, dest_max, src, count, kind)
    try:
        move(None)
    except BadAddress as reason:
        raise AclFailure(RT_INVALID, f"dst and src must be memory that can be touched: {reason}") from None


@status_call
def memcpy_async(dst: Handle, dest_max: Size, src: Handle, count: Size, kind: Int32, stream: Handle) -> None:
    with runtime.lock:  # held until it is queued: a free in between would go unnoticed
        found = runtime.stream(stream or 0)
        found.submit(Task("aclrtMemcpyAsync", *_check_copy(dst, dest_max, src, count, kind)))


def _check_fill(dev_ptr: int | None, max_count: int, value: int, count: int) -> Work:
    runtime.current_context()
    if not dev_ptr:
        raise _null("devPtr")
    if count > max_count:
        raise AclFailure(RT_INVALID, f"count must not exceed maxCount ({max_count}); got {count}")
    if count == 0:
        return (lambda queue: None), ()
    block = _side("devPtr", dev_ptr, count, "device")
    assert block is not None

    def fill(queue: int | None) -> None:
        runtime.hardware.fill(dev_ptr, value & 0xFF, count, queue)

    return fill, (block,)


@status_call
def memset(dev_ptr: Handle, max_count: Size, value: Int32, count: Size) -> None:
    with runtime.lock:
        fill, _ = _check_fill(dev_ptr, max_count, value, count)
    fill(None)


@status_call
def memset_async(dev_ptr: Handle, max_count: Size, value: Int32, count: Size, stream: Handle) -> None:
    with runtime.lock:
        found = runtime.stream(stream or 0)
        found.submit(Task("aclrtMemsetAsync", *_check_fill(dev_ptr, max_count, value, count)))


# --- system parameters ------------------------------------------------------------------------------------------------


def _check_option(opt: int, value: int | None = None) -> None:
    if opt not in _OPTIONS:
        raise AclFailure(RT_INVALID, f"opt must be 0 (ACL_OPT_DETERMINISTIC); got {opt}")
    if value is not None and value not in _OPTIONS[opt]:
        raise AclFailure(RT_INVALID, f"value must be from 0 to {_OPTIONS[opt][-1]}; got {value}")


@status_call
def set_sys_param_opt(opt: Int32, value: Int64) -> None:
    """Stored and harmless: results are always deterministic."""
    _check_option(opt, value)
    runtime.options[opt] = value


@value_call(0)
def get_sys_param_opt(opt: Int32) -> int:
    _check_option(opt)
    return runtime.options.get(opt, 0)


@status_call
def ctx_set_sys_param_opt(opt: Int32, value: Int64) -> None:
    _check_option(opt, value)
    runtime.current_context().options[opt] = value


@value_call(0)
def ctx_get_sys_param_opt(opt: Int32) -> int:
    _check_option(opt)
    options = runtime.current_context().options
    if opt not in options:
        raise AclFailure(Status.ACL_ERROR_RT_SYSPARAMOPT_NOT_SET, f"option {opt} of this context was never set")
    return options[opt]
