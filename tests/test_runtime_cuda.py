"""The runtime and the two phases with BACKNORM_DEVICE=cuda: on a GPU, or where there is none over a stand-in for its
driver, with the kernels in Triton's interpreter.

The tests of the CPU's runtime are run again as they are; those that cannot hold on a GPU are named with the reason.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis.stateful import run_state_machine_as_test

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton")

# ruff: noqa: E402 (Triton must see the environment)
from backnorm import acl
from backnorm.acl import cuda
from backnorm.acl.cuda import Cuda
from backnorm.acl.runtime import runtime
from backnorm.demo import run_demo
from backnorm.ops import OPS
from backnorm.ops.layer_norm.gpu_tiling import LONGEST_WHOLE_ROW

from .calls import Good, good_calls
from .doors import Client, Layout, queue_python
from .fake_cuda import FakeDriver, stand_in
from .test_numbers import run_and_check
from .test_runtime import *  # noqa: F403
from .test_runtime_stateful import Runtime
from .test_two_phase import *  # noqa: F403
from .test_two_phase import LayerNorm, message, run

on_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
without_gpu = pytest.mark.skipif(ON_GPU, reason="the stand-in is for machines without a GPU")

for name in (
    "test_devices",  # counts bytes of memory that here is shared with others, and given out in pages
    "test_a_copy_whose_memory_is_freed_is_found_out_and_not_made",  # what a GPU has queued it does
    "test_a_stream_whose_thread_cannot_start_is_not_lost",  # there is no thread
    "test_a_forked_child_starts_without_a_runtime",  # it has one, but no GPU: below
    "test_another_device_is_refused_never_replaced",  # below
):
    del globals()[name]


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver | None]:
    """BACKNORM_DEVICE=cuda, and what stands for the driver."""
    acl.finalize()
    monkeypatch.setenv("BACKNORM_DEVICE", "cuda")
    if ON_GPU:
        yield None
    else:
        yield from stand_in(monkeypatch)
    acl.finalize()
    acl.get_recent_err_msg()


@pytest.fixture
def fake(device: FakeDriver | None) -> FakeDriver:
    assert device is not None
    return device


# --- the whole operator suite ---


def _check(good: Good) -> None:
    """Rows that programs share take the interpreter a minute each; tests/test_gpu.py has some of them."""
    assume(ON_GPU or math.prod(good.call.get("normalizedShape", ())) <= LONGEST_WHOLE_ROW)
    run_and_check(good)


@pytest.mark.usefixtures("ready")
@settings(max_examples=80)
@given(good=good_calls(doors=("aclnn",)))
def test_random_calls_agree_with_the_reference(good: Good) -> None:
    _check(good)


@pytest.mark.usefixtures("ready")
def test_rows_that_are_all_alike() -> None:
    """Every rounding of their sums goes the same way."""
    rng = np.random.default_rng(0)
    for _ in range(10):
        dy, x, mean, invstd = (rng.standard_normal(count).astype(np.float32) for count in (1, 2, 2, 2))
        names = ("sumDy", "sumDyXmu", "gradWeight", "gradBias")
        call = {
            "gradOut": Layout(dy, (70, 2, 1), (0, 0, 0), 0), "input": Layout(x, (70, 2, 1), (0, 1, 0), 0),
            "mean": Layout(mean, (2,), (1,), 0), "invstd": Layout(invstd, (2,), (1,), 0), "weight": None,
            "inputG": True, "weightG": True, "biasG": True,
            **{name: Layout(np.full(2, np.nan, np.float32), (2,), (1,), 0) for name in names},
        }  # fmt: skip
        run_and_check(Good(OPS["batch_norm_backward_reduce"], "Ascend950", "aclnn", call, names))


@pytest.mark.usefixtures("ready")
@settings(max_examples=30)
@given(good=good_calls(doors=("aclnn",), data="infinite"))
def test_nan_and_inf_propagate(good: Good) -> None:
    _check(good)


def test_the_example_calls_give_their_golden_numbers() -> None:
    assert all(line.passed for line in run_demo())


def test_random_sequences_of_calls_keep_the_ledger() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Runtime, settings=settings(max_examples=25, stateful_step_count=40, deadline=None)
    )


def test_the_hardware_is_the_one_asked_for(ready: None) -> None:
    assert isinstance(runtime.hardware, Cuda)
    tensor = acl.create_tensor([2], 0, None, 0, 2, [2], None)
    assert runtime.objects[tensor].desc.device == "cuda:0"


# --- memory ---


def test_memory_is_the_devices_own(ready: None) -> None:
    free, total, ret = acl.rt.get_mem_info(0)
    assert ret == 0
    assert 0 < free <= total
    address, ret = acl.rt.malloc(64 << 20, 0)
    assert ret == 0
    assert address % 256 == 0
    assert acl.rt.get_mem_info(0)[0] <= free - (64 << 20)
    assert acl.rt.free(address) == 0
    assert acl.rt.get_mem_info(0)[0] > free - (64 << 20)  # what is held back can be had again
    assert acl.rt.get_device_count() == (1, 0)
    assert acl.rt.set_device(1) == 107001


def test_memory_that_was_freed_is_there_for_the_next(ready: None) -> None:
    """Blocks held back, to recognize stale addresses, never stand in the way of a new one."""
    most = acl.rt.get_mem_info(0)[0] * 3 // 4
    for _ in range(3):
        address, ret = acl.rt.malloc(most, 0)
        assert ret == 0, message()
        assert acl.rt.memset(address + most - 8, 8, 7, 8) == 0
        assert acl.rt.free(address) == 0
    address, _ = acl.rt.malloc(most, 0)
    assert acl.rt.malloc(most, 0) == (0, 207001)
    assert f"got {most}" in message()
    assert acl.rt.free(address) == 0


def test_finalize_gives_back_what_was_leaked(ready: None) -> None:
    free = acl.rt.get_mem_info(0)[0]
    for _ in range(4):
        assert acl.rt.malloc(64 << 20, 0)[1] == 0
    assert acl.finalize() == 0
    assert acl.init() == 0
    assert acl.rt.set_device(0) == 0
    assert acl.rt.get_mem_info(0)[0] > free - (64 << 20)


def test_copies_from_pinned_memory_keep_their_place_in_the_stream(ready: None) -> None:
    stream, _ = acl.rt.create_stream()
    host, ret = acl.rt.malloc_host(1 << 20)
    assert ret == 0
    there = np.ctypeslib.as_array((ctypes.c_uint8 * (1 << 20)).from_address(host))
    there[:] = 1
    device, _ = acl.rt.malloc(1 << 20, 0)
    go = threading.Event()
    queue_python(stream, lambda: go.wait(20))
    assert acl.rt.memcpy_async(device, 1 << 20, host, 1 << 20, 1, stream) == 0
    assert acl.rt.memset_async(device, 1 << 20, 5, 1 << 19, stream) == 0
    assert acl.rt.memcpy_async(host, 1 << 20, device, 1 << 20, 2, stream) == 0
    there[:] = 2  # read when its turn has come, not before
    go.set()
    assert acl.rt.synchronize_stream(stream) == 0
    assert (there[: 1 << 19] == 5).all()
    assert (there[1 << 19 :] == 2).all()
    assert acl.rt.free_host(host) == 0


# --- work on streams ---


def test_phase_two_keeps_its_place_in_the_stream(ready: None) -> None:
    """Inputs that arrive on the stream just before, an output that leaves just after."""
    with Client() as client:
        call = LayerNorm(client)
        expected = call.expected()
        size, executor, ret = call.plan()
        assert ret == 0
        workspace = client.malloc(size)
        assert run(workspace, size, executor) == 0  # compiles, which may wait for the GPU
        assert acl.rt.synchronize_stream(0) == 0
        pinned, _ = acl.rt.malloc_host(call.host["input"].nbytes)
        kept = np.ctypeslib.as_array((ctypes.c_float * call.host["input"].size).from_address(pinned))
        kept[:] = call.host["input"].ravel()
        bytes_ = call.host["input"].nbytes
        assert acl.rt.memset(call.address["input"], bytes_, 0, bytes_) == 0
        stream, _ = acl.rt.create_stream()
        go = threading.Event()
        queue_python(stream, lambda: go.wait(20))
        assert acl.rt.memcpy_async(call.address["input"], bytes_, pinned, bytes_, 1, stream) == 0
        _, executor, _ = call.plan()
        assert run(workspace, size, executor, stream) == 0
        assert acl.rt.memcpy_async(pinned, bytes_, call.address["gradInputOut"], bytes_, 2, stream) == 0
        go.set()
        assert acl.rt.synchronize_stream(stream) == 0
        np.testing.assert_allclose(kept.reshape(expected.shape), expected, rtol=1e-5, atol=1e-5)
        del kept
        assert acl.rt.free_host(pinned) == 0
        client.release.clear()


def test_threads_of_their_own_streams(ready: None) -> None:
    """Each thread has a context to set and a stream to use; the results are the same bits."""
    context, _ = acl.rt.get_context()
    results: list[bytes] = []
    failures: list[str] = []

    def work() -> None:
        try:
            assert acl.rt.set_context(context) == 0
            stream, ret = acl.rt.create_stream()
            assert ret == 0
            with Client() as client:
                call = LayerNorm(client)
                for _ in range(5):
                    size, executor, _ = call.plan()
                    assert run(client.malloc(size), size, executor, stream) == 0
                assert acl.rt.synchronize_stream(stream) == 0
                results.append(call.result().tobytes())
                client.release.clear()
        except AssertionError as error:
            failures.append(f"{error} {message()}")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(results) == 4
    assert len(set(results)) == 1


@on_gpu
def test_events_time_the_gpu(ready: None) -> None:
    """A fill of 1 GiB cannot take less than its bytes over any GPU's bandwidth, nor a second."""
    address, ret = acl.rt.malloc(1 << 30, 0)
    assert ret == 0
    first, second = acl.rt.create_event()[0], acl.rt.create_event()[0]
    assert acl.rt.record_event(first, 0) == 0
    assert acl.rt.memset_async(address, 1 << 30, 1, 1 << 30, 0) == 0
    assert acl.rt.record_event(second, 0) == 0
    assert acl.rt.synchronize_event(second) == 0
    milliseconds, ret = acl.rt.event_elapsed_time(first, second)
    assert ret == 0
    assert 0.05 < milliseconds < 1000


