"""Random sequences of legal and illegal runtime calls: documented codes only, and a balanced ledger."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from backnorm import acl, aclnn
from backnorm.acl.runtime import runtime
from backnorm.acl.streams import Event, Stream
from backnorm.acl.tensors import BoolArray, Executor, IntArray, Tensor
from backnorm.ops.layer_norm.reference import reference
from backnorm.status import Status

CODES = {int(status) for status in Status}
ROWS, COLS = 3, 4
DIMS = ([ROWS, COLS], [ROWS, COLS], [ROWS, 1], [ROWS, 1], [COLS], [COLS], [ROWS, COLS], [COLS], [COLS])
#: Bytes that phase two touches of each tensor: nothing of bias, the sixth.
BYTES = [0 if i == 5 else 4 * int(np.prod(dims)) for i, dims in enumerate(DIMS)]
WILD = st.sampled_from([None, 0, 1, 0x10, 0x10000, 0xDEADBEEF, 2**47, 2**63, 2**64 - 1])


class Runtime(RuleBasedStateMachine):
    """The model is a ledger: which handles and addresses are alive, and how large."""

    memory = Bundle("memory")
    streams = Bundle("streams")
    events = Bundle("events")
    tensors = Bundle("tensors")
    arrays = Bundle("arrays")
    executors = Bundle("executors")
    anything = memory | streams | events | tensors | arrays | executors

    @initialize()
    def start(self) -> None:
        acl.finalize()
        assert acl.init() == 0
        assert acl.rt.set_device(0) == 0
        self.sizes: dict[int, int] = {}
        self.host_sizes: dict[int, int] = {}
        self.scratch = 1  # bytes of workspace, as phase one says
        self.planned: dict[int, list[int | None]] = {}  # executor -> the addresses it will touch
        self.live: dict[type, set[int]] = {k: set() for k in (Stream, Event, Tensor, IntArray, BoolArray, Executor)}
        self.last = 0
        self.host = np.zeros(4096, np.uint8)
        acl.get_recent_err_msg()

    def expect(self, ret: int, *codes: int) -> None:
        """One of the codes came, and a message exactly when it is a failure."""
        assert ret in CODES
        assert ret in codes, (ret, codes, acl.get_recent_err_msg())
        message = acl.get_recent_err_msg()
        assert (message is None) == (ret == 0), message

    def made(self, kind: type, handle: int) -> int:
        assert handle > self.last, "a handle was reused"
        self.last = handle
        self.live[kind].add(handle)
        return handle

    # --- memory ---

    @rule(target=memory, size=st.integers(0, 2000))
    def malloc(self, size: int) -> Any:
        address, ret = acl.rt.malloc(size, 0)
        self.expect(ret, 0 if size else 100000)
        if ret:
            return multiple()
        for start, length in self.sizes.items():
            assert address + size <= start or start + length <= address, "two live blocks overlap"
        self.sizes[address] = size
        return address

    @rule(target=memory, address=consumes(memory))
    def free(self, address: int) -> int:
        self.expect(acl.rt.free(address), 0 if address in self.sizes else 107000)
        self.sizes.pop(address, None)
        return address

    @rule(address=memory | WILD | tensors, off=st.integers(1, 64))
    def free_nonsense(self, address: int | None, off: int) -> None:
        wrong = min((address or 0) + off, 2**64 - 1)
        if wrong not in self.sizes:
            self.expect(acl.rt.free(wrong), 107000)

    def fits(self, address: int | None, count: int) -> bool:
        return any(a <= (address or 0) and (address or 0) + count <= a + size for a, size in self.sizes.items())

    @rule(
        address=memory | WILD, off=st.integers(0, 300), count=st.integers(0, 2100), room=st.integers(0, 2100),
        kind=st.sampled_from([1, 2]), stream=st.none() | streams,
    )  # fmt: skip
    def copy(self, address: int | None, off: int, count: int, room: int, kind: int, stream: int | None) -> None:
        device = min((address or 0) + off, 2**64 - 1) if address else address
        host = self.host.ctypes.data
        dst, src = (device, host) if kind == 1 else (host, device)
        if stream is not None and stream not in self.live[Stream]:
            code = 107017
        elif count == 0:
            code = 0
        elif not device:
            code = 100000
        else:
            code = 0 if count <= room and self.fits(device, count) else 107000
        if stream is None:
            self.expect(acl.rt.memcpy(dst, room, src, count, kind), code)
        else:
            self.expect(acl.rt.memcpy_async(dst, room, src, count, kind, stream), code)
            acl.rt.synchronize_stream(stream)
            acl.get_recent_err_msg()

    @rule(address=memory, count=st.integers(0, 2100), value=st.integers(-5, 300))
    def memset(self, address: int, count: int, value: int) -> None:
        self.expect(
            acl.rt.memset(address, count, value, count), 0 if not count or self.fits(address, count) else 107000
        )

    @rule(size=st.integers(0, 500), wrong=memory | WILD)
    def host_memory(self, size: int, wrong: int | None) -> None:
        address, ret = acl.rt.malloc_host(size)
        self.expect(ret, 0 if size else 100000)
        if ret == 0:
            self.host_sizes[address] = size
            self.expect(acl.rt.free(address), 107000)
        if wrong not in self.host_sizes:
            self.expect(acl.rt.free_host(wrong), 107000 if wrong else 100000)

    @rule(data=st.data())
    def free_host(self, data: st.DataObject) -> None:
        if self.host_sizes:
            address = data.draw(st.sampled_from(sorted(self.host_sizes)))
            self.expect(acl.rt.free_host(address), 0)
            del self.host_sizes[address]
            self.expect(acl.rt.free_host(address), 107000)

    @rule(opt=st.integers(-1, 2), value=st.integers(-2, 5))
    def options(self, opt: int, value: int) -> None:
        good = opt == 0 and 0 <= value <= 3
        self.expect(acl.rt.set_sys_param_opt(opt, value), 0 if good else 107000)
        self.expect(acl.rt.ctx_set_sys_param_opt(opt, value), 0 if good else 107000)
        if good:
            assert acl.rt.get_sys_param_opt(opt) == acl.rt.ctx_get_sys_param_opt(opt) == (value, 0)

    @rule(stream=streams, device=st.integers(-2, 3))
    def another_context(self, stream: int, device: int) -> None:
        """A context for a moment: the streams of this one are refused there."""
        home, ret = acl.rt.get_context()
        self.expect(ret, 0)
        self.expect(acl.rt.set_device(device), 0 if device == 0 else 107001)
        if device == 0:
            self.expect(acl.rt.reset_device(device), 0, 500000)
        away, ret = acl.rt.create_context(0)
        self.expect(ret, 0)
        assert away > self.last
        self.last = away
        self.expect(acl.rt.synchronize_stream(stream), 107003 if stream in self.live[Stream] else 107017)
        self.expect(acl.rt.destroy_context(away), 0)
        self.expect(acl.rt.synchronize_stream(stream), 107002)
        self.expect(acl.rt.set_context(away), 107017)
        self.expect(acl.rt.set_context(home), 0)

    @rule()
    def start_again(self) -> None:
        """Everything ends with the runtime, and nothing is left of it."""
        assert acl.finalize() == 0
        self.expect(acl.finalize(), 100037)
        self.expect(acl.rt.malloc(8, 0)[1], 100001)
        assert not runtime.objects
        last = self.last
        self.start()
        self.last = last

    # --- streams and events ---

    @rule(target=streams)
    def create_stream(self) -> int:
        handle, ret = acl.rt.create_stream()
        self.expect(ret, 0)
        return self.made(Stream, handle)

    @rule(handle=anything | WILD)
    def destroy_stream(self, handle: int | None) -> None:
        alive = handle in self.live[Stream]
        # 500000 where work was queued on memory that was freed before anyone synchronized.
        self.expect(acl.rt.destroy_stream(handle), *([0, 500000] if alive else [100000 if not handle else 107017]))
        self.live[Stream].discard(handle)  # type: ignore[arg-type]

    @rule(handle=anything | WILD)
    def synchronize_stream(self, handle: int | None) -> None:
        good = not handle or handle in self.live[Stream]
        self.expect(acl.rt.synchronize_stream(handle), *([0, 500000] if good else [107017]))

    @rule(target=events)
    def create_event(self) -> int:
        handle, ret = acl.rt.create_event()
        self.expect(ret, 0)
        return self.made(Event, handle)

    def event_code(self, handle: int | None) -> int:
        return 0 if handle in self.live[Event] else 107017 if handle else 100000

    @rule(event=anything | WILD, stream=st.none() | streams)
    def record_and_wait(self, event: int | None, stream: int | None) -> None:
        code = self.event_code(event) or (0 if stream is None or stream in self.live[Stream] else 107017)
        self.expect(acl.rt.record_event(event, stream), code)
        self.expect(acl.rt.stream_wait_event(stream, event), code)
        self.expect(acl.rt.synchronize_event(event), self.event_code(event))
        self.expect(acl.rt.query_event(event)[1], self.event_code(event))

    @rule(event=anything | WILD)
    def destroy_event(self, event: int | None) -> None:
        self.expect(acl.rt.destroy_event(event), self.event_code(event))
        self.live[Event].discard(event)  # type: ignore[arg-type]

    # --- tensors, arrays, executors ---

    @rule(
        target=tensors, address=memory | WILD, dims=st.sampled_from([[ROWS, COLS], [COLS], [ROWS, 1], [0, COLS], [-1]])
    )
    def create_tensor(self, address: int | None, dims: list[int]) -> Any:
        handle = acl.create_tensor(dims, 0, None, 0, 2, dims, address)
        self.expect(0 if handle else 161002, 161002 if dims == [-1] else 0)
        return self.made(Tensor, handle) if handle else multiple()

    @rule(target=arrays, mask=st.lists(st.booleans(), max_size=4))
    def create_arrays(self, mask: list[bool]) -> Any:
        return multiple(
            self.made(IntArray, acl.create_int_array([COLS])), self.made(BoolArray, acl.create_bool_array(mask))
        )

    @rule(handle=anything | WILD, kind=st.sampled_from([Tensor, IntArray, BoolArray]))
    def destroy(self, handle: int | None, kind: type) -> None:
        function = {
            Tensor: acl.destroy_tensor, IntArray: acl.destroy_int_array, BoolArray: acl.destroy_bool_array,
        }[kind]  # fmt: skip
        self.expect(function(handle), 0 if not handle or handle in self.live[kind] else 561000)
        self.live[kind].discard(handle)  # type: ignore[arg-type]

    @rule(handle=anything | WILD)
    def getters(self, handle: int | None) -> None:
        code = 0 if handle in self.live[Tensor] else 161001
        for getter in (acl.get_view_shape, acl.get_view_strides, acl.get_data_type, acl.get_raw_tensor_addr):
            self.expect(getter(handle)[1], code)

    @rule(target=executors, picks=st.lists(tensors, min_size=9, max_size=9), shape=arrays, mask=arrays)
    def plan(self, picks: list[int], shape: int, mask: int) -> Any:
        """Phase one on arbitrary tensors: mostly refused, always with a documented code."""
        dy, x, mean, rstd, w, b, *outs = picks
        size, handle, ret = aclnn.aclnnLayerNormBackwardGetWorkspaceSize(dy, x, shape, mean, rstd, w, b, mask, *outs)
        self.expect(ret, 0, 161001, 161002)
        if ret:
            assert (size, handle) == (0, 0)
            return multiple()
        # What came out of chance may run or not; it is not followed further.
        self.last = handle
        self.expect(acl.destroy_acl_op_executor(handle), 0)
        return multiple()

    @rule(target=executors, data=st.data(), repeatable=st.booleans())
    def plan_well(self, data: st.DataObject, repeatable: bool) -> Any:
        """Phase one that succeeds: right shapes over memory that may or may not be any good."""
        large = [address for address, size in self.sizes.items() if size >= max(BYTES)] or [None]
        places = st.sampled_from([*large * 8, None, 0x10, *self.sizes] if data.draw(st.booleans()) else large)
        addresses = [data.draw(places) for _ in DIMS]
        made = [self.made(Tensor, acl.create_tensor(d, 0, None, 0, 2, d, a)) for d, a in zip(DIMS, addresses)]
        shape = self.made(IntArray, acl.create_int_array([COLS]))
        mask = self.made(BoolArray, acl.create_bool_array([True] * 3))
        dy, x, mean, rstd, w, b, *outs = made
        size, handle, ret = aclnn.aclnnLayerNormBackwardGetWorkspaceSize(dy, x, shape, mean, rstd, w, b, mask, *outs)
        self.expect(ret, 0)
        assert size > 0
        self.scratch = size
        self.planned[self.made(Executor, handle)] = addresses
        if repeatable:
            self.expect(acl.set_acl_op_executor_repeatable(handle), 0)
        for tensor in made:
            self.expect(acl.destroy_tensor(tensor), 0)
            self.live[Tensor].discard(tensor)
        self.expect(acl.destroy_int_array(shape), 0)
        self.live[IntArray].discard(shape)
        self.expect(acl.destroy_bool_array(mask), 0)
        self.live[BoolArray].discard(mask)
        return handle

    @rule(
        executor=executors | anything | WILD, workspace=memory | WILD,
        room=st.sampled_from(["none", "short", "exact", "exact", "exact", "more"]),
        stream=st.none() | streams,
    )  # fmt: skip
    def run(self, executor: int | None, workspace: int | None, room: str, stream: int | None) -> None:
        size = {"none": 0, "short": self.scratch - 1, "exact": self.scratch, "more": self.scratch + 72}[room]
        alive = executor in self.live[Executor]
        repeatable = alive and runtime.objects[executor].repeatable
        ret = aclnn.aclnnLayerNormBackward(workspace, size, executor, stream)
        if not alive or (size and not workspace):
            self.expect(ret, 161001)
        elif (
            size < self.scratch
            or not self.fits(workspace, size)
            or not self.good(self.planned[executor or 0], workspace)
        ):
            self.expect(ret, 161002)
        else:
            self.expect(ret, 0 if stream is None or stream in self.live[Stream] else 361001)
        if ret == 0:
            event("phase two succeeded")
        if alive and not (repeatable and ret == 0):
            self.live[Executor].discard(executor)  # type: ignore[arg-type]

    def good(self, addresses: list[int | None], workspace: int | None) -> bool:
        """Whether every tensor that is touched lies in live memory, apart from the workspace."""
        touched = [(address or 0, size) for address, size in zip(addresses, BYTES) if size]
        apart = all(a + n <= (workspace or 0) or (workspace or 0) + self.scratch <= a for a, n in touched)
        return apart and all(self.fits(a, n) for a, n in touched)

    @rule(stream=st.none() | streams, seed=st.integers(0, 1000))
    def run_well(self, stream: int | None, seed: int) -> None:
        """A whole call that must succeed, amid whatever the others have left: the numbers are checked."""
        if stream is not None and stream not in self.live[Stream]:
            stream = None
        self.expect(acl.rt.synchronize_stream(stream), 0, 500000)
        rng = np.random.default_rng(seed)
        host = [rng.standard_normal(dims).astype(np.float32) for dims in DIMS]
        places = []
        for array in host:
            places.append(self.malloc(array.nbytes))
            self.expect(acl.rt.memcpy(places[-1], array.nbytes, array.ctypes.data, array.nbytes, 1), 0)
        made = [self.made(Tensor, acl.create_tensor(d, 0, None, 0, 2, d, a)) for d, a in zip(DIMS, places)]
        shape, mask = acl.create_int_array([COLS]), acl.create_bool_array([True] * 3)
        dy, x, mean, rstd, w, b, *outs = made
        size, handle, ret = aclnn.aclnnLayerNormBackwardGetWorkspaceSize(dy, x, shape, mean, rstd, w, b, mask, *outs)
        self.expect(ret, 0)
        self.last = handle
        workspace = self.malloc(size)
        self.expect(aclnn.aclnnLayerNormBackward(workspace, size, handle, stream), 0)
        self.expect(acl.rt.synchronize_stream(stream), 0)
        result = np.empty((ROWS, COLS), np.float32)
        self.expect(acl.rt.memcpy(result.ctypes.data, result.nbytes, places[6], result.nbytes, 2), 0)
        names = ("gradOut", "input", "mean", "rstd", "weightOptional")
        golden = reference({**dict(zip(names, host)), "normalizedShape": (COLS,)})["gradInputOut"]
        np.testing.assert_allclose(result, golden, rtol=1e-4, atol=1e-4)
        for tensor in made:
            self.expect(acl.destroy_tensor(tensor), 0)
            self.live[Tensor].discard(tensor)
        self.expect(acl.destroy_int_array(shape), 0)
        self.expect(acl.destroy_bool_array(mask), 0)
        for place in (*places, workspace):
            self.expect(acl.rt.free(place), 0)
            del self.sizes[place]

    @rule(executor=anything | WILD)
    def destroy_executor(self, executor: int | None) -> None:
        alive = executor in self.live[Executor]
        self.expect(acl.destroy_acl_op_executor(executor), 0 if alive else 561000 if executor else 561103)
        self.live[Executor].discard(executor)  # type: ignore[arg-type]

    # --- the ledger ---

    @invariant()
    def balance(self) -> None:
        if not hasattr(self, "live"):
            return
        for kind, handles in self.live.items():
            assert {h for h, thing in runtime.objects.items() if type(thing) is kind} == handles, kind
        assert {block.address: block.size for block in runtime.memory.live} == self.sizes | self.host_sizes
        assert runtime.memory.used == {"device": sum(self.sizes.values()), "host": sum(self.host_sizes.values())}

    def teardown(self) -> None:
        if not hasattr(self, "live"):
            return
        for stream in self.live[Stream]:
            assert acl.rt.synchronize_stream(stream) in (0, 500000)
        assert acl.rt.synchronize_stream(None) in (0, 500000)
        acl.get_recent_err_msg()
        assert acl.finalize() == 0
        assert not runtime.objects
        assert runtime.memory.used == {"device": 0, "host": 0}


TestRuntime = Runtime.TestCase
TestRuntime.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
