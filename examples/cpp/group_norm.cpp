// GroupNorm backward: two samples of three channels and four pixels, in one group.
#include <numeric>

#include "aclnnop/aclnn_group_norm_backward.h"
#include "device.h"

int main()
{
    Device device;
    std::vector<float> oneTo24(24);
    std::iota(oneTo24.begin(), oneTo24.end(), 1.0f);
    const Tensor gradOut({2, 3, 4}, oneTo24);
    const Tensor input({2, 3, 4}, oneTo24);
    const Tensor mean({2, 1}, {6.5f, 18.5f});
    const Tensor rstd({2, 1}, {0.2896827f, 0.2896827f});
    const Tensor gamma({3}, {1, 1, 1});
    const Tensor gradInput({2, 3, 4}, std::vector<float>(24));
    const Tensor gradGamma({3}, std::vector<float>(3));
    const Tensor gradBeta({3}, std::vector<float>(3));
    const bool wanted[] = {true, true, true};
    aclBoolArray* outputMask = aclCreateBoolArray(wanted, 3);

    uint64_t workspaceSize = 0;
    aclOpExecutor* executor = nullptr;
    CHECK(aclnnGroupNormBackwardGetWorkspaceSize(gradOut.get(), input.get(), mean.get(), rstd.get(), gamma.get(), 2, 3,
                                                 4, 1, outputMask, gradInput.get(), gradGamma.get(), gradBeta.get(),
                                                 &workspaceSize, &executor));
    const Memory workspace(workspaceSize);
    CHECK(aclnnGroupNormBackward(workspace.address(), workspaceSize, executor, device.stream()));
    CHECK(aclrtSynchronizeStream(device.stream()));

    gradInput.Print("gradInput");
    gradGamma.Print("gradGammaOut");
    gradBeta.Print("gradBetaOut");
    CHECK(aclDestroyBoolArray(outputMask));
    return 0;
}
