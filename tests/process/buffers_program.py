"""A user's program whose buffer counts the batches that its model has seen; it is larger than what a socket takes at once."""

import time
from pathlib import Path

import torch
from run_flags import make_parser, make_session
from torch import nn

import torchquorum as tq
from torchquorum.rules import parse_rule

task = tq.join()
parser = make_parser()
parser.add_argument("--buffers", default="chief")
parser.add_argument("--until", type=Path, help="end when this file is there")
parser.set_defaults(steps=60)
args = parser.parse_args()


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(100))
        self.tied = self.weight
        self.register_buffer("seen", torch.zeros(100_000, dtype=torch.float64))
        self.seen: torch.Tensor

    def forward(self) -> torch.Tensor:
        self.seen.add_(1)
        return -self.weight.sum()


model = Counter()
optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=1.0), rule=parse_rule(args.rule))
with make_session(args, task, model, optimizer, buffers=args.buffers) as session:
    print(f"started at {session.global_step} having seen {model.seen[0].item():g}", flush=True)
    while not session.should_stop():
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
        step = optimizer.last
        assert bool((model.seen == model.seen[0]).all())
        if task.num_workers == 1:  # then every batch is an update, also after a recovery
            assert model.seen[0].item() == step.version, (model.seen[0].item(), step)
        print(f"local {step.local_step} global {step.version} seen {model.seen[0].item():g}", flush=True)
        if args.until is not None and args.until.exists():
            session.request_stop()
        time.sleep(args.pause)
    with session.shared_buffers():
        print(f"the run has seen {model.seen[0].item():g}", flush=True)
print(f"done at {session.global_step} having seen {model.seen[0].item():g}", flush=True)
