"""Triton kernels, compiled once for a plan and launched on addresses.

A launch names a kernel, its grid, its constants and its arguments; addresses in them are places, known when it runs.
Kernels are compiled by whether the addresses of large tensors are multiples of 16, and launched through the driver
itself: a launcher of Triton's takes 10 microseconds of Python's time, a call of the driver 4.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from ..datatypes import BF16, F16, F32, DataType, itemsize
from ..spec import TensorDesc
from ..status import AclnnError, Status
from ._program import WORKSPACE
from ._tiles import SHARED_MEMORY

TORCH: dict[int, Any] = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16, DataType.INT64: torch.int64}
#: What lies at a multiple of 16 is read in vectors, and their lengths shape the sums. A slice of a batch keeps its rows
#: there, but not its statistics, so small tensors are taken to lie anywhere.
_LARGE = (WORKSPACE, "gradOut", "input", "gradInput", "gradInputOut")
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Pointer(NamedTuple):
    """Bytes from the start of a tensor or of the workspace, and the type of what lies there."""

    name: str
    offset: int
    dtype: int

    @property
    def may_be_aligned(self) -> bool:
        """Whether it is a multiple of 16 where the large tensors' addresses are."""
        return self.name in _LARGE and self.offset % 16 == 0


def pointer_to(name: str, desc: TensorDesc, *packed: dict[str, int]) -> Pointer:
    """Where a tensor is read or written: itself, or its copy in the workspace, if one of these has a place for it."""
    for places in packed:
        if name in places:
            return Pointer(WORKSPACE, places[name], desc.dtype)
    return Pointer(name, 0, desc.dtype)


class Launch(NamedTuple):
    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    #: All its programs must run at a time; what is launched instead where they cannot.
    apart: tuple[Launch, ...] | None = None
    #: Its constant that says whether the large tensors' addresses are multiples of 16, where it has one.
    aligned: str | None = None
    #: Registers of a thread at most, where the compiler would take more.
    registers: int | None = None
    #: Programs that a multiprocessor must have room for, if all are to run at a time.
    each: int = 1
    #: What is launched instead in the interpreter, where a program cannot have so many bytes of shared memory, or copy
    #: to them ahead, and, unless tensors may begin anywhere, where the large ones' addresses are no multiples of 16.
    otherwise: tuple[Launch, ...] | None = None
    shared_bytes: int = 0
    anywhere: bool = False

    def on(self, aligned: bool) -> Launch:
        """The launch on such addresses."""
        return self._replace(constants={**self.constants, self.aligned: aligned}) if self.aligned else self


def or_else(launches: Sequence[Launch], otherwise: Sequence[Launch]) -> list[Launch]:
    """Launches, the first of which cannot be everywhere, and what stands in for all of them."""
    first, *rest = launches
    return [first._replace(otherwise=tuple(otherwise)), *[launch._replace(otherwise=()) for launch in rest]]


class _Somewhere:
    """Stands for a pointer while a kernel is compiled."""

    def __init__(self, dtype: Any, address: int) -> None:
        self.dtype, self._address = dtype, address

    def data_ptr(self) -> int:
        return self._address


class _Attribute(ctypes.Structure):
    """CUDA's CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("_", ctypes.c_int), ("value", ctypes.c_int), ("__", ctypes.c_int * 15))


class _Config(ctypes.Structure):
    """CUDA's CUlaunchConfig. (With it a launch has four arguments: 11 of them take Python 2.5 microseconds longer.)"""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("attribute_count", ctypes.c_uint),
    )  # fmt: skip


_COOPERATIVE = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE


@cache
def _cu_launch() -> Any:
    launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    launch.argtypes = [ctypes.c_void_p] * 4
    return launch


#: How a parameter of a compiled kernel lies in its place of 8 bytes.
_FORMATS = {"u64": "<q", "b64": "<q", "s64": "<q", "u32": "<i", "b32": "<i", "s32": "<i", "f32": "<f"}


class _Compiled:
    """A launch, ready for addresses."""

    def __init__(self, launch: Launch, slots: dict[str, int], aligned: bool) -> None:
        mocks = [
            _Somewhere(TORCH[a.dtype], 0 if aligned and a.may_be_aligned else itemsize(a.dtype))
            if isinstance(a, Pointer)
            else a
            for a in launch.arguments
        ]
        together = launch.apart is not None
        options = {
            "num_warps": launch.num_warps, "num_stages": launch.num_stages, "launch_cooperative_grid": together,
            "maxnreg": launch.registers, "enable_fp_fusion": True,
        }  # fmt: skip
        kernel = launch.kernel.warmup(*mocks, **launch.constants, **options, grid=launch.grid)
        kernel._init_handles()
        self._places = [(slots[a.name], a.offset) for a in launch.arguments if isinstance(a, Pointer)]
        grid = (*launch.grid, 1, 1)[:3]
        threads, shared_bytes = 32 * launch.num_warps, kernel.metadata.shared
        self._attribute = _Attribute(id=_COOPERATIVE, value=1)
        self._config = _Config(
            grid, (threads, 1, 1), shared_bytes, None, ctypes.pointer(self._attribute), 1 if together else 0
        )
        # The kernel's parameters, each in 8 bytes: the addresses, which all come first, numbers that were not compiled
        # in, and nulls for memory of Triton's own, which these kernels do not use.
        names, signature = launch.kernel.arg_names, kernel.src.signature
        numbers = launch.arguments[len(self._places) :]
        assert not any(isinstance(number, Pointer) for number in numbers), "a kernel's pointers come first"
        given = [n for n, name in zip(numbers, names[len(self._places) :]) if signature[name] != "constexpr"]
        kinds = re.findall(r"\.param\s+\.(\w+)", re.split(r"\.entry", kernel.asm["ptx"])[1].partition(")")[0])
        given += [0] * (len(kinds) - len(self._places) - len(given))
        self._values = (ctypes.c_uint64 * len(kinds))()
        start = ctypes.addressof(self._values)
        for i, (number, kind) in enumerate(zip(given, kinds[len(self._places) :]), len(self._places)):
            struct.pack_into(_FORMATS[kind], self._values, 8 * i, number)
        self._parameters = (ctypes.c_void_p * len(kinds))(*[start + 8 * i for i in range(len(kinds))])
        self._write_addresses = struct.Struct(f"<{len(self._places)}Q").pack_into
        self._launch = _cu_launch()
        self._where = (ctypes.addressof(self._config), kernel.function, ctypes.addressof(self._parameters), None)
        self._lock = threading.Lock()
        self._slowly = (kernel, grid, launch)

    def __call__(self, pointers: Sequence[int], stream: int) -> None:
        with self._lock:  # the driver copies the values before it returns
            self._write_addresses(self._values, 0, *[pointers[slot] + offset for slot, offset in self._places])
            self._config.stream = stream
            code = self._launch(*self._where)
        if code:  # say, no context in this thread yet: Triton's own way makes one, or tells what is wrong
            kernel, grid, launch = self._slowly
            addresses = iter(self._places)
            arguments = [
                pointers[(place := next(addresses))[0]] + place[1] if isinstance(a, Pointer) else a
                for a in launch.arguments
            ]
            kernel.run(
                *grid, stream, kernel.function, kernel.packed_metadata, None, None, None, *arguments,
                *launch.constants.values(),
            )  # fmt: skip


