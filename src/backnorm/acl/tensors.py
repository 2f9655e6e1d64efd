"""What aclnn calls are described with: tensors as views over addresses, int and bool arrays, executors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

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

    @cached_property
    def _extent(self) -> tuple[int, int, int]:
        """In bytes from its address: the first element, and where what the view touches starts and ends."""
        size = itemsize(self.desc.dtype)
        low, high = span(self.desc.shape, self.desc.strides)
        start = self.offset * size
        return start, start + low * size, start + (high + 1) * size

    @cached_property
    def _bytes(self) -> int:
        return self.desc.numel * itemsize(self.desc.dtype)

    def locate(self, memory: Memory, address: int) -> tuple[Allocation, int, int, int]:
        """Where the view at `address` lies: its allocation, its first element, and from where to where it reaches."""
        if address == 0:
            raise BadAddress("its data is null")
        block = memory.locate(address, address + 1, "device")
        start, low, high = self._extent
        if address + low < block.address or address + high > block.address + block.size:
            check_inside(block, address + low, address + high)
        if self._bytes >= 2**63:
            raise BadAddress(f"its shape {list(self.desc.shape)} is beyond what can be computed")
        return block, address + start, address + low, address + high


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
