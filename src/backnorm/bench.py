"""Speed beside PyTorch's: interleaved medians, and the share of the memory bandwidth probed in the same run.

Every timed call gets the next of several sets of inputs; ours writes into arrays given with out=. PyTorch's functions
allocate their results (their out= variants copy, and are slower); malloc is told to keep freed memory, so that this
costs no page faults, and each set's results are kept until its next call, so that both write to memory that takes turns
as the inputs do: else PyTorch's would be the same at every call, and stay in the caches. Inputs begin at cache lines
drawn at random: those of sizes that are powers of two would lie at the same places of their pages, and reading two such
tensors takes up to 1.5 times as long, for one library more than for the other. The contestants take turns in short
bursts, in every order, since who comes after the probe is up to 4 % slower; the head of each does not count, since the
other's threads may still be spinning.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import llvmlite.binding
import numpy as np

from . import __version__, functional, threads
from .ops import OPS

Sizes = dict[str, int]

#: Seconds until OpenMP's idle threads, which spin for some 6 ms after PyTorch's calls, have left the CPUs to others.
_SETTLING = 0.012

#: The shapes of the table. `pixels` is channels-last.
SAMPLES: dict[str, dict[str, Sizes]] = {
    "layer_norm_backward": {
        "gpt2_rows4k_cols768": {"rows": 4096, "cols": 768},
        "rows16k_cols1024": {"rows": 16384, "cols": 1024},
        "rows8k_cols4096": {"rows": 8192, "cols": 4096},
        "ragged_rows4097_cols769": {"rows": 4097, "cols": 769},
        "short_rows131k_cols64": {"rows": 131072, "cols": 64},
        "long_rows64_cols1m": {"rows": 64, "cols": 1 << 20},
        "one_row_cols18m": {"rows": 1, "cols": 18_000_000},
    },
    "group_norm_backward": {
        "resnet_32x256x56x56": {"N": 32, "C": 256, "HxW": 3136, "group": 32, "pixels": 0},
        "resnet_32x256x56x56_pixels": {"N": 32, "C": 256, "HxW": 3136, "group": 32, "pixels": 1},
        "unet_8x512x64x64": {"N": 8, "C": 512, "HxW": 4096, "group": 32, "pixels": 0},
        "unet_2x320x64x64_pixels": {"N": 2, "C": 320, "HxW": 4096, "group": 32, "pixels": 1},
        "small_64x64x7x7": {"N": 64, "C": 64, "HxW": 49, "group": 8, "pixels": 0},
        "huge_group_1x128x262144": {"N": 1, "C": 128, "HxW": 262144, "group": 32, "pixels": 0},
    },
    "batch_norm_backward_reduce": {
        "stem_32x64x112x112": {"N": 32, "C": 64, "HxW": 12544, "pixels": 0},
        "resnet_64x256x28x28": {"N": 64, "C": 256, "HxW": 784, "pixels": 0},
        "resnet_64x256x28x28_pixels": {"N": 64, "C": 256, "HxW": 784, "pixels": 1},
        "last_128x1024x7x7": {"N": 128, "C": 1024, "HxW": 49, "pixels": 0},
        "dense_65536x512": {"N": 65536, "C": 512, "HxW": 1, "pixels": 1},
    },
}
DTYPES = ("float32", "bfloat16", "float16")


def odd_samples(rng: np.random.Generator, count: int = 10) -> Iterator[tuple[str, str, Sizes]]:
    """Shapes nobody chose, of one to sixteen million elements."""
    for _ in range(count):
        op = str(rng.choice(list(SAMPLES)))
        elements = int(2 ** rng.uniform(20, 24))
        if op == "layer_norm_backward":
            cols = int(2 ** rng.uniform(4, 15)) | 1
            sizes = {"rows": max(1, elements // cols), "cols": cols}
        else:
            group, pixels = int(rng.choice([1, 4, 8])), int(rng.integers(0, 2))
            channels = group * int(rng.integers(3, 40))
            hw = int(rng.integers(5, 60)) ** 2
            sizes = {"N": max(1, elements // (channels * hw)), "C": channels, "HxW": hw, "pixels": pixels}
            if op == "group_norm_backward":
                sizes["group"] = group
        yield op, "odd_" + "x".join(str(value) for value in sizes.values()), sizes


@dataclass(frozen=True)
class Result:
    op: str
    sample: str
    dtype: str
    ours_ms: float
    torch_ms: float
    gb_s: float
    share: float

    @property
    def ratio(self) -> float:
        return self.torch_ms / self.ours_ms


def keep_freed_memory() -> None:
    """Tell glibc neither to map nor to trim, so that a large array is not paged in anew at every call."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-4, 0)  # M_MMAP_MAX
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


