"""A plain PyTorch trainer, alone or under DDP (torchrun --nproc-per-node 2): prints its batches per second.

Arguments: `alone` or `ddp`, seconds, batches before the clock starts, the optimizer (sgd).
"""

import sys

import torch
import torch.distributed as dist
from family import Window
from work import OPTIMIZERS, load, loss_of, make_model

mode, seconds, warm_up = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
images, labels = load()
model = make_model()
if mode == "ddp":
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = OPTIMIZERS[sys.argv[4] if len(sys.argv) > 4 else "sgd"](model.parameters())
step, window = 0, Window()
while True:
    if step == warm_up:
        window = Window()
    loss = loss_of(model, images, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if step % 20 == 0 and step > warm_up:
        done = torch.tensor(float(window.seconds > seconds))
        if mode == "ddp":
            dist.all_reduce(done)  # all leave in the same round
        if done > 0:
            break
sys.stdout.write(window.line(step - warm_up))  # one write: two ranks share the pipe
sys.stdout.flush()
if mode == "ddp":
    dist.destroy_process_group()
