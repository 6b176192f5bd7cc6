"""The same trainer as a task of torchquorum: prints the worker's batches per second.

Arguments: rule, seconds, batches before the clock starts; then perhaps the optimizer (sgd), a folder for the run, how it is durable.
"""

import sys

import torch
from family import Window
from work import OPTIMIZERS, load, loss_of, make_model

import torchquorum as tq
from torchquorum.rules import parse_rule

task = tq.join()
rule, seconds, warm_up = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
images, labels = load()
model = make_model()
name, logdir, durable = sys.argv[4:7] if len(sys.argv) > 4 else ("sgd", "", "")
optimizer = tq.Optimizer(OPTIMIZERS[name](model.parameters()), rule=parse_rule(rule))
with tq.Session(task, model, optimizer, logdir=logdir or None, durable=durable or None):
    step, window = 0, Window()
    while True:
        if step == warm_up:
            window = Window()
        loss = loss_of(model, images, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 20 == 0 and step > warm_up and window.seconds > seconds:
            break
    line = window.line(step - warm_up)
print(line, end="", flush=True)
