"""A user's program that really learns, with dropout and momentum, and ends with a digest of all it has learnt.

Started as real processes by tests that stop it somewhere and start it again: a sync run must end with the same digest.
"""

import argparse
import hashlib
import time
from pathlib import Path

import torch
from torch import nn

import torchquorum as tq

task = tq.join()
parser = argparse.ArgumentParser()
parser.add_argument("--logdir", required=True)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--pull-for-ever-at", type=int, default=-1)
parser.add_argument("--wait-at-end", action="store_true")
parser.add_argument("--hold-at", type=int, default=-1, help="wait at this step until the file --hold-until is there")
parser.add_argument("--hold-until")
args = parser.parse_args()


class WaitAtEnd(tq.Hook):
    """Stays between the last step and the last checkpoint until its file is there."""

    def end(self, session: tq.hooks.HookSession) -> None:
        print("ending", flush=True)
        deadline = time.monotonic() + 60
        while not Path(args.logdir, "go-on").exists() and time.monotonic() < deadline:
            time.sleep(0.01)


torch.manual_seed(1)
x = torch.randn(400, 20)
y = torch.randint(0, 5, (400,))
torch.manual_seed(2 + task.index)
model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 5))
optimizer = tq.Optimizer(
    torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    rule=tq.Sync(),
    schedule=tq.schedule("StepLR", step_size=10, gamma=0.9),
    average=tq.ExponentialMovingAverage(0.9),
)
batches = tq.Batches((x, y), 8, worker=task.index, workers=task.num_workers, seed=3)
with tq.Session(
    task,
    model,
    optimizer,
    logdir=args.logdir,
    last_step=args.steps,
    save_every_steps=7,
    wait_for_workers=task.num_workers,
    data=batches,
    hooks=[WaitAtEnd()] if args.wait_at_end else [],
) as session:
    print(f"started at {session.global_step}", flush=True)
    while not session.should_stop():
        images, labels = next(batches)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        step = optimizer.last
        print(f"global {step.version} ", flush=True)
        if step.version == args.pull_for_ever_at:
            print("pulling", flush=True)
            while session.pull() == step.version:
                pass
            print(f"rolled back to {session.global_step}", flush=True)
            args.pull_for_ever_at = -1
        deadline = time.monotonic() + 300
        while step.version == args.hold_at and not Path(args.hold_until).exists() and time.monotonic() < deadline:
            if session.should_stop():
                break
            time.sleep(0.01)
        time.sleep(args.pause)
    with session.averaged():
        averages = [p.detach().clone() for p in model.parameters()]
digest = hashlib.sha256()
for tensor in [*model.parameters(), *averages]:
    digest.update(tensor.detach().numpy().tobytes())
print(f"digest {digest.hexdigest()}", flush=True)
