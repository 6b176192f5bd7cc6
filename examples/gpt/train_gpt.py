"""A small GPT that learns the characters of this file: tied weights, accumulation, clipping, a cosine rate by hand, two groups.

    python examples/gpt/train_gpt.py --plain                          # plain PyTorch
    python examples/gpt/train_gpt.py                                  # the same bits, alone with a ps in this process
    torchquorum run --workers 2 examples/gpt/train_gpt.py             # two workers: twice the batch

What torchquorum adds are the lines with `tq`, `task` and `session`; the loop is the one of nanoGPT.
"""

from __future__ import annotations

import argparse
import math
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import torchquorum as tq

CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 32, 32, 4, 2, 8
ACCUMULATE, CLIP, WARM_UP, HIGHEST_RATE, LOWEST_RATE = 2, 1.0, 5, 3e-3, 3e-4
TEXT = Path(__file__).read_text(encoding="utf-8")
LETTERS = sorted(set(TEXT))
TOKENS = torch.tensor([LETTERS.index(letter) for letter in TEXT])


class Block(nn.Module):
    """Attention over what came before, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the next layer's input."""
        batch, length, _ = x.shape
        heads = self.attention(self.before_attention(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    """The input's embedding and the output's weights are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(len(LETTERS), WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(LETTERS), bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        """Returns a score for each next letter, at each place."""
        x = self.tokens(letters) + self.places.weight[: letters.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def rate_at(step: int, steps: int) -> float:
    """A warm-up, then half a cosine."""
    if step < WARM_UP:
        return HIGHEST_RATE * (step + 1) / WARM_UP
    done = (step - WARM_UP) / max(1, steps - WARM_UP)
    return LOWEST_RATE + 0.5 * (HIGHEST_RATE - LOWEST_RATE) * (1 + math.cos(math.pi * done))


def next_batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws pieces of the text, and the same pieces one letter later."""
    starts = torch.randint(len(TOKENS) - CONTEXT - 1, (BATCH,), generator=generator).tolist()
    pieces = torch.stack([TOKENS[start : start + CONTEXT + 1] for start in starts])
    return pieces[:, :-1], pieces[:, 1:]


def main() -> None:
    """Trains, and prints what can be compared: the last loss, and a sum over the weights."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--plain", action="store_true", help="train without torchquorum")
    task = tq.join(parser=parser)  # a ps serves here until the run is over
    steps, plain = task.flags.steps, task.flags.plain

    torch.manual_seed(0)
    model = GPT()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    run = nullcontext()
    if not plain:
        optimizer = tq.Optimizer(optimizer, rule=tq.Sync())
        run = tq.Session(task, model, optimizer, last_step=steps)
    generator = torch.Generator().manual_seed(task.index)
    total = float("nan")
    with run as session:
        for step in range(steps):
            if session is not None and session.should_stop():
                break
            for group in optimizer.param_groups:
                group["lr"] = rate_at(step, steps)  # the chief's counts
            optimizer.zero_grad()
            total = 0.0
            for _ in range(ACCUMULATE):
                letters, after = next_batch(generator)
                loss = functional.cross_entropy(model(letters).flatten(0, 1), after.flatten()) / ACCUMULATE
                loss.backward()
                total += loss.item()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            if step == 0:
                print(f"loss at first {total:.6f}", flush=True)
    weights = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    print(f"loss at last {total:.6f}, weights {weights!r}", flush=True)


if __name__ == "__main__":
    main()
