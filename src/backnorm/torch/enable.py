"""One line for an existing model: aten's backward passes of the three operators go to backnorm.

Eagerly, the kernels of `aten::native_layer_norm_backward` and the others are overridden for CPU and CUDA; what backnorm
does not have (float64, more than 8 axes) goes on to aten's own kernel and is counted. Under torch.compile, inductor
would take the aten operators apart before any kernel is called; its decompositions are replaced, so that
`torch.ops.backnorm.*` stand in the compiled graph. Compiled code on disk is kept apart from that of other models.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.compiler.config

from .. import __version__
from ..spec import INVALID, NULLPTR
from ..status import AclnnError
from . import engine, formulas, operators

_ATEN = {
    "layer_norm_backward": "native_layer_norm_backward",
    "group_norm_backward": "native_group_norm_backward",
    "batch_norm_backward_reduce": "batch_norm_backward_reduce",
}
_CACHE_TAG = f"backnorm {__version__}"

_library: torch.library.Library | None = None
_decompositions: dict[Any, Callable[..., Any]] = {}


#: Contexts that are open; the last to be left puts things back as they were before the first.
_open = 0
_outlives_contexts = False
_switch = threading.RLock()


class Enabled:
    """What `enable()` returns: leaving it as a context manager puts things back as they were."""

    def __init__(self, was_enabled: bool) -> None:
        self._was_enabled = was_enabled

    def __enter__(self) -> Enabled:
        global _open, _outlives_contexts
        with _switch:
            if _open == 0:
                _outlives_contexts = self._was_enabled
            _open += 1
            _enable()
        return self

    def __exit__(self, *exception: object) -> None:
        global _open
        with _switch:
            _open -= 1
            if _open == 0 and not _outlives_contexts:
                disable()


def enable() -> Enabled:
    """Let backnorm do the backward passes of LayerNorm and GroupNorm, and BatchNorm's reduce, from now on.

    In force at once, in all threads, until `disable()`; as a context manager, until its end. A model that was compiled
    before keeps what it was compiled with: call `torch.compiler.reset()`.
    """
    with _switch:
        was_enabled = is_enabled()
        _enable()
    return Enabled(was_enabled)


def _enable() -> None:
    if not is_enabled():
        _override_kernels()
        _set_decompositions()
        torch.compiler.config.cache_key_tag += _CACHE_TAG


def disable() -> None:
    """Give the operators back to aten; harmless where `enable()` was not called."""
    global _library
    with _switch:
        if _library is not None:
            _library._destroy()
            _library = None
            _set_decompositions()
            torch.compiler.config.cache_key_tag = torch.compiler.config.cache_key_tag.replace(_CACHE_TAG, "")


def is_enabled() -> bool:
    return _library is not None


# --- eager calls ------------------------------------------------------------------------------------------------------


def _override_kernels() -> None:
    global _library
    if not hasattr(torch.library, "get_kernel"):
        raise RuntimeError(f"backnorm.torch.enable() needs PyTorch 2.10 or newer; this is {torch.__version__}")
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel", UserWarning)
        for name, aten_name in _ATEN.items():
            for device in ("CPU", "CUDA"):
                library.impl(aten_name, _override(name, aten_name, device), device, with_keyset=True)
    _library = library


def _override(name: str, aten_name: str, device: str) -> Callable[..., Any]:
    kernel = operators.KERNELS[name]
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{aten_name}", device)
    original = torch.library.get_kernel(f"aten::{aten_name}", device) if has_kernel else None

    def run(keyset: Any, grad_out: Any, input: Any, *others: Any) -> Any:
        if input.dtype in engine.TYPES:
            try:
                return kernel(grad_out, input, *others)
            except AclnnError as error:
                if error.status not in (INVALID, NULLPTR):
                    raise
                reason = str(error).removeprefix(f"{name}: ").partition(";")[0]
        else:
            reason = f"input is {str(input.dtype).removeprefix('torch.')}"
        engine.count(name, f"aten: {reason}")
        if original is not None:
            return original.call_boxed(keyset, grad_out, input, *others)
        if name != "batch_norm_backward_reduce":
            raise NotImplementedError(f"aten::{aten_name} has no kernel for {device} in this PyTorch")
        return _reduce_without_aten(grad_out, input, *others)

    return run


def _reduce_without_aten(
    grad_out: Any, input: Any, mean: Any, invstd: Any, weight: Any, input_g: bool, weight_g: bool, bias_g: bool
) -> Any:
    """aten has no batch_norm_backward_reduce for CPUs at all: what is not ours there comes from torch's operations."""
    results = formulas.batch_norm_backward_reduce(grad_out, input, mean, invstd, weight)
    asked = (input_g, input_g, weight_g, bias_g)
    return tuple(result if wanted else None for result, wanted in zip(results, asked))


# --- torch.compile ----------------------------------------------------------------------------------------------------


def _set_decompositions() -> None:
    """Put our decompositions into torch's tables, or torch's own back."""
    if not _decompositions:
        for aten_name in _ATEN.values():
            overload = getattr(torch.ops.aten, aten_name).default
            if overload in torch._decomp.decomposition_table:  # without one, the operator stays in the graph
                _decompositions[overload] = torch._decomp.decomposition_table[overload]
    for overload, original in _decompositions.items():
        for table in _decomposition_tables():
            if overload in table:
                table[overload] = _decompose(overload, original) if is_enabled() else original


def _decomposition_tables() -> list[dict[Any, Any]]:
    """torch's, from which inductor's are made when it is loaded, and inductor's where it is."""
    tables: list[dict[Any, Any]] = [torch._decomp.decomposition_table]
    inductor = sys.modules.get("torch._inductor.decomposition")
    if inductor is not None:
        tables += [inductor.decompositions, inductor.fast_random_decomps()]
    return tables


def _decompose(overload: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    name = next(name for name, aten_name in _ATEN.items() if overload._schema.name == f"aten::{aten_name}")
    ours = getattr(torch.ops.backnorm, name).default

    def decompose(grad_out: Any, input: Any, *others: Any) -> Any:
        tensors = [value for value in (grad_out, input, *others) if isinstance(value, torch.Tensor)]
        # The same that the rules ask of a call, as far as aten's own forward pass leaves it open. Inductor may have
        # copied this function into a table of its own, where it stays when it is no longer wanted.
        fits = is_enabled() and input.ndim <= 8 and input.device.type in ("cpu", "cuda")
        if name == "layer_norm_backward" and others[3] is not None:
            fits = fits and others[3].dtype in (torch.float32, input.dtype)
        if not fits or any(tensor.dtype not in engine.TYPES for tensor in tensors):
            return original(grad_out, input, *others)
        if name == "group_norm_backward":
            return _group_norm(grad_out, input, *others)
        return ours(grad_out, input, *others)

    return decompose


def _group_norm(grad_out: Any, input: Any, mean: Any, rstd: Any, weight: Any, *others: Any) -> Any:
    """Inductor's forward pass may keep statistics in another type than the weight's; the rules ask for one."""
    ours = torch.ops.backnorm.group_norm_backward.default
    if weight is None or weight.dtype == mean.dtype:
        return ours(grad_out, input, mean, rstd, weight, *others)
    dx, *rest = ours(grad_out, input, mean.float(), rstd.float(), weight.float(), *others)
    return dx, *[None if gradient is None else gradient.to(weight.dtype) for gradient in rest]