@on_gpu
def test_torch_and_the_runtime_share_the_gpu(ready: None) -> None:
    """Both are in the primary context: torch goes on with its own streams and sees what was computed."""
    before = torch.arange(8, device="cuda", dtype=torch.float32)
    address, _ = acl.rt.malloc(32, 0)
    assert acl.rt.memset(address, 32, 0, 32) == 0
    assert float((before + 1).sum()) == 36
    back = np.ones(8, np.float32)
    assert acl.rt.memcpy(back.ctypes.data, 32, address, 32, 2) == 0
    assert not back.any()


@on_gpu
def test_a_failure_is_told_with_cudas_name() -> None:
    """In a process of its own: after some failures the context is of no use."""
    program = """
import numpy as np
from backnorm import acl
from backnorm.acl.runtime import runtime
from backnorm.acl.streams import Task
assert acl.init() == 0 and acl.rt.set_device(0) == 0
hardware = runtime.hardware
runtime.stream(0).submit(Task("wild", lambda queue: hardware.fill(0x10000, 1, 64, queue)))
codes = [acl.rt.synchronize_stream(0)]
print(codes, acl.get_recent_err_msg())
print(acl.finalize())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "CUDA_ERROR_" in done.stdout


# --- what is missing, and what fails ---


def test_an_unknown_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("npu", "cuda:1", "CUDA", " "):
        monkeypatch.setenv("BACKNORM_DEVICE", name)
        assert acl.init() == 200006
        assert f"aclInit: BACKNORM_DEVICE must be cpu or cuda (default: cpu); got {name!r}" in message()
    monkeypatch.setenv("BACKNORM_DEVICE", "")
    assert acl.init() == 0
    assert not isinstance(runtime.hardware, Cuda)


@without_gpu
def test_without_a_gpu_the_runtime_does_not_start() -> None:
    """No stand-in here: the machine as it is."""
    program = "from backnorm import acl; print(acl.init(), acl.get_recent_err_msg(), acl.rt.set_device(0))"
    environment = {**os.environ, "BACKNORM_DEVICE": "cuda"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True, timeout=120
    )
    assert done.stdout.startswith("200006 aclInit: BACKNORM_DEVICE=cuda must name a GPU that can be used;")
    assert done.stdout.rstrip().endswith("100001")


@without_gpu
def test_a_missing_driver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(cuda, "load_driver", missing)
    assert acl.init() == 200006
    assert "the CUDA driver cannot be loaded: libcuda.so.1" in message()
    assert acl.rt.malloc(8, 0) == (0, 100001)


@without_gpu
def test_a_machine_whose_gpus_are_hidden_is_told(fake: FakeDriver) -> None:
    fake.devices = 0
    assert acl.init() == 200006
    assert "CUDA's cuInit failed: CUDA_ERROR_NO_DEVICE (100), what it means" in message()
    fake.devices = 1
    assert acl.init() == 0


@pytest.mark.parametrize("missing", ["torch", "triton"])
@without_gpu
def test_missing_kernels_are_told(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the real check, without the stand-in
    monkeypatch.setenv("BACKNORM_DEVICE", "cuda")
    monkeypatch.setitem(sys.modules, missing, None)
    assert acl.init() == 200006
    assert f"the kernels need {missing}: install backnorm[gpu]" in message()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python's, from 3.12 on
def test_a_forked_child_is_told_that_the_gpu_is_not_its_own(ready: None) -> None:
    child = os.fork()
    if child == 0:
        codes = [acl.rt.get_device()[1], acl.init()]
        os._exit(0 if codes == [100001, 200006] and "forked child" in message() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert acl.rt.synchronize_device() == 0


@without_gpu
@pytest.mark.parametrize(
    ("function", "code", "status", "call"),
    [
        ("cuMemAlloc_v2", 2, 207001, lambda: acl.rt.malloc(64, 0)[1]),
        ("cuMemAlloc_v2", 700, 500000, lambda: acl.rt.malloc(64, 0)[1]),
        ("cuMemHostAlloc", 2, 207001, lambda: acl.rt.malloc_host(64)[1]),
        ("cuStreamCreate", 2, 207001, lambda: acl.rt.create_stream()[1]),
        ("cuStreamCreate", 999, 500000, lambda: acl.rt.create_stream()[1]),
        ("cuMemGetInfo_v2", 700, 500000, lambda: acl.rt.get_mem_info(0)[2]),
        ("cuEventRecord", 400, 107017, lambda: acl.rt.record_event(acl.rt.create_event()[0], 0)),
    ],
)
def test_the_drivers_errors_become_codes(
    fake: FakeDriver, ready: None, function: str, code: int, status: int, call: Any
) -> None:
    fake.fail[function] = code
    assert call() == status
    text = message()
    if status != 207001 or "Stream" in function:
        assert f"CUDA's {function} failed: " in text
        assert f"({code})" in text
    fake.fail.clear()
    assert acl.rt.synchronize_device() == 0


@without_gpu
def test_a_driver_that_fails_later_is_told_at_synchronize(fake: FakeDriver, ready: None) -> None:
    address, _ = acl.rt.malloc(64, 0)
    fake.fail["cuMemsetD8Async"] = 1
    assert acl.rt.memset(address, 64, 1, 64) == 107000
    assert acl.rt.memset_async(address, 64, 1, 64, 0) == 0
    assert acl.rt.synchronize_stream(0) == 500000
    assert "aclrtMemsetAsync failed: AclFailure: CUDA's cuMemsetD8Async failed: CUDA_ERROR_INVALID_VALUE" in message()
    fake.fail = {"cuEventSynchronize": 700}
    assert acl.rt.memset_async(address, 64, 1, 64, 0) == 0
    assert acl.rt.synchronize_stream(0) == 500000
    assert "CUDA's cuEventSynchronize failed: CUDA_ERROR_ILLEGAL_ADDRESS (700)" in message()
    assert acl.finalize() == 0  # a dead GPU does not keep the runtime from ending
    fake.fail.clear()


@without_gpu
def test_events_are_used_again(fake: FakeDriver, ready: None) -> None:
    address, _ = acl.rt.malloc(64, 0)
    for _ in range(200):
        assert acl.rt.memset_async(address, 64, 1, 64, 0) == 0
        assert acl.rt.synchronize_stream(0) == 0
    assert fake.calls.count("cuEventCreate") < 10


@without_gpu
def test_every_thread_leaves_its_context_as_it_was(fake: FakeDriver, ready: None) -> None:
    address, _ = acl.rt.malloc(64, 0)
    assert acl.rt.memset(address, 64, 1, 64) == 0
    assert acl.rt.synchronize_device() == 0
    assert fake.calls.count("cuCtxPushCurrent_v2") == fake.calls.count("cuCtxPopCurrent_v2") > 0


# --- the driver's signatures ---

_C = {
    "unsigned int": "c_uint", "int": "c_int", "size_t": "c_ulong", "CUdeviceptr": "c_ulong", "CUdevice": "c_int",
    "CUcontext": "c_void_p", "CUstream": "c_void_p", "CUevent": "c_void_p", "void*": "c_void_p", "CUresult": "c_int",
    "unsigned char": "c_ubyte", "float": "c_float", "const char*": "c_char_p",
}  # fmt: skip


def test_signatures_are_those_of_the_drivers_header() -> None:
    """Triton brings the header along."""
    import triton

    header = Path(triton.__file__).parent / "backends/nvidia/include/cuda.h"
    if not header.exists():
        pytest.skip("this Triton has no cuda.h")
    text = header.read_text()
    for name, types in cuda.SIGNATURES.items():
        base = re.sub(r"_v2$", "", name)
        found = re.search(rf"CUresult CUDAAPI {base}\(([^)]*)\);", text)
        assert found, name
        if base != name:
            assert re.search(rf"#define {base}\s+(__CUDA_API_PTDS\()?{name}\b", text), name
        expected = []
        for argument in found[1].split(","):
            words = re.sub(r"\s+", " ", argument.strip())
            kind, stars = re.match(r"((?:const |unsigned )?\w+)[ ]?(\**)", words).groups()  # type: ignore[union-attr]
            if kind in ("void", "const char"):
                kind, stars = f"{kind}*", stars[1:]
            expected.append(f"LP_{_C[kind]}" if stars else _C[kind])
        assert [kind.__name__ for kind in types] == expected, name
