"""The C interface as data: headers, constants and functions; headers and library are rendered from it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..acl import constants
from ..datatypes import DataType, Format
from ..ops import OPS
from ..spec import OpSpec, Param
from ..status import Status

#: What handles are to C: opaque structs, and plain pointers.
STRUCTS = ("aclTensor", "aclIntArray", "aclBoolArray", "aclOpExecutor")
POINTERS = ("aclrtContext", "aclrtStream", "aclrtEvent")


def _named(prefix: str) -> dict[str, int]:
    return {name: value for name, value in vars(constants).items() if name.startswith(prefix)}


#: The enums, and the constants of each.
ENUMS: dict[str, dict[str, int]] = {
    "aclDataType": {f"ACL_{'DT_' if d < 0 else ''}{d.name}": int(d) for d in DataType},
    "aclFormat": {f"ACL_FORMAT_{f.name}": int(f) for f in Format},
    "aclrtMemcpyKind": _named("ACL_MEMCPY_"),
    "aclrtMemMallocPolicy": _named("ACL_MEM_MALLOC_"),
    "aclrtMemAttr": {name: value for name, value in vars(constants).items() if name in ("ACL_DDR_MEM", "ACL_HBM_MEM")},
    "aclrtRunMode": {"ACL_DEVICE": constants.ACL_DEVICE, "ACL_HOST": constants.ACL_HOST},
    "aclrtStreamStatus": _named("ACL_STREAM_STATUS_"),
    "aclrtEventStatus": _named("ACL_EVENT_STATUS_"),
    "aclrtEventRecordedStatus": _named("ACL_EVENT_RECORDED_STATUS_"),
    "aclSysParamOpt": _named("ACL_OPT_"),
}
#: Numbers of type uint32_t that streams and events are created with.
FLAGS = {**_named("ACL_STREAM_FAST_"), "ACL_EVENT_SYNC": constants.ACL_EVENT_SYNC, **_named("ACL_EVENT_TIME_")}

#: Codes by the type that returns them.
ACL_CODES = [status for status in Status if not status.name.startswith("ACLNN_")]
ACLNN_CODES = [status for status in Status if status.name.startswith("ACLNN_")]


@dataclass(frozen=True)
class Parameter:
    type: str
    name: str

    @property
    def is_output(self) -> bool:
        """Whether the callee writes through it: a pointer to something that is neither constant nor opaque."""
        target = self.type.removesuffix("*")
        return target != self.type and "const" not in target and target not in ("void", *STRUCTS)


@dataclass(frozen=True)
class Function:
    returns: str
    name: str
    params: tuple[Parameter, ...]

    @property
    def declaration(self) -> str:
        params = ", ".join(f"{param.type} {param.name}" for param in self.params)
        return f"{self.returns} {self.name}({params or 'void'})"

    @property
    def failed(self) -> int:
        """What it returns when it cannot even start: a code, or null."""
        codes = {"aclError": Status.ACL_ERROR_INTERNAL_ERROR, "aclnnStatus": Status.ACLNN_ERR_INNER}
        return int(codes.get(self.returns, 0))


def _function(declaration: str) -> Function:
    match = re.fullmatch(r"(.*?)\s*(\w+)\((.*)\)", declaration)
    assert match, declaration
    returns, name, words = match.groups()
    params = [re.fullmatch(r"(.*?)\s*(\w+)", word.strip()) for word in words.split(",") if word.strip() != "void"]
    return Function(returns, name, tuple(Parameter(param[1], param[2]) for param in params if param))


def _functions(text: str) -> tuple[Function, ...]:
    return tuple(_function(line.strip()) for line in text.strip().splitlines())


C_TYPES = {
    "tensor": "aclTensor*",
    "int_array": "aclIntArray*",
    "bool_array": "aclBoolArray*",
    "int64": "int64_t",
    "bool": "bool",
}
_OUT_POINTERS = {"workspaceSize": "uint64_t*", "executor": "aclOpExecutor**"}


def _parameter(param: Param) -> Parameter:
    kind = _OUT_POINTERS.get(param.name) or C_TYPES[param.kind]
    constant = "const " if kind.endswith("*") and not param.requested and param.kind != "out_pointer" else ""
    return Parameter(constant + kind, param.name)


def phase_one(op: OpSpec) -> Function:
    return Function("aclnnStatus", f"{op.c_name}GetWorkspaceSize", tuple(_parameter(param) for param in op.params))


def phase_two(op: OpSpec) -> Function:
    return _function(
        f"aclnnStatus {op.c_name}(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream stream)"
    )


#: The functions by the header that declares them.
FUNCTIONS: dict[str, tuple[Function, ...]] = {
    "acl/acl_base.h": _functions("""
        size_t aclDataTypeSize(aclDataType dataType)
        float aclFloat16ToFloat(aclFloat16 value)
        aclFloat16 aclFloatToFloat16(float value)
    """),
    "acl/acl_rt.h": _functions("""
        aclError aclrtSetDevice(int32_t deviceId)
        aclError aclrtResetDevice(int32_t deviceId)
        aclError aclrtGetDevice(int32_t* deviceId)
        aclError aclrtGetDeviceCount(uint32_t* count)
        aclError aclrtGetRunMode(aclrtRunMode* runMode)
        aclError aclrtGetMemInfo(aclrtMemAttr attr, size_t* free, size_t* total)
        aclError aclrtSynchronizeDevice(void)
        aclError aclrtCreateContext(aclrtContext* context, int32_t deviceId)
        aclError aclrtDestroyContext(aclrtContext context)
        aclError aclrtSetCurrentContext(aclrtContext context)
        aclError aclrtGetCurrentContext(aclrtContext* context)
        aclError aclrtCreateStream(aclrtStream* stream)
        aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t priority, uint32_t flag)
        aclError aclrtDestroyStream(aclrtStream stream)
        aclError aclrtSynchronizeStream(aclrtStream stream)
        aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout)
        aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus* status)
        aclError aclrtCreateEvent(aclrtEvent* event)
        aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flag)
        aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream)
        aclError aclrtSynchronizeEvent(aclrtEvent event)
        aclError aclrtQueryEvent(aclrtEvent event, aclrtEventStatus* status)
        aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus* status)
        aclError aclrtEventElapsedTime(float* ms, aclrtEvent startEvent, aclrtEvent endEvent)
        aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event)
        aclError aclrtDestroyEvent(aclrtEvent event)
        aclError aclrtMalloc(void** devPtr, size_t size, aclrtMemMallocPolicy policy)
        aclError aclrtFree(void* devPtr)
        aclError aclrtMallocHost(void** hostPtr, size_t size)
        aclError aclrtFreeHost(void* hostPtr)
        aclError aclrtMemset(void* devPtr, size_t maxCount, int32_t value, size_t count)
        aclError aclrtMemsetAsync(void* devPtr, size_t maxCount, int32_t value, size_t count, aclrtStream stream)
        aclError aclrtMemcpy(void* dst, size_t destMax, const void* src, size_t count, aclrtMemcpyKind kind)
        aclError aclrtMemcpyAsync(void* dst, size_t destMax, const void* src, size_t count, aclrtMemcpyKind kind, aclrtStream stream)
        aclError aclrtSetSysParamOpt(aclSysParamOpt opt, int64_t value)
        aclError aclrtGetSysParamOpt(aclSysParamOpt opt, int64_t* value)
        aclError aclrtCtxSetSysParamOpt(aclSysParamOpt opt, int64_t value)
        aclError aclrtCtxGetSysParamOpt(aclSysParamOpt opt, int64_t* value)
    """),  # noqa: E501
    "acl/acl.h": _functions("""
        aclError aclInit(const char* configPath)
        aclError aclFinalize(void)
        aclError aclFinalizeReference(uint64_t* refCount)
        aclError aclrtGetVersion(int32_t* majorVersion, int32_t* minorVersion, int32_t* patchVersion)
        const char* aclrtGetSocName(void)
        const char* aclGetRecentErrMsg(void)
    """),
    "aclnn/acl_meta.h": _functions("""
        aclTensor* aclCreateTensor(const int64_t* viewDims, uint64_t viewDimsNum, aclDataType dataType, const int64_t* stride, int64_t offset, aclFormat format, const int64_t* storageDims, uint64_t storageDimsNum, void* tensorData)
        aclIntArray* aclCreateIntArray(const int64_t* value, uint64_t size)
        aclBoolArray* aclCreateBoolArray(const bool* value, uint64_t size)
        aclnnStatus aclDestroyTensor(const aclTensor* tensor)
        aclnnStatus aclDestroyIntArray(const aclIntArray* array)
        aclnnStatus aclDestroyBoolArray(const aclBoolArray* array)
        aclnnStatus aclGetViewShape(const aclTensor* tensor, int64_t** viewDims, uint64_t* viewDimsNum)
        aclnnStatus aclGetViewStrides(const aclTensor* tensor, int64_t** stridesValue, uint64_t* stridesNum)
        aclnnStatus aclGetViewOffset(const aclTensor* tensor, int64_t* offset)
        aclnnStatus aclGetStorageShape(const aclTensor* tensor, int64_t** storageDims, uint64_t* storageDimsNum)
        aclnnStatus aclGetDataType(const aclTensor* tensor, aclDataType* dataType)
        aclnnStatus aclGetFormat(const aclTensor* tensor, aclFormat* format)
        aclnnStatus aclGetRawTensorAddr(const aclTensor* tensor, void** addr)
        aclnnStatus aclSetRawTensorAddr(aclTensor* tensor, void* addr)
        aclnnStatus aclSetAclOpExecutorRepeatable(aclOpExecutor* executor)
        aclnnStatus aclDestroyAclOpExecutor(aclOpExecutor* executor)
        aclnnStatus aclSetTensorAddr(aclOpExecutor* executor, size_t index, aclTensor* tensor, void* addr)
        aclnnStatus aclSetInputTensorAddr(aclOpExecutor* executor, size_t index, aclTensor* tensor, void* addr)
        aclnnStatus aclSetOutputTensorAddr(aclOpExecutor* executor, size_t index, aclTensor* tensor, void* addr)
    """),  # noqa: E501
    "aclnn/aclnn_base.h": _functions("""
        aclnnStatus aclnnInit(const char* configPath)
        aclnnStatus aclnnFinalize(void)
    """),
    **{f"aclnnop/{op.header}": (phase_one(op), phase_two(op)) for op in OPS.values()},
}
ALL_FUNCTIONS = tuple(function for functions in FUNCTIONS.values() for function in functions)
