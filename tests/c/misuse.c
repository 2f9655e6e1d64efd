/* What clients do wrong: each gets a code and a sentence, and the process goes on. */
#include "expect.h"

static aclrtContext other_context;
static aclrtStream other_stream;

static void before_init(void)
{
    int64_t value = 0;
    void *address = NULL;
    aclrtStream stream = NULL;
    REFUSED(100001, "aclInit", aclrtSetDevice(0));
    REFUSED(100001, "aclInit", aclrtMalloc(&address, 8, ACL_MEM_MALLOC_HUGE_FIRST));
    REFUSED(100001, "aclInit", aclrtMalloc(NULL, 8, ACL_MEM_MALLOC_HUGE_FIRST));
    REFUSED(100001, "aclInit", aclrtCreateStream(&stream));
    REFUSED(100001, "aclInit", aclrtGetSysParamOpt(ACL_OPT_DETERMINISTIC, &value));
    REFUSED(100001, "aclInit", aclnnLayerNormBackward(NULL, 0, NULL, NULL));
    REFUSED(100001, "aclInit", aclFinalize());
    EXPECT(1, aclCreateTensor(&value, 1, ACL_FLOAT, NULL, 0, ACL_FORMAT_ND, &value, 1, NULL) == NULL);
    REFUSED(100000, "no/such/file", aclInit("/no/such/file"));
    setenv("BACKNORM_DEVICE", "abacus", 1);
    REFUSED(200006, "abacus", aclInit(NULL));
    unsetenv("BACKNORM_DEVICE");
    setenv("BACKNORM_SOC", "Ascend1", 1);
    REFUSED(100000, "Ascend1", aclInit(NULL));
    unsetenv("BACKNORM_SOC");
    OK(aclInit(NULL));
    REFUSED(107002, "no context", aclrtMalloc(&address, 8, ACL_MEM_MALLOC_HUGE_FIRST));
    REFUSED(107001, "deviceId", aclrtSetDevice(7));
}

static void null_pointers(void)
{
    size_t size = 0;
    uint64_t count = 0;
    int64_t *list = NULL;
    REFUSED(100000, "devPtr must not be null", aclrtMalloc(NULL, 8, ACL_MEM_MALLOC_HUGE_FIRST));
    REFUSED(100000, "stream must not be null", aclrtCreateStream(NULL));
    REFUSED(100000, "stream must not be null", aclrtDestroyStream(NULL));
    REFUSED(100000, "context must not be null", aclrtCreateContext(NULL, 0));
    REFUSED(100000, "event must not be null", aclrtCreateEvent(NULL));
    REFUSED(100000, "total must not be null", aclrtGetMemInfo(ACL_HBM_MEM, &size, NULL));
    REFUSED(100000, "devPtr must not be null", aclrtFree(NULL));
    REFUSED(100000, "src must not be null", aclrtMemcpy(&size, 8, NULL, 8, ACL_MEMCPY_HOST_TO_HOST));
    REFUSED(161001, "tensor must not be null", aclGetViewShape(NULL, &list, &count));
    REFUSED(561103, "executor must not be null", aclSetAclOpExecutorRepeatable(NULL));
    REFUSED(561103, "executor must not be null", aclDestroyAclOpExecutor(NULL));
    EXPECT(1, aclCreateTensor(NULL, 2, ACL_FLOAT, NULL, 0, ACL_FORMAT_ND, NULL, 2, NULL) == NULL);
    expect_message("viewDims must not be null", __LINE__);
    EXPECT(1, aclCreateIntArray(NULL, 2) == NULL);
    expect_message("value must not be null", __LINE__);
}

