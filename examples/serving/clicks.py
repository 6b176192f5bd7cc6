"""What the program that trains and the server share: a model of clicks, and clicks that are made up."""

import torch
from torch import nn

import torchquorum as tq


class Clicks(nn.Module):
    """A row for each user and item, and a small network that makes a logit of both."""

    def __init__(self) -> None:
        super().__init__()
        learn = tq.rows.RowwiseAdagrad(lr=0.1)
        self.users = tq.Table(8, init=tq.rows.Uniform(-0.1, 0.1), optimizer=learn)
        self.items = tq.Table(8, init=tq.rows.Uniform(-0.1, 0.1), optimizer=learn)
        self.top = nn.Linear(16, 1)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Returns a logit for each pair."""
        user, item = self.users(users), self.items(items)
        return self.top(torch.cat([user, item], 1)).squeeze(1) + (user * item).sum(1)


def read_clicks(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns users, items, and whether each was clicked: users like items whose number is even as theirs is, or odd as theirs is."""
    users = torch.randint(0, 200, (count,), generator=generator)
    items = torch.randint(0, 300, (count,), generator=generator)
    return users, items, ((users + items) % 2 == 0).float()
