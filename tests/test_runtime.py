"""The acl runtime: which code each mistake gets, and what the message says."""

from __future__ import annotations

import ctypes
import errno
import inspect
import mmap
import os
import threading
import time
from typing import Any

import numpy as np
import pytest

from backnorm import acl
from backnorm.acl import memory
from backnorm.acl.runtime import runtime
from backnorm.acl.streams import Stream, Task

from .doors import queue_python

H2D, D2H, D2D, H2H = 1, 2, 3, 0


def last_message() -> str:
    return acl.get_recent_err_msg() or ""


def malloc(size: int) -> int:
    address, ret = acl.rt.malloc(size, 0)
    assert ret == 0
    return address


def stream() -> int:
    handle, ret = acl.rt.create_stream()
    assert ret == 0
    return handle


def block(handle: int) -> threading.Event:
    """Hold a stream until the event is set."""
    go = threading.Event()
    queue_python(handle, lambda: go.wait(20))
    return go


# --- init and finalize ---


def test_every_call_before_init_is_refused_and_getters_are_not() -> None:
    acl.finalize()
    calls: list[Any] = [
        lambda: acl.rt.set_device(0), lambda: acl.rt.malloc(8, 0)[1], lambda: acl.rt.create_stream()[1],
        lambda: acl.rt.free(8), lambda: acl.destroy_tensor(0), lambda: acl.rt.get_device_count()[1],
        lambda: acl.set_acl_op_executor_repeatable(0), lambda: acl.rt.memcpy(0, 0, 0, 0, 0),
        lambda: acl.rt.get_sys_param_opt(0)[1], lambda: acl.get_view_shape(0)[1],
    ]  # fmt: skip
    for call in calls:
        assert call() == 100001
        assert "aclInit" in last_message()
    assert acl.create_int_array([1]) == 0
    assert acl.rt.get_soc_name() == acl.get_soc_name() == "Ascend910B"
    assert acl.rt.get_version()[-1] == 0
    assert acl.data_type_size(0) == 4


def test_second_init_and_second_finalize_have_their_codes() -> None:
    acl.finalize()
    assert acl.init() == 0
    assert acl.init() == 100002
    assert acl.finalize() == 0
    assert acl.finalize() == 100037
    assert acl.init(None) == 0
    assert acl.finalize_reference() == (0, 0)
    assert acl.finalize_reference() == (0, 100037)


def test_init_reads_a_configuration_file(tmp_path: Any) -> None:
    acl.finalize()
    assert acl.init(str(tmp_path / "missing.json")) == 100000
    assert "missing.json" in last_message()
    (tmp_path / "bad.json").write_text("{")
    assert acl.init(str(tmp_path / "bad.json")) == 100000
    for bad in ("[" * 100_000, " " * (2 << 20)):
        (tmp_path / "bad.json").write_text(bad)
        assert acl.init(str(tmp_path / "bad.json")) == 100000
    os.mkfifo(tmp_path / "pipe")
    assert acl.init(str(tmp_path / "pipe")) == 100000
    (tmp_path / "good.json").write_text("{}")
    assert acl.init(str(tmp_path / "good.json")) == 0
    assert acl.finalize() == 0


def test_aclnn_has_an_init_of_its_own() -> None:
    from backnorm import aclnn

    acl.finalize()
    assert aclnn.aclnnInit(None) == 100001
    assert acl.init() == 0
    assert aclnn.aclnnInit(None) == 0
    assert aclnn.aclnnInit(None) == 100002
    assert aclnn.aclnnFinalize() == 0
    assert aclnn.aclnnFinalize() == 100037
    assert aclnn.aclnnInit(None) == 0
    assert acl.finalize() == 0


def test_the_environment_chooses_the_product_at_init(monkeypatch: pytest.MonkeyPatch) -> None:
    acl.finalize()
    monkeypatch.setenv("BACKNORM_SOC", "Ascend910B2")
    assert acl.init() == 0
    assert acl.rt.get_soc_name() == "Ascend910B2"
    assert runtime.product.name == "Ascend910B"
    assert acl.set_soc(None) == 100000
    assert acl.set_soc("Pentium") == 100000
    assert "Pentium" in last_message()
    assert acl.set_soc("Ascend950") == 0
    assert acl.get_soc_name() == "Ascend950"
    assert acl.finalize() == 0
    assert acl.init() == 0
    assert acl.get_soc_name() == "Ascend950"  # what the program chose is stronger than the environment
    assert acl.finalize() == 0
    runtime._chosen_soc = None
    monkeypatch.setenv("BACKNORM_SOC", "Ascend910")
    assert acl.init() == 0
    assert acl.get_soc_name() == "Ascend910"  # read again at every init
    assert acl.finalize() == 0
    monkeypatch.setenv("BACKNORM_SOC", "Ascend3")
    assert acl.init() == 100000
    assert "BACKNORM_SOC" in last_message()


