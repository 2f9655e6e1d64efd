#define _POSIX_C_SOURCE 200809L
/* Microseconds that both phases and the synchronize take together: `latency ROWS COLS CALLS`, a LayerNorm.
 * Prints the time of the first call, from aclInit on, in milliseconds, then the median of the later ones. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "acl/acl.h"
#include "aclnnop/aclnn_layer_norm_backward.h"

#define CHECK(call)                                                                      \
    do {                                                                                 \
        int ret_ = (call);                                                               \
        if (ret_ != 0) {                                                                 \
            fprintf(stderr, "%s: %d %s\n", #call, ret_, aclGetRecentErrMsg());           \
            exit(1);                                                                     \
        }                                                                                \
    } while (0)

static double now_us(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e6 + time.tv_nsec / 1e3;
}

static aclTensor *make_tensor(int64_t rows, int64_t cols)
{
    int64_t dims[2] = {rows, cols};
    void *data = NULL;
    CHECK(aclrtMalloc(&data, rows * cols * 4, ACL_MEM_MALLOC_HUGE_FIRST));
    CHECK(aclrtMemset(data, rows * cols * 4, 0, rows * cols * 4));
    return aclCreateTensor(dims, 2, ACL_FLOAT, NULL, 0, ACL_FORMAT_ND, dims, 2, data);
}

static aclTensor *make_row(int64_t cols)
{
    void *data = NULL;
    CHECK(aclrtMalloc(&data, cols * 4, ACL_MEM_MALLOC_HUGE_FIRST));
    CHECK(aclrtMemset(data, cols * 4, 0, cols * 4));
    return aclCreateTensor(&cols, 1, ACL_FLOAT, NULL, 0, ACL_FORMAT_ND, &cols, 1, data);
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
    int64_t rows = argc > 1 ? atoll(argv[1]) : 4, cols = argc > 2 ? atoll(argv[2]) : 64;
    int calls = argc > 3 ? atoi(argv[3]) : 2000;
    bool all[3] = {true, true, true};
    double begun = now_us(), *times = malloc(sizeof(double) * (calls + 1));
    aclrtStream stream = NULL;
    CHECK(aclInit(NULL));
    CHECK(aclrtSetDevice(0));
    CHECK(aclrtCreateStream(&stream));
    aclTensor *dy = make_tensor(rows, cols), *x = make_tensor(rows, cols), *mean = make_tensor(rows, 1);
    aclTensor *rstd = make_tensor(rows, 1), *weight = make_row(cols), *bias = make_row(cols);
    aclTensor *dx = make_tensor(rows, cols), *dw = make_row(cols), *db = make_row(cols);
    aclIntArray *shape = aclCreateIntArray(&cols, 1);
    aclBoolArray *mask = aclCreateBoolArray(all, 3);
    void *workspace = NULL;
    uint64_t room = 0;
    for (int call = 0; call <= calls; call++) {
        uint64_t size = 0;
        aclOpExecutor *executor = NULL;
        double start = now_us();
        CHECK(aclnnLayerNormBackwardGetWorkspaceSize(dy, x, shape, mean, rstd, weight, bias, mask, dx, dw, db, &size,
                                                     &executor));
        if (size > room) {
            CHECK(aclrtMalloc(&workspace, size, ACL_MEM_MALLOC_HUGE_FIRST));
            room = size;
        }
        CHECK(aclnnLayerNormBackward(workspace, size, executor, stream));
        CHECK(aclrtSynchronizeStream(stream));
        double end = now_us();
        if (call == 0)
            printf("first %.1f\n", (end - begun) / 1e3);
        times[call] = end - start;
    }
    qsort(times, calls, sizeof(double), ascending);
    printf("median %.1f\n", times[calls / 2]);
    free(times);
    return 0;
}
