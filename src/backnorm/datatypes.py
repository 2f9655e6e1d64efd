"""Data types and formats by their acl numbers, and the NumPy types behind the supported ones."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import ml_dtypes
import numpy as np


class DataType(IntEnum):
    """aclDataType."""

    UNDEFINED = -1
    FLOAT = 0
    FLOAT16 = 1
    INT8 = 2
    INT32 = 3
    UINT8 = 4
    INT16 = 6
    UINT16 = 7
    UINT32 = 8
    INT64 = 9
    UINT64 = 10
    DOUBLE = 11
    BOOL = 12
    STRING = 13
    COMPLEX64 = 16
    COMPLEX128 = 17
    BF16 = 27


class Format(IntEnum):
    """aclFormat."""

    UNDEFINED = -1
    NCHW = 0
    NHWC = 1
    ND = 2
    NC1HWC0 = 3
    FRACTAL_Z = 4
    HWCN = 16
    NDHWC = 27
    FRACTAL_NZ = 29
    NCDHW = 30
    NDC1HWC0 = 32
    NC = 35
    NCL = 47


F32, F16, BF16 = DataType.FLOAT, DataType.FLOAT16, DataType.BF16

#: The layouts a client may see; every other number is private to the hardware.
PUBLIC_FORMATS = frozenset(
    {Format.ND, Format.NCHW, Format.NHWC, Format.HWCN, Format.NDHWC, Format.NCDHW, Format.NC, Format.NCL}
)

#: The NumPy type of each number that has one.
NUMPY: dict[int, np.dtype[Any]] = {
    DataType.FLOAT: np.dtype(np.float32),
    DataType.FLOAT16: np.dtype(np.float16),
    DataType.INT8: np.dtype(np.int8),
    DataType.INT32: np.dtype(np.int32),
    DataType.UINT8: np.dtype(np.uint8),
    DataType.INT16: np.dtype(np.int16),
    DataType.UINT16: np.dtype(np.uint16),
    DataType.UINT32: np.dtype(np.uint32),
    DataType.INT64: np.dtype(np.int64),
    DataType.UINT64: np.dtype(np.uint64),
    DataType.DOUBLE: np.dtype(np.float64),
    DataType.BOOL: np.dtype(np.bool_),
    DataType.COMPLEX64: np.dtype(np.complex64),
    DataType.COMPLEX128: np.dtype(np.complex128),
    DataType.BF16: np.dtype(ml_dtypes.bfloat16),
}
#: The number of each NumPy type; types of another byte order have none.
NUMBERS: dict[np.dtype[Any], DataType] = {numpy: DataType(number) for number, numpy in NUMPY.items()}
#: The number of each name, as torch has them.
BY_NAME: dict[str, DataType] = {numpy.name: DataType(number) for number, numpy in NUMPY.items()}


def itemsize(number: int) -> int:
    """Bytes of an element."""
    return NUMPY[number].itemsize


def dtype_name(number: int) -> str:
    """`float32` for 0, `data type 99` for a number without a name."""
    if number in NUMPY:
        return NUMPY[number].name
    return "an unknown data type" if number == DataType.UNDEFINED else f"data type {number}"


def format_name(number: int) -> str:
    return Format(number).name if number in Format._value2member_map_ else f"format {number}"
