// The reduce step of BatchNorm backward: four samples of two channels.
#include "aclnnop/aclnn_batch_norm_backward_reduce.h"
#include "device.h"

int main()
{
    Device device;
    const Tensor gradOut({4, 2}, {1, 1, 1, 2, 2, 2, 3, 3});
    const Tensor input({4, 2}, {0, 1, 2, 3, 4, 5, 6, 7});
    const Tensor mean({2}, {1, 1});
    const Tensor invstd({2}, {1, 1});
    const Tensor weight({2}, {1, 1});
    const Tensor sumDy({2}, std::vector<float>(2));
    const Tensor sumDyXmu({2}, std::vector<float>(2));
    const Tensor gradWeight({2}, std::vector<float>(2));
    const Tensor gradBias({2}, std::vector<float>(2));

    uint64_t workspaceSize = 0;
    aclOpExecutor* executor = nullptr;
    CHECK(aclnnBatchNormReduceBackwardGetWorkspaceSize(gradOut.get(), input.get(), mean.get(), invstd.get(),
                                                       weight.get(), true, true, true, sumDy.get(), sumDyXmu.get(),
                                                       gradWeight.get(), gradBias.get(), &workspaceSize, &executor));
    const Memory workspace(workspaceSize);
    CHECK(aclnnBatchNormReduceBackward(workspace.address(), workspaceSize, executor, device.stream()));
    CHECK(aclrtSynchronizeStream(device.stream()));

    sumDy.Print("sumDy");
    sumDyXmu.Print("sumDyXmu");
    gradWeight.Print("gradWeight");
    gradBias.Print("gradBias");
    return 0;
}
