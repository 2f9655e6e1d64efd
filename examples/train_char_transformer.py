"""Train a small character transformer twice, with torch's LayerNorm backward and with backnorm's, on the same seed.

    python examples/train_char_transformer.py [--steps 100] [--dtype bfloat16] [--device cuda]

The text is the first five chapters of Lewis Carroll's "Alice's Adventures in Wonderland" (1865, in the public domain).
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import backnorm.torch

TEXT = (Path(__file__).parent / "alice.txt").read_text(encoding="utf-8")
CONTEXT, BATCH, WIDTH, HEADS, LAYERS = 64, 16, 128, 4, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.before_attention(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.before_mlp(x))


class Transformer(nn.Module):
    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.characters(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.last(self.blocks(x)))


def train(steps: int, dtype: torch.dtype, device: str) -> tuple[list[float], float]:
    """The loss of every step, and milliseconds a step spent in LayerNorm's backward pass over the last ten."""
    vocabulary = sorted(set(TEXT))
    data = torch.tensor([vocabulary.index(character) for character in TEXT])
    torch.manual_seed(0)
    model = Transformer(len(vocabulary)).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []

    def step() -> None:
        starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,)).tolist()
        batch = torch.stack([data[start : start + CONTEXT + 1] for start in starts]).to(device)
        logits = model(batch[:, :-1]).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
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
    name = "aten::native_layer_norm_backward"
    spent = sum(event.cpu_time_total for event in profiler.key_averages() if event.key == name)
    return losses, spent / measured / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="training steps of each run (default: %(default)s)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="of the model")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps must be positive")
    dtype = getattr(torch, options.dtype)
    print(f"training with torch's LayerNorm backward, {options.steps} steps ...", flush=True)
    theirs, their_ms = train(options.steps, dtype, options.device)
    print(f"and with backnorm's, {options.steps} steps ...", flush=True)
    with backnorm.torch.enable():
        ours, our_ms = train(options.steps, dtype, options.device)
    print("\nstep   loss: torch   backnorm")
    for step in sorted({*range(0, options.steps, max(1, options.steps // 10)), options.steps - 1}):
        print(f"{step:4d}   {theirs[step]:11.4f}   {ours[step]:8.4f}")
    print(f"\nin LayerNorm's backward pass, a step: torch {their_ms:.2f} ms, backnorm {our_ms:.2f} ms")
    print("calls:", backnorm.torch.stats()["layer_norm_backward"])


if __name__ == "__main__":
    main()
