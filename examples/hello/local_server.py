"""The smallest cluster: one server in this process, and a client that runs a small graph on it.

python examples/hello/local_server.py
"""

import torch

import torchquorum as tq


def letters(text: str) -> torch.Tensor:
    """A tensor cannot hold words, so a text is a tensor of bytes."""
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def join(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.cat([first, second])


server = tq.graph.Server.create_local_server()
with tq.graph.connect(server.target) as client:
    greeting = client.run(join, letters("Hello, distributed "), letters("torchquorum!"))
print(bytes(greeting.tolist()).decode())
server.close()
