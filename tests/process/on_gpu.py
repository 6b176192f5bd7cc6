"""A worker on a GPU, for `tests/equivalence/test_capture.py`: says how its loss went and whether it used graph and fast path."""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import torchquorum as tq
from torchquorum.rules import parse_rule

task = tq.join([])
torch.manual_seed(task.index)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).cuda()
optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.2), rule=parse_rule(sys.argv[1]))
step = tq.capture(lambda x, y: cross_entropy(model(x), y), optimizer)
generator = torch.Generator().manual_seed(5)
x, y = torch.randn(12, 8, generator=generator), torch.randint(0, 3, (12,), generator=generator)
losses = []
with tq.Session(task, model, optimizer, last_step=400, wait_for_workers=2) as session:
    while not session.should_stop():
        losses.append(step(x, y))
    assert optimizer.link is not None and optimizer.link.joined is not None
    fastpath = optimizer.link.joined.tracks[0].fastpath
print(
    "first",
    losses[0],
    "last",
    losses[-1],
    "captured",
    step.captured,
    "on the fast path",
    fastpath is not None and fastpath.made > 50,
)
