/* Every function once, as it should be used. */
#include "expect.h"

static void versions_and_numbers(void)
{
    int32_t major = -1, minor = -1, patch = -1;
    OK(aclrtGetVersion(&major, &minor, &patch));
    EXPECT(1, major >= 1 && minor >= 0 && patch >= 0);
    EXPECT(4, aclDataTypeSize(ACL_FLOAT));
    EXPECT(2, aclDataTypeSize(ACL_BF16));
    EXPECT(16, aclDataTypeSize(ACL_COMPLEX128));
    EXPECT(0, aclDataTypeSize(ACL_DT_UNDEFINED));
    EXPECT(0x3E00, aclFloatToFloat16(1.5f));
    EXPECT(0x7C00, aclFloatToFloat16(1e9f));
    EXPECT(1, aclFloat16ToFloat(0xC100) == -2.5f);
    EXPECT(0, strcmp(aclrtGetSocName(), "Ascend910B"));
}

static void devices(void)
{
    int32_t device = -1;
    uint32_t count = 0;
    aclrtRunMode mode = ACL_DEVICE;
    size_t free_bytes = 0, total_bytes = 0;
    OK(aclrtSetDevice(0));
    OK(aclrtGetDevice(&device));
    EXPECT(0, device);
    OK(aclrtGetDeviceCount(&count));
    EXPECT(1, count);
    OK(aclrtGetRunMode(&mode));
    EXPECT(ACL_HOST, mode);
    OK(aclrtGetMemInfo(ACL_HBM_MEM, &free_bytes, &total_bytes));
    EXPECT(1, free_bytes > 0 && free_bytes <= total_bytes);
    OK(aclrtSynchronizeDevice());
}

static void contexts(void)
{
    aclrtContext first = NULL, second = NULL, current = NULL;
    OK(aclrtGetCurrentContext(&first));
    OK(aclrtCreateContext(&second, 0));
    OK(aclrtGetCurrentContext(&current));
    EXPECT(1, current == second && first != second);
    int64_t value = -1;
    EXPECT(107021, aclrtCtxGetSysParamOpt(ACL_OPT_DETERMINISTIC, &value));
    OK(aclrtCtxSetSysParamOpt(ACL_OPT_DETERMINISTIC, 3));
    OK(aclrtCtxGetSysParamOpt(ACL_OPT_DETERMINISTIC, &value));
    EXPECT(3, value);
    OK(aclrtSetSysParamOpt(ACL_OPT_DETERMINISTIC, 1));
    OK(aclrtGetSysParamOpt(ACL_OPT_DETERMINISTIC, &value));
    EXPECT(1, value);
    OK(aclrtSetCurrentContext(first));
    OK(aclrtDestroyContext(second));
}

static void memory(void)
{
    char text[32] = "the quick brown fox", back[32] = "";
    void *device = NULL, *host = NULL;
    aclrtStream stream = NULL;
    OK(aclrtMalloc(&device, 64, ACL_MEM_MALLOC_NORMAL_ONLY));
    EXPECT(0, (uintptr_t)device % 64);
    OK(aclrtMallocHost(&host, 64));
    OK(aclrtCreateStreamWithConfig(&stream, 0, ACL_STREAM_FAST_LAUNCH | ACL_STREAM_FAST_SYNC));
    OK(aclrtMemcpy(device, 64, text, sizeof text, ACL_MEMCPY_HOST_TO_DEVICE));
    OK(aclrtMemset((char *)device + 4, 60, 'Q', 1));
    OK(aclrtMemcpyAsync(host, 64, device, 32, ACL_MEMCPY_DEVICE_TO_HOST, stream));
    OK(aclrtSynchronizeStream(stream));
    EXPECT(0, strcmp(host, "the Quick brown fox"));
    OK(aclrtMemsetAsync(device, 64, 0, 64, stream));
    OK(aclrtSynchronizeStreamWithTimeout(stream, 5000));
    OK(aclrtMemcpy(back, sizeof back, device, sizeof back, ACL_MEMCPY_DEFAULT));
    EXPECT(0, back[0]);
    OK(aclrtDestroyStream(stream));
    OK(aclrtFree(device));
    OK(aclrtFreeHost(host));
}

