"""What aclnn calls are described with: tensors as views over addresses, int and bool arrays, executors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..datatypes import itemsize
from ..plan import Plan
from ..spec import Shape, TensorDesc, span
from .memory import Allocation, BadAddress, Memory, check_inside


@dataclass(eq=False)
class Tensor:
    """A view over memory the caller owns. Strides and offset count elements."""

    desc: TensorDesc
    offset: int
    storage_shape: Shape
    address: int

    def locate(self, memory: Memory, address: int) -> tuple[Allocation, range, int]:
        """Where the view at `address` lies: its allocation, its bytes, and its first element."""
        if address == 0:
            raise BadAddress("its data is null")
        block = memory.locate(address, address + 1, "device")
        size = itemsize(self.desc.dtype)
        low, high = span(self.desc.shape, self.desc.strides)
        start = address + self.offset * size
        touched = range(start + low * size, start + (high + 1) * size)
        check_inside(block, touched.start, touched.stop)
        if self.desc.numel * size >= 2**63:
            raise BadAddress(f"its shape {list(self.desc.shape)} is beyond what can be computed")
        return block, touched, start


@dataclass(eq=False)
class IntArray:
    values: tuple[int, ...]


@dataclass(eq=False)
class BoolArray:
    values: tuple[bool, ...]


@dataclass(eq=False)
class Executor:
    """A plan, the tensors it was made for and where their data lie now."""

    plan: Plan
    tensors: Mapping[str, Tensor]
    addresses: dict[str, int]
    repeatable: bool = False