def test_another_device_is_refused_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    acl.finalize()
    monkeypatch.setenv("BACKNORM_DEVICE", "cuda")
    assert acl.init() == 200006
    assert "cuda" in last_message()


def test_finalize_reports_leaks_and_where_they_were_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    acl.finalize()
    monkeypatch.setenv("BACKNORM_TRACE", "1")
    assert acl.init() == 0
    assert acl.rt.set_device(0) == 0
    acl.create_tensor([2], 0, None, 0, 2, [2], None)
    acl.create_int_array([1])
    acl.create_bool_array([True])
    malloc(128)
    stream()
    acl.rt.create_event()
    acl.rt.create_context(0)
    assert acl.finalize() == 0
    report = capsys.readouterr().err
    for word in ("1 tensor", "1 int array", "1 bool array", "1 stream", "1 event", "1 context", "1 device allocation"):
        assert word in report
    assert "128 bytes" in report
    assert report.count(f"made at {__file__}") == 7

    assert acl.init() == 0
    assert acl.rt.set_device(0) == 0
    assert acl.rt.reset_device(0) == 0
    assert acl.finalize() == 0
    assert capsys.readouterr().err == ""


# --- devices and contexts ---


@pytest.mark.usefixtures("ready")
def test_devices() -> None:
    assert acl.rt.get_device_count() == (1, 0)
    assert acl.rt.get_device() == (0, 0)
    for bad in (-1, 1, 2**31 - 1):
        assert acl.rt.set_device(bad) == 107001
        assert acl.rt.reset_device(bad) == 107001
        assert acl.rt.create_context(bad) == (0, 107001)
    assert acl.rt.get_run_mode() == (acl.ACL_HOST, 0)
    free, total, ret = acl.rt.get_mem_info(1)
    assert ret == 0
    assert 0 < free <= total
    address = malloc(1 << 20)
    assert acl.rt.get_mem_info(1)[0] == free - (1 << 20)
    host, _ = acl.rt.malloc_host(1 << 20)
    assert acl.rt.get_mem_info(1)[0] == free - (1 << 20)
    assert acl.rt.free_host(host) == 0
    assert acl.rt.free(address) == 0
    assert acl.rt.synchronize_device() == 0


def test_a_thread_without_a_context_is_told_so() -> None:
    acl.finalize()
    assert acl.init() == 0
    calls: list[Any] = [
        lambda: acl.rt.malloc(8, 0)[1], lambda: acl.rt.create_stream()[1], lambda: acl.rt.create_event()[1],
        lambda: acl.rt.synchronize_stream(0), lambda: acl.rt.get_device()[1], lambda: acl.rt.synchronize_device(),
        lambda: acl.rt.ctx_get_sys_param_opt(0)[1], lambda: acl.rt.get_context()[1],
        lambda: acl.rt.memcpy(0, 0, 0, 0, 0), lambda: acl.rt.get_mem_info(0)[2],
    ]  # fmt: skip
    for call in calls:
        assert call() == 107002
    assert acl.finalize() == 0


@pytest.mark.usefixtures("ready")
def test_contexts() -> None:
    default, ret = acl.rt.get_context()
    assert ret == 0
    assert acl.rt.get_current_context() == (default, 0)
    mine, ret = acl.rt.create_context(0)
    assert ret == 0
    assert acl.rt.get_context() == (mine, 0)
    theirs = stream()
    assert acl.rt.set_context(default) == 0
    for call in (acl.rt.synchronize_stream, acl.rt.destroy_stream):
        assert call(theirs) == 107003
        assert "another context" in last_message()
    assert acl.rt.memset_async(malloc(8), 8, 0, 8, theirs) == 107003
    event, _ = acl.rt.create_event()
    assert acl.rt.record_event(event, theirs) == 107003
    assert acl.rt.set_current_context(theirs) == 107017
    assert acl.rt.set_context(None) == 100000
    assert acl.rt.destroy_context(0) == 100000
    assert acl.rt.destroy_context(default) == 100000
    assert acl.rt.set_context(mine) == 0
    assert acl.rt.synchronize_stream(theirs) == 0
    assert acl.rt.destroy_context(mine) == 0
    assert acl.rt.destroy_context(mine) == 107017
    assert acl.rt.get_context() == (0, 107002)
    assert acl.rt.set_context(default) == 0
    assert acl.rt.destroy_stream(theirs) == 0  # what a dead context left behind can still be cleaned up


def test_the_last_reset_ends_the_default_context() -> None:
    acl.finalize()
    assert acl.init() == 0
    assert acl.rt.set_device(0) == 0
    assert acl.rt.set_device(0) == 0
    assert acl.rt.reset_device(0) == 0
    assert acl.rt.get_device() == (0, 0)
    assert acl.rt.reset_device(0) == 0
    assert acl.rt.get_device() == (0, 107002)
    assert acl.rt.reset_device(0) == 0
    assert acl.finalize() == 0


