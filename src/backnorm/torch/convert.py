"""From torch.nn's layers to backnorm's, in place."""

from __future__ import annotations

from typing import TypeVar

import torch

from .modules import GroupNorm, LayerNorm
from .sync_batch_norm import SyncBatchNorm

_OURS: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    torch.nn.LayerNorm: LayerNorm,
    torch.nn.GroupNorm: GroupNorm,
    torch.nn.SyncBatchNorm: SyncBatchNorm,
}

Module = TypeVar("Module", bound=torch.nn.Module)


def convert(model: Module) -> Module:
    """Make every torch.nn.LayerNorm, GroupNorm and SyncBatchNorm in a model one of backnorm's, and return the model.

    The layers stay the objects they are, with their parameters, buffers, hooks and names; only their class changes.
    Layers of classes derived from torch.nn's have their own forward pass and are left alone.
    """
    for module in model.modules():
        ours = _OURS.get(type(module))
        if ours is not None:
            module.__class__ = ours
    return model