static void memory(void)
{
    void *address = NULL;
    char text[256] = "";
    OK(aclrtMalloc(&address, 128, ACL_MEM_MALLOC_HUGE_FIRST));
    REFUSED(100000, "size must be positive", aclrtMalloc(&address, 0, ACL_MEM_MALLOC_HUGE_FIRST));
    REFUSED(207001, "bytes left", aclrtMalloc(&address, (size_t)1 << 60, ACL_MEM_MALLOC_HUGE_FIRST));
    REFUSED(100000, "policy", aclrtMalloc(&address, 8, (aclrtMemMallocPolicy)9));
    REFUSED(107000, "bytes inside", aclrtFree((char *)address + 8));
    REFUSED(107000, "128 bytes past", aclrtMemcpy(address, 256, text, 256, ACL_MEMCPY_HOST_TO_DEVICE));
    REFUSED(107000, "destMax", aclrtMemcpy(address, 64, text, 128, ACL_MEMCPY_HOST_TO_DEVICE));
    REFUSED(107000, "device memory", aclrtMemcpy(text, 256, address, 128, ACL_MEMCPY_HOST_TO_HOST));
    REFUSED(107000, "memory of this process", aclrtMemcpy(address, 128, (void *)0x10, 128, ACL_MEMCPY_HOST_TO_DEVICE));
    REFUSED(107000, "cannot be written", aclrtMemcpy((void *)"constant", 8, address, 8, ACL_MEMCPY_DEVICE_TO_HOST));
    REFUSED(100000, "kind", aclrtMemcpy(text, 8, address, 8, (aclrtMemcpyKind)17));
    OK(aclrtFree(address));
    REFUSED(107000, "freed before", aclrtFree(address)); /* twice */
    REFUSED(107000, "freed before", aclrtMemset(address, 128, 0, 128));
    REFUSED(107000, "in no host allocation", aclrtFreeHost(text));
}

static void handles(Call *call)
{
    aclrtStream stream = NULL;
    aclrtEvent event = NULL;
    REFUSED(107003, "another context", aclrtSynchronizeStream(other_stream));
    REFUSED(107003, "another context", aclrtDestroyStream(other_stream));
    OK(aclrtCreateStream(&stream));
    OK(aclrtDestroyStream(stream));
    REFUSED(107017, "destroyed or foreign", aclrtDestroyStream(stream));
    REFUSED(107017, "destroyed or foreign", aclrtSynchronizeStream(stream));
    OK(aclrtCreateEvent(&event));
    OK(aclrtDestroyEvent(event));
    REFUSED(107017, "destroyed or foreign", aclrtRecordEvent(event, NULL));
    REFUSED(107017, "destroyed or foreign", aclrtSynchronizeStream(call)); /* an address of the program's own */
    REFUSED(561000, "destroyed or foreign", aclDestroyTensor((aclTensor *)call->shape));
    REFUSED(561000, "destroyed or foreign", aclDestroyTensor((aclTensor *)call));
    aclTensor *tensor = call->tensor[WEIGHT];
    call->tensor[WEIGHT] = (aclTensor *)call->mask;
    REFUSED(161001, "weightOptional", plan(call));
    call->tensor[WEIGHT] = tensor;
}

static void executors(Call *call)
{
    aclOpExecutor *untouched = (aclOpExecutor *)0x77;
    uint64_t size = 77;
    aclTensor **t = call->tensor;
    REFUSED(161001, "workspaceSize must not be null",
            aclnnLayerNormBackwardGetWorkspaceSize(t[DY], t[X], call->shape, t[MEAN], t[RSTD], t[WEIGHT], t[BIAS],
                                                   call->mask, t[DX], t[DW], t[DB], NULL, &untouched));
    REFUSED(161001, "executor must not be null",
            aclnnLayerNormBackwardGetWorkspaceSize(t[DY], t[X], call->shape, t[MEAN], t[RSTD], t[WEIGHT], t[BIAS],
                                                   call->mask, t[DX], t[DW], t[DB], &size, NULL));
    REFUSED(161001, "gradOut must not be null",
            aclnnLayerNormBackwardGetWorkspaceSize(NULL, t[X], call->shape, t[MEAN], t[RSTD], t[WEIGHT], t[BIAS],
                                                   call->mask, t[DX], t[DW], t[DB], &size, &untouched));
    EXPECT(1, size == 77 && untouched == (aclOpExecutor *)0x77);

    REFUSED(161001, "executor must not be null", aclnnLayerNormBackward(NULL, 0, NULL, NULL));
    REFUSED(161001, "destroyed or foreign", aclnnLayerNormBackward(NULL, 0, (aclOpExecutor *)call, NULL));
    plan_with_workspace(call);
    OK(run(call, NULL));
    REFUSED(161001, "used up", run(call, NULL));
    REFUSED(561000, "destroyed or foreign", aclDestroyAclOpExecutor(call->executor));
    OK(aclrtSynchronizeStream(NULL));
    expect_golden(call);

    OK(plan(call));
    REFUSED(161001, "aclnnLayerNormBackward's",
            aclnnGroupNormBackward(call->workspace, call->size, call->executor, NULL));
    OK(plan(call));
    REFUSED(161001, "aclnnLayerNormBackward's",
            aclnnBatchNormReduceBackward(call->workspace, call->size, call->executor, NULL));
    OK(plan(call));
    REFUSED(361001, "another context", run(call, other_stream));
    OK(plan(call));
    REFUSED(161001, "workspace must not be null", aclnnLayerNormBackward(NULL, call->size, call->executor, NULL));
    OK(plan(call));
    REFUSED(161002, "workspaceSize", aclnnLayerNormBackward(call->workspace, call->size - 1, call->executor, NULL));
}