@pytest.mark.usefixtures("ready")
def test_reset_waits_for_queued_work() -> None:
    handle = stream()
    done = []
    queue_python(handle, lambda: (time.sleep(0.2), done.append(1))[1])
    assert acl.rt.reset_device(0) == 0
    assert done == [1]


# --- streams and events ---


@pytest.mark.usefixtures("ready")
def test_streams_are_asynchronous_and_ordered() -> None:
    handle = stream()
    order: list[int] = []
    go = block(handle)
    for i in range(50):
        queue_python(handle, lambda i=i: order.append(i))
    assert order == []
    assert acl.rt.stream_query(handle) == (acl.ACL_STREAM_STATUS_NOT_READY, 0)
    assert acl.rt.synchronize_stream_with_timeout(handle, 10) == 507046
    assert acl.rt.synchronize_stream_with_timeout(handle, -2) == 107000
    go.set()
    assert acl.rt.synchronize_stream_with_timeout(handle, -1) == 0
    assert order == list(range(50))
    assert acl.rt.stream_query(handle) == (acl.ACL_STREAM_STATUS_COMPLETE, 0)
    assert acl.rt.destroy_stream(handle) == 0


@pytest.mark.usefixtures("ready")
def test_times_are_milliseconds() -> None:
    handle = stream()
    go = block(handle)
    begun = time.perf_counter()
    assert acl.rt.synchronize_stream_with_timeout(handle, 300) == 507046
    assert 0.25 < time.perf_counter() - begun < 10
    first, second = acl.rt.create_event()[0], acl.rt.create_event()[0]
    go.set()
    assert acl.rt.record_event(first, handle) == 0
    queue_python(handle, lambda: time.sleep(0.1))
    assert acl.rt.record_event(second, handle) == 0
    assert acl.rt.synchronize_stream(handle) == 0
    assert 90 < acl.rt.event_elapsed_time(first, second)[0] < 10_000
    assert acl.rt.record_event(first, handle) == 0  # the newest recording counts
    assert acl.rt.synchronize_event(first) == 0
    assert acl.rt.event_elapsed_time(second, first)[0] >= 0


@pytest.mark.usefixtures("ready")
def test_stream_handles() -> None:
    handle = stream()
    assert acl.rt.destroy_stream(None) == 100000
    assert acl.rt.destroy_stream(handle) == 0
    assert acl.rt.destroy_stream(handle) == 107017
    assert acl.rt.synchronize_stream(handle) == 107017
    assert acl.rt.stream_query(handle) == (0, 107017)
    tensor = acl.create_tensor([1], 0, None, 0, 2, [1], None)
    assert acl.rt.synchronize_stream(tensor) == 107017
    assert acl.rt.synchronize_stream(None) == 0
    second, ret = acl.rt.create_stream_with_config(0, 1)
    assert ret == 0
    assert second > handle  # handles are never reused


@pytest.mark.usefixtures("ready")
def test_a_failure_in_queued_work_comes_back_at_the_next_synchronize_only() -> None:
    handle, other = stream(), stream()

    def fail() -> None:
        raise RuntimeError("boom")

    runtime.stream(handle).submit(Task("aclnnTest", lambda _: fail()))
    assert acl.rt.synchronize_stream(other) == 0
    assert acl.rt.synchronize_stream(handle) == 500000
    assert "aclnnTest failed: RuntimeError: boom" in last_message()
    assert acl.rt.synchronize_stream(handle) == 0
    runtime.stream(handle).submit(Task("aclnnTest", lambda _: fail()))
    assert acl.rt.destroy_stream(handle) == 500000  # not lost with the stream
    assert acl.rt.destroy_stream(handle) == 107017


