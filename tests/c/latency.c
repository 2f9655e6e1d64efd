/* `latency ROWS COLS CALLS`: the milliseconds of the first LayerNorm, from aclInit on, and the median of the
 * microseconds that both phases and the synchronize take together afterwards. */
#include "expect.h"

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
    if (argc != 4)
        return 2;
    int calls = atoi(argv[3]);
    double begun = now_us(), *times = malloc(sizeof(double) * calls);
    aclrtStream stream = NULL;
    OK(aclInit(NULL));
    OK(aclrtSetDevice(0));
    OK(aclrtCreateStream(&stream));
    Call call;
    make_call(&call, atoll(argv[1]), atoll(argv[2]));
    plan_with_workspace(&call);
    OK(run(&call, stream));
    OK(aclrtSynchronizeStream(stream));
    printf("first %.1f\n", (now_us() - begun) / 1e3);
    for (int i = 0; i < calls; i++) {
        double start = now_us();
        OK(plan(&call));
        OK(run(&call, stream));
        OK(aclrtSynchronizeStream(stream));
        times[i] = now_us() - start;
    }
    qsort(times, calls, sizeof(double), ascending);
    printf("median %.1f\n", times[calls / 2]);
    free(times);
    return wrong != 0;
}
