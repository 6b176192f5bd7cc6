"""One trainer on a GPU: plain, captured, or as a task of torchquorum; prints a line of JSON with its steps per second.

Arguments, as JSON: kind (eager, captured, quorum), model (mlp, gpt), rule, optimizer, rows, seconds, warm_up; for quorum also
ordinary (no `tq.capture`) and late (gradients leave the GPU after the backward pass only).
"""

import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from gpt import Transformer, batch
from work import BATCH, load, make_model

import torchquorum as tq
from torchquorum.rules import parse_rule
from torchquorum.worker import overlap as early

given = json.loads(sys.argv[1])
task = tq.join([]) if given["kind"] == "quorum" else None
torch.manual_seed(1 + (task.index if task else 0))
torch.set_float32_matmul_precision("high")

if given["model"] == "mlp":
    model = make_model().cuda()
    images, labels = (x.cuda() for x in load())

    def loss_of(rows: torch.Tensor) -> torch.Tensor:
        """Returns the loss of some rows of the data, which lie on the GPU."""
        return torch.nn.functional.cross_entropy(model(images[rows]), labels[rows])

    def next_batch() -> torch.Tensor:
        """Returns the numbers of some random rows."""
        return torch.randint(0, len(images), (BATCH,), device="cuda")
else:
    model = Transformer().cuda()
    text = batch(given["rows"], "cuda")
    loss_of: Callable[[torch.Tensor], torch.Tensor] = model.loss

    def next_batch() -> torch.Tensor:
        """Returns the text, the same every time: what is measured is the step."""
        return text


inner = getattr(torch.optim, given["optimizer"])(model.parameters(), lr=1e-4, **given.get("options", {}))
step: Callable[[torch.Tensor], object]
if given["kind"] == "quorum":
    assert task is not None
    optimizer = tq.Optimizer(inner, rule=parse_rule(given["rule"]))
    step = tq.capture(loss_of, optimizer)
    if given.get("late"):
        early.LEAST_BYTES = sys.maxsize
    if given.get("ordinary"):

        def ordinary(x: torch.Tensor) -> object:
            """The loop that everybody writes."""
            optimizer.zero_grad()
            loss = loss_of(x)
            loss.backward()
            return optimizer.step()

        step = ordinary
    session = tq.Session(task, model, optimizer, wait_for_workers=task.num_workers)
else:
    session = nullcontext()

    def eager(x: torch.Tensor) -> object:
        """The plain loop."""
        inner.zero_grad()
        loss = loss_of(x)
        loss.backward()
        inner.step()
        return loss

    step = eager
    if given["kind"] == "captured":
        x_in = next_batch()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                eager(x_in)
        torch.cuda.synchronize()
        inner.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            eager(x_in)

        def replay(x: torch.Tensor) -> object:
            """The same, captured."""
            x_in.copy_(x)
            return graph.replay()

        step = replay

with session:
    for _ in range(given["warm_up"]):
        step(next_batch())
    torch.cuda.synchronize()
    started, steps = time.perf_counter(), 0
    while time.perf_counter() - started < given["seconds"]:
        for _ in range(given.get("look_every", 20)):
            step(next_batch())
            steps += 1
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    captured = getattr(step, "captured", None)
print(json.dumps({"steps": steps, "seconds": seconds, "captured": captured}), flush=True)
