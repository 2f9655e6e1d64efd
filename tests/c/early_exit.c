/* `early_exit HOW`: ends with work queued and nothing released, in main (return), by exit() on another thread (thread),
 * or with the kernels not even loaded (init). Or forks (fork): the child starts without a runtime, and can start one. */
#include <sys/wait.h>

#include "expect.h"

static void *leave(void *unused)
{
    (void)unused;
    exit(7);
}

static int fork_and_use(Call *call)
{
    pid_t child = fork();
    if (child == 0) {
        REFUSED(100001, "aclInit", aclrtSetDevice(0));
        OK(aclInit(NULL));
        OK(aclrtSetDevice(0));
        make_call(call, 2, 2);
        plan_with_workspace(call);
        OK(run(call, NULL));
        OK(aclrtSynchronizeStream(NULL));
        expect_golden(call);
        release_call(call);
        OK(aclFinalize());
        exit(wrong ? 1 : 7);
    }
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT(7, WIFEXITED(status) ? WEXITSTATUS(status) : -1);
    OK(aclrtSynchronizeStream(NULL));
    expect_golden(call);
    return wrong ? 1 : 7;
}

int main(int argc, char **argv)
{
    const char *how = argc > 1 ? argv[1] : "return";
    OK(aclInit(NULL));
    OK(aclrtSetDevice(0));
    if (strcmp(how, "init") == 0)
        return 7;
    Call call;
    make_call(&call, 2, 2);
    plan_with_workspace(&call);
    OK(run(&call, NULL));
    if (strcmp(how, "fork") == 0)
        return fork_and_use(&call);
    if (strcmp(how, "thread") == 0) {
        pthread_t thread;
        pthread_create(&thread, NULL, leave, NULL);
        pthread_join(thread, NULL);
    }
    return wrong ? 1 : 7;
}
