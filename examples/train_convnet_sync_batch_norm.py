"""Train a small convnet on two processes with SyncBatchNorm, beside torch's BatchNorm in one process on the same seed.

    torchrun --nproc-per-node 2 examples/train_convnet_sync_batch_norm.py [--steps 60]

Every process has its half of each batch; statistics and gradients are those of the whole. On CPUs (gloo), where
torch.nn.SyncBatchNorm does not run, so process 0 also trains torch.nn.BatchNorm2d on whole batches, to compare.
The pictures are rings, squares and crosses in noise, drawn as they are needed.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import backnorm.torch

BATCH, SIZE = 32, 24


def draw(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of pictures and what is on them: 0 a ring, 1 a square, 2 a cross."""
    kinds = torch.randint(3, (BATCH,), generator=generator)
    centers = torch.randint(8, SIZE - 8, (BATCH, 2, 1, 1), generator=generator)
    axis = torch.arange(SIZE)
    dy, dx = (axis.view(1, SIZE, 1) - centers[:, 0]).abs(), (axis.view(1, 1, SIZE) - centers[:, 1]).abs()
    ring = ((dy**2 + dx**2).float().sqrt() - 5).abs() < 1
    square = torch.maximum(dy, dx) == 5
    cross = (torch.minimum(dy, dx) == 0) & (torch.maximum(dy, dx) <= 5)
    pictures = torch.stack([ring, square, cross])[kinds, torch.arange(BATCH)].float()
    return (pictures + 0.5 * torch.randn(pictures.shape, generator=generator)).unsqueeze(1), kinds


def network() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for channels, out in ((1, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(channels, out, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 3))


def train(model: nn.Module, steps: int, share: slice, node: str) -> tuple[list[float], float]:
    """The loss of every step, and milliseconds a step spent in the normalization's backward pass."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    losses = []

    def step() -> None:
        pictures, kinds = draw(generator)
        loss = nn.functional.cross_entropy(model(pictures[share]), kinds[share])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    measured = min(10, max(1, steps // 2))
    for _ in range(steps - measured):
        step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(measured):
            step()
    spent = sum(event.cpu_time_total for event in profiler.key_averages() if event.key == node)
    return losses, spent / measured / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="training steps of each run (default: %(default)s)")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps must be positive")
    if "RANK" not in os.environ:
        sys.exit(f"start it with: torchrun --nproc-per-node 2 {sys.argv[0]}")
    torch.set_num_threads(1)
    backnorm.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if BATCH % ranks:
        sys.exit(f"the number of processes must divide {BATCH}; got {ranks}")
    if rank == 0:
        print(f"training on {ranks} processes with backnorm's SyncBatchNorm, {options.steps} steps ...", flush=True)
    model = DistributedDataParallel(backnorm.torch.SyncBatchNorm.convert_sync_batchnorm(network()))
    share = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    losses, our_ms = train(model, options.steps, share, "_SyncBatchNormBackward")
    mean = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(mean)
    if rank == 0:
        print(f"and on one with torch's BatchNorm2d, {options.steps} steps ...", flush=True)
        theirs, their_ms = train(network(), options.steps, slice(None), "NativeBatchNormBackward0")
        print("\nstep   loss: torch, whole batch   backnorm, shards")
        for step in sorted({*range(0, options.steps, max(1, options.steps // 10)), options.steps - 1}):
            print(f"{step:4d}   {theirs[step]:24.4f}   {mean[step] / ranks:16.4f}")
        print(
            f"\nin the normalization's backward pass, a step: torch {their_ms:.2f} ms for the whole batch, backnorm"
            f" {our_ms:.2f} ms for a share and the collective"
        )
        print("calls:", backnorm.torch.stats()["batch_norm_backward_reduce"])
    dist.barrier()
    # Before the group: DistributedDataParallel, freed last, would end gloo's threads while it holds the interpreter's
    # lock, for which one of them may be waiting to let go of a tensor, and the process would hang now and then.
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
