"""Speed on a GPU beside PyTorch's and others': kernel time from replays of a graph, eager time from the host's clock,
and the share of the limit: the bytes that must move once over the bandwidth of a copy measured in the same run."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import __version__
from .bench import Sizes, agree, bytes_moved, make_tensors, odd_samples, ours_and_torchs
from .bench_peers import Peer, forget_compiled, make_peer

#: The shapes of the table. `pixels` is channels-last.
SAMPLES: dict[str, dict[str, Sizes]] = {
    "layer_norm_backward": {
        f"rows{rows}_cols{cols}": {"rows": rows, "cols": cols}
        for rows, cols in (
            (4096, 768), (16384, 1024), (8192, 4096), (16384, 8192), (4096, 16384), (1024, 65536), (262144, 128),
            (1048576, 64), (64, 1048576),
        )
    },
    "group_norm_backward": {
        f"{n}x{c}x{hw}_groups{g}{'_pixels' if px else ''}": {"N": n, "C": c, "HxW": hw, "group": g, "pixels": px}
        for n, c, hw, g in (
            (32, 256, 3136, 32), (8, 512, 4096, 32), (16, 128, 65536, 32), (1, 128, 1048576, 32), (2, 320, 4096, 32),
            (64, 64, 49, 8),
        )
        for px in (0, 1)
    },
    "batch_norm_backward_reduce": {
        f"{n}x{c}x{hw}{'_pixels' if pixels else ''}": {"N": n, "C": c, "HxW": hw, "pixels": pixels}
        for n, c, hw, pixels in (
            (32, 64, 12544, 0), (32, 64, 12544, 1), (64, 256, 3136, 0), (64, 256, 3136, 1), (256, 2048, 49, 0),
            (256, 2048, 49, 1), (65536, 512, 1, 1), (2, 16, 262144, 0), (2, 16, 262144, 1),
        )
    },
}  # fmt: skip


@dataclass(frozen=True)
class Result:
    op: str
    sample: str
    dtype: str
    ours_us: float
    torch_us: float
    limit_us: float
    ours_eager_us: float
    torch_eager_us: float
    #: Kernel and eager microseconds of the other peers that can do the sample, and why the rest cannot.
    peers: dict[str, tuple[float, float]] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        return self.torch_us / self.ours_us

    def line(self) -> dict[str, Any]:
        """As it is recorded: the other peers' numbers under names of their own."""
        line = {name: value for name, value in vars(self).items() if name not in ("peers", "refusals")}
        for name, (kernel, eager) in self.peers.items():
            line |= {f"{name}_us": kernel, f"{name}_eager_us": eager, f"{name}_ratio": kernel / self.ours_us}
        return {**line, "ratio": self.ratio, "share": self.share}

    @property
    def share(self) -> float:
        return self.limit_us / self.ours_us


def copy_bandwidth() -> float:
    """Bytes a second of a large copy, those read and those written."""
    import torch

    size = 1 << 30
    source, target = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in "st")
    return 2 * size / min(_eager(lambda: target.copy_(source)) for _ in range(3)) * 1e6


def measure(op: str, sample: str, sizes: Sizes, dtype: str, bandwidth: float, against: tuple[str, ...] = ()) -> Result:
    """Medians over sets of inputs that the L2 cache does not hold together, where memory allows."""
    moved = bytes_moved(op, sizes, dtype)
    sets = max(2, min(8, int(256e6 // moved)))
    inputs = [make_tensors(op, sizes, dtype, "cuda") for _ in range(sets)]
    pairs = [ours_and_torchs(op, sizes, tensors) for tensors in inputs]
    ours, theirs = ([pair[i] for pair in pairs] for i in (0, 1))
    result = Result(
        op, sample, dtype, _graph(ours), _graph(theirs), moved / bandwidth * 1e6, _eager(ours[0]), _eager(theirs[0])
    )
    for name in against:
        try:
            times = _measure_peer(name, op, sizes, dtype, inputs, ours[0])
        except Exception as error:  # of theirs: a shape too large for it, a compiler that gives up
            first = (str(error).strip() or "no reason given").splitlines()[0]
            result.refusals[name] = f"{type(error).__name__}: {first}"
            continue
        if times is not None:
            result.peers[name] = times
    return result


def _measure_peer(
    name: str, op: str, sizes: Sizes, dtype: str, inputs: list[tuple[Any, ...]], ours: Callable[[], Any]
) -> tuple[float, float] | None:
    if name == "compile":
        forget_compiled()
    made = [make_peer(name, op, sizes, tensors) for tensors in inputs]
    calls: list[Peer] = [peer for peer in made if peer is not None]
    if not calls:
        return None
    if not agree(ours()[0], calls[0]()[0], dtype):
        raise ValueError("its results differ from ours: its times mean nothing")
    return _graph(calls), _eager(calls[0])


def _graph(calls: list[Callable[[], Any]]) -> float:
    """Microseconds of a call in a graph of several of each."""
    import torch

    stream: Any = torch.cuda.Stream
    side = stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph, count = torch.cuda.CUDAGraph(), max(8, len(calls))
    with torch.cuda.graph(graph):
        for i in range(count):
            calls[i % len(calls)]()
    times: list[float] = []
    event: Any = torch.cuda.Event
    for _ in range(12):
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / count * 1e3)
    return statistics.median(times)


def _eager(call: Callable[[], Any]) -> float:
    """Microseconds of a call, many one after the other."""
    import torch

    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(30):
            call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begun) / 30 * 1e6)
    return statistics.median(times[1:])


def work(ops: list[str], odd: int) -> list[tuple[str, str, Sizes]]:
    samples = [(op, name, sizes) for op in ops for name, sizes in SAMPLES[op].items()]
    return samples + [sample for sample in odd_samples(np.random.default_rng(), odd) if sample[0] in ops]


def record(results: list[Result], bandwidth: float, path: str) -> None:
    """One line a measurement, after one about the machine."""
    import torch
    import triton

    machine = {
        "backnorm": __version__, "torch": torch.__version__, "triton": triton.__version__,
        "device": torch.cuda.get_device_name(), "copy_tb_s": bandwidth / 1e12, "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    lines: list[dict[str, Any]] = [machine]
    lines += [result.line() for result in results]
    with open(path, "w", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in line.items()}) + "\n")
