"""A program with two optimizers and tables of rows, one of which grows and evicts, to be recorded and replayed."""

import argparse
import random
import time

import torch
from torch import nn

import torchquorum as tq
from torchquorum.rules import parse_rule
from torchquorum.wire.rpc import Patience

task = tq.join()
parser = argparse.ArgumentParser()
parser.add_argument("--rule", default="async")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--save-steps", type=int, default=9)
parser.add_argument("--durable", default="")
parser.add_argument("--logdir")
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument(
    "--ahead", action="store_true", help="asks for the rows of the next batch before this one is computed"
)
parser.add_argument("--max-staleness", type=int, default=0)
parser.add_argument("--record", action="store_true", default=None)
flags = parser.parse_args()
torch.manual_seed(1)


class Model(nn.Module):
    """A fixed table, one that grows and evicts, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed = nn.Embedding(100, 4, sparse=True)
        self.words = tq.Table(4, optimizer=tq.rows.Adagrad(lr=0.1), capacity=200, admit=2)
        self.out = nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns one number for each row of ids."""
        return self.out(torch.cat([self.fixed(ids % 100).mean(1), self.words(ids).mean(1)], 1))


model = Model()
optimizers = {
    "rows": tq.Optimizer(torch.optim.Adagrad([model.fixed.weight], lr=0.1), parse_rule(flags.rule, task.num_workers)),
    "dense": tq.Optimizer(torch.optim.Adam(model.out.parameters(), lr=0.01), parse_rule(flags.rule, task.num_workers)),
}
reading = tq.rows.Reading(max_staleness=flags.max_staleness, keep=150) if flags.max_staleness else None
torch.manual_seed(5 + task.index)

with tq.Session(
    task,
    model,
    optimizers,
    logdir=flags.logdir,
    last_step=flags.steps,
    save_every_steps=flags.save_steps,
    durable=flags.durable or None,
    record=flags.record,
    rows=reading,
    liveness_s=2.0,
    patience=Patience(silence_s=3.0),
    start_afresh=True,
) as session:
    print(f"begins at {session.global_step}", flush=True)
    coming = torch.randint(0, 400, (8, 5))
    while not session.should_stop():
        ids, coming = coming, torch.randint(0, 400, (8, 5))
        if flags.ahead:
            session.prefetch({"fixed": coming % 100, "words": coming})
        time.sleep(flags.pause * random.random())
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        loss = ((model(ids) - ids.float().mean(1, keepdim=True) / 400) ** 2).mean()
        loss.backward()
        for optimizer in optimizers.values():
            optimizer.step(loss=loss)
print("done", flush=True)
