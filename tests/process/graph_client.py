"""A client of an in-graph run, for tests: it prints a line per batch and one at the end."""

import argparse
import os
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

import torchquorum as tq
from torchquorum.rules.presets import parse_rule
from torchquorum.wire.rpc import Patience

parser = argparse.ArgumentParser()
parser.add_argument("--ps_hosts")
parser.add_argument("--worker_hosts")
parser.add_argument("--until", help="go on until this file exists")
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--pause", type=float, default=0.01)
parser.add_argument("--rule", default="async")
parser.add_argument("--wait", type=int, default=1)
parser.add_argument("--patience", type=float, default=100.0)
parser.add_argument("--logdir")
parser.add_argument("--save-steps", type=int)
args = parser.parse_args()


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(2)
    while not os.path.exists(args.until):
        time.sleep(args.pause)
        yield torch.randn(64, args.width), torch.randint(0, 5, (64,))


torch.manual_seed(1)
model = nn.Sequential(
    nn.Linear(args.width, args.width), nn.BatchNorm1d(args.width), nn.ReLU(), nn.Linear(args.width, 5)
)
graph = tq.graph.Graph(
    model, F.cross_entropy, example_inputs=(torch.randn(4, args.width), torch.zeros(4, dtype=torch.long))
)
optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.05), rule=parse_rule(args.rule))
patience = Patience(start_s=args.patience, round_s=args.patience, say_s=2.0)
cluster = {"ps": args.ps_hosts, "worker": args.worker_hosts}
options = {"logdir": args.logdir, "save_every_steps": args.save_steps, "wait_for_workers": args.wait, "liveness_s": 2.0}
accepted = 0
numbers: list[int] = []
with tq.graph.GraphSession(cluster, graph, optimizer, patience=patience, **options) as session:
    for result in session.run(batches()):
        accepted += bool(result.accepted)
        numbers.append(result.number)
        print(f"batch {result.number} step {result.step} attempts {result.attempts} on {result.placement}", flush=True)
    version = session.pull()
once = sorted(numbers) == list(range(len(numbers)))
print(f"done: {len(numbers)} results, each once: {once}, {accepted} accepted, global step {version}", flush=True)
