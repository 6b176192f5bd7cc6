"""Input threads: readers that prefetch batches, and the coordinator that ends them together.

Called by training loops. A `Prefetcher` owns one reader thread, the only one that touches the source of the batches; the loop
takes batches from a buffer of at most `depth`. What always holds: an exception in a reader stops all readers of its coordinator
and is raised in the loop, at its next batch; the end of the data is a StopIteration there; a position is that of the next
batch of the loop, whatever was read ahead; every wait has a deadline, except the loop's own for a batch, which ends when the
reader does.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Generic, TypeVar

from torchquorum.clock import SYSTEM, Clock
from torchquorum.errors import ConfigError, DeadlineError

GRACE_S = 10.0
_T = TypeVar("_T")
_numbers = itertools.count()


class Coordinator:
    """Ends several threads together, as tf.train.Coordinator. Thread-safe.

    Your own readers call `should_stop()` between two pieces of work. As a context manager it asks all threads to stop at
    the end of the block and waits for them.
    """

    def __init__(self, *, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._wakers: list[Callable[[], None]] = []

    def run(self, threads: Iterable[Prefetcher[Any] | threading.Thread | Callable[[], Any]]) -> list[threading.Thread]:
        """Starts prefetchers, threads and functions (one thread each), and coordinates them from now on.

        Returns:
            The threads.
        """
        started = []
        for given in threads:
            if isinstance(given, Prefetcher):
                started.append(given._start(self))
                continue
            thread = given
            if not isinstance(thread, threading.Thread):
                name = f"torchquorum-reader-{next(_numbers)}"
                thread = threading.Thread(target=self._guard, args=(thread,), name=name, daemon=True)
            self._adopt(thread)
            if thread.ident is None:
                thread.start()
            started.append(thread)
        return started

    def request_stop(self, error: BaseException | None = None) -> None:
        """Asks all threads to stop; the first error given is raised in the loop."""
        with self._lock:
            self._error = self._error or error
            self._stopped.set()
            wakers = list(self._wakers)
        for wake in wakers:
            wake()

    def should_stop(self) -> bool:
        """Whether a stop was requested."""
        return self._stopped.is_set()

    def wait_for_stop(self, timeout_s: float) -> bool:
        """Waits until a stop is requested, at most `timeout_s`; returns whether it was."""
        return self._clock.wait(self._stopped, timeout_s)

    def raise_if_failed(self) -> None:
        """Raises the error of a reader, if one has failed."""
        if self._error is not None:
            raise self._error

    @contextmanager
    def stop_on_exception(self) -> Iterator[None]:
        """In this block an exception stops all threads and is raised in the loop; StopIteration only ends the block."""
        try:
            yield
        except StopIteration:
            pass
        except BaseException as error:
            error.add_note(f"raised in {threading.current_thread().name}, which read ahead for the training loop")
            self.request_stop(error)

    def join(self, threads: Sequence[threading.Thread] | None = None, *, timeout_s: float = GRACE_S) -> None:
        """Waits until the threads have ended, and raises the error of the one that failed.

        Args:
            threads: The threads to wait for; default: all.
            timeout_s: How long they may take together.

        Raises:
            DeadlineError: Some did not end in time; they are named.
        """
        deadline = self._clock.now() + timeout_s
        with self._lock:
            waited_for = list(self._threads if threads is None else threads)
        for thread in waited_for:
            thread.join(max(0.0, deadline - self._clock.now()))
        self.raise_if_failed()
        stuck = [thread.name for thread in waited_for if thread.is_alive()]
        if stuck:
            raise DeadlineError(_stuck(stuck, timeout_s))

    def _guard(self, work: Callable[[], Any]) -> None:
        with self.stop_on_exception():
            work()

    def _adopt(self, thread: threading.Thread, wake: Callable[[], None] | None = None) -> None:
        with self._lock:
            self._threads.append(thread)
            if wake is not None:
                self._wakers.append(wake)

    def _release(self, thread: threading.Thread, wake: Callable[[], None]) -> None:
        with self._lock, suppress(ValueError):
            self._threads.remove(thread)
            self._wakers.remove(wake)

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.request_stop()
        if kind is None:
            self.join()
        else:
            with suppress(Exception):  # the exception of the block is the one to raise
                self.join()


def _stuck(names: Sequence[str], timeout_s: float) -> str:
    return (
        f"waited {timeout_s:g} s for {', '.join(names)} to end, and gave up: the source of the batches does not return. "
        "Check what its next batch waits for"
    )


class _Source:
    """Batches and their positions, in order. Owned by the reader's thread while it runs.

    A source with `state_dict` and `load_state_dict` knows its position. For any other source the position is the epoch and
    the batch in it, and going there reads the batches before it again.
    """

    def __init__(self, batches: Any, epochs: int | None) -> None:
        self._batches, self._epochs = batches, epochs
        self.stateful = hasattr(batches, "state_dict") and hasattr(batches, "load_state_dict")
        self.once = iter(batches) is batches if isinstance(batches, Iterator) else False
        self._iterator: Iterator[Any] | None = None
        self._epoch = self._batch = self._skip = 0

    def position(self) -> dict[str, Any]:
        """Returns the position of the next batch."""
        if self.stateful and self.once:
            return dict(self._batches.state_dict())
        position: dict[str, Any] = {"epoch": self._epoch, "batch": self._batch}
        if self.stateful:
            position["source"] = self._batches.state_dict()
        return position

    def go_to(self, position: Mapping[str, Any]) -> None:
        """Goes to a position; reads nothing before the next batch."""
        if self.stateful and self.once:
            self._batches.load_state_dict(position)
            return
        epoch, batch = position.get("epoch"), position.get("batch")
        if not isinstance(epoch, int) or not isinstance(batch, int) or epoch < 0 or batch < 0:
            raise ConfigError(
                f"a saved position with epoch={epoch!r} and batch={batch!r}: both must be whole numbers, 0 or more; was it "
                "saved from other batches?"
            )
        if self.once and (self._epoch, self._batch) != (0, 0):
            raise ConfigError("these batches can be read only once, and reading has begun: load the position first")
        self._epoch, self._batch, self._iterator = epoch, batch, None
        if self.stateful:
            self._batches.load_state_dict(position["source"])
        else:
            self._skip = batch

    def next(self) -> Any:
        """Returns the next batch.

        Raises:
            StopIteration: There is none.
        """
        while True:
            if self._iterator is None:
                if self._epochs is not None and not self.once and self._epoch >= self._epochs:
                    raise StopIteration
                self._iterator = self._begin()
            try:
                batch = next(self._iterator)
            except StopIteration:
                if self.once or (self._batch == 0 and self._skip == 0):
                    raise  # read once; or an epoch without batches, which would repeat for ever
                self._iterator, self._skip = None, 0
                self._epoch, self._batch = self._epoch + 1, 0
                continue
            if self._skip:
                self._skip -= 1
                continue
            self._batch += 1
            return batch

    def _begin(self) -> Iterator[Any]:
        for name in ("sampler", "dataset"):  # a DistributedSampler and a TFRecordDataset shuffle by epoch
            set_epoch = getattr(getattr(self._batches, name, None), "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self._epoch)
        return iter(self._batches)


class _Reader:
    """The thread, its buffer, and the position of the loop. Holds no reference to the Prefetcher, which may be collected."""

    def __init__(self, source: _Source, depth: int, coordinator: Coordinator) -> None:
        self.source, self._depth, self.coordinator = source, depth, coordinator
        self.position = source.position()
        self.taken = 0
        self._ready: deque[tuple[Any, dict[str, Any]]] = deque()
        self._changed = threading.Condition()
        self._stop = self._ended = False
        self.thread = threading.Thread(target=self._run, name=f"torchquorum-reader-{next(_numbers)}", daemon=True)
        coordinator._adopt(self.thread, self._wake)
        self.thread.start()

    def _run(self) -> None:
        try:
            with self.coordinator.stop_on_exception():
                while self._wait_for_room():
                    batch = self.source.next()
                    after = self.source.position()
                    with self._changed:
                        self._ready.append((batch, after))
                        self._changed.notify_all()
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _wait_for_room(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._over() or len(self._ready) < self._depth)
            return not self._over()

    def _over(self) -> bool:
        return self._stop or self.coordinator.should_stop()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    @property
    def waiting(self) -> int:
        """Returns how many batches are read and not yet taken."""
        with self._changed:
            return len(self._ready)

    def take(self) -> Any:
        """Returns the next batch; called by the loop."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended or self._over())
            self.coordinator.raise_if_failed()
            if self._over() or not self._ready:
                raise StopIteration
            batch, self.position = self._ready.popleft()
            self.taken += 1
            self._changed.notify_all()
            return batch

    def stop(self) -> None:
        """Asks the thread to end, without waiting."""
        with self._changed:
            self._stop = True
            self._ready.clear()
            self._changed.notify_all()

    def join(self, timeout_s: float) -> None:
        """Waits for the thread to end."""
        self.thread.join(timeout_s)
        self.coordinator._release(self.thread, self._wake)
        if self.thread.is_alive():
            raise DeadlineError(_stuck([self.thread.name], timeout_s))


