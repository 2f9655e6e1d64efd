"""The operators: one folder and one entry here each."""

from __future__ import annotations

from ..spec import OpSpec
from .batch_norm_reduce.spec import BATCH_NORM_REDUCE
from .group_norm.spec import GROUP_NORM
from .layer_norm.spec import LAYER_NORM

OPS: dict[str, OpSpec] = {op.name: op for op in (LAYER_NORM, GROUP_NORM, BATCH_NORM_REDUCE)}
