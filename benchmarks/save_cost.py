"""What a checkpoint costs while training goes on: steps in seconds with a save, beside seconds without one.

    torchquorum run benchmarks/save_cost.py [SECONDS]

One run alternates: every other second a checkpoint is made. Prints the median steps of a second of either kind.
"""

import statistics
import sys
import tempfile
import time

import torch
from work import load, loss_of, make_model

import torchquorum as tq

task = tq.join()
seconds = int(sys.argv[1]) if len(sys.argv) > 1 else 30
torch.set_num_threads(1)
images, labels = load()
model = make_model()
optimizer = tq.Optimizer(
    torch.optim.Adam(model.parameters()), rule=tq.Sync(), average=tq.ExponentialMovingAverage(0.99)
)
with (
    tempfile.TemporaryDirectory() as folder,
    tq.Session(task, model, optimizer, logdir=folder, save_every_s=0, max_seconds=seconds) as session,
):
    counts: list[int] = []
    began, count = time.perf_counter(), 0
    while not session.should_stop():
        loss = loss_of(model, images, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        count += 1
        if time.perf_counter() - began >= 1.0:
            counts.append(count)
            began, count = time.perf_counter(), 0
            if task.is_chief and len(counts) % 2 == 1:
                session.save()
    session.pull()
plain, saving = counts[2::2], counts[3::2]
if task.is_chief:
    a, b = statistics.median(plain), statistics.median(saving)
    print(f"steps in a second: {a:g} without a save, {b:g} with one: {100 * (1 - b / a):.1f} % fewer", flush=True)
