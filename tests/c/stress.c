/* `stress THREADS CALLS`: whole calls, from malloc to free, checked, on threads with a stream each.
 * Prints the resident KiB a fifth of the way and at the end. */
#include "expect.h"

static int calls;

/* The same call in memory of its own, copied on the stream. */
static Call copy_call(const Call *source, aclrtStream stream)
{
    Call call = *source;
    bool all[3] = {true, true, true};
    for (int i = 0; i < TENSORS; i++) {
        int64_t *dims = NULL;
        uint64_t rank = 0;
        size_t bytes = count_of(source, i) * 4;
        OK(aclrtMalloc(&call.data[i], bytes, ACL_MEM_MALLOC_HUGE_FIRST));
        OK(aclrtMemcpyAsync(call.data[i], bytes, source->data[i], bytes, ACL_MEMCPY_DEVICE_TO_DEVICE, stream));
        OK(aclGetViewShape(source->tensor[i], &dims, &rank));
        call.tensor[i] = aclCreateTensor(dims, rank, ACL_FLOAT, NULL, 0, ACL_FORMAT_ND, dims, rank, call.data[i]);
        delete_array(dims);
    }
    call.shape = aclCreateIntArray(&call.cols, 1);
    call.mask = aclCreateBoolArray(all, 3);
    call.workspace = NULL;
    return call;
}

static void *work(void *context)
{
    aclrtStream stream = NULL;
    if (context)
        OK(aclrtSetCurrentContext(context));
    else
        OK(aclrtSetDevice(0));
    OK(aclrtCreateStream(&stream));
    Call source;
    make_call(&source, 2, 2);
    for (int i = 0; i < calls; i++) {
        aclrtStream used = i % 3 ? stream : NULL;
        Call call = copy_call(&source, used);
        plan_with_workspace(&call);
        OK(run(&call, used));
        OK(aclrtSynchronizeStream(used));
        if (i % 10 == 0)
            expect_golden(&call);
        if (i % 7 == 0) /* a failure, whose message is this thread's own */
            REFUSED(161001, "used up", run(&call, stream));
        release_call(&call);
    }
    release_call(&source);
    OK(aclrtDestroyStream(stream));
    return NULL;
}

static long resident_kib(void)
{
    long pages = 0, resident = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (!file || fscanf(file, "%ld %ld", &pages, &resident) != 2)
        exit(3);
    fclose(file);
    return resident * (sysconf(_SC_PAGESIZE) / 1024);
}

static void round_of_threads(int count, aclrtContext *contexts)
{
    pthread_t threads[64];
    for (int i = 0; i < count; i++)
        pthread_create(&threads[i], NULL, work, contexts[i % 2]);
    for (int i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
}

int main(int argc, char **argv)
{
    if (argc != 3)
        return 2;
    int count = atoi(argv[1]), all = atoi(argv[2]);
    aclrtContext contexts[2] = {NULL, NULL};
    OK(aclInit(NULL));
    OK(aclrtSetDevice(0));
    OK(aclrtCreateContext(&contexts[1], 0));
    calls = all / 5;
    round_of_threads(count, contexts);
    long before = resident_kib();
    calls = all - calls;
    round_of_threads(count, contexts);
    printf("%ld %ld\n", before, resident_kib());
    OK(aclrtDestroyContext(contexts[1]));
    OK(aclFinalize());
    return wrong != 0;
}
