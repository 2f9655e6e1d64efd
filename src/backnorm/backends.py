"""From the device of a tensor to the module that computes there, loaded on first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .spec import OpSpec
from .status import AclnnError, Status

#: Device type -> the module of an operator's folder that holds its kernels.
BACKENDS = {"cpu": "cpu"}


def find_backend(op: OpSpec, device: str, parameter: str) -> Any:
    """The operator's kernel module for a device; an error, never another device, where there is none."""
    module = BACKENDS.get(device.partition(":")[0])
    if module is None:
        raise AclnnError(
            Status.ACLNN_ERR_INNER_FIND_KERNEL_ERROR,
            parameter,
            f"{op.name}: {parameter} must be on a supported device ({', '.join(BACKENDS)}); got {device}",
        )
    return import_module(f".ops.{op.folder}.{module}", __package__)


def find_tiling(op: OpSpec) -> Any:
    return import_module(f".ops.{op.folder}.tiling", __package__)
