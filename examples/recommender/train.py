"""Click prediction on a stream: users and items are int64 ids, new ones come every hour, and their rows live on the ps tasks.

    torchquorum run examples/recommender/train.py --logdir runs/clicks
    torchquorum run --ps 2 --workers 3 examples/recommender/train.py --logdir runs/clicks --steps 2000

AUC on the hour that comes next is in TensorBoard and in the report. Nothing is downloaded: the clicks are made up from hidden tastes.
"""

import argparse

import torch
from stream import CLICKS, auc, hour_at, read_hour
from torch import nn

import torchquorum as tq

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--logdir", default="runs/clicks")
parser.add_argument("--steps", type=int, default=600, help="global steps")
parser.add_argument("--batch", type=int, default=512)
args = parser.parse_args()


class Model(nn.Module):
    """A row for each user, item and pair of both's groups; a small network makes a logit of them."""

    def __init__(self) -> None:
        super().__init__()
        learn = tq.rows.RowwiseAdagrad(lr=0.1)
        # A user is known after two clicks, and forgotten after 400 steps without one; of items the 20,000 latest stay.
        self.users = tq.Table(16, init=tq.rows.Uniform(-0.1, 0.1), optimizer=learn, admit=2, ttl=400)
        self.items = tq.Table(16, init=tq.rows.Uniform(-0.1, 0.1), optimizer=learn, capacity=20_000)
        self.bias = tq.Table(1, init=tq.rows.Zeros(), optimizer=tq.rows.FTRL(lr=0.1, l1=0.01), mode="sum")
        self.top = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, clicks: torch.Tensor) -> torch.Tensor:
        """Returns a logit for each pair of user and item, [B, 2]."""
        user, item = self.users(clicks[:, 0]), self.items(clicks[:, 1])
        match = (user * item).sum(1) + self.bias(clicks).squeeze(1)
        return self.top(torch.cat([user, item], 1)).squeeze(1) + match


task = tq.join()
torch.manual_seed(0)
model = Model()
optimizer = tq.Optimizer(torch.optim.Adagrad(model.parameters(), lr=0.05), rule=tq.Async())
loss_fn = nn.BCEWithLogitsLoss()

with tq.Session(task, model, optimizer, logdir=args.logdir, last_step=args.steps, hooks=[tq.SummaryHook()]) as session:
    generator = torch.Generator().manual_seed(100 + task.index)
    hour, (clicks, labels) = -1, read_hour(0)
    while not session.should_stop():
        if hour_at(session.global_step) != hour:
            hour = hour_at(session.global_step)
            if session.leads:  # the hour that comes, before anybody has trained on it
                clicks, labels = read_hour(hour)
                with torch.no_grad():
                    area = auc(model(clicks), labels)
                session.measure(auc=area)
                print(f"hour {hour}, step {session.global_step}: AUC {area:.3f} on its clicks, not yet trained on")
            clicks, labels = read_hour(hour)
        rows = torch.randint(0, CLICKS, (args.batch,), generator=generator)
        loss = loss_fn(model(clicks[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step(loss=loss)
    if session.leads:
        print(f"{len(model.users.evicted())} users and {len(model.items.evicted())} items have gone")
