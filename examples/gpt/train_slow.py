"""A byte-level GPT on the documents of this repository, for workers that an ordinary line joins: local steps, compression, streaming.

    torchquorum run --workers 2 examples/gpt/train_slow.py --rule local:30 --compress int4 --steps 300
    torchquorum run --workers 4 --link 20mbit examples/gpt/train_slow.py --rule local:30/4 --compress int4 --seconds 60   # as root

Every worker reads pieces of its own. Prints the loss on text that nobody trains on; `--curve FILE` writes how it falls, by time and bytes.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import torchquorum as tq
from torchquorum.rules import parse_rule

ROOT = Path(__file__).resolve().parents[2]
CONTEXT, WIDTH, HEADS, LAYERS, BATCH, CHUNK = 64, 96, 4, 2, 16, 1024
WARM_UP, RATE, HELD_OUT = 20, 2e-3, 20  # every 20th piece of the text is held out


def read_text() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the bytes to train on, and those that are held out."""
    files = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/adr/*.md")])
    text = torch.tensor(list(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    chunks = text[: len(text) // CHUNK * CHUNK].view(-1, CHUNK)
    held = torch.arange(len(chunks)) % HELD_OUT == 0
    return chunks[~held].reshape(-1), chunks[held]


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
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def loss(self, pieces: torch.Tensor) -> torch.Tensor:
        """Returns the loss of pieces of text, one byte longer than the context."""
        given, after = pieces[:, :-1].long(), pieces[:, 1:].long()
        x = self.bytes(given) + self.places.weight[: given.shape[1]]
        return functional.cross_entropy(self.head(self.norm(self.blocks(x))).flatten(0, 1), after.flatten())


def draw(text: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Returns a batch of pieces."""
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1), generator=generator)
    return text[starts + torch.arange(CONTEXT + 1)]


@torch.no_grad()
def evaluate(model: GPT, held: torch.Tensor, most: int) -> float:
    """Returns the loss on held out text."""
    pieces = held[:, : CHUNK // (CONTEXT + 1) * (CONTEXT + 1)].reshape(-1, CONTEXT + 1)
    return float(model.loss(pieces[:: max(1, len(pieces) // most)]))


def bytes_of_link() -> list[int]:
    """Returns how many bytes this host has sent and received over its network, headers and all."""
    lines = [line.split() for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    return [sum(int(line[k]) for line in lines if not line[0].startswith("lo")) for k in (9, 1)]


def main() -> None:
    """Trains, and prints the loss at the end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rule", default="local:30")
    parser.add_argument("--compress")
    parser.add_argument("--steps", type=int, default=600, help="inner steps of a worker")
    parser.add_argument("--seconds", type=float, help="of training, instead of steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slow", type=float, default=1.0, help="how many times slower the last worker is")
    parser.add_argument("--curve", help="a file for the chief's curve")
    task = tq.join(parser=parser)
    flags, rule = task.flags, parse_rule(task.flags.rule, task.num_workers)

    torch.set_num_threads(1)
    torch.manual_seed(flags.seed)
    model, (text, held) = GPT(), read_text()
    inner = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    warm_up = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: min(1.0, (step + 1) / WARM_UP))
    optimizer = tq.Optimizer(inner, rule=rule, compress=flags.compress)
    generator = torch.Generator().manual_seed(1000 * flags.seed + task.index)
    updates = flags.steps // (rule.local_steps or 1) if not flags.seconds else None
    curve: list[dict[str, float]] = []
    with tq.Session(task, model, optimizer, last_step=updates, max_seconds=flags.seconds) as session:
        began, before, steps, apart = time.monotonic(), bytes_of_link(), 0, 0.0
        while not session.should_stop():
            at = time.monotonic()
            optimizer.zero_grad()
            loss = model.loss(draw(text, generator))
            loss.backward()
            if flags.slow > 1 and task.index == task.num_workers - 1:
                time.sleep((flags.slow - 1) * (time.monotonic() - at))
            optimizer.step(loss=loss)
            warm_up.step()
            steps += 1
            outer = optimizer.last.reason != "inner"
            if task.is_chief and flags.curve and outer and (rule.local_steps or steps % 5 == 0):
                at = time.monotonic()
                sent, received = (now - then for now, then in zip(bytes_of_link(), before, strict=True))
                found = evaluate(model, held, 32)
                curve.append(
                    {"s": at - began - apart, "step": steps, "sent": sent, "received": received, "loss": found}
                )
                apart += time.monotonic() - at
        took = time.monotonic() - began - apart
        session.pull()
    if task.is_chief:
        result = {"loss": evaluate(model, held, 512), "steps": steps, "seconds": took, "rule": flags.rule}
        print(f"loss on held out text {result['loss']:.4f} after {steps} steps in {took:.1f} s", flush=True)
        if flags.curve:
            body = {**result, "compress": flags.compress or "", "seed": flags.seed, "slow": flags.slow, "curve": curve}
            Path(flags.curve).write_text(json.dumps(body) + "\n")
    else:
        print(f"worker {task.index}: {steps} steps in {took:.1f} s", flush=True)


if __name__ == "__main__":
    main()
