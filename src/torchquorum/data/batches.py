"""Each worker's endless stream of mini-batches.

Owns the order in which rows are visited. Called by training loops, one `Batches` per worker and from one thread. What always
holds: the order is a pure function of (seed, epoch, worker, workers), so the workers agree on their shares without a message,
and a position is two numbers: the epoch and the step in it.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import numpy as np
import torch

from torchquorum.data.mnist import Split
from torchquorum.errors import ConfigError

Sharing = Literal["split", "own"]


class Batches:
    """An endless iterator over (inputs, labels) mini-batches; every epoch is a fresh permutation of the rows.

    With `share="split"` all workers follow one permutation and step s of an epoch uses its rows
    [s * workers * batch_size, (s + 1) * workers * batch_size), worker w the w-th block of `batch_size` of them. So no
    row is used twice in an epoch, and N workers in a sync round see what one process would see in a batch N times as
    large. With `share="own"` each worker permutes the whole set with its own seed, independently of the others.

    Attributes:
        epoch: The epoch of the next batch, from 0.
        step_in_epoch: The step of the next batch in that epoch, from 0 up to `steps_per_epoch - 1`.
        prefetch_to: Takes the ids of the next batch; set by the session.
        steps_per_epoch: How many batches each worker takes from one epoch; the same for all workers.
    """

    def __init__(
        self,
        source: Split | tuple[torch.Tensor, torch.Tensor],
        batch_size: int,
        *,
        worker: int = 0,
        workers: int = 1,
        seed: int = 0,
        share: Sharing = "split",
        drop_last: bool = True,
        prefetch: Callable[..., Any] | None = None,
    ) -> None:
        """Prepares the stream; reads no row before the first batch.

        Args:
            source: A `Split`, whose images come out as float32 in 0..1, or a pair (inputs, labels) of tensors of the
                same length and on the same device, whose rows come out as they are.
            batch_size: How many rows this worker takes per step.
            worker: This worker's index, from 0.
            workers: How many workers share the rows.
            seed: The same for all workers.
            share: "split" for disjoint shares of one permutation, "own" for a permutation per worker.
            drop_last: Whether the rows at an epoch's end that do not fill a batch for every worker are left out. If
                not, they make one more, smaller step, split as evenly as possible; they are still left out if there
                are fewer of them than workers, since a batch must not be empty.
            prefetch: Returns the ids of a batch, as `session.prefetch` takes them: `prefetch=lambda ids, labels: ids`. Their rows are
                asked for one batch ahead, by the session whose `data=` the batches are.

        Raises:
            ConfigError: An argument is out of range, or the batch is larger than this worker's share.
        """
        self._split = source if isinstance(source, Split) else None
        inputs, labels = (source.images, source.labels) if isinstance(source, Split) else source
        self._inputs: torch.Tensor = inputs
        self._labels: torch.Tensor = labels
        rows = len(self._labels)
        if len(self._inputs) != rows:
            raise ConfigError(f"source: {len(self._inputs):,} inputs and {rows:,} labels: must be the same number")
        _check_arguments(rows, batch_size, worker, workers, seed, share)
        self._rows = rows
        self._batch_size = batch_size
        self._worker = worker
        self._seed = seed
        self._share: Sharing = share
        # With share="own" a worker is alone on its permutation.
        self._sharers, self._block = (workers, worker) if share == "split" else (1, 0)
        self.steps_per_epoch = rows // (batch_size * self._sharers)
        if not drop_last and rows % (batch_size * self._sharers) >= self._sharers:
            self.steps_per_epoch += 1
        self.epoch = 0
        self.step_in_epoch = 0
        self._order = torch.empty(0, dtype=torch.int64)
        self._order_epoch = -1
        self._ids_of, self._next = prefetch, None
        self.prefetch_to: Callable[[Any], None] | None = None

    @property
    def batch_size(self) -> int:
        """Returns how many rows this worker takes per step."""
        return self._batch_size

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        batch, self._next = self._next or self._read(), None
        self.step_in_epoch += 1
        if self.step_in_epoch == self.steps_per_epoch:
            self.epoch += 1
            self.step_in_epoch = 0
        if self._ids_of is not None:
            if self.prefetch_to is None:
                raise ConfigError(
                    "prefetch= of these batches has no effect before a session: give them to it, tq.Session(..., data=batches), and "
                    "take the first batch inside"
                )
            self._next = self._read()
            self.prefetch_to(self._ids_of(*self._next))
        return batch

    def _read(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self._next_rows()
        inputs = self._inputs.index_select(0, rows) if self._split is None else self._split.inputs(rows)
        return inputs, self._labels.index_select(0, rows)

    def state_dict(self) -> dict[str, int | str]:
        """Returns the position, and the settings that must be equal for it to mean the same rows; JSON-compatible."""
        return {"epoch": self.epoch, "step_in_epoch": self.step_in_epoch, **self._identity()}

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Goes to a saved position: the next batch is the one that would have followed where it was saved.

        Raises:
            ConfigError: The position is not valid, or belongs to batches that visit the rows in another order.
        """
        for name, value in self._identity().items():
            if name in state and state[name] != value:
                raise ConfigError(
                    f"{name}={value!r}: the saved position belongs to batches with {name}={state[name]!r}, and does not "
                    f"lead to the same rows; use {name}={state[name]!r}, or start the data from the beginning"
                )
        epoch, step = state.get("epoch"), state.get("step_in_epoch")
        if not isinstance(epoch, int) or epoch < 0:
            raise ConfigError(f"epoch={epoch!r} in the saved position: must be a whole number, 0 or more")
        if not isinstance(step, int) or not 0 <= step < self.steps_per_epoch:
            raise ConfigError(
                f"step_in_epoch={step!r} in the saved position: must be a whole number from 0 to "
                f"{self.steps_per_epoch - 1}; was it saved with another drop_last?"
            )
        self.epoch, self.step_in_epoch, self._next = epoch, step, None

    def _identity(self) -> dict[str, int | str]:
        return {
            "rows": self._rows,
            "batch_size": self._batch_size,
            "workers": self._sharers,
            "seed": self._seed,
            "share": self._share,
        }

    def _next_rows(self) -> torch.Tensor:
        if self._order_epoch != self.epoch:
            stream = 0 if self._share == "split" else 1 + self._worker
            self._order = permute(self._rows, self._seed, self.epoch, stream).to(self._labels.device)
            self._order_epoch = self.epoch
        joined = self._batch_size * self._sharers
        start = self.step_in_epoch * joined
        if start + joined <= self._rows:
            first = start + self._block * self._batch_size
            return self._order[first : first + self._batch_size]
        return self._order[start:].tensor_split(self._sharers)[self._block]