def _stop_reader(reader: weakref.ref[_Reader]) -> None:
    living = reader()  # a running thread holds its reader
    if living is not None:
        living.stop()


class Prefetcher(Generic[_T]):
    """An iterator whose batches are read ahead by a separate thread. Used by one thread, that of the loop.

    The reader starts at the first batch, or when a coordinator runs it; from then on it owns the source, so take positions
    from the prefetcher and not from the source.

    Args:
        batches: The source: a `tq.Batches`, a DataLoader, any iterable or iterator of batches.
        depth: How many batches may be read ahead.
        epochs: Number of passes over an iterable, None for no end; an iterator is read once.
        coordinator: Ends this reader together with others; default: a new one.
    """

    def __init__(
        self,
        batches: Iterable[_T],
        depth: int = 4,
        *,
        epochs: int | None = 1,
        coordinator: Coordinator | None = None,
    ) -> None:
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
            raise ConfigError(f"depth={depth!r}: must be a whole number, 1 or more")
        if epochs is not None and (isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1):
            raise ConfigError(f"epochs={epochs!r}: must be a whole number, 1 or more; None for no end")
        if not hasattr(batches, "__iter__"):
            raise ConfigError(f"Prefetcher({type(batches).__name__}): must be an iterable of batches")
        self._source, self._depth = _Source(batches, epochs), depth
        self._coordinator = coordinator
        self._reader: _Reader | None = None
        self._taken = 0
        self._closed = False

    def __iter__(self) -> Prefetcher[_T]:
        return self

    def __next__(self) -> _T:
        if self._closed:
            raise StopIteration
        reader = self._reader
        if reader is None:
            self._start(None)
            reader = self._reader
            assert reader is not None
        return reader.take()

    def _start(self, coordinator: Coordinator | None) -> threading.Thread:
        if self._closed:
            raise ConfigError("this prefetcher is closed; create a new one")
        if self._reader is not None:
            if coordinator is not None and coordinator is not self._reader.coordinator:
                raise ConfigError(
                    "this prefetcher already runs with another coordinator; run it before its first batch"
                )
            return self._reader.thread
        self._coordinator = coordinator or self._coordinator or Coordinator()
        self._reader = _Reader(self._source, self._depth, self._coordinator)
        # A prefetcher that is garbage-collected stops its thread. The finalizer holds the reader weakly: a failed reader's
        # error refers, by its traceback, to the prefetcher, which would then never be collected.
        weakref.finalize(self, _stop_reader, weakref.ref(self._reader))
        return self._reader.thread

    @property
    def epoch(self) -> int:
        """Returns the epoch, from 0, of the next batch of the loop.

        If a source does not know the length of its epoch, the epoch ends when the first batch of the next one is taken.
        """
        return int(self._position().get("epoch", 0))

    @property
    def taken(self) -> int:
        """Returns how many batches the loop has taken."""
        return self._taken + (self._reader.taken if self._reader is not None else 0)

    @property
    def waiting(self) -> int:
        """Returns how many batches are read ahead now."""
        return self._reader.waiting if self._reader is not None else 0

    def _position(self) -> dict[str, Any]:
        return self._reader.position if self._reader is not None else self._source.position()

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the next batch of the loop, in the source's own form where it has one."""
        return dict(self._position())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved position; drops what was read ahead.

        Raises:
            ConfigError: The position is not valid for these batches.
        """
        if self._reader is not None:
            self._end_reader()
        self._source.go_to(state)

    def close(self) -> None:
        """Ends the reader; the next batch is a StopIteration.

        Raises:
            DeadlineError: The source does not return, so its thread cannot end.
        """
        self._closed = True
        if self._reader is not None:
            self._end_reader(keep=True)

    def _end_reader(self, *, keep: bool = False) -> None:
        reader = self._reader
        assert reader is not None
        reader.stop()
        reader.join(GRACE_S)
        if not keep:
            self._taken += reader.taken
            self._reader = None

    def __enter__(self) -> Prefetcher[_T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            with suppress(DeadlineError):  # the exception of the block is the one to raise
                self.close()
