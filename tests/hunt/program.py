"""What a worker's program does in a simulated run: gradients of its batches for one optimizer or two, and what programs do beside that.

Run by the cluster, on a simulated thread. What always holds: the book hears what the program gives, and what it holds afterwards.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

import torchquorum as tq
from tests.hunt.arithmetic import Values
from tests.hunt.book import Book
from tests.hunt.past import DIM, MODELS, NUM_ROWS, Rows, assigned, first_rows, gradient, row_gradients, start
from tests.hunt.schedule import COMPUTE_S, Config
from tests.hunt.world import World
from torchquorum.rules.quorum import Key

RATES = (1.0, 0.5, 2.0)
LOOK_AT_AVERAGES = 8
ASSIGN_EVERY, BARRIER_EVERY = 24, 16  # batches


class UserError(RuntimeError):
    """What a program raises."""


class Numbers(nn.Module):
    """The model of an optimizer."""

    def __init__(self, track: int, *, rows: bool) -> None:
        super().__init__()
        self._names = list(MODELS[track])
        for name, numel in MODELS[track].items():
            self.register_parameter(name, nn.Parameter(torch.zeros(numel, dtype=torch.float64)))
        self.write(start(track))
        if rows:
            self.rows = nn.Embedding(NUM_ROWS, DIM, sparse=True, dtype=torch.float64)
            with torch.no_grad():
                self.rows.weight.copy_(torch.tensor(list(first_rows().values()), dtype=torch.float64))

    def _pieces(self, values: Values) -> list[tuple[nn.Parameter, torch.Tensor]]:
        parameters = self._dense
        whole = torch.tensor(values, dtype=torch.float64)
        return list(zip(parameters, whole.split([p.numel() for p in parameters]), strict=True))

    def write(self, values: Values) -> None:
        """Writes numbers to the parameters."""
        with torch.no_grad():
            for parameter, piece in self._pieces(values):
                parameter.copy_(piece)

    def write_gradient(self, values: Values) -> None:
        """Writes numbers to their gradients."""
        for parameter, piece in self._pieces(values):
            parameter.grad = piece.clone()

    @property
    def values(self) -> Values:
        """Returns all numbers."""
        return [value for p in self._dense for value in p.detach().tolist()]

    @property
    def _dense(self) -> list[nn.Parameter]:
        return [getattr(self, name) for name in self._names]

    def look_up(self, gradients: Rows) -> Rows:
        """Looks rows up, with a loss that gives them these gradients; returns them."""
        self.rows.weight.grad = None
        ids = list(gradients)
        found = self.rows(torch.tensor(ids))
        (found * torch.tensor(list(gradients.values()), dtype=torch.float64)).sum().backward()
        return dict(zip(ids, found.tolist(), strict=True))


class Source:
    """Where a worker is in its data."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Program:
    """One process of a worker, from the beginning of its session to its end.

    Args:
        world: Where it waits.
        book: Who hears of it.
        config: What it does.
        who: Its process, in words.
        life: Which of its task's processes it is.

    Attributes:
        throws: Whether it raises at its next step.
    """

    def __init__(self, world: World, book: Book, config: Config, who: str, life: int) -> None:
        self._world, self._book, self._config, self._who, self._life = world, book, config, who, life
        self.throws = False

    def run(
        self, session: tq.Session, models: list[Numbers], optimizers: list[tq.Optimizer], source: Source, index: int
    ) -> None:
        """Trains until the run is over; inside the session's block."""
        pace = random.Random(f"{self._config.seed} {index} {self._life}")
        before, done = [(0, 0)] * len(models), {source.position}
        self._stand(index, optimizers[0], source)
        while not session.should_stop():
            position = source.position
            self._book.drawn.setdefault(index, position)
            if position not in done:  # a program that begins there has done it
                done.add(position)
                self._now_and_then(session, models[0], index, position)
                self._stand(index, optimizers[0], source)
            source.position += 1
            for track, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                self._world.wait(COMPUTE_S * pace.uniform(0.5, 1.5))
                if self.throws:
                    self.throws = False
                    raise UserError("the program's own exception")
                before[track] = self._step(session, model, optimizer, (index, position, track), before[track])
                if not track:
                    self._stand(index, optimizer, source)
            if self._config.average and position % LOOK_AT_AVERAGES == 0:
                self._look_at_averages(session, models[0])

    def _stand(self, index: int, optimizer: tq.Optimizer, source: Source) -> None:
        link = optimizer.link
        assert link is not None
        self._book.stands(index, link.generation, optimizer.version, source.position)

    def _step(
        self,
        session: tq.Session,
        model: Numbers,
        optimizer: tq.Optimizer,
        who: tuple[int, int, int],
        before: tuple[int, int],
    ) -> tuple[int, int]:
        """Gives the gradient of a batch, as (worker, position, optimizer); returns the generation and version that it holds then."""
        index, position, track = who
        rows: Rows = {}
        if self._config.rows and not track:
            rows = row_gradients(index, position)
            self._look_up(model, optimizer, rows)
        key, values = Key(index, session.incarnation, session.local_step + 1), gradient(*who)
        self._book.computed(key, values, track, rows)
        model.write_gradient(values)
        if self._config.changes_lr:
            optimizer.param_groups[0]["lr"] = RATES[session.global_step // 15 % len(RATES)]
        optimizer.step(loss=1.0)
        step, link = optimizer.last, optimizer.link
        assert link is not None
        now = link.generation, step.version
        self._book.holds(self._who, model.values, track, now, before)
        if not link.pipeline:
            self._book.answered(self._who, key, step.accepted, step.reason, step.version, link.generation)
        return now

    def _look_up(self, model: Numbers, optimizer: tq.Optimizer, gradients: Rows) -> None:
        before = optimizer.link
        assert before is not None
        generation, version = before.generation, optimizer.version
        found, after = model.look_up(gradients), optimizer.link
        assert after is not None
        since = version if after.generation == generation else 0  # the run has gone back meanwhile
        self._book.looked_up(self._who, found, after.generation, since)

    def _now_and_then(self, session: tq.Session, model: Numbers, index: int, position: int) -> None:
        """Values of its own, and waits for the others, at the same batches on every worker."""
        if self._config.assigns and position % ASSIGN_EVERY == 0:
            model.write(assigned(index))
            session.assign()
        if self._config.barriers and position % BARRIER_EVERY == 0:
            session.barrier()

    def _look_at_averages(self, session: tq.Session, model: Numbers) -> None:
        with session.averaged() as version:
            link = session.optimizer.link
            assert link is not None
            self._book.averaged(self._who, model.values, version, link.generation)
