"""`session.share(...)`: the worker's side of data that ps task 0 hands out by batch.

Owned by the training loop's thread, which takes batches from it; a hook of its session, because it has to know when a step
is pushed. It asks ps task 0 over the worker's link, for batches that are needed soon. What always holds: ps task 0 knows, before a
gradient is pushed, which batches it was computed from; so a worker may die at any moment, and the batches that it has not
finished go to others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import msgspec

import torchquorum.wire.messages as m
from torchquorum.data.numbered import NumberedBatches
from torchquorum.errors import ConfigError, DeadlineError
from torchquorum.session.epochs import EpochLoop
from torchquorum.session.hooks.hook import Hook, Ran
from torchquorum.session.loaders import unwatched
from torchquorum.wire.rpc import Arrived, Pending, error_of
from torchquorum.worker.link import Link
from torchquorum.worker.optimizer import Optimizer
from torchquorum.worker.polls import NOTICE_EVERY_S, notice_losses

AHEAD = 8
POLL_S = 0.02
_NOTHING = object()
_Answer = TypeVar("_Answer")


class ShareSession(Protocol):
    """What a share needs of its session."""

    optimizer: Optimizer
    hooks: list[Hook]
    epoch_loop: EpochLoop

    @property
    def local_step(self) -> int:
        """Returns how many gradients this worker has computed."""
        ...

    def should_stop(self) -> bool:
        """Whether the run is over."""
        ...

    def surviving(self, ask: Callable[[], _Answer]) -> _Answer:
        """Asks the ps tasks for something; if one is lost meanwhile, finds it again and asks once more."""
        ...


class Share(Hook):
    """This worker's part of the data: an iterator over the batches that it is given.

    Made by `session.share`. It ends when every batch of all epochs is used, and when the session should stop. The batches
    that are taken between two `optimizer.step()` count as used by the second.

    Attributes:
        epoch: The epoch of the last batch that was taken, from 0.
        number: Its number, counted over all epochs, from 0; -1 before the first.
        batches_per_epoch: How many batches an epoch has, for all workers together.
    """

    every_optimizer = True

    def __init__(self, session: ShareSession, batches: NumberedBatches, epochs: int | None, name: str) -> None:
        self._session, self._batches = session, batches
        by_epoch = session.epoch_loop.running
        self._spec = m.ShareSpec(
            name, batches.rows, batches.batch_size, batches.per_epoch, epochs, batches.seed, by_epoch
        )
        self.given: Any = None
        self.batches_per_epoch = batches.per_epoch
        self.epoch, self.number = 0, -1
        self._ahead = max(AHEAD, batches.ahead + 4)
        self._stream: Iterator[Any] | None = None
        self._handed: list[int] = []  # that the loop has taken since the last step
        self._tainted = False  # what the loop computes now is of batches that are not this worker's any more
        self._drop()
        self._void = False

    def _drop(self) -> None:
        """Forgets what it holds: ps task 0 has it, or is going to hear that this worker has not."""
        self._leases: deque[int] = deque()  # not yet read
        self._fed: deque[int] = deque()  # being read by the processes of a DataLoader
        self._tainted |= bool(self._handed)
        self._handed = []
        self._planned: dict[int, int] = {}  # of all these: the local step that ps task 0 believes each is for
        self._per_step = 1
        self._asked: Pending | None = None  # for more batches
        self._stream = None
        self._void, self._over = True, False

    # -- the loop -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Share:
        return self

    def __next__(self) -> Any:
        while not self._session.should_stop():
            if self._batches.ahead == 0:
                number = self._session.surviving(self._wait)
                if number is None:
                    break
                return self._hand(number, self._batches.fetch(number))
            if self._stream is None:
                number = self._session.surviving(self._wait)
                if number is None:
                    break
                self._leases.appendleft(number)
                with unwatched():
                    self._stream = self._batches.stream(self._feed())
            batch = next(self._stream, _NOTHING)
            if batch is _NOTHING or not self._fed:
                self._stream = None  # nothing more was to be had just then; or what was read is others' now
            else:
                return self._hand(self._fed.popleft(), batch)
        self.close()
        if self._spec.by_epoch:
            self._session.epoch_loop.data_ended()
        raise StopIteration

    def begin_epoch(self, epoch: int) -> None:
        """Goes on with the batches of an epoch, in a loop over `session.epochs`."""
        self._spec = msgspec.structs.replace(self._spec, epochs=epoch + 1)
        self._over = False

    @property
    def last_epoch(self) -> int:
        """Returns the last epoch that it has batches of, or -1 where there is no end."""
        return -1 if self._spec.epochs is None else self._spec.epochs - 1

    def __len__(self) -> int:
        """Returns how many batches all workers together are given."""
        if self._spec.epochs is None:
            raise TypeError("a share without an end has no length")
        if self._spec.by_epoch:
            return self._spec.batches
        return self._spec.batches * self._spec.epochs

    def _hand(self, number: int, batch: Any) -> Any:
        self.number, self.epoch = number, number // self.batches_per_epoch
        self._handed.append(number)
        self._session.surviving(self._ask_in_time)
        return batch

    def _feed(self) -> Iterator[int]:
        """Numbers for the processes of a DataLoader, as long as there are some to be had."""
        while not self._over:
            if not self._leases and self._asked is None:
                self._ask_for_more()
            if not self._leases and self._asked is not None:
                self._session.surviving(self._finish_asking)
            if not self._leases:
                return
            number = self._leases.popleft()
            self._fed.append(number)
            yield number

    # -- around a step ------------------------------------------------------------------------------------------------

    def before_run(self, session: object) -> None:
        """A step is about to be pushed: ps task 0 has to know which batches it was computed from."""
        step, surviving = self._session.local_step + 1, self._session.surviving
        # An answer that is on its way may be about this step: it is waited for.
        if self._asked is not None and min(self._asked.message.steps) <= step:
            surviving(self._finish_asking)
        # All is known that ps task 0 believes about this step; where the loop did otherwise, it hears of it.
        planned = [n for n, s in self._planned.items() if s <= step]
        if sorted(planned) != sorted(self._handed) and not self._tainted:
            self._settle(step)
        for number in self._handed:
            self._planned.pop(number, None)
        self._handed = []
        if self._tainted:
            surviving(lambda: self._disown(step))
            self._tainted = False

    def _disown(self, step: int) -> None:
        """The gradient of this step is of batches that others have: says so, and it will be refused."""
        self._drop()
        self._ask_for_more(void=step)
        self._finish_asking()

    def _settle(self, step: int) -> None:
        """The loop takes more or fewer batches per step than was foreseen: tells for which steps they are."""
        session = self._session
        session.surviving(self._finish_asking)
        if self._tainted:
            return
        handed = self._handed
        self._per_step = max(1, len(handed))
        self._planned = dict.fromkeys(handed, step)
        for place, number in enumerate([*self._fed, *self._leases]):
            self._planned[number] = step + 1 + place // self._per_step
        if self._planned:
            steps = list(self._planned.items())
            session.surviving(lambda: self._tell_steps(steps))

    def _tell_steps(self, steps: list[tuple[int, int]]) -> None:
        question = self._link.channels.question(m.UseBatches(*self._life, 0, self._spec.name, steps))
        self._link.channels.finish(question, "ps task 0 to note its batches")

    def after_run(self, session: object, ran: Ran) -> None:
        """A gradient that was refused as expired says that this worker was taken for dead: others have its batches."""
        if ran.step.accepted is False and ran.step.reason == "expired":
            self._drop()

    def after_create_session(self, session: object) -> None:
        """The session has recovered: whatever was held is asked for anew."""
        self.close()
        self._drop()

    def end(self, session: object) -> None:
        """The run is over for this worker."""
        self.close()

    def close(self) -> None:
        """Ends the processes of a DataLoader."""
        self._stream = None

    # -- ps task 0 ----------------------------------------------------------------------------------------------------

    @property
    def _link(self) -> Link:
        link = self._session.optimizer.link
        if link is None:
            raise ConfigError("the session is over; take batches inside its `with` block")
        return link

    @property
    def _life(self) -> tuple[int, int]:
        return self._link.end.index, self._link.incarnation

    def _wait(self) -> int | None:
        """Returns the next batch's number, once there is one for this worker; None when all are used, or it should stop."""
        session, end = self._session, self._link.end
        started = reported = noticed = end.clock.now()
        while not self._over and not session.should_stop():
            self._receive()
            if not self._leases and self._asked is None:
                self._ask_for_more(idle=True)
            if not self._leases:
                self._finish_asking()
            if self._leases:
                return self._leases.popleft()
            if self._over:
                break
            # Ps task 0 has answered that others have all batches that are left.
            now = end.clock.now()
            if now - started > end.patience.round_s:
                raise DeadlineError(
                    f"{end.task}: waited {now - started:.0f} s for a batch of {self._spec.name!r}: other workers have all "
                    "that are left, and do not finish them. Look at `torchquorum status`, which says who they are."
                )
            if now - noticed >= NOTICE_EVERY_S:
                noticed = now
                session.surviving(lambda: notice_losses(self._link.channels, "a batch", end.patience.round_s))
            if now - reported >= end.patience.say_s:
                reported = now
                end.tell(f"waiting for a batch, others have those that are left: {now - started:.0f} s")
            end.clock.sleep(POLL_S)
        return None

    def _receive(self) -> None:
        """Takes an answer that has come."""
        if self._asked is not None:
            self._link.attend()
            if (arrived := self._asked.take()) is not None:
                self._take_batches(arrived)

    def _ask_in_time(self) -> None:
        """Asks for more while there is still something to compute."""
        self._receive()
        if self._asked is None and not self._over and len(self._leases) + len(self._fed) <= self._ahead // 2:
            self._ask_for_more()

    def _ask_for_more(self, *, idle: bool = False, void: int | None = None) -> None:
        leased = len(self._handed) + len(self._fed) + len(self._leases)
        if void is None:
            void = self._session.local_step if self._void else -1
        first = max(self._session.local_step, void) + 1
        last = max(self._planned.values(), default=first - 1)
        of_last = sum(step == last for step in self._planned.values()) if last >= first else self._per_step
        steps = [last + (of_last + i) // self._per_step for i in range(max(1, self._ahead - leased))]
        self._asked = self._link.channels.question(m.TakeBatches(*self._life, 0, self._spec, steps, void, idle))

    def _finish_asking(self) -> None:
        """Waits for the answer to what was asked."""
        if self._asked is not None:
            self._take_batches(self._link.channels.finish(self._asked, "its share of the data"))

    def _take_batches(self, arrived: Arrived) -> None:
        """Takes the batches that an answer leases to this worker."""
        answer, asked = arrived[0], self._asked
        if isinstance(answer, m.Fault):
            raise error_of(answer)
        if not isinstance(answer, m.LeasedBatches) or asked is None:
            return
        self._asked = None
        if answer.void:
            self._drop()
            return
        self._void = False
        self._over = answer.over
        self._leases.extend(answer.numbers)
        self._planned.update(zip(answer.numbers, asked.message.steps, strict=False))


def make_share(
    session: ShareSession,
    data: Any,
    batch_size: int | None,
    *,
    epochs: int | None,
    seed: int,
    shuffle: bool | None,
    drop_last: bool | None,
    name: str,
) -> Share:
    """Makes the share of a session, whose arguments it checks; see `tq.Session.share`."""
    if epochs is not None and (isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1):
        raise ConfigError(f"epochs={epochs!r}: must be a whole number, 1 or more; None for no end")
    if not isinstance(name, str) or not name or len(name) > 200 or name.startswith("~"):
        raise ConfigError(f"name={name!r}: must be a text, such as 'data'")
    loop, given = session.epoch_loop, (data, batch_size, seed, shuffle, drop_last)
    if loop.running and epochs != 1:
        raise ConfigError(
            f"session.share(epochs={epochs}) in a loop over session.epochs(): it is one epoch at a time; leave epochs out"
        )
    named = next((hook for hook in session.hooks if isinstance(hook, Share) and hook._spec.name == name), None)
    if named is not None and not (loop.running and named._spec.by_epoch and named.last_epoch < loop.epoch):
        raise ConfigError(f"session.share(name={name!r}): there is one of that name; give the second another")
    if named is not None and all(
        a is b or (i and a == b) for i, (a, b) in enumerate(zip(named.given, given, strict=True))
    ):
        named.begin_epoch(loop.epoch)
        return named
    batches = NumberedBatches(data, batch_size, seed=seed, shuffle=shuffle, drop_last=drop_last)
    share = Share(session, batches, loop.epoch + 1 if loop.running else epochs, name)
    share.given = given
    if named is not None:
        named.close()
        session.hooks.remove(named)
    session.hooks.append(share)
    return share
