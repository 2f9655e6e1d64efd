"""PyTorch: one line for existing models, modules, and operators for torch's dispatcher.

import backnorm.torch

backnorm.torch.enable()  # LayerNorm, GroupNorm and SyncBatchNorm of any model are differentiated by backnorm
print(backnorm.torch.stats())
"""

from . import operators as operators  # defines torch.ops.backnorm
from .convert import convert
from .enable import disable, enable, is_enabled
from .engine import reset_stats, stats
from .modules import GroupNorm, LayerNorm, group_norm, layer_norm
from .sync_batch_norm import SyncBatchNorm

__all__ = [
    "GroupNorm",
    "LayerNorm",
    "SyncBatchNorm",
    "convert",
    "disable",
    "enable",
    "group_norm",
    "is_enabled",
    "layer_norm",
    "reset_stats",
    "stats",
]
