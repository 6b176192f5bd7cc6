"""A stream of clicks, made up: each hour has users and items of the hours before, and new ones."""

import torch

CLICKS, STEPS_AN_HOUR = 20_000, 100
USERS, ITEMS, NEW = 2_000, 3_000, 300


def hour_at(step: int) -> int:
    """Returns the hour in which a step falls."""
    return step // STEPS_AN_HOUR


def read_hour(hour: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the hour's pairs of user and item ids, int64 [N, 2], and whether each was clicked, float32 [N]."""
    generator = torch.Generator().manual_seed(hour)
    first = NEW * hour  # ids below have gone out of use
    users = first + (USERS * torch.rand(CLICKS, generator=generator) ** 2).long()
    items = first + (ITEMS * torch.rand(CLICKS, generator=generator) ** 2).long()
    tastes = (_taste(users, 3) * _taste(items, 5)).sum(1) + 2 * _taste(items, 11)[:, 0] + _taste(users, 7)[:, 0]
    labels = (torch.rand(CLICKS, generator=generator) < torch.sigmoid(2 * tastes)).float()
    return torch.stack([_spread(users), _spread(items)], 1), labels


def _taste(ids: torch.Tensor, salt: int) -> torch.Tensor:
    """Returns four hidden numbers for each id, from -1 to 1."""
    return torch.sin(ids.unsqueeze(1) * torch.tensor([12.9898, 78.233, 37.719, 4.581]) * salt)


def _spread(ids: torch.Tensor) -> torch.Tensor:
    """Returns ids as they come from elsewhere: 64 bits, without an order."""
    return ids * 6364136223846793005 + 1442695040888963407


def auc(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Returns the area under the ROC curve: how often a clicked pair has the larger logit of the two."""
    order = logits.argsort()
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(1, len(order) + 1)
    clicked = labels > 0.5
    count = int(clicked.sum())
    return float((ranks[clicked].sum() - count * (count + 1) / 2) / (count * (len(labels) - count)))
