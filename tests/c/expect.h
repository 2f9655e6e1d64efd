/* What the C programs of the tests share: expectations, and a LayerNorm call to bend. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "acl/acl.h"
#include "aclnnop/aclnn_batch_norm_backward_reduce.h"
#include "aclnnop/aclnn_group_norm_backward.h"
#include "aclnnop/aclnn_layer_norm_backward.h"

/* delete[] of C++, by its name for a linker: what arrays of aclGetViewShape are released with. */
extern void _ZdaPv(void *memory);
#define delete_array _ZdaPv

static int wrong;

static inline void expect_code(long long got, long long expected, const char *what, int line)
{
    if (got != expected) {
        const char *message = aclGetRecentErrMsg();
        __atomic_add_fetch(&wrong, 1, __ATOMIC_RELAXED);
        fprintf(stderr, "line %d: %s gave %lld, not %lld: %s\n", line, what, got, expected, message ? message : "");
    }
}

static inline void expect_message(const char *part, int line)
{
    const char *message = aclGetRecentErrMsg();
    if (!message || !strstr(message, part)) {
        __atomic_add_fetch(&wrong, 1, __ATOMIC_RELAXED);
        fprintf(stderr, "line %d: the message is '%s', without '%s'\n", line, message ? message : "", part);
    }
}

#define EXPECT(expected, call) expect_code((long long)(call), (expected), #call, __LINE__)
#define OK(call) EXPECT(0, call)
/* The call fails with a code, and the message says why. */
#define REFUSED(expected, part, call) (aclGetRecentErrMsg(), EXPECT(expected, call), expect_message(part, __LINE__))

static inline double now_us(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e6 + time.tv_nsec / 1e3;
}

enum { DY, X, MEAN, RSTD, WEIGHT, BIAS, DX, DW, DB, TENSORS };

typedef struct {
    int64_t rows, cols;
    void *data[TENSORS];
    aclTensor *tensor[TENSORS];
    aclIntArray *shape;
    aclBoolArray *mask;
    uint64_t size;
    void *workspace;
    aclOpExecutor *executor;
} Call;

static inline size_t count_of(const Call *call, int which)
{
    return which == MEAN || which == RSTD ? call->rows
           : which >= WEIGHT && which != DX ? call->cols
                                            : call->rows * call->cols;
}

static inline void make_call(Call *call, int64_t rows, int64_t cols)
{
    static const float values[TENSORS][4] = {{2, 3, 4, 5}, {2, 3, 4, 5}, {2, 3}, {4, 5}, {1, 1}, {0, 0}};
    memset(call, 0, sizeof *call);
    call->rows = rows;
    call->cols = cols;
    for (int i = 0; i < TENSORS; i++) {
        int vector = count_of(call, i) == (size_t)cols && i >= WEIGHT && i != DX;
        int64_t dims[2] = {vector ? cols : rows, i == MEAN || i == RSTD ? 1 : cols};
        size_t count = count_of(call, i);
        float *host = calloc(count, sizeof(float));
        for (size_t at = 0; at < count; at++)
            host[at] = values[i][at % 4];
        OK(aclrtMalloc(&call->data[i], count * 4, ACL_MEM_MALLOC_HUGE_FIRST));
        OK(aclrtMemcpy(call->data[i], count * 4, host, count * 4, ACL_MEMCPY_HOST_TO_DEVICE));
        free(host);
        call->tensor[i] = aclCreateTensor(dims, vector ? 1 : 2, ACL_FLOAT, NULL, 0, ACL_FORMAT_ND, dims,
                                          vector ? 1 : 2, call->data[i]);
        EXPECT(1, call->tensor[i] != NULL);
    }
    bool all[3] = {true, true, true};
    call->shape = aclCreateIntArray(&cols, 1);
    call->mask = aclCreateBoolArray(all, 3);
}

static inline aclnnStatus plan(Call *call)
{
    aclTensor **t = call->tensor;
    return aclnnLayerNormBackwardGetWorkspaceSize(t[DY], t[X], call->shape, t[MEAN], t[RSTD], t[WEIGHT], t[BIAS],
                                                  call->mask, t[DX], t[DW], t[DB], &call->size, &call->executor);
}

static inline void plan_with_workspace(Call *call)
{
    OK(plan(call));
    if (call->size && !call->workspace)
        OK(aclrtMalloc(&call->workspace, call->size, ACL_MEM_MALLOC_HUGE_FIRST));
}

static inline aclnnStatus run(Call *call, aclrtStream stream)
{
    return aclnnLayerNormBackward(call->workspace, call->size, call->executor, stream);
}

/* The results of a call with two rows and two columns. */
static inline void expect_golden(Call *call)
{
    static const float golden[3][4] = {{-2, -94, -877.5, -1747.5}, {20, 62}, {6, 8}};
    for (int i = DX; i <= DB; i++) {
        float host[4] = {0};
        size_t bytes = count_of(call, i) * 4;
        OK(aclrtMemcpy(host, sizeof host, call->data[i], bytes, ACL_MEMCPY_DEVICE_TO_HOST));
        EXPECT(0, memcmp(host, golden[i - DX], bytes));
    }
}

static inline void release_call(Call *call)
{
    for (int i = 0; i < TENSORS; i++) {
        OK(aclDestroyTensor(call->tensor[i]));
        OK(aclrtFree(call->data[i]));
    }
    OK(aclDestroyIntArray(call->shape));
    OK(aclDestroyBoolArray(call->mask));
    if (call->workspace)
        OK(aclrtFree(call->workspace));
}
