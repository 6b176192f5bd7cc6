"""Data divided into numbered batches: batch i of epoch e is number e * batches + i, with the same rows on every worker.

Created by `session.share`; ps task 0 assigns the numbers to workers. Used from one thread. What always holds: the order of an
epoch is a pure function of (seed, epoch), so only numbers are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, TensorDataset
from torch.utils.data import default_collate as collate

from torchquorum.data.batches import permute
from torchquorum.data.mnist import Split
from torchquorum.errors import ConfigError

_KEPT = ("collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator")


class NumberedBatches:
    """The batches of a map-style data set, by number.

    Args:
        source: A `Split`, tensors of the same length, a TensorDataset, any data set with a length and items by index, or a
            DataLoader over one, whose settings are then used.
        batch_size: Rows per batch.
        seed: Seed of the order of the rows, the same on every worker.
        shuffle: Whether every epoch is a new permutation; None for yes, or as in the DataLoader.
        drop_last: Whether rows that do not fill a batch are left out; None for no, or as in the DataLoader.

    Attributes:
        rows: Number of rows.
        batch_size: Rows per batch.
        per_epoch: Batches per epoch.
        seed: The seed; -1 if rows are not shuffled.
        ahead: How many batches a DataLoader's processes read ahead; 0 without such processes.
    """

    def __init__(
        self, source: Any, batch_size: int | None, *, seed: int, shuffle: bool | None, drop_last: bool | None
    ) -> None:
        self._settings: dict[str, Any] = {}
        self.ahead = 0
        if isinstance(source, DataLoader):
            batch_size, shuffle, drop_last = self._read_loader(source, batch_size, shuffle, drop_last)
            source = source.dataset
        if batch_size is None or isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ConfigError(f"batch_size={batch_size!r}: must be a whole number, 1 or more")
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ConfigError(f"seed={seed!r}: must be a whole number, 0 or more")
        self._fetch, self.rows = _reader(source)
        self._dataset: Any = source
        if self._settings:
            self._fetch = self._collated
        self.batch_size = batch_size
        self.seed = -1 if shuffle is False else seed
        self.per_epoch = self.rows // batch_size if drop_last else -(-self.rows // batch_size)
        if self.per_epoch < 1:
            raise ConfigError(f"batch_size={batch_size}: the data has {self.rows} rows, which do not fill a batch")
        self._order, self._order_epoch = torch.empty(0, dtype=torch.int64), -1
        self._loader: DataLoader[Any] | None = None

    def rows_of(self, number: int) -> torch.Tensor:
        """Returns the rows of a batch, as indices into the data."""
        epoch, index = divmod(number, self.per_epoch)
        if self._order_epoch != epoch:
            self._order = permute(self.rows, self.seed, epoch) if self.seed >= 0 else torch.arange(self.rows)
            self._order_epoch = epoch
        return self._order[index * self.batch_size : (index + 1) * self.batch_size]

    def fetch(self, number: int) -> Any:
        """Returns a batch."""
        return self._fetch(self.rows_of(number))

    def stream(self, numbers: Iterator[int]) -> Iterator[Any]:
        """Returns the batches of the numbers, in order, read ahead by the processes of the DataLoader."""
        if self._loader is None:
            self._sampler = _NumberSampler(self)
            self._loader = DataLoader(
                self._dataset, batch_sampler=self._sampler, persistent_workers=True, **self._settings
            )
        self._sampler.numbers = numbers
        return iter(self._loader)

    def _collated(self, rows: torch.Tensor) -> Any:
        items = self._dataset.__getitems__(rows.tolist()) if hasattr(self._dataset, "__getitems__") else None
        return self._settings["collate_fn"]([self._dataset[i] for i in rows.tolist()] if items is None else items)

    def _read_loader(
        self, loader: DataLoader[Any], batch_size: int | None, shuffle: bool | None, drop_last: bool | None
    ) -> tuple[int | None, bool, bool]:
        if any(value is not None for value in (batch_size, shuffle, drop_last)):
            raise ConfigError(
                "session.share(DataLoader): a DataLoader has its own batch_size, shuffle and drop_last; leave them out"
            )
        if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
            raise ConfigError(
                "session.share(DataLoader): it must have a batch_size and a data set with a length and items by index; "
                "a stream, or a custom batch_sampler, cannot be shared by number"
            )
        if type(loader.sampler) not in (RandomSampler, SequentialSampler) or getattr(
            loader.sampler, "replacement", False
        ):
            raise ConfigError(
                f"session.share(DataLoader): its sampler is {type(loader.sampler).__name__}, but session.share assigns the "
                "rows; create the DataLoader with shuffle=True or shuffle=False and no sampler"
            )
        self._settings = {name: getattr(loader, name) for name in _KEPT}
        if loader.num_workers > 0:
            self._settings["prefetch_factor"] = loader.prefetch_factor
            self.ahead = loader.num_workers * (loader.prefetch_factor or 2)
        return loader.batch_size, isinstance(loader.sampler, RandomSampler), loader.drop_last


class _NumberSampler:
    """The batch sampler of a DataLoader: yields the rows of each number."""

    def __init__(self, batches: NumberedBatches) -> None:
        self._batches = batches
        self.numbers: Iterator[int] = iter(())

    def __iter__(self) -> Iterator[list[int]]:
        for number in self.numbers:
            yield self._batches.rows_of(number).tolist()


def _reader(source: Any) -> tuple[Callable[[torch.Tensor], Any], int]:
    """Returns a function that reads rows of the data, and the number of rows."""
    if isinstance(source, Split):
        return lambda rows: (source.inputs(rows), source.labels.index_select(0, rows)), len(source.labels)
    tensors: Sequence[Any] | None = None
    if isinstance(source, TensorDataset):
        tensors = source.tensors
    elif isinstance(source, torch.Tensor):
        return lambda rows: source.index_select(0, rows.to(source.device)), len(source)
    elif isinstance(source, tuple | list) and source and all(isinstance(t, torch.Tensor) for t in source):
        tensors = source
    if tensors is not None:
        found = tuple(tensors)
        if len({len(t) for t in found}) != 1:
            raise ConfigError(f"data: tensors of {[len(t) for t in found]} rows; must have the same length")
        return lambda rows: tuple(t.index_select(0, rows.to(t.device)) for t in found), len(found[0])
    if isinstance(source, IterableDataset) or not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        raise ConfigError(
            f"data={type(source).__name__}: must be tensors of the same length, a data set with a length and items by index, "
            "or a DataLoader over one; a stream cannot be shared by number"
        )
    items: Any = source
    return lambda rows: collate([items[i] for i in rows.tolist()]), len(source)
