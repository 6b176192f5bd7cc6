"""`session.epochs(...)`: a worker's loop over epochs, which all workers leave together, and where it is in one.

A hook of its session, because it has to know which batches a step was made of, and a source of data whose position is saved with the run.
Owned by the training loop's thread; it asks ps task 0 over the link until it may go on (`torchquorum.rules.barriers` decides). What
always holds: after a loop over training data the model holds the version that all workers have made of the epoch; a run that goes on
yields its epoch again, with the batches left out that its variables have; every wait says for whom, and ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.utils.data import DataLoader

import torchquorum.wire.messages as m
from torchquorum.data.sampler import samplers_of
from torchquorum.errors import ConfigError, DeadlineError
from torchquorum.session.accelerated import reads_ahead
from torchquorum.session.hooks.hook import Hook
from torchquorum.session.join import Task
from torchquorum.session.loaders import Begin, LoaderBatches, LoaderPlace, kind_of, watched
from torchquorum.worker.link import Link
from torchquorum.worker.optimizer import Optimizer
from torchquorum.worker.polls import NOTICE_EVERY_S, notice_losses

EPOCHS = "~epochs"
POLL_S, SLOW_POLL_S = 0.005, 0.05
_Answer = TypeVar("_Answer")


class EpochSession(Protocol):
    """What a loop over epochs needs of its session."""

    task: Task
    model: nn.Module
    optimizer: Optimizer
    logdir: str | None

    def should_stop(self) -> bool:
        """Whether the run is over."""
        ...

    def surviving(self, ask: Callable[[], _Answer]) -> _Answer:
        """Asks the ps tasks for something; if one is lost meanwhile, finds it again and asks once more."""
        ...

    def pull(self) -> int:
        """Takes the current version into the model."""
        ...


class _Pace:
    """How many batches a program takes for how many gradients: one for two in a GAN, four for one where gradients are accumulated.

    Attributes:
        now: Batches and gradients of this epoch, counted where a batch begins after a step.
    """

    def __init__(self) -> None:
        self.now, self._run, self._before, self._told = (0, 0), (0, 0), 0, 0

    def begin(self, status: m.BarrierStatus) -> None:
        """An epoch begins: `status` says what is known of the run, and how many gradients this worker has given already."""
        self.now, self._run, self._before, self._told = (0, 0), status.pace, status.steps, status.pace[1]

    def note(self, batches: int, steps: int) -> bool:
        """A batch begins; returns whether ps task 0 should hear of the count: when it is twice what it knows, unless that is one to one."""
        steps -= self._before
        if steps <= self.now[1]:
            return False
        self.now = batches, steps
        if steps < 2 * self._told or (batches == steps and not self._told):
            return False
        self._told = steps
        return True

    def batches(self, steps: int) -> int:
        """Returns how many whole batches so many gradients were computed from."""
        taken, given = self._run
        return steps * taken // given if given else steps


class EpochLoop(Hook):
    """One worker's place in the epochs of a run.

    Args:
        session: The session.
        waits_for: How many workers the program waits for at its beginning, if it says so.

    Attributes:
        running: Whether a loop over `session.epochs` runs.
        epoch: The epoch that it is in.
    """

    def __init__(self, session: EpochSession, waits_for: int | None = None) -> None:
        self._session, self._waits_for = session, waits_for
        self.running = self._closed = False
        self.epoch = self._stage = self._steps = self._barriers = 0
        self._ended = False  # all workers have used up their data of this epoch
        self._loaders: list[LoaderPlace] = []
        self._given: list[LoaderPlace] = []  # those that have given a batch since the last step, in that order
        self._leading: LoaderPlace | None = None  # the loop that steps begin with
        self._skipped: list[dict[str, Any]] = []  # of this epoch's loops that steps were made from, in the run before
        self._more = 0  # batches used up beyond those, of each loop that begins before any batch is taken
        self._pace = _Pace()
        self._restored: dict[str, Any] = {}

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self, count: int | None) -> Iterator[int]:
        """See `tq.Session.epochs`."""
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 0):
            raise ConfigError(f"session.epochs({count!r}): must be a whole number, such as 10; None for no end")
        if self.running:
            raise ConfigError("session.epochs() inside a loop over session.epochs(): a run has one sequence of epochs")
        return self._run(count)

    def _run(self, count: int | None) -> Iterator[int]:
        session = self._session
        self.running = True
        try:
            session.surviving(lambda: self._link.wait_for_workers(self._members, begins=True))
            self._begin(self._ask(), count)
            while (count is None or self.epoch < count) and not session.should_stop():
                if not self._ended:
                    with watched(self):
                        yield self.epoch
                if session.should_stop():
                    break
                self._send_position()
                self._begin(self._wait_for_all(self.epoch + 1, 0), count)
                self._link.positions.renew(self._link.version)
            if count is not None and self.epoch >= count:
                self._send_position()
        finally:
            self.running = False

    @property
    def _members(self) -> int:
        """Returns how many workers begin the first epoch together: all that a launcher starts, as its data is divided among them."""
        task = self._session.task
        return self._waits_for or (task.num_workers if task.launched and not task.cluster.elastic else 1)

    def _begin(self, now: m.BarrierStatus, count: int | None) -> None:
        """The epoch that ps task 0 has named begins, or goes on, for this worker."""
        session, restored = self._session, self._restored
        self._restored = {}
        self.epoch, self._stage, self._steps = max(now.epoch, self.epoch), 0, now.steps
        self._pace.begin(now)
        self._loaders, self._given, self._leading, self._skipped, self._ended = [], [], None, [], False
        self._more = self._pace.batches(now.steps)
        if restored.get("epoch") == self.epoch:
            self._skipped, self._ended = list(restored.get("loaders", [])), bool(restored.get("ended"))
            self._more = self._pace.batches(max(0, now.steps - int(restored.get("steps", 0))))
        here = session.task.index
        part = now.members.index(here) if here in now.members else None
        for sampler in samplers_of(session.task):
            sampler.set_epoch(self.epoch)
            sampler.divide(part, max(1, len(now.members)))
        behind = sum(int(place.get("taken", 0)) for place in self._skipped if place.get("leads", True)) + self._more
        if (self.epoch or behind) and (restored or behind) and (count is None or self.epoch < count):
            of = f" of {count}" if count is not None else ""
            after = f", after {behind} batches" if behind and not self._ended else ""
            session.optimizer.say(f"goes on in epoch {self.epoch + 1}{of}{after}")

    # -- a loop over data ---------------------------------------------------------------------------------------------

    def begin_loader(self, loader: DataLoader[Any], begin: Begin) -> Iterator[Any]:
        """The program begins a loop over a DataLoader."""
        if not torch.is_grad_enabled():
            return begin(loader)  # an evaluation
        kind, trains = kind_of(loader), self._session.model.training
        skipped = next((place for place in self._skipped if place.get("of", kind) == kind), {})
        if skipped:
            self._skipped.remove(skipped)
        begins = bool(skipped) or (trains and not any(place.taken for place in self._loaders))
        batches = LoaderBatches(loader, begin, skipped=skipped, more=self._more if begins else 0, watcher=self)
        self._loaders.append(batches.place)
        return batches

    def next_comes(self) -> bool:
        """A loop that steps begin with is about to take its next batch; returns whether the run is over."""
        if self._pace.note(sum(p.taken - p.skipped for p in self._loaders if p.leads) - reads_ahead(), self._steps):
            self._ask(self._pace.now)
        return self._session.should_stop()

    def batch_taken(self, place: LoaderPlace) -> None:
        """A batch goes to the program: the next step may be made with it."""
        self._more = 0
        if place not in self._given and torch.is_grad_enabled():
            self._given.append(place)

    def loop_ended(self, place: LoaderPlace) -> None:
        """A loop has used its last batch; one that an earlier epoch has begun says nothing of this one."""
        if place in self._loaders:
            self.data_ended()

    def data_ended(self) -> None:
        """This worker has used its last batch of a loop: waits for the others, and takes the version that all have made."""
        if not self.running or not torch.is_grad_enabled():
            return
        if not self._session.should_stop():
            self._stage += 1
            self._send_position()
            self._wait_for_all(self.epoch, self._stage)
        self._session.pull()
        if not self._session.should_stop():
            self._ended = True
            self._link.positions.renew(self._link.version)

    def before_run(self, session: object) -> None:
        """A step is about to be pushed: what the program has taken from its loops since the one before is part of it."""
        if self.running:
            self._steps += 1
            self._ended = False
            those, self._given = [place for place in self._given if place.in_use], []
            if those and (self._leading is None or self._leading.over or not self._leading.in_use):
                self._leading = those[0]
            for place in those:
                place.trained, place.leads = True, place is self._leading

    # -- waiting for others -------------------------------------------------------------------------------------------

    def barrier(self, timeout_s: float | None) -> None:
        """See `tq.Session.barrier`."""
        if timeout_s is not None and timeout_s <= 0:
            raise ConfigError(f"session.barrier(timeout_s={timeout_s}): must be more than 0 seconds")
        self._barriers += 1
        self._wait_for_all(0, 0, barrier=self._barriers, limit_s=timeout_s)

    def _ask(self, pace: tuple[int, int] = (0, 0)) -> m.BarrierStatus:
        """Asks which epoch the run is in, and tells what is known of this worker's pace."""
        self._finish_request()
        return self._session.surviving(lambda: self._question(m.AtBarrier(*self._life, 0, wait=False, pace=pace)))

    def _finish_request(self) -> None:
        if self._link.joined is not None:
            self._link.joined.finish_request()

    def _wait_for_all(
        self, epoch: int, stage: int, *, barrier: int = 0, limit_s: float | None = None
    ) -> m.BarrierStatus:
        """Waits until all live workers have come as far; returns where the run is then."""
        self._finish_request()
        return self._session.surviving(lambda: self._wait(m.AtBarrier(*self._life, 0, epoch, stage, barrier), limit_s))

    def _wait(self, asked: m.AtBarrier, limit_s: float | None) -> m.BarrierStatus:
        end = self._link.end
        seen = end.patience.seen_time(end.clock)
        began = moved = reported = noticed = seen.now()
        progress, polls = -1, 0
        while not (answer := self._question(asked)).opened and not answer.stopped and not self._session.should_stop():
            now, polls = seen.turn(), polls + 1
            if answer.progress != progress:
                progress, moved = answer.progress, now
            since = began if limit_s is not None else moved
            what = "at session.barrier()" if asked.barrier else f"at the end of epoch {asked.epoch + (asked.stage > 0)}"
            missing = ", ".join(f"/job:worker/task:{worker}" for worker in answer.missing[:8])
            if now - since > (limit_s if limit_s is not None else end.patience.round_s):
                raise DeadlineError(
                    f"{end.task}: waited {now - began:.0f} s {what} for {missing}, which are alive and do not come. Do all workers run "
                    "the same lines? `torchquorum status` says what they do."
                )
            if now - noticed >= NOTICE_EVERY_S:
                noticed = now
                notice_losses(self._link.channels, f"the others {what}", end.patience.round_s)
            if now - reported >= end.patience.say_s:
                reported = now
                end.tell(f"waiting {what} for {missing}: {now - began:.0f} s")
            end.clock.sleep(POLL_S if polls < 20 else SLOW_POLL_S)
        if answer.stopped and not self._link.stopped:
            self._session.pull()
        return answer

    def _question(self, asked: m.AtBarrier) -> m.BarrierStatus:
        link = self._link
        asked.worker, asked.incarnation = link.end.index, link.incarnation
        answer = link.channels.finish(link.channels.question(asked), "the end of the others' epoch")[0]
        assert isinstance(answer, m.BarrierStatus)
        return answer

    @property
    def _link(self) -> Link:
        link = self._session.optimizer.link
        if link is None:
            raise ConfigError("the session is over; take epochs inside its `with` block")
        return link

    @property
    def _life(self) -> tuple[int, int]:
        return self._link.end.index, self._link.incarnation

    # -- where it is --------------------------------------------------------------------------------------------------

    @property
    def in_use(self) -> bool:
        """Whether there is something to save."""
        return self.running

    def state_dict(self) -> dict[str, Any]:
        """Returns where the loop is, as JSON values."""
        places = [place.saved() for place in self._loaders if place.trained]
        return {"epoch": self.epoch, "steps": self._steps, "ended": self._ended, "loaders": places}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to a position in the run before; a loop that runs stays where it is."""
        if self.running:
            self._session.optimizer.say(
                f"the epoch goes on where it is, in epoch {self.epoch + 1}: what was lost is not read again"
            )
        else:
            self._restored = dict(state)

    def after_create_session(self, session: object) -> None:
        """The session has recovered: ps task 0 hears which epoch the loop is in."""
        if self.running:
            self._question(m.AtBarrier(*self._life, 0, self.epoch, wait=False))

    def _send_position(self) -> None:
        """Others may save while this worker waits: ps task 0 has its position then."""
        if self._session.logdir is not None:
            self._link.positions.send(self._link.version, final=True)
