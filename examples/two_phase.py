"""BatchNorm's reduce step through the two phases, with device memory, a stream and a deliberate mistake."""

import numpy as np

from backnorm import acl, aclnn

assert acl.init() == 0
assert acl.rt.set_device(0) == 0
stream, ret = acl.rt.create_stream()
assert ret == 0

rng = np.random.default_rng(0)
shapes = {"gradOut": (8, 3, 5), "input": (8, 3, 5), "mean": (3,), "invstd": (3,)}
shapes |= {"sumDy": (3,), "sumDyXmu": (3,), "gradWeight": (3,), "gradBias": (3,)}
host = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
device, tensor = {}, {}
for name, array in host.items():
    device[name], ret = acl.rt.malloc(array.nbytes, acl.ACL_MEM_MALLOC_HUGE_FIRST)
    acl.rt.memcpy(device[name], array.nbytes, array.ctypes.data, array.nbytes, acl.ACL_MEMCPY_HOST_TO_DEVICE)
    tensor[name] = acl.create_tensor(
        array.shape, acl.ACL_FLOAT, None, 0, acl.ACL_FORMAT_ND, array.shape, device[name]
    )  # fmt: skip

# Phase one checks everything and plans; it looks at no data.
workspace_size, executor, ret = aclnn.aclnnBatchNormReduceBackwardGetWorkspaceSize(
    **tensor, weight=None, inputG=True, weightG=True, biasG=True
)
workspace, _ = acl.rt.malloc(workspace_size, acl.ACL_MEM_MALLOC_HUGE_FIRST)

# Phase two queues the work; it counts after the stream is synchronized.
assert aclnn.aclnnBatchNormReduceBackward(workspace, workspace_size, executor, stream) == 0
assert acl.rt.synchronize_stream(stream) == 0

result = host["sumDy"]
acl.rt.memcpy(result.ctypes.data, result.nbytes, device["sumDy"], result.nbytes, acl.ACL_MEMCPY_DEVICE_TO_HOST)
print("sumDy   ", result)
print("expected", host["gradOut"].sum(axis=(0, 2)))

# The same executor again is a mistake; on a device it crashes, here it is told.
ret = aclnn.aclnnBatchNormReduceBackward(workspace, workspace_size, executor, stream)
print(ret, acl.get_recent_err_msg())

for name in tensor:
    acl.destroy_tensor(tensor[name])
    acl.rt.free(device[name])
acl.rt.free(workspace)
acl.rt.destroy_stream(stream)
acl.rt.reset_device(0)
acl.finalize()
