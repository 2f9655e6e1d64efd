// LayerNorm backward: two rows of two columns.
#include "aclnnop/aclnn_layer_norm_backward.h"
#include "device.h"

int main()
{
    Device device;
    const Tensor gradOut({2, 2}, {2, 3, 4, 5});
    const Tensor input({2, 2}, {2, 3, 4, 5});
    const Tensor mean({2, 1}, {2, 3});
    const Tensor rstd({2, 1}, {4, 5});
    const Tensor weight({2}, {1, 1});
    const Tensor bias({2}, {0, 0});
    const Tensor gradInput({2, 2}, std::vector<float>(4));
    const Tensor gradWeight({2}, std::vector<float>(2));
    const Tensor gradBias({2}, std::vector<float>(2));
    const int64_t columns = 2;
    const bool wanted[] = {true, true, true};
    aclIntArray* normalizedShape = aclCreateIntArray(&columns, 1);
    aclBoolArray* outputMask = aclCreateBoolArray(wanted, 3);

    uint64_t workspaceSize = 0;
    aclOpExecutor* executor = nullptr;
    CHECK(aclnnLayerNormBackwardGetWorkspaceSize(gradOut.get(), input.get(), normalizedShape, mean.get(), rstd.get(),
                                                 weight.get(), bias.get(), outputMask, gradInput.get(),
                                                 gradWeight.get(), gradBias.get(), &workspaceSize, &executor));
    const Memory workspace(workspaceSize);
    CHECK(aclnnLayerNormBackward(workspace.address(), workspaceSize, executor, device.stream()));
    CHECK(aclrtSynchronizeStream(device.stream()));

    gradInput.Print("gradInputOut");
    gradWeight.Print("gradWeightOut");
    gradBias.Print("gradBiasOut");
    CHECK(aclDestroyIntArray(normalizedShape));
    CHECK(aclDestroyBoolArray(outputMask));
    return 0;
}