def prepare(
    launches: Sequence[Launch], names: Sequence[str], device: str
) -> Callable[[Sequence[int], int | None], None]:
    """A function of the addresses of the workspace and the tensors that queues the launches on a stream, or (None) on
    the current one."""
    slots = {name: slot for slot, name in enumerate((WORKSPACE, *names))}
    if _INTERPRETED:
        if device != "cpu":  # its memory is out of the interpreter's reach
            raise AclnnError(
                Status.ACLNN_ERR_INNER_FIND_KERNEL_ERROR,
                "device",
                f"Triton's interpreter (TRITON_INTERPRET=1) must be off for tensors on a GPU; got {device}",
            )
        one_by_one = _fitting(_on(launches, False, -1), 1, 0)
        return lambda pointers, stream: _interpret(one_by_one, slots, pointers)
    index = torch.device(device).index or 0
    large = [slot for name, slot in slots.items() if name in _LARGE]
    properties: Any = torch.cuda.get_device_properties(index)
    room = properties.multi_processor_count, properties.shared_memory_per_multiprocessor
    compiled: dict[bool, list[_Compiled]] = {}

    def run(pointers: Sequence[int], stream: int | None) -> None:
        aligned = _aligned([pointers[slot] for slot in large])
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                return run(pointers, stream)
        try:
            if aligned not in compiled:
                # Before 8.0, there are no copies ahead to shared memory.
                shared_bytes = properties.shared_memory_per_block_optin if properties.major >= 8 else -1
                fitting = _fitting(_on(launches, aligned, shared_bytes), *room)
                compiled[aligned] = [_Compiled(launch.on(aligned), slots, aligned) for launch in fitting]
            queue = torch._C._cuda_getCurrentRawStream(index) if stream is None else stream
            for launch in compiled[aligned]:
                launch(pointers, queue)
        except Exception as error:
            raise AclnnError(
                Status.ACLNN_ERR_INNER, "executor", f"a kernel could not be launched on {device}: {error}"
            ) from error
        return None

    return run


def _aligned(pointers: Sequence[int]) -> bool:
    bits = 0
    for pointer in pointers:
        bits |= pointer
    return bits % 16 == 0


def _on(launches: Sequence[Launch], aligned: bool, shared_bytes: int) -> list[Launch]:
    """Those of the launches, or of what stands in for them, that are for such addresses and so much shared memory."""
    needy = [launch for launch in launches if launch.otherwise]
    fits = all(launch.shared_bytes <= shared_bytes and (aligned or launch.anywhere) for launch in needy)
    chosen: list[Launch] = []
    for launch in launches:
        chosen += [launch] if fits or launch.otherwise is None else launch.otherwise
    return chosen


def _fitting(launches: Sequence[Launch], multiprocessors: int, shared_memory: int) -> list[Launch]:
    """Those of the launches, or of what stands in for them, whose programs run at a time on so many multiprocessors."""
    chosen: list[Launch] = []
    for launch in launches:
        programs = multiprocessors * (launch.each if shared_memory >= SHARED_MEMORY else 1)  # several want all of it
        chosen += launch.apart if launch.apart is not None and launch.grid[0] > programs else [launch]
    return chosen


def _interpret(launches: Sequence[Launch], slots: dict[str, int], pointers: Sequence[int]) -> None:
    """Under TRITON_INTERPRET=1: the kernels step by step on the CPU's memory."""

    def tensor(place: Pointer) -> Any:
        size = itemsize(place.dtype)
        memory = (ctypes.c_byte * size).from_address(pointers[slots[place.name]] + place.offset)
        return torch.frombuffer(memory, dtype=TORCH[place.dtype], count=1)

    with np.errstate(all="ignore"):  # a GPU does in silence what NumPy warns of
        for launch in launches:
            arguments = [tensor(a) if isinstance(a, Pointer) else a for a in launch.arguments]
            aligned = _aligned([pointers[slots[name]] for name in slots if name in _LARGE])
            launch.kernel[launch.grid](*arguments, **launch.on(aligned).constants)