def permute(rows: int, seed: int, epoch: int, stream: int = 0) -> torch.Tensor:
    """Returns the order of the rows in an epoch, the same on every worker."""
    # SeedSequence keeps neighbouring (seed, epoch) apart, where a sum would give (0, 1) and (1, 0) the same order.
    mixed = np.random.SeedSequence((seed, epoch, stream)).generate_state(1, np.uint64)[0]
    return torch.randperm(rows, generator=torch.Generator().manual_seed(int(mixed)))


def _check_arguments(rows: int, batch_size: int, worker: int, workers: int, seed: int, share: str) -> None:
    if share not in get_args(Sharing):
        raise ConfigError(f"share={share!r}: must be 'split' (disjoint shares) or 'own' (each worker the whole set)")
    if workers < 1:
        raise ConfigError(f"workers={workers}: must be 1 or more")
    if not 0 <= worker < workers:
        raise ConfigError(f"worker={worker}: must be from 0 to {workers - 1}, since workers={workers}")
    if seed < 0:
        raise ConfigError(f"seed={seed}: must be 0 or more")
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size}: must be 1 or more")
    share_rows = rows // workers if share == "split" else rows
    if batch_size > share_rows:
        each = f", each worker's share of {rows:,} rows over {workers} workers" if share_rows != rows else ""
        raise ConfigError(
            f"batch_size={batch_size}: must be at most {share_rows:,}{each or ', the number of rows'}; use a smaller "
            f"batch{', fewer workers or share=' + repr('own') if each else ''} or more data"
        )
