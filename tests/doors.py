"""One call through any door: tensors laid out in memory, outputs poisoned, results read back."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import backnorm
from backnorm import acl, aclnn
from backnorm.acl.cuda import Cuda
from backnorm.acl.runtime import runtime
from backnorm.acl.streams import Task
from backnorm.datatypes import BF16, BY_NAME, NUMPY
from backnorm.spec import OpSpec, contiguous_strides, span

POISON = 0xA5


@dataclass
class Layout:
    """A tensor in memory: a flat base, and the view of it that starts at `offset`."""

    base: np.ndarray
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def view(self, base: np.ndarray | None = None) -> np.ndarray:
        base = self.base if base is None else base
        return np.ndarray(
            self.shape, base.dtype, base, self.offset * base.itemsize, [s * base.itemsize for s in self.strides]
        )

    def tensor(self) -> torch.Tensor:
        """The same memory as a torch tensor."""
        if self.base.dtype == NUMPY[BF16]:
            flat = torch.from_numpy(self.base.view(np.int16)).view(torch.bfloat16)
        else:
            flat = torch.from_numpy(self.base)
        return flat.as_strided(self.shape, self.strides, self.offset)


def lay_out(shape: tuple[int, ...], dtype: Any, style: str, rng: np.random.Generator) -> Layout:
    """Poisoned memory for a shape: packed, permuted, offset, gapped, reversed or expanded."""
    dtype = np.dtype(dtype)
    order = list(range(len(shape)))
    padded = list(shape)
    if style == "permuted":
        rng.shuffle(order)
    if style == "gapped":
        padded = [size + int(rng.integers(0, 3)) for size in shape]
    inner_first = contiguous_strides([padded[axis] for axis in order])
    step = 2 if style == "gapped" else 1
    strides = [0] * len(shape)
    for axis, stride in zip(order, inner_first):
        strides[axis] = stride * step
        if style == "reversed" and rng.random() < 0.6:
            strides[axis] = -strides[axis]
        if style == "expanded" and rng.random() < 0.5:
            strides[axis] = 0
    low, high = span(shape, strides) if 0 not in shape else (0, -1)
    before = int(rng.integers(1, 40)) if style != "packed" else 0
    base = np.full(((before + high - low + 1 + 5) * dtype.itemsize,), POISON, np.uint8).view(dtype)
    return Layout(base, tuple(shape), tuple(strides), before - low)


def fill(layout: Layout, values: np.ndarray) -> Layout:
    """Write values through the view; where it is expanded, the last one written counts for all."""
    layout.view()[...] = values.astype(layout.base.dtype)
    return layout


def untouched(layout: Layout, base: np.ndarray) -> bool:
    """Whether everything outside the view still holds the poison."""
    outside = np.ones(base.size, bool)
    where = np.ndarray(layout.shape, bool, outside, layout.offset, layout.strides)
    where[...] = False
    return bool(np.all(base.view(np.uint8).reshape(base.size, -1)[outside] == POISON))


def run_arrays(op: OpSpec, call: Mapping[str, Any], product: str, as_torch: bool) -> dict[str, np.ndarray]:
    """Through an array function with out=; the bases of the outputs afterwards."""

    def hand_over(value: Any) -> Any:
        if isinstance(value, Layout):
            return value.tensor() if as_torch else value.view()
        return value

    arguments = {p.array_name: hand_over(call[p.name]) for p in op.inputs}
    out = tuple(hand_over(call[p.name]) for p in op.outputs)
    results = getattr(backnorm, op.name)(**arguments, out=out, product=product)
    for given, result in zip(out, results):
        assert result is None or result is given
    return {p.name: call[p.name].base for p in op.outputs if call[p.name] is not None}


class Client:
    """A small aclnn client: owns handles and device memory, and releases them."""

    def __init__(self) -> None:
        self.release: list[tuple[Any, int]] = []

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        for function, handle in reversed(self.release):
            assert function(handle) == 0, acl.get_recent_err_msg()

    def malloc(self, size: int) -> int:
        address, ret = acl.rt.malloc(max(size, 1), acl.ACL_MEM_MALLOC_HUGE_FIRST)
        assert ret == 0
        self.release.append((acl.rt.free, address))
        return address

    def upload(self, array: np.ndarray) -> int:
        address = self.malloc(array.nbytes)
        assert acl.rt.memcpy(address, array.nbytes, array.ctypes.data, array.nbytes, acl.ACL_MEMCPY_HOST_TO_DEVICE) == 0
        return address

    def download(self, address: int, like: np.ndarray) -> np.ndarray:
        host = np.empty_like(like)
        assert acl.rt.memcpy(host.ctypes.data, host.nbytes, address, host.nbytes, acl.ACL_MEMCPY_DEVICE_TO_HOST) == 0
        return host

    def tensor(self, layout: Layout, address: int, format: int = acl.ACL_FORMAT_ND) -> int:
        dtype = int(BY_NAME[layout.base.dtype.name])
        handle = acl.create_tensor(
            layout.shape, dtype, layout.strides, layout.offset, format, [layout.base.size], address
        )
        assert handle
        self.release.append((acl.destroy_tensor, handle))
        return handle

    def handle(self, value: Any) -> int:
        """A handle for an int or bool array; numbers and null pass."""
        if isinstance(value, tuple) and all(isinstance(item, bool) for item in value) and value:
            made, destroy = acl.create_bool_array(value), acl.destroy_bool_array
        elif isinstance(value, tuple):
            made, destroy = acl.create_int_array(value), acl.destroy_int_array
        else:
            return 0 if value is None else value
        self.release.append((destroy, made))
        return made


_HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_host_functions: list[Any] = []  # the driver calls them later


def queue_python(stream: int, work: Callable[[], Any]) -> None:
    """Let a stream do something in Python when its turn has come."""
    hardware = runtime.hardware
    if isinstance(hardware, Cuda):
        launch = hardware.driver.cuLaunchHostFunc
        launch.argtypes = (ctypes.c_void_p, _HostFunction, ctypes.c_void_p)
        _host_functions.append(_HostFunction(lambda _: (work(), None)[1]))
        runtime.stream(stream).submit(Task("test", lambda queue: launch(queue, _host_functions[-1], None)))
    else:
        runtime.stream(stream).submit(Task("test", lambda _: work()))


def run_aclnn(op: OpSpec, call: Mapping[str, Any], stream: int) -> dict[str, np.ndarray]:
    """Through the two phases; the bases of the outputs afterwards."""
    with Client() as client:
        addresses = {n: client.upload(v.base) for n, v in call.items() if isinstance(v, Layout)}
        handles = {
            n: client.tensor(v, addresses[n]) if isinstance(v, Layout) else client.handle(v) for n, v in call.items()
        }
        size, executor, ret = getattr(aclnn, f"{op.c_name}GetWorkspaceSize")(**handles)
        assert ret == 0, acl.get_recent_err_msg()
        # A poisoned workspace of exactly the size asked for.
        workspace = client.upload(np.full(size, POISON, np.uint8)) if size else 0
        assert getattr(aclnn, op.c_name)(workspace, size, executor, stream) == 0, acl.get_recent_err_msg()
        assert acl.rt.synchronize_stream(stream) == 0, acl.get_recent_err_msg()
        outputs = [p.name for p in op.outputs if call[p.name] is not None]
        return {name: client.download(addresses[name], call[name].base) for name in outputs}