static void data_of_tensors(Call *call)
{
    void *small = NULL;
    int64_t dims[2] = {2, 2}, strides[2] = {1000, 1};
    aclTensor *good = call->tensor[X];
    OK(aclrtMalloc(&small, 8, ACL_MEM_MALLOC_HUGE_FIRST));
    void *bad[] = {NULL, small, (void *)0x10, dims};
    const char *words[] = {"its data is null", "8 bytes past its allocation", "in no device", "in no device"};
    for (int i = 0; i < 4; i++) {
        OK(aclSetRawTensorAddr(good, bad[i]));
        OK(plan(call)); /* phase one looks at no address */
        REFUSED(161002, words[i], run(call, NULL));
    }
    OK(aclSetRawTensorAddr(good, call->data[X]));
    call->tensor[X] = aclCreateTensor(dims, 2, ACL_FLOAT, strides, 0, ACL_FORMAT_ND, dims, 2, call->data[X]);
    OK(plan(call));
    REFUSED(161002, "past its allocation", run(call, NULL));
    OK(aclDestroyTensor(call->tensor[X]));
    call->tensor[X] = good;

    /* A workspace that was freed, before the run and after it. */
    void *workspace = NULL, *kept = call->workspace;
    OK(aclrtMalloc(&workspace, call->size, ACL_MEM_MALLOC_HUGE_FIRST));
    OK(aclrtFree(workspace));
    call->workspace = workspace;
    OK(plan(call));
    REFUSED(161002, "freed before", run(call, NULL));
    OK(aclrtMalloc(&workspace, call->size, ACL_MEM_MALLOC_HUGE_FIRST));
    call->workspace = workspace;
    OK(plan(call));
    OK(run(call, NULL));
    OK(aclrtFree(workspace));
    REFUSED(500000, "freed before the stream was synchronized", aclrtSynchronizeStream(NULL));
    OK(aclrtSynchronizeStream(NULL)); /* told once */
    call->workspace = kept;
    OK(aclrtFree(small));
}

static void *on_another_thread(void *unused)
{
    (void)unused;
    void *address = NULL;
    EXPECT(1, aclGetRecentErrMsg() == NULL); /* the other thread's failure is not this one's */
    REFUSED(107002, "no context", aclrtMalloc(&address, 8, ACL_MEM_MALLOC_HUGE_FIRST));
    return NULL;
}

int main(void)
{
    before_init();
    aclrtContext first = NULL;
    OK(aclrtSetDevice(0));
    OK(aclrtGetCurrentContext(&first));
    OK(aclrtCreateContext(&other_context, 0));
    OK(aclrtCreateStream(&other_stream));
    OK(aclrtSetCurrentContext(first));
    Call call;
    make_call(&call, 2, 2);
    null_pointers();
    memory();
    handles(&call);
    executors(&call);
    data_of_tensors(&call);

    EXPECT(107001, aclrtSetDevice(-1));
    const char *message = aclGetRecentErrMsg();
    EXPECT(107001, aclrtSetDevice(-2)); /* the text lives until the next time it is asked for */
    EXPECT(1, strstr(message, "got -1") != NULL);
    pthread_t thread;
    pthread_create(&thread, NULL, on_another_thread, NULL);
    pthread_join(thread, NULL);
    expect_message("got -2", __LINE__);

    /* It all still works. */
    OK(plan(&call));
    OK(run(&call, NULL));
    OK(aclrtSynchronizeStream(NULL));
    expect_golden(&call);
    release_call(&call);
    OK(aclrtSetCurrentContext(other_context));
    OK(aclrtDestroyStream(other_stream));
    OK(aclrtDestroyContext(other_context));
    OK(aclrtResetDevice(0));
    OK(aclFinalize());
    REFUSED(100037, "finalized already", aclFinalize());
    return wrong != 0;
}
