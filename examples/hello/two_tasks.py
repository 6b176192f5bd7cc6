"""A cluster of two tasks: start it twice, in two terminals, and the first waits, visibly, for the second.

    python examples/hello/two_tasks.py 0
    python examples/hello/two_tasks.py 1

What either of them defines is run by the first task, unless it asks for another one with `on`. Ctrl-C ends a task.
"""

import math
import sys

import torch

import torchquorum as tq

task_index = int(sys.argv[1])
addresses = sys.argv[2] if len(sys.argv) > 2 else "localhost:2222,localhost:2223"


def letters(text: str) -> torch.Tensor:
    """A tensor cannot hold words, so a text is a tensor of bytes."""
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def join(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.cat([first, second])


server = tq.graph.Server({"local": addresses}, job_name="local", task_index=task_index)
with tq.graph.connect(
    server.target, log_device_placement=True, wait_s=math.inf
) as client:  # however long the other takes
    greeting = client.run(join, letters("Hello from "), letters(f"server{task_index + 1}!"))
    print(bytes(greeting.tolist()).decode(), flush=True)
    if task_index == 0:
        client.run(join, letters("a "), letters("b"), on="/job:local/task:1")
try:
    print(f"{server.task} serves on; Ctrl-C ends it", flush=True)
    server.join()
except KeyboardInterrupt:
    print("bye")
