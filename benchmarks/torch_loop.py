"""A plain PyTorch trainer, alone or under DDP (torchrun --nproc-per-node 2): prints its batches per second."""

import sys
import time

import torch
import torch.distributed as dist
from work import WARM_UP, load, loss_of, make_model

mode, seconds = sys.argv[1], float(sys.argv[2])
torch.set_num_threads(1)
images, labels = load()
model = make_model()
if mode == "ddp":
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step, start = 0, 0.0
while True:
    if step == WARM_UP:
        start = time.perf_counter()
    loss = loss_of(model, images, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if step % 50 == 0 and step > WARM_UP:
        done = torch.tensor(float(time.perf_counter() - start > seconds))
        if mode == "ddp":
            dist.all_reduce(done)
        if done > 0:
            break
sys.stdout.write(f"rate {(step - WARM_UP) / (time.perf_counter() - start):.3f}\n")
sys.stdout.flush()
if mode == "ddp":
    dist.destroy_process_group()
