"""DataLoaders inside `for epoch in session.epochs(...)`: how many batches the loop has taken from each, and which of them to skip.

A loop over a DataLoader is the program's own, so it is watched where every DataLoader begins: in `DataLoader.__iter__`, which is replaced
while a loop over epochs runs (ADR 0053). What always holds: outside of such a loop, and on other threads, DataLoaders are torch's own;
batches come out as they are; a loader that nothing is trained from is not ended, counted or waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from torchquorum.session.accelerated import reads_ahead
from torchquorum.session.position import Generators, decode_state, encode_state

Begin = Callable[[DataLoader[Any]], Iterator[Any]]


class LoaderWatcher(Protocol):
    """Who is told what a loop does with a DataLoader."""

    def begin_loader(self, loader: DataLoader[Any], begin: Begin) -> Iterator[Any]:
        """A loop over a DataLoader begins; `begin` makes torch's own iterator."""
        ...


_watching: dict[int, LoaderWatcher] = {}
_torchs = DataLoader.__iter__


def _iterate(self: DataLoader[Any]) -> Iterator[Any]:
    watcher = _watching.get(threading.get_ident())
    return _torchs(self) if watcher is None else watcher.begin_loader(self, _torchs)


@contextmanager
def watched(watcher: LoaderWatcher) -> Iterator[None]:
    """Inside this block the watcher hears of every loop over a DataLoader on this thread."""
    thread = threading.get_ident()
    _watching[thread] = watcher
    DataLoader.__iter__ = _iterate  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        del _watching[thread]
        if not _watching:
            DataLoader.__iter__ = _torchs


@contextmanager
def unwatched() -> Iterator[None]:
    """Inside this block DataLoaders are torch's own on this thread."""
    watcher = _watching.pop(thread := threading.get_ident(), None)
    try:
        yield
    finally:
        if watcher is not None:
            _watching[thread] = watcher


class LoaderBatches:
    """The batches of one loop over a DataLoader.

    Args:
        loader: The DataLoader.
        begin: Makes torch's iterator.
        skipped: What `place` returned in the run before, whose batches are not read again.
        more: How many batches are skipped beyond that.
        stops: Whether a loop that trains is to end before its next batch; asked before each.
        ended: Is called when a loop ends, and before the loop hears of it.

    Attributes:
        taken: How many batches were taken, with those that were skipped.
        skipped: How many were skipped.
        trained: Whether a step was made with some of them, now or in the run before.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        begin: Begin,
        *,
        skipped: dict[str, Any],
        more: int,
        stops: Callable[[], bool],
        ended: Callable[[LoaderBatches], None],
    ) -> None:
        self._stops, self._ended = stops, ended
        self._over = self._told = False
        now = Generators.now()
        if skipped:
            _set_generators(loader, skipped)
        self._begun_at = _generators(loader)
        self._inner: Any = begin(loader)
        self.taken = 0
        count = int(skipped.get("taken", 0)) + more
        self.trained = count > 0
        while self.taken < count and not self._over:
            self.taken += 1
            self._over = next(self._inner, self) is self
        self.skipped = self.taken
        if skipped:
            now.restore()

    def __iter__(self) -> LoaderBatches:
        return self

    def __next__(self) -> Any:
        if not self._over and not (self.trained and self._stops()):
            batch = next(self._inner, self)
            if batch is not self:
                self.taken += 1
                return batch
        self._over = True
        if not self._told:
            self._told = True
            if self.trained or not self.taken:
                self._ended(self)
        raise StopIteration

    def __len__(self) -> int:
        return len(self._inner) - self.skipped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def place(self) -> dict[str, Any]:
        """Returns where the loop is, as JSON values; a loop that nothing was trained from begins anew."""
        ahead = 0 if self._over else reads_ahead()
        return {"taken": self.taken - ahead, **self._begun_at} if self.trained else {}


def _own(loader: DataLoader[Any]) -> dict[str, torch.Generator]:
    """Returns the random number generators that belong to a DataLoader and its samplers."""
    found: dict[str, torch.Generator] = {}
    for name, of in (
        ("loader", loader),
        ("sampler", loader.sampler),
        ("batches", getattr(loader.batch_sampler, "sampler", None)),
    ):
        generator = getattr(of, "generator", None)
        if isinstance(generator, torch.Generator) and generator not in found.values():
            found[name] = generator
    return found


def _generators(loader: DataLoader[Any]) -> dict[str, Any]:
    own = {name: encode_state(generator.get_state()) for name, generator in _own(loader).items()}
    return {"torch": encode_state(torch.get_rng_state()), **own}


def _set_generators(loader: DataLoader[Any], begun_at: dict[str, Any]) -> None:
    if "torch" in begun_at:
        torch.set_rng_state(decode_state(begun_at["torch"]))
    for name, generator in _own(loader).items():
        if name in begun_at:
            generator.set_state(decode_state(begun_at[name]))
