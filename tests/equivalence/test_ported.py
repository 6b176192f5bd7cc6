"""Small programs in the manner of public ones, with one optimizer: as they are, and ported, they end with the same bits."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchquorum as tq
from tests.equivalence.test_one_worker import same
from tests.harness import PATIENCE, Cluster

Wrap = Callable[[nn.Module, torch.optim.Optimizer], Any]


def batches(count: int, *shape: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    for _ in range(count):
        yield torch.randn(*shape, generator=generator)


def classifier(wrap: Wrap) -> nn.Module:
    """Epochs, a rate that falls by epoch, dropout, an evaluation after each epoch."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Dropout(0.25), nn.Flatten(), nn.Linear(144, 5))
    optimizer = wrap(model, torch.optim.Adadelta(model.parameters(), lr=1.0))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for _ in range(3):
        model.train()
        for x in batches(4, 8, 1, 8, 8):
            optimizer.zero_grad()
            F.cross_entropy(model(x), x.sum((1, 2, 3)).abs().long() % 5).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            model(next(batches(1, 8, 1, 8, 8)))
        scheduler.step()
    return model


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(12, 6), nn.Linear(3, 12)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mu, logvar = self.encode(x).chunk(2, dim=1)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return torch.sigmoid(self.decode(z)), mu, logvar


def vae(wrap: Wrap) -> nn.Module:
    """Noise in the forward pass, Adam, the loss summed over the epoch."""
    model = Vae()
    optimizer = wrap(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    total = 0.0
    for _ in range(2):
        for x in batches(5, 6, 12):
            optimizer.zero_grad()
            out, mu, logvar = model(x)
            loss = F.binary_cross_entropy(out, torch.sigmoid(x), reduction="sum")
            loss = loss - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
            loss.backward()
            total += loss.item()
            optimizer.step()
    assert total > 0
    return model


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.rnn, self.decoder = nn.Embedding(11, 6), nn.GRU(6, 6), nn.Linear(6, 11)
        self.decoder.weight = self.encoder.weight

    def forward(self, words: torch.Tensor, hidden: Any) -> Any:
        out, hidden = self.rnn(self.encoder(words), hidden)
        return self.decoder(out), hidden


def language_model(wrap: Wrap) -> nn.Module:
    """Tied weights, clipped gradients, a hidden state that is carried on, the rate annealed by hand on the validation loss."""
    model = Recurrent()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=5.0))
    best: float | None = None
    for _ in range(4):
        hidden = None
        for x in batches(3, 5, 2):
            words = (x.abs() * 100).long() % 11
            optimizer.zero_grad()
            out, hidden = model(words, hidden)
            hidden = hidden.detach()
            F.cross_entropy(out.view(-1, 11), words.view(-1)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
        with torch.no_grad():
            words = (next(batches(1, 5, 2)).abs() * 77).long() % 11
            value = float(F.cross_entropy(model(words, None)[0].view(-1, 11), words.view(-1)))
        if best is None or value < best:
            best = value
        for group in optimizer.param_groups:
            group["lr"] /= 4.0
    return model


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items, self.top = nn.Embedding(9, 4), nn.Embedding(7, 4), nn.Linear(8, 1)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([self.users(user), self.items(item)], dim=1)).squeeze(1)


def recommender(wrap: Wrap) -> nn.Module:
    """Embeddings, weight decay in one of two groups, gradients accumulated over two batches."""
    model = Recommender()
    tables = [*model.users.parameters(), *model.items.parameters()]
    groups = [{"params": tables, "weight_decay": 0.01}, {"params": model.top.parameters()}]
    optimizer = wrap(model, torch.optim.Adagrad(groups, lr=0.1))
    for number, x in enumerate(batches(8, 10)):
        rows = (x.abs() * 100).long()
        F.mse_loss(model(rows % 9, rows % 7), x).div(2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return model


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.one = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.second, self.two = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.two(self.second(F.relu(self.one(self.first(x))))))


def resnet(wrap: Wrap) -> nn.Module:
    """Batch norm, momentum with weight decay, a cosine rate by scheduler, the best weights kept by hand."""
    stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    model = nn.Sequential(stem, Block(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
    kept: dict[str, torch.Tensor] = {}
    for _ in range(3):
        model.train()
        for x in batches(3, 4, 3, 8, 8):
            optimizer.zero_grad()
            F.cross_entropy(model(x), x.sum((1, 2, 3)).abs().long() % 3).backward()
            optimizer.step()
        model.eval()
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        scheduler.step()
    assert len(kept) == len(model.state_dict())
    return model


@pytest.mark.parametrize("program", [classifier, vae, language_model, recommender, resnet])
def test_a_ported_program_equals_the_plain_one_bit_for_bit(program: Callable[[Wrap], nn.Module]) -> None:
    sessions: list[tq.Session] = []

    def port(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        ported = tq.Optimizer(optimizer)
        sessions.append(tq.Session(tq.join([]), model, ported).start())
        return ported

    torch.manual_seed(11)
    ours = program(port)
    sessions[0].close()
    torch.manual_seed(11)
    theirs = program(lambda _model, optimizer: optimizer)
    assert same(list(ours.parameters()), list(theirs.parameters()))
    assert same(list(ours.buffers()), list(theirs.buffers()))


def test_a_worker_that_shares_nothing_but_the_ps_learns_as_hogwild_does() -> None:
    def work(task: Any) -> float:
        generator = torch.Generator().manual_seed(task.index)
        model = nn.Linear(4, 1)
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.05), rule=tq.Async())
        loss = torch.ones(())
        with tq.Session(task, model, optimizer, last_step=300, patience=PATIENCE) as session:
            while not session.should_stop():
                x = torch.randn(16, 4, generator=generator)
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
                loss.backward()
                optimizer.step()
        return float(loss.detach())

    assert max(Cluster(workers=2).run(work, work)) < 0.05
