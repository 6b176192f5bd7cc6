"""DataLoaders inside `for epoch in session.epochs(...)`: how many batches the loop has taken from each, and which of them to skip.

A loop over a DataLoader is the program's own, so it is watched where every DataLoader begins: in `DataLoader.__iter__`, which is replaced
while a loop over epochs runs (ADR 0053). What always holds: outside of such a loop, and on other threads, DataLoaders are torch's own;
batches come out as they are; a loader that nothing is trained from is not ended, counted or waited for.
"""

from __future__ import annotations

import threading
import weakref
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


class BatchWatcher(Protocol):
    """Who is told what becomes of the batches of such loops."""

    def next_comes(self) -> bool:
        """A loop that steps begin with is about to take its next batch; returns whether it is to end instead."""
        ...

    def batch_taken(self, place: LoaderPlace) -> None:
        """A batch goes to the program."""
        ...

    def loop_ended(self, place: LoaderPlace) -> None:
        """A loop that steps begin with, or one without any batch, has none left; the program has not heard of it yet."""
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


class LoaderPlace:
    """How far one loop over a DataLoader is, which outlives the loop.

    Args:
        of: Which of the program's loaders it is, as `kind_of` tells them apart.
        begun_at: The generators that its order was drawn from, as JSON values.

    Attributes:
        first_at: The program's generator before the first batch, for which a sampler draws its seed, if others have drawn since then.
        taken: How many batches were taken, with those that were skipped.
        skipped: How many were skipped.
        over: Whether it has no batch left.
        trained: Whether a step was made with some of them, now or in the run before.
        leads: Whether they are the first ones of a step: of a loop over `zip(a, b)` those of `a`.
    """

    def __init__(self, of: list[Any], begun_at: dict[str, Any]) -> None:
        self._of, self._begun_at = of, begun_at
        self.first_at = ""
        self.taken = self.skipped = 0
        self.over = self.trained = self.leads = False
        self._batches: weakref.ref[LoaderBatches] | None = None

    def follow(self, batches: LoaderBatches) -> None:
        """The loop has begun."""
        self._batches = weakref.ref(batches)

    @property
    def in_use(self) -> bool:
        """Whether the program still has the loop: one that an evaluation has begun and left is none of a step."""
        return self._batches is not None and self._batches() is not None

    def saved(self) -> dict[str, Any]:
        """Returns it as JSON values."""
        ahead = 0 if self.over else reads_ahead()
        first = {"first": self.first_at} if self.first_at else {}
        return {"of": self._of, "taken": self.taken - ahead, "leads": self.leads, **first, **self._begun_at}


class LoaderBatches:
    """The batches of one loop over a DataLoader.

    Args:
        loader: The DataLoader.
        begin: Makes torch's iterator.
        skipped: What `LoaderPlace.saved` returned in the run before, whose batches are not read again.
        more: How many batches are skipped beyond that.
        watcher: Is asked before each batch and told of each.

    Attributes:
        place: How far it is.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        begin: Begin,
        *,
        skipped: dict[str, Any],
        more: int,
        watcher: BatchWatcher,
    ) -> None:
        self._watcher, self._told = watcher, False
        now = Generators.now()
        if skipped:
            _set_generators(loader, skipped)
        self.place = place = LoaderPlace(kind_of(loader), _generators(loader))
        self._inner: Any = begin(loader)
        self._begun: torch.Tensor | None = torch.get_rng_state()
        if "first" in skipped:
            place.first_at = skipped["first"]
            torch.set_rng_state(decode_state(place.first_at))
        count = int(skipped.get("taken", 0)) + more
        place.trained, place.leads = count > 0, count > 0 and bool(skipped.get("leads", True))
        while place.taken < count and not place.over:
            place.taken += 1
            place.over = next(self._inner, self) is self
        place.skipped = place.taken
        place.follow(self)
        if count:
            self._begun = None
        if skipped:
            now.restore()

    def __iter__(self) -> LoaderBatches:
        return self

    def __next__(self) -> Any:
        place = self.place
        if not place.over and not (place.leads and self._watcher.next_comes()):
            if self._begun is not None:
                now, begun, self._begun = torch.get_rng_state(), self._begun, None
                place.first_at = "" if torch.equal(now, begun) else encode_state(now)
            batch = next(self._inner, self)
            if batch is not self:
                place.taken += 1
                self._watcher.batch_taken(place)
                return batch
        place.over = True
        if not self._told:
            self._told = True
            if place.leads or not place.taken:
                self._watcher.loop_ended(place)
        raise StopIteration

    def __len__(self) -> int:
        return len(self._inner) - self.place.skipped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def kind_of(loader: DataLoader[Any]) -> list[Any]:
    """Returns what tells a program's loaders apart, also after another start, as JSON values."""
    data = loader.dataset
    try:
        length = len(data)  # pyright: ignore[reportArgumentType]
    except TypeError:
        length = None
    return [type(data).__name__, length, loader.batch_size, type(loader.sampler).__name__]


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