static void tensors(void)
{
    int64_t dims[3] = {2, 3, 4}, strides[3] = {24, 4, 1}, storage[2] = {12, 24}, offset = -1, *list = NULL;
    uint64_t count = 0;
    aclDataType dtype = ACL_DT_UNDEFINED;
    aclFormat format = ACL_FORMAT_UNDEFINED;
    void *address = NULL;
    aclTensor *tensor = aclCreateTensor(dims, 3, ACL_BF16, strides, 5, ACL_FORMAT_NCL, storage, 2, (void *)0x1000);
    dims[0] = strides[0] = 99; /* they were copied */
    OK(aclGetViewShape(tensor, &list, &count));
    EXPECT(1, count == 3 && list[0] == 2 && list[1] == 3 && list[2] == 4);
    delete_array(list);
    OK(aclGetViewStrides(tensor, &list, &count));
    EXPECT(1, count == 3 && list[0] == 24 && list[1] == 4 && list[2] == 1);
    delete_array(list);
    OK(aclGetStorageShape(tensor, &list, &count));
    EXPECT(1, count == 2 && list[0] == 12 && list[1] == 24);
    delete_array(list);
    OK(aclGetViewOffset(tensor, &offset));
    EXPECT(5, offset);
    OK(aclGetDataType(tensor, &dtype));
    EXPECT(ACL_BF16, dtype);
    OK(aclGetFormat(tensor, &format));
    EXPECT(ACL_FORMAT_NCL, format);
    OK(aclGetRawTensorAddr(tensor, &address));
    EXPECT(0x1000, (uintptr_t)address);
    OK(aclSetRawTensorAddr(tensor, (void *)0x2000));
    OK(aclGetRawTensorAddr(tensor, &address));
    EXPECT(0x2000, (uintptr_t)address);
    OK(aclDestroyTensor(tensor));
    OK(aclDestroyTensor(NULL));
    tensor = aclCreateTensor(NULL, 0, ACL_FLOAT, NULL, 0, ACL_FORMAT_ND, NULL, 0, NULL); /* a scalar */
    OK(aclGetViewShape(tensor, &list, &count));
    EXPECT(1, count == 0 && list != NULL);
    delete_array(list);
    OK(aclDestroyTensor(tensor));
    aclIntArray *numbers = aclCreateIntArray(NULL, 0); /* a real, empty array */
    aclBoolArray *switches = aclCreateBoolArray(NULL, 0);
    EXPECT(1, numbers && switches);
    OK(aclDestroyIntArray(numbers));
    OK(aclDestroyBoolArray(switches));
}

static void events_and_executors(void)
{
    aclrtStream first = NULL, second = NULL;
    aclrtEvent start = NULL, end = NULL;
    aclrtEventStatus status = ACL_EVENT_STATUS_NOT_READY;
    aclrtEventRecordedStatus recorded = ACL_EVENT_RECORDED_STATUS_NOT_READY;
    aclrtStreamStatus state = ACL_STREAM_STATUS_NOT_READY;
    float ms = -1;
    OK(aclrtCreateStream(&first));
    OK(aclrtCreateStream(&second));
    OK(aclrtCreateEvent(&start));
    OK(aclrtCreateEventWithFlag(&end, ACL_EVENT_TIME_LINE));
    Call call;
    make_call(&call, 2, 2);
    plan_with_workspace(&call);
    OK(aclSetAclOpExecutorRepeatable(call.executor));
    OK(aclrtRecordEvent(start, first));
    OK(run(&call, first));
    OK(aclrtRecordEvent(end, first));
    OK(aclrtStreamWaitEvent(second, end));
    OK(aclrtSynchronizeEvent(end));
    OK(aclrtQueryEvent(end, &status));
    EXPECT(ACL_EVENT_STATUS_COMPLETE, status);
    OK(aclrtQueryEventStatus(end, &recorded));
    EXPECT(ACL_EVENT_RECORDED_STATUS_COMPLETE, recorded);
    OK(aclrtEventElapsedTime(&ms, start, end));
    EXPECT(1, ms >= 0 && ms < 60000);
    expect_golden(&call);

    /* The same executor on other memory: the gradient of the bias goes to a new place. */
    void *moved = NULL;
    float bias[2] = {0, 0};
    OK(aclrtMalloc(&moved, 8, ACL_MEM_MALLOC_HUGE_FIRST));
    OK(aclSetOutputTensorAddr(call.executor, 2, call.tensor[DB], moved));
    OK(aclSetInputTensorAddr(call.executor, 1, call.tensor[X], call.data[X]));
    OK(aclSetTensorAddr(call.executor, 0, call.tensor[DY], call.data[DY]));
    OK(run(&call, second));
    for (int i = 0; i < 5000 && state != ACL_STREAM_STATUS_COMPLETE; i++) {
        OK(aclrtStreamQuery(second, &state));
        usleep(1000);
    }
    EXPECT(ACL_STREAM_STATUS_COMPLETE, state);
    OK(aclrtSynchronizeStream(second));
    OK(aclrtMemcpy(bias, 8, moved, 8, ACL_MEMCPY_DEVICE_TO_HOST));
    EXPECT(1, bias[0] == 6 && bias[1] == 8);
    OK(aclDestroyAclOpExecutor(call.executor));
    OK(aclrtFree(moved));
    release_call(&call);
    OK(aclrtDestroyEvent(start));
    OK(aclrtDestroyEvent(end));
    OK(aclrtDestroyStream(first));
    OK(aclrtDestroyStream(second));
}

int main(void)
{
    EXPECT(1, aclGetRecentErrMsg() == NULL);
    OK(aclInit(NULL));
    EXPECT(100002, aclInit(NULL));
    EXPECT(1, strstr(aclGetRecentErrMsg(), "initialized already") != NULL);
    EXPECT(1, aclGetRecentErrMsg() == NULL); /* cleared by reading */
    OK(aclnnInit(NULL));
    versions_and_numbers();
    devices();
    contexts();
    memory();
    tensors();
    events_and_executors();
    OK(aclrtResetDevice(0));
    OK(aclnnFinalize());
    OK(aclFinalize());
    setenv("BACKNORM_SOC", "Ascend310P3", 1); /* read at every aclInit */
    OK(aclInit(NULL));
    EXPECT(0, strcmp(aclrtGetSocName(), "Ascend310P3"));
    uint64_t users = 9;
    OK(aclFinalizeReference(&users));
    EXPECT(0, users);
    unsetenv("BACKNORM_SOC");
    return wrong != 0;
}