def test_a_failure_nobody_asked_for_is_told_at_finalize(capsys: pytest.CaptureFixture[str]) -> None:
    acl.finalize()
    assert acl.init() == 0
    assert acl.rt.set_device(0) == 0
    runtime.stream(0).submit(Task("aclnnTest", lambda _: 1 // 0 and None))
    assert acl.finalize() == 0
    assert "aclnnTest failed: ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.usefixtures("ready")
def test_events_order_streams_and_measure_time() -> None:
    first, second = stream(), stream()
    start, _ = acl.rt.create_event()
    end, ret = acl.rt.create_event_with_flag(8)
    assert ret == 0
    assert acl.rt.query_event(start) == (acl.ACL_EVENT_STATUS_COMPLETE, 0)
    assert acl.rt.event_elapsed_time(start, end)[1] == 107000
    assert acl.rt.record_event(start, first) == 0
    go = block(first)
    assert acl.rt.record_event(end, first) == 0
    assert acl.rt.query_event(end) == (acl.ACL_EVENT_STATUS_NOT_READY, 0)
    assert acl.rt.query_event_status(end) == (acl.ACL_EVENT_RECORDED_STATUS_NOT_READY, 0)
    assert acl.rt.event_elapsed_time(start, end)[1] == 107000
    seen: list[bool] = []
    assert acl.rt.stream_wait_event(second, end) == 0
    queue_python(second, lambda: seen.append(go.is_set()))
    time.sleep(0.05)
    assert seen == []
    go.set()
    assert acl.rt.synchronize_event(end) == 0
    assert acl.rt.query_event_status(end) == (acl.ACL_EVENT_RECORDED_STATUS_COMPLETE, 0)
    milliseconds, ret = acl.rt.event_elapsed_time(start, end)
    assert ret == 0
    assert milliseconds >= 40
    assert acl.rt.synchronize_stream(second) == 0
    assert seen == [True]
    assert acl.rt.destroy_event(end) == 0
    for call in (acl.rt.destroy_event, acl.rt.synchronize_event):
        assert call(end) == 107017
        assert call(None) == 100000
    assert acl.rt.record_event(end, first) == 107017
    assert acl.rt.stream_wait_event(second, end) == 107017
    assert acl.rt.query_event(first) == (0, 107017)


# --- memory ---


@pytest.mark.usefixtures("ready")
def test_malloc_and_free() -> None:
    assert acl.rt.malloc(0, 0) == (0, 100000)
    assert acl.rt.malloc(8, 3) == (0, 100000)
    addresses = [malloc(size) for size in (1, 7, 64, 100_000)]
    assert all(address % 64 == 0 for address in addresses)
    assert acl.rt.free(None) == 100000
    assert acl.rt.free(addresses[1] + 1) == 107000
    assert "1 bytes inside" in last_message()
    assert acl.rt.free(addresses[0]) == 0
    assert acl.rt.free(addresses[0]) == 107000
    assert "freed before" in last_message()
    assert acl.rt.free(0x1234560) == 107000
    assert acl.rt.malloc(2**63, 0) == (0, 207001)
    assert acl.rt.malloc(runtime.memory.total("device"), 0) == (0, 207001)
    host, ret = acl.rt.malloc_host(32)
    assert ret == 0
    assert acl.rt.free(host) == 107000
    assert "host memory" in last_message()
    assert acl.rt.free_host(addresses[1]) == 107000
    assert acl.rt.free_host(host) == 0
    assert acl.rt.free_host(None) == 100000
    assert acl.rt.malloc_host(0) == (0, 100000)


@pytest.mark.usefixtures("ready")
def test_memcpy_moves_bytes_within_bounds_alone() -> None:
    data = np.arange(64, dtype=np.uint8)
    back = np.zeros(64, np.uint8)
    one, two = malloc(64), malloc(64)
    src, dst = data.ctypes.data, back.ctypes.data
    assert acl.rt.memcpy(one, 64, src, 64, H2D) == 0
    assert acl.rt.memcpy(two, 64, one, 64, D2D) == 0
    assert acl.rt.memcpy(dst, 64, two, 64, D2H) == 0
    np.testing.assert_array_equal(back, data)
    back[:] = 0
    for kind in (acl.ACL_MEMCPY_DEFAULT, acl.ACL_MEMCPY_HOST_TO_BUF_TO_DEVICE):
        assert acl.rt.memcpy(one, 64, src, 64, kind) == 0
    assert acl.rt.memcpy(dst, 64, one, 64, acl.ACL_MEMCPY_DEFAULT) == 0
    np.testing.assert_array_equal(back, data)
    assert acl.rt.memcpy(dst, 64, src, 64, H2H) == 0

    assert acl.rt.memcpy(None, 0, None, 0, H2D) == 0
    assert acl.rt.memcpy(None, 8, src, 8, H2D) == 100000
    assert acl.rt.memcpy(one, 8, None, 8, H2D) == 100000
    assert acl.rt.memcpy(one, 7, src, 8, H2D) == 107000
    for kind in (-1, 6, 77):
        assert acl.rt.memcpy(one, 8, src, 8, kind) == 100000
    assert acl.rt.memcpy(one + 60, 8, src, 8, H2D) == 107000
    assert "4 bytes past" in last_message()
    assert acl.rt.memcpy(dst, 65, one, 65, D2H) == 107000
    assert acl.rt.memcpy(one - 1, 8, src, 8, H2D) == 107000
    assert acl.rt.memcpy(dst, 8, src, 8, H2D) == 107000  # dst is not the device's
    assert acl.rt.memcpy(dst, 8, one, 8, H2H) == 107000  # src is
    assert "device memory, not host" in last_message()
    assert acl.rt.free(one) == 0
    assert acl.rt.memcpy(dst, 8, one, 8, D2H) == 107000
    assert "freed before" in last_message()


@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize("wild", [8, 0x10, 2**47, 2**63, 2**64 - 8])
def test_a_wild_host_address_is_a_code_not_a_crash(wild: int) -> None:
    address = malloc(64)
    assert acl.rt.memcpy(address, 64, wild, 64, H2D) == 107000
    assert acl.rt.memcpy(wild, 64, address, 64, D2H) == 107000
    assert "memory of this process" in last_message()


def _page(protection: int, pages: int = 1) -> int:
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    address = libc.mmap(None, 4096 * pages, protection, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    assert address
    return int(address)


@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize("sandboxed", [False, True])
@pytest.mark.parametrize("protection", [mmap.PROT_READ, 0])
def test_a_page_that_may_not_be_touched_is_a_code_not_a_crash(
    protection: int, sandboxed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sandboxed:  # where the kernel's own copies are forbidden

        def forbidden(*_: object) -> int:
            ctypes.set_errno(errno.EPERM)
            return -1

        monkeypatch.setattr(memory._libc, "process_vm_readv", forbidden)
        monkeypatch.setattr(memory._libc, "process_vm_writev", forbidden)
    page = _page(protection)
    device, host = malloc(64), np.zeros(64, np.uint8)
    assert acl.rt.memcpy(page, 64, device, 64, D2H) == 107000
    assert "cannot be written" in last_message()
    assert acl.rt.memcpy(page, 64, host.ctypes.data, 64, H2H) == 107000
    readable = protection == mmap.PROT_READ
    assert acl.rt.memcpy(device, 64, page, 64, H2D) == (0 if readable else 107000)
    assert acl.rt.memcpy(host.ctypes.data, 64, device, 64, D2H) == 0
    handle = stream()
    assert acl.rt.memcpy_async(page, 64, device, 64, D2H, handle) == 0
    assert acl.rt.synchronize_stream(handle) == 500000


@pytest.mark.usefixtures("ready")
def test_a_copy_is_made_wholly_or_not_at_all() -> None:
    pages = _page(mmap.PROT_READ | mmap.PROT_WRITE, 2)
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(pages + 4096), ctypes.c_size_t(4096), mmap.PROT_READ) == 0
    device = malloc(8192)
    assert acl.rt.memset(device, 8192, 7, 8192) == 0
    assert acl.rt.memcpy(pages, 8192, device, 8192, D2H) == 107000
    assert ctypes.string_at(pages, 4096) == bytes(4096)


@pytest.mark.usefixtures("ready")
def test_a_host_range_may_not_run_into_device_memory() -> None:
    freed, live, device = malloc(64), malloc(64), malloc(64)
    host = np.zeros(256, np.uint8)
    other = host.ctypes.data
    assert acl.rt.free(freed) == 0
    for dst, src, kind in (
        (other, freed, acl.ACL_MEMCPY_DEFAULT), (freed, other, H2H), (device, freed, H2D), (freed, device, D2H),
        (other, live + 64, acl.ACL_MEMCPY_DEFAULT), (live - 8, device, D2H), (live - 8, other, H2H),
        (live + 60, device, D2H),
    ):  # fmt: skip
        assert acl.rt.memcpy(dst, 16, src, 16, kind) == 107000, (dst, src, kind)
        assert "must lie inside one live" in last_message()


@pytest.mark.usefixtures("ready")
def test_large_blocks_are_recognized_after_their_end() -> None:
    address = malloc(100 << 20)
    assert acl.rt.free(address) == 0
    assert acl.rt.free(address) == 107000
    assert "freed before" in last_message()


@pytest.mark.usefixtures("ready")
def test_host_memory_of_ours_is_held_to_its_bounds() -> None:
    host, _ = acl.rt.malloc_host(16)
    device = malloc(64)
    assert acl.rt.memcpy(device, 64, host, 16, H2D) == 0
    assert acl.rt.memcpy(device, 64, host, 17, H2D) == 107000
    assert "1 bytes past" in last_message()


@pytest.mark.usefixtures("ready")
def test_memset_and_asynchronous_copies() -> None:
    handle = stream()
    address = malloc(64)
    pinned, _ = acl.rt.malloc_host(64)  # a copy to other memory may be waited for
    host = np.frombuffer((ctypes.c_uint8 * 64).from_address(pinned), np.uint8)
    host[:] = 0
    assert acl.rt.memset(address, 64, 0x1FF, 64) == 0
    assert acl.rt.memset(address, 8, 1, 9) == 107000
    assert acl.rt.memset(None, 8, 1, 8) == 100000
    assert acl.rt.memset(address + 60, 8, 1, 8) == 107000
    go = block(handle)
    assert acl.rt.memset_async(address, 64, 7, 32, handle) == 0
    assert acl.rt.memcpy_async(pinned, 64, address, 64, D2H, handle) == 0
    assert acl.rt.memcpy_async(pinned, 64, address, 65, D2H, handle) == 107000
    assert acl.rt.memcpy_async(pinned, 64, address, 64, D2H, 0xABC) == 107017
    assert not host.any()
    go.set()
    assert acl.rt.synchronize_stream(handle) == 0
    assert host[:32].tolist() == [7] * 32
    assert host[32:].tolist() == [255] * 32


@pytest.mark.usefixtures("ready")
def test_memory_freed_under_queued_work_is_found_out() -> None:
    handle = stream()
    address = malloc(64)
    go = block(handle)
    assert acl.rt.memset_async(address, 64, 7, 64, handle) == 0
    assert acl.rt.free(address) == 0
    go.set()
    assert acl.rt.synchronize_stream(handle) == 500000
    message = last_message()
    assert "aclrtMemsetAsync" in message
    assert f"{address:#x}" in message
    assert acl.rt.synchronize_stream(handle) == 0


@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize("how", ["stream", "event", "device", "query", "other stream"])
def test_any_kind_of_synchronization_lets_memory_go(how: str) -> None:
    handle, other = stream(), stream()
    address = malloc(64)
    event, _ = acl.rt.create_event()
    assert acl.rt.memset_async(address, 64, 7, 64, handle) == 0
    assert acl.rt.record_event(event, handle) == 0
    assert acl.rt.stream_wait_event(other, event) == 0
    if how == "stream":
        assert acl.rt.synchronize_stream(handle) == 0
    elif how == "event":
        assert acl.rt.synchronize_event(event) == 0
    elif how == "device":
        assert acl.rt.synchronize_device() == 0
    elif how == "query":
        while acl.rt.stream_query(handle)[0] != acl.ACL_STREAM_STATUS_COMPLETE:
            time.sleep(0.001)
    else:
        assert acl.rt.synchronize_stream(other) == 0
    assert acl.rt.free(address) == 0
    assert acl.rt.synchronize_stream(handle) == 0


# --- tensors and arrays ---


@pytest.mark.usefixtures("ready")
def test_tensor_getters_give_what_was_set() -> None:
    tensor = acl.create_tensor([2, 3], acl.ACL_BF16, [10, 2], 5, acl.ACL_FORMAT_NCHW, [40], 0x1000)
    assert acl.get_view_shape(tensor) == ([2, 3], 0)
    assert acl.get_view_strides(tensor) == ([10, 2], 0)
    assert acl.get_view_offset(tensor) == (5, 0)
    assert acl.get_storage_shape(tensor) == ([40], 0)
    assert acl.get_data_type(tensor) == (27, 0)
    assert acl.get_format(tensor) == (0, 0)
    assert acl.get_raw_tensor_addr(tensor) == (0x1000, 0)
    assert acl.set_raw_tensor_addr(tensor, 0x2000) == 0
    assert acl.get_raw_tensor_addr(tensor) == (0x2000, 0)
    packed = acl.create_tensor([2, 0, 3], 99, None, 0, -5, None, None)
    assert acl.get_view_strides(packed) == ([0, 3, 1], 0)
    assert acl.get_data_type(packed) == (99, 0)
    assert acl.get_format(packed) == (-5, 0)
    for getter in (acl.get_view_shape, acl.get_view_strides, acl.get_storage_shape):
        assert getter(None) == ([], 161001)
        assert getter(0xBAD) == ([], 161001)
    assert acl.get_raw_tensor_addr(None) == (0, 161001)
    assert acl.set_raw_tensor_addr(None, 1) == 561103
    assert acl.set_raw_tensor_addr(0xBAD, 1) == 561000


@pytest.mark.usefixtures("ready")
def test_what_cannot_be_made_is_null() -> None:
    assert acl.create_tensor(None, 0, None, 0, 2, [2], None) == 0
    assert acl.create_tensor([2, -1], 0, None, 0, 2, [2], None) == 0
    assert acl.create_tensor([2], 0, [1, 1], 0, 2, [2], None) == 0
    assert acl.create_int_array(None) == 0
    assert acl.create_bool_array(None) == 0
    assert acl.create_tensor([], 0, None, 0, 2, [], None) != 0
    assert acl.create_tensor([1] * 12, 0, None, 0, 2, [1], None) != 0
    assert acl.create_int_array([]) != 0


@pytest.mark.usefixtures("ready")
def test_destroying() -> None:
    made = {
        acl.destroy_tensor: acl.create_tensor([1], 0, None, 0, 2, [1], None),
        acl.destroy_int_array: acl.create_int_array([1, 2]),
        acl.destroy_bool_array: acl.create_bool_array([True]),
    }
    assert acl.destroy_tensor(made[acl.destroy_int_array]) == 561000  # another kind
    for destroy, handle in made.items():
        assert destroy(None) == 0
        assert destroy(handle) == 0
        assert destroy(handle) == 561000
        assert "destroyed or foreign" in last_message()


# --- options, pure functions, messages, types ---


@pytest.mark.usefixtures("ready")
def test_system_parameters_are_stored_apart() -> None:
    assert acl.rt.ctx_get_sys_param_opt(0) == (0, 107021)
    assert acl.rt.get_sys_param_opt(0) == (0, 0)
    assert acl.rt.set_sys_param_opt(0, 3) == 0
    assert acl.rt.ctx_set_sys_param_opt(0, 1) == 0
    assert acl.rt.get_sys_param_opt(0) == (3, 0)
    assert acl.rt.ctx_get_sys_param_opt(0) == (1, 0)
    for value in (-1, 4):
        assert acl.rt.set_sys_param_opt(0, value) == 107000
        assert acl.rt.ctx_set_sys_param_opt(0, value) == 107000
    assert acl.rt.set_sys_param_opt(9, 0) == 107000
    assert acl.rt.get_sys_param_opt(9) == (0, 107000)
    acl.rt.create_context(0)
    assert acl.rt.ctx_get_sys_param_opt(0) == (0, 107021)


def test_pure_functions() -> None:
    sizes = {0: 4, 1: 2, 2: 1, 3: 4, 4: 1, 6: 2, 7: 2, 8: 4, 9: 8, 10: 8, 11: 8, 12: 1, 16: 8, 17: 16, 27: 2}
    for dtype in range(-2, 40):
        assert acl.data_type_size(dtype) == sizes.get(dtype, 0)
    for value in (0.0, 1.0, -2.5, 65504.0, 1e-7, float("inf")):
        assert acl.float16_to_float(acl.float_to_float16(value)) == float(np.float16(value))
    assert acl.float_to_float16(1.0) == 0x3C00
    assert acl.float_to_float16(1e6) == 0x7C00


@pytest.mark.usefixtures("ready")
def test_messages_come_newest_first_and_once() -> None:
    assert acl.get_recent_err_msg() is None
    acl.rt.malloc(0, 0)
    acl.rt.free(None)
    message = acl.get_recent_err_msg()
    assert message is not None
    first, second = message.splitlines()
    assert first.startswith("aclrtFree: ")
    assert second.startswith("aclrtMalloc: ")
    assert acl.get_recent_err_msg() is None


@pytest.mark.usefixtures("ready")
def test_messages_belong_to_their_thread() -> None:
    acl.rt.malloc(0, 0)
    others: list[str | None] = []
    thread = threading.Thread(target=lambda: others.append(acl.get_recent_err_msg()))
    thread.start()
    thread.join()
    assert others == [None]
    assert "aclrtMalloc" in last_message()


@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize(
    "call",
    [
        lambda: acl.rt.malloc(8), lambda: acl.rt.malloc(8, 0, 0), lambda: acl.rt.malloc("8", 0),
        lambda: acl.rt.malloc(8.0, 0), lambda: acl.rt.malloc(-1, 0), lambda: acl.rt.malloc(2**64, 0),
        lambda: acl.rt.set_device("0"), lambda: acl.rt.set_device(2**40), lambda: acl.rt.free("x"),
        lambda: acl.create_tensor(5, 0, None, 0, 2, [1], None), lambda: acl.create_tensor("ab", 0, None, 0, 2, [1], 0),
        lambda: acl.create_int_array([1.5]), lambda: acl.create_int_array([2**63]),
        lambda: acl.create_bool_array([2.0]), lambda: acl.create_bool_array([2]),
        lambda: acl.init(3), lambda: acl.set_soc(), lambda: acl.rt.memcpy(1, 2, 3, 4, 5, 6),
        lambda: acl.rt.malloc(size=8, policy=0, other=1),
    ],
)  # fmt: skip
def test_wrong_arity_or_type_is_a_type_error(call: Any) -> None:
    with pytest.raises(TypeError) as caught:
        call()
    assert str(caught.value)


@pytest.mark.usefixtures("ready")
def test_integers_of_numpy_and_ctypes_are_taken() -> None:
    address, ret = acl.rt.malloc(np.int64(64), np.int32(0))
    assert ret == 0
    buffer = (ctypes.c_char * 64)()
    assert acl.rt.memcpy(address, np.uint64(64), ctypes.addressof(buffer), 64, H2D) == 0
    assert acl.rt.malloc(size=8, policy=0)[1] == 0


def test_pure_functions_check_their_arguments() -> None:
    for call in (
        lambda: acl.float16_to_float(70000), lambda: acl.float16_to_float("3"), lambda: acl.float_to_float16("1.5"),
        lambda: acl.float_to_float16(None), lambda: acl.data_type_size("x"), lambda: acl.data_type_size(),
        lambda: acl.float_to_float16(10**400), lambda: acl.rt.malloc(10**5000, 0),
        lambda: acl.rt.malloc(np.zeros((3, 3)), 0),
    ):  # fmt: skip
        with pytest.raises(TypeError) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_help_shows_arguments_alone() -> None:
    assert str(inspect.signature(acl.rt.malloc)) == "(size, policy)"
    assert str(inspect.signature(acl.init)) == "(path=None)"


@pytest.mark.usefixtures("ready")
def test_a_failing_getter_gives_a_list_of_its_own() -> None:
    shape, _ = acl.get_view_shape(0)
    shape.append(99)
    assert acl.get_view_shape(0) == ([], 161001)


@pytest.mark.usefixtures("ready")
def test_a_tensor_of_absurd_rank_costs_nothing() -> None:
    handle = acl.create_tensor([2**62] * 20_000, 0, None, 0, 2, [1], 0)
    assert acl.get_view_strides(handle)[0][0] == 2**63 - 1


def test_finalize_survives_a_closed_stderr(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    acl.finalize()
    assert acl.init() == 0
    acl.create_int_array([1])
    closed = open(tmp_path / "stderr", "w")  # noqa: SIM115
    closed.close()
    monkeypatch.setattr("sys.stderr", closed)
    assert acl.finalize() == 0


@pytest.mark.usefixtures("ready")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python's, from 3.12 on
def test_a_forked_child_starts_without_a_runtime() -> None:
    handle, address = stream(), malloc(8)
    assert acl.rt.memset_async(address, 8, 1, 8, handle) == 0
    assert acl.rt.synchronize_stream(handle) == 0
    child = os.fork()
    if child == 0:
        codes = [acl.rt.synchronize_stream(handle), acl.init(), acl.rt.set_device(0)]
        fresh, ret = acl.rt.create_stream()
        codes += [ret, acl.rt.synchronize_stream(handle), acl.rt.synchronize_stream(fresh)]
        os._exit(0 if codes == [100001, 0, 0, 0, 107017, 0] and fresh > handle else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert acl.rt.synchronize_stream(handle) == 0


@pytest.mark.usefixtures("ready")
def test_a_long_chain_of_waiting_streams_is_synchronized_whole() -> None:
    address = malloc(64)
    first = handle = stream()
    assert acl.rt.memset_async(address, 64, 7, 64, first) == 0
    for _ in range(1100):
        event, _ = acl.rt.create_event()
        assert acl.rt.record_event(event, handle) == 0
        handle = stream()
        assert acl.rt.stream_wait_event(handle, event) == 0
    assert acl.rt.synchronize_stream(handle) == 0
    assert acl.rt.free(address) == 0
    assert acl.rt.synchronize_stream(first) == 0


@pytest.mark.usefixtures("ready")
def test_only_one_of_two_finalizes_succeeds() -> None:
    go = block(0)
    codes: list[int] = []
    threads = [threading.Thread(target=lambda: codes.append(acl.finalize())) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    go.set()
    for thread in threads:
        thread.join()
    assert sorted(codes) == [0, 100037]


@pytest.mark.usefixtures("ready")
def test_a_stream_whose_thread_cannot_start_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    handle, address = stream(), malloc(8)

    def refuse(self: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert acl.rt.memset_async(address, 8, 1, 8, handle) == 500000
    assert acl.rt.synchronize_stream_with_timeout(handle, 1000) == 0
    assert acl.rt.memset_async(address, 8, 1, 8, handle) == 0
    assert acl.rt.synchronize_stream_with_timeout(handle, 5000) == 0


def test_a_closed_stream_takes_no_work() -> None:
    acl.finalize()
    assert acl.init() == 0
    assert acl.rt.set_device(0) == 0
    lonely = Stream(runtime.current_context())
    lonely.close()
    with pytest.raises(Exception, match="destroyed"):
        lonely.submit(Task("test"))
    assert acl.finalize() == 0


def test_handles_keep_growing_over_a_restart() -> None:
    acl.finalize()
    assert acl.init() == 0
    before = acl.create_int_array([1])
    assert acl.destroy_int_array(before) == 0
    assert acl.finalize() == 0
    assert acl.init() == 0
    after = acl.create_int_array([1])
    assert after > before
    assert acl.destroy_int_array(after) == 0
    assert acl.finalize() == 0


@pytest.mark.usefixtures("ready")
def test_an_event_stands_for_its_newest_recording() -> None:
    handle = stream()
    event, _ = acl.rt.create_event()
    assert acl.rt.record_event(event, handle) == 0
    assert acl.rt.synchronize_stream(handle) == 0
    go = block(handle)
    assert acl.rt.record_event(event, handle) == 0
    assert acl.rt.query_event(event) == (acl.ACL_EVENT_STATUS_NOT_READY, 0)
    go.set()
    assert acl.rt.synchronize_event(event) == 0


@pytest.mark.usefixtures("ready")
def test_an_early_event_does_not_cover_later_work() -> None:
    handle, address = stream(), malloc(64)
    event, _ = acl.rt.create_event()
    assert acl.rt.record_event(event, handle) == 0
    assert acl.rt.memset_async(address, 64, 7, 64, handle) == 0
    assert acl.rt.synchronize_event(event) == 0
    assert acl.rt.free(address) == 0
    assert acl.rt.synchronize_stream(handle) == 500000


@pytest.mark.usefixtures("ready")
def test_a_copy_whose_memory_is_freed_is_found_out_and_not_made() -> None:
    handle, address = stream(), malloc(64)
    host = np.zeros(64, np.uint8)
    assert acl.rt.memset(address, 64, 0x101, 64) == 0  # the low byte counts
    go = block(handle)
    assert acl.rt.memcpy_async(host.ctypes.data, 64, address, 64, D2H, handle) == 0
    assert acl.rt.free(address) == 0
    go.set()
    assert acl.rt.synchronize_stream(handle) == 500000
    assert "aclrtMemcpyAsync" in last_message()
    assert not host.any()
