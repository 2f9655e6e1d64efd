"""The C constants of the runtime, by their C names."""

from __future__ import annotations

from ..datatypes import DataType, Format

# aclDataType
ACL_DT_UNDEFINED = int(DataType.UNDEFINED)
ACL_FLOAT = int(DataType.FLOAT)
ACL_FLOAT16 = int(DataType.FLOAT16)
ACL_INT8 = int(DataType.INT8)
ACL_INT32 = int(DataType.INT32)
ACL_UINT8 = int(DataType.UINT8)
ACL_INT16 = int(DataType.INT16)
ACL_UINT16 = int(DataType.UINT16)
ACL_UINT32 = int(DataType.UINT32)
ACL_INT64 = int(DataType.INT64)
ACL_UINT64 = int(DataType.UINT64)
ACL_DOUBLE = int(DataType.DOUBLE)
ACL_BOOL = int(DataType.BOOL)
ACL_STRING = int(DataType.STRING)
ACL_COMPLEX64 = int(DataType.COMPLEX64)
ACL_COMPLEX128 = int(DataType.COMPLEX128)
ACL_BF16 = int(DataType.BF16)

# aclFormat
ACL_FORMAT_UNDEFINED = int(Format.UNDEFINED)
ACL_FORMAT_NCHW = int(Format.NCHW)
ACL_FORMAT_NHWC = int(Format.NHWC)
ACL_FORMAT_ND = int(Format.ND)
ACL_FORMAT_NC1HWC0 = int(Format.NC1HWC0)
ACL_FORMAT_FRACTAL_Z = int(Format.FRACTAL_Z)
ACL_FORMAT_HWCN = int(Format.HWCN)
ACL_FORMAT_NDHWC = int(Format.NDHWC)
ACL_FORMAT_FRACTAL_NZ = int(Format.FRACTAL_NZ)
ACL_FORMAT_NCDHW = int(Format.NCDHW)
ACL_FORMAT_NDC1HWC0 = int(Format.NDC1HWC0)
ACL_FORMAT_NC = int(Format.NC)
ACL_FORMAT_NCL = int(Format.NCL)

# aclrtMemcpyKind
ACL_MEMCPY_HOST_TO_HOST = 0
ACL_MEMCPY_HOST_TO_DEVICE = 1
ACL_MEMCPY_DEVICE_TO_HOST = 2
ACL_MEMCPY_DEVICE_TO_DEVICE = 3
ACL_MEMCPY_DEFAULT = 4
ACL_MEMCPY_HOST_TO_BUF_TO_DEVICE = 5

# aclrtMemMallocPolicy
ACL_MEM_MALLOC_HUGE_FIRST = 0
ACL_MEM_MALLOC_HUGE_ONLY = 1
ACL_MEM_MALLOC_NORMAL_ONLY = 2

# aclrtMemAttr; others exist and mean the same memory here
ACL_DDR_MEM = 0
ACL_HBM_MEM = 1

# flags of aclrtCreateStreamWithConfig and aclrtCreateEventWithFlag, which change nothing here
ACL_STREAM_FAST_LAUNCH = 1
ACL_STREAM_FAST_SYNC = 2
ACL_EVENT_SYNC = 1
ACL_EVENT_TIME_LINE = 8

# aclrtRunMode
ACL_DEVICE = 0
ACL_HOST = 1

# aclrtStreamStatus, aclrtEventStatus, aclrtEventRecordedStatus
ACL_STREAM_STATUS_COMPLETE = 0
ACL_STREAM_STATUS_NOT_READY = 1
ACL_EVENT_STATUS_COMPLETE = 0
ACL_EVENT_STATUS_NOT_READY = 1
ACL_EVENT_RECORDED_STATUS_NOT_READY = 0
ACL_EVENT_RECORDED_STATUS_COMPLETE = 1

# aclSysParamOpt
ACL_OPT_DETERMINISTIC = 0
