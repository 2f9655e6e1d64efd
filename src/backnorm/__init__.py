"""Backward passes of LayerNorm, GroupNorm and BatchNorm-reduce under the aclnn contract, without an NPU."""

from .functional import batch_norm_backward_reduce, group_norm_backward, layer_norm_backward
from .status import AclnnError, Status
from .threads import get_num_threads, set_num_threads

__version__ = "0.1.0"

__all__ = [
    "AclnnError",
    "Status",
    "batch_norm_backward_reduce",
    "get_num_threads",
    "group_norm_backward",
    "layer_norm_backward",
    "set_num_threads",
]
