"""What the NumPy kernels share: float32 terms, float64 sums, and sums kept in the workspace."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]


def load(tensor: Any) -> Float32:
    """A contiguous float32 copy or view; exact, as every supported type is a part of float32."""
    return np.ascontiguousarray(tensor, dtype=np.float32)


def sum64(terms: Float32, axis: int | tuple[int, ...]) -> Float64:
    """A float64 sum. The cast comes first: NumPy's buffered one would cut rows at its buffer's end,
    and a row's bits would depend on the rows before it."""
    return np.add.reduce(terms.astype(np.float64), axis=axis, keepdims=True)


def take_sums(workspace: Any, count: int, length: int) -> list[Float64]:
    """`count` zeroed float64 vectors at the head of the workspace."""
    sums: Float64 = workspace[: count * length * 8].view(np.float64).reshape(count, length)
    sums[...] = 0.0
    return list(sums)


def store(tensor: Any, values: Float32 | Float64) -> None:
    """Round to the output's type and write through its strides. A float64 sum goes to bfloat16 by way of float32,
    which moves the rounding point by 2**-17 ulp at most."""
    tensor[...] = values.reshape(tensor.shape).astype(tensor.dtype)