#: Inputs are moved by up to so many elements.
_FURTHEST = 1 << 18


def _moved(tensor: Any) -> Any:
    """The same elements, from a cache line on that is drawn at random."""
    import torch

    if tensor.is_cuda:
        return tensor
    memory = torch.empty(tensor.numel() + _FURTHEST, dtype=tensor.dtype)
    start = int(torch.randint(_FURTHEST // 32, ())) * 32  # 16-bit elements of a cache line
    return memory.as_strided(tensor.shape, tensor.stride(), start).copy_(tensor)


def make_tensors(op: str, sizes: Sizes, dtype: str, device: str = "cpu") -> tuple[Any, ...]:
    """One set of inputs, as torch tensors: gradOut and input, then the small ones."""
    import torch

    kind = getattr(torch, dtype)
    on: dict[str, Any] = {"device": device}
    if op == "layer_norm_backward":
        rows, cols = sizes["rows"], sizes["cols"]
        dy, x = (_moved(torch.randn(rows, cols, **on).to(kind)) for _ in "dx")
        return dy, x, torch.randn(rows, 1, **on), torch.rand(rows, 1, **on) + 0.5, torch.randn(cols, **on).to(kind)
    n, c, hw = sizes["N"], sizes["C"], sizes["HxW"]
    format = torch.channels_last if sizes["pixels"] else torch.contiguous_format
    dy, x = (_moved(torch.randn(n, c, hw, 1, **on).to(kind).to(memory_format=format)) for _ in "dx")
    if hw == 1:
        dy, x = dy.reshape(n, c), x.reshape(n, c)
    shape = (n, sizes["group"]) if "group" in sizes else (c,)
    return dy, x, torch.randn(shape, **on), torch.rand(shape, **on) + 0.5, torch.randn(c, **on)


def ours_and_torchs(op: str, sizes: Sizes, tensors: tuple[Any, ...]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Ours and PyTorch's call on one set of inputs."""
    import torch

    dy, x, mean, rstd, w = tensors
    aten = torch.ops.aten
    if op == "layer_norm_backward":
        out = (torch.empty_like(x), torch.empty_like(w), torch.empty_like(w))
        cols = [sizes["cols"]]
        saved = torch.float32 if x.is_cuda else x.dtype  # by PyTorch's own forward pass
        m, r = mean.to(saved), rstd.to(saved)
        return (
            lambda: functional.layer_norm_backward(dy, x, cols, mean, rstd, w, out=out),
            lambda: aten.native_layer_norm_backward(dy, x, cols, m, r, w, w, [True] * 3),
        )
    n, c, hw = sizes["N"], sizes["C"], sizes["HxW"]
    if op == "group_norm_backward":
        out = (torch.empty_like(x), torch.empty_like(w), torch.empty_like(w))
        group = sizes["group"]
        small = tuple(t.to(x.dtype) for t in (mean, rstd, w))
        if x.is_cuda and sizes["pixels"]:  # PyTorch's CUDA kernel takes planes only
            return (
                lambda: functional.group_norm_backward(dy, x, mean, rstd, w, n, c, hw, group, out=out),
                lambda: aten.native_group_norm_backward(
                    dy.contiguous(), x.contiguous(), *small, n, c, hw, group, [True] * 3
                ),
            )
        return (
            lambda: functional.group_norm_backward(dy, x, mean, rstd, w, n, c, hw, group, out=out),
            lambda: aten.native_group_norm_backward(dy, x, *small, n, c, hw, group, [True] * 3),
        )
    results = tuple(torch.empty_like(mean) for _ in range(4))
    if x.is_cuda:
        return (
            lambda: functional.batch_norm_backward_reduce(dy, x, mean, rstd, w, out=results),
            lambda: aten.batch_norm_backward_reduce(dy, x, mean, rstd, w, True, True, True),
        )
    return (
        lambda: functional.batch_norm_backward_reduce(dy, x, mean, rstd, w, out=results),
        lambda: aten.native_batch_norm_backward(dy, x, w, None, None, mean, rstd, True, 1e-5, [False, True, True]),
    )


def bytes_moved(op: str, sizes: Sizes, dtype: str) -> int:
    """What must move once: both inputs, and the gradient of the input where there is one."""
    elements = math.prod(value for name, value in sizes.items() if name not in ("group", "pixels"))
    return elements * (4 if dtype == "float32" else 2) * (2 if op == "batch_norm_backward_reduce" else 3)


def measure(op: str, sample: str, sizes: Sizes, dtype: str, seconds: float = 1.5) -> Result:
    """Interleaved medians of ours and PyTorch's, and of the bandwidth probe, with the results checked afterwards."""
    moved = bytes_moved(op, sizes, dtype)
    sets = max(
        2, min(4, int(512e6 // moved))
    )  # fresh inputs every call; more than the caches hold, where memory allows
    pairs = [ours_and_torchs(op, sizes, make_tensors(op, sizes, dtype)) for _ in range(sets)]
    probes = _probes(moved, 2 if op == "batch_norm_backward_reduce" else 3, sets)
    contestants: dict[str, list[Callable[[], Any]]] = {
        "ours": [ours for ours, _ in pairs], "torch": [peer for _, peer in pairs], "probe": probes,
    }  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for calls in contestants.values():
        for call in calls:
            call()
    begun = time.perf_counter()
    while len(times["probe"]) < 9 or time.perf_counter() - begun < seconds:
        for name in itertools.chain.from_iterable(itertools.permutations(contestants)):
            times[name] += _burst(contestants[name])
    _check(pairs[0], dtype)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return Result(
        op, sample, dtype, medians["ours"] * 1e3, medians["torch"] * 1e3, moved / medians["ours"] / 1e9,
        medians["probe"] / medians["ours"],
    )  # fmt: skip


def _burst(calls: list[Callable[[], Any]]) -> list[float]:
    """Times of calls one after the other, as in training, each one's results kept until it is made again; those of the
    first _SETTLING seconds do not count."""
    times: list[float] = []
    results: list[Any] = [None] * len(calls)
    start = time.perf_counter()
    while len(times) < 3 or (time.perf_counter() - start < 2 * _SETTLING and len(times) < 60):
        for i, call in enumerate(calls):
            begun = time.perf_counter()
            results[i] = call()
            ended = time.perf_counter()
            if begun - start > _SETTLING:
                times.append(ended - begun)
    return times


def _check(pair: tuple[Callable[[], Any], Callable[[], Any]], dtype: str) -> None:
    """Both must have computed the same thing; PyTorch's column sums are coarse in 16 bits, so grad_input decides."""
    ours, theirs = pair[0](), pair[1]()
    mine, other = (ours[0], theirs[0]) if theirs[0] is not None else (ours[2], theirs[1])
    if not agree(mine, other, dtype):
        raise RuntimeError("the results differ from PyTorch's: the times mean nothing")


def agree(mine: Any, other: Any, dtype: str) -> bool:
    """Whether two results are of the same thing."""
    mine, other = mine.float(), other.float()
    limit = 1e-3 if dtype == "float32" else 0.1
    return bool(float((mine - other).abs().max()) <= limit * float(other.abs().max()))


def _probes(moved: int, streams: int, sets: int) -> list[Callable[[], None]]:
    """Kernels that only move bytes: read two arrays, and stream out a third where the operator writes one."""
    from .ops._probe import TASK_BYTES, move
    from .ops._program import Place, Program

    part = max(1 << 16, moved // streams // 256 * 256)
    program = Program(("a", "b", "out"))
    places = Place("a", 0), Place("b", 0), Place("out", 0)
    program.job(move(streams == 3), -(-part // TASK_BYTES), part // 4, *places, part)
    code = program.code()

    def probe() -> Callable[[], None]:
        arrays = [np.ones(part + 64, np.uint8) for _ in range(streams)]
        pointers = [-(-array.ctypes.data // 64) * 64 for array in arrays]
        pointers = [0, *pointers, *[0] * (3 - streams)]
        return lambda keep=arrays: threads.run(code, pointers)  # type: ignore[misc]

    return [probe() for _ in range(sets)]


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


def record(results: list[Result], path: str) -> None:
    """One line a measurement, after one about the machine."""
    import torch

    machine = {
        "backnorm": __version__, "torch": torch.__version__, "device": "cpu",
        "cpu": llvmlite.binding.get_host_cpu_name(),
        "threads": threads.get_num_threads(), "cpus": os.cpu_count(), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    with open(path, "w", encoding="utf-8") as file:
        for line in (machine, *({**vars(result), "ratio": result.ratio} for result in results)):
            file.write(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in line.items()}) + "\n")


assert set(SAMPLES) == set(OPS)
