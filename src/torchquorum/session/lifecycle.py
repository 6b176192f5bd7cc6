"""A worker's life in a run: it attaches, trains, recovers from the loss of a ps task, saves, and leaves.

`tq.Session` calls this for a task that trains; the optimizer calls `before_run`, `after_run` and `recover` around every step. All of it
runs on the thread of the training loop. What always holds: after `end` nothing is open any more; the state changes only by
`torchquorum.session.states`; a signal, the end of the run's time or a request to leave is seen at every step and during every wait.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from typing import TypeVar

from torchquorum.cluster.signals import Signals
from torchquorum.errors import (
    ConfigError,
    DeadlineError,
    InterruptedRunError,
    LostPlaceError,
    LostVariablesError,
    TaskLostError,
    TorchQuorumError,
    UpdateError,
)
from torchquorum.session.attach import Attachment, AttachRequest
from torchquorum.session.config import Setup
from torchquorum.session.durable import is_saved
from torchquorum.session.hooks.device_hook import SessionDevices
from torchquorum.session.hooks.hook import HookCalls
from torchquorum.session.join import Task, say
from torchquorum.session.presence import Presence
from torchquorum.session.recording import Determinism
from torchquorum.session.run_state import RunState
from torchquorum.session.share import Share
from torchquorum.session.start_note import note_start
from torchquorum.session.states import SessionState, StateMachine
from torchquorum.session.stop_condition import StopCondition
from torchquorum.session.stop_requests import StopRequests
from torchquorum.worker.link import Link
from torchquorum.worker.loaded_state import LoadedState
from torchquorum.worker.parameter_places import ParameterPlaces
from torchquorum.worker.polls import wait_until_saved
from torchquorum.worker.step import Step

_Answer = TypeVar("_Answer")
PAST_THE_END = 20  # steps after the end of the run before that is said: a loop may end only at the end of what it is in
_made: weakref.WeakSet[Lifecycle] = weakref.WeakSet()


class Lifecycle:
    """One worker's session with the ps tasks.

    Args:
        setup: What the task brings to the run.
        stop: When the run is over.
        hooks: The session's hooks.
        devices: Closed at the end, whatever happened.
        recorded: What the program has recorded for the report when the worker leaves.

    Attributes:
        states: The session's state.
        requests: Who wants this worker to stop.
        run: The run's variables, buffers and checkpoints.
        presence: Says after the session that the program goes on; None where it does not matter.
        confirms: Whether the chief confirms live variables before it continues with them; a client has done so for its compute tasks.
    """

    def __init__(
        self,
        setup: Setup,
        stop: StopCondition,
        hooks: HookCalls,
        devices: SessionDevices,
        recorded: Mapping[str, float],
    ) -> None:
        self._setup, self._stop, self._hooks, self._devices, self._recorded = setup, stop, hooks, devices, recorded
        self.states = StateMachine()
        self._attachment = Attachment(setup, stop, lambda: self.requests.check())
        self._connection = self._attachment.connection
        what = "saving and ending the run" if setup.task.is_chief else "leaving the run"
        self.signals = Signals(setup.say, what, lambda: self.requests.overdue(), setup.clock)
        self.requests = StopRequests(setup, stop, self._connection, self.states, self.signals)
        self.run = RunState(setup, self._attachment, self.signals, self.surviving)
        self.after_run = hooks.after_run
        self._places: ParameterPlaces | None = None
        self.confirms = True
        self.presence: Presence | None = None
        self._determinism = Determinism(setup.say)
        self._past_the_end = 0

    # -- begin, recover, end ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Takes this worker's place in the run."""
        task = self._setup.task
        if (pid := os.getpid()) != task.pid:
            raise ConfigError(
                f"tq.Session in process {pid}: it is a fork of {task}, process {task.pid}, which has called tq.join(); only that one "
                "takes part in the run. Start the session there, or give the child a task of its own: call tq.join() in it"
            )
        if any(other.trains(task) for other in _made if other is not self):
            raise ConfigError(
                f"{task} is in a session already: end that first, with session.close() or by leaving its block. To train several models "
                "at a time give them to one session: tq.Session(task, [a, b], [optimizer_a, optimizer_b])"
            )
        self.states.begin()
        _made.add(self)
        self._hooks.begin()
        if task.alone is not None:
            task.alone.start()
        if self._setup.member.record or task.replay is not None:
            self._determinism.begin()
        try:
            link = self._attachment.attach(
                AttachRequest(creates=task.is_chief, confirms=self.confirms, on_state=self.states.go)
            ).link
        except BaseException:
            self.states.go(SessionState.FAILED)
            self._close()
            raise
        if self.presence is not None:
            self.presence.pause()
        # What the journal has beyond the checkpoint, or what others have made since, is in no checkpoint yet.
        restored = link.version > 0 and (not task.is_chief or is_saved(self._setup.logdir, link.version))
        self.run.saved_step = link.version if restored else -1
        self._attach_optimizers(link)
        trained = (
            p for optimizer in self._setup.optimizers for group in optimizer.param_groups for p in group["params"]
        )
        self._places = ParameterPlaces(self._setup.model, trained)
        self._attachment.initializer.survive_by(self.surviving)
        self.signals.install()
        self._stop.start_clock()
        note_start(self._setup)
        self.states.go(SessionState.RUNNING)
        try:
            self._hooks.after_create_session()
        except BaseException as error:
            self.end(error)
            raise

    def trains(self, task: Task) -> bool:
        """Whether this is a session of that task, and is under way."""
        ended = (SessionState.NEW, SessionState.CLOSED, SessionState.FAILED)
        return self._setup.task is task and self.states.state not in ended

    def _attach_optimizers(self, link: Link) -> None:
        for track, optimizer in enumerate(self._setup.optimizers):
            optimizer.attach(link, self, track)

    def before_run(self) -> None:
        """A step is about to be pushed."""
        if self._places is not None:
            self._places.check()
        if self.link.stopped:
            self._step_past_the_end()
        self._hooks.before_run()

    def _step_past_the_end(self) -> None:
        """The run is over, and the program's loop goes on: it changes nothing any more, which is said, and a signal ends it."""
        self.requests.check()
        self._past_the_end += 1
        if self._past_the_end == PAST_THE_END:
            self._setup.say(
                f"the run is over at global step {self.link.version}, and this loop goes on: its steps change nothing. Leave the loop when "
                "session.should_stop() says so, or go through session.epochs(...)"
            )

    def recover(self, error: Exception) -> Step | None:
        """A ps task was lost: waits for it, and continues from what it holds or from a checkpoint.

        Called by the optimizer and by `surviving`. If the variables are where they were, a gradient that was being pushed is pushed
        again unless it had arrived; if they are back at a checkpoint, it is dropped.

        Returns:
            What became of the gradient that was being pushed, if one was and it was not dropped.

        Raises:
            LostVariablesError: There is nothing to continue from; or the loop is over and the run is back before its end.
        """
        task, start_s = self._setup.task, self._setup.patience.start_s
        after_loop = self.states.state is SessionState.STOPPING
        self.states.go(SessionState.RECOVERING)
        say(f"{error}\n{task}: trying to go on for {start_s:.0f} s")
        before = self.link
        reached = before.version
        self.requests.ended_at = reached if after_loop else None
        shares = any(isinstance(hook, Share) for hook in self._hooks.all)
        try:
            found = self._attachment.attach(
                AttachRequest(creates=task.is_chief, before=before, resumes=not after_loop, has_shares=shares)
            )
        except (TaskLostError, LostPlaceError, DeadlineError) as last:
            if not after_loop:
                raise
            self.states.go(SessionState.STOPPING)
            raise _lost_at_the_end(last) from None
        # Attached again: the model holds the version that the run continues at.
        link = found.link
        if after_loop:
            self._check_still_over(link.version)
        self._attach_optimizers(link)
        self.states.go(SessionState.STOPPING if after_loop else SessionState.RUNNING)
        back = f", {found.steps_back} steps before where it was" if found.steps_back else ""
        if found.steps_back and found.version > reached - found.steps_back:
            back = f"; {found.steps_back} steps that this task had seen are lost, others have gone on since"
        self._setup.say(f"going on at global step {found.version}{back}")
        if not after_loop:
            self._hooks.after_create_session()
        return found.resumed

    def _check_still_over(self, version: int) -> None:
        """A ps was lost after the loop: that does no harm unless the run has lost steps that no worker will make again."""
        task, last_step = self._setup.task, self._stop.last_step
        if task.is_chief and last_step is not None and version < last_step:
            raise LostVariablesError(
                f"{task}: a ps task was lost after the last step and before the last checkpoint: the run is back at "
                f"global step {version} of {last_step}. Start the program again: it goes on from there."
            )

    def surviving(self, ask: Callable[[], _Answer]) -> _Answer:
        """Asks the ps tasks for something; if one is lost meanwhile, recovers and asks once more."""
        while True:
            try:
                return ask()
            except (LostPlaceError, TaskLostError) as error:
                self.recover(error)

    def end(self, error: BaseException | None) -> None:
        """Ends the hooks, unless the block ended with an error, and leaves the run; `sys.exit()` in the block is no error.

        Raises:
            InterruptedRunError: A signal has ended the loop, and all is done that was to be done then.
        """
        if os.getpid() != self._setup.task.pid:
            return  # a fork of this worker has run out of its block: what is open here belongs to the worker
        finished = error is None or (isinstance(error, SystemExit) and not error.code)
        finished = finished or error is self.requests.interrupted
        if isinstance(error, UpdateError) and self._setup.task.alone is not None:
            error.__cause__ = self._setup.task.alone.failure
        if self.states.state is not SessionState.FAILED:
            self.states.go(SessionState.STOPPING if finished else SessionState.FAILED)
        try:
            if finished and self.signals.asked:
                self.requests.check()  # if the program has not: the chief ends the run for all
            if finished and (self.link.pipeline or self.link.requests.is_open):
                self.run.pull()
            if finished:
                self.surviving(self._look_for_writes)
                self._hooks.end()
                self._attachment.initializer.give_rows_back()
            if finished and not self._setup.task.is_chief:
                self._see_that_it_is_saved()
            if finished and self.presence is not None:
                self.link.stay()
                self.presence.begin(self.link.generation)
            orderly = finished or isinstance(error, InterruptedRunError)
            self.link.leave(failed=None if orderly else error, **self._recorded)
            if finished:
                self.states.go(SessionState.CLOSED)
        except BaseException as failure:
            if finished:
                self.states.go(SessionState.FAILED)
                self.link.leave(failed=failure)
                raise
            if not isinstance(failure, TorchQuorumError):
                raise
        finally:
            for optimizer in self._setup.optimizers:
                optimizer.attach(None)
            self._close()
        if (explained := self._devices.explain(error)) is not None:
            raise explained from error
        if finished and self.signals.asked:
            raise InterruptedRunError(self._describe_interrupt())

    def _look_for_writes(self) -> None:
        """The loop is over: tells of what the program has written to its parameters since its last step, which is in no version.

        Raises:
            ConfigError: It has made no step at all, so it trains by hand, and nothing of that is in the run.
        """
        link = self.link
        for optimizer in self._setup.optimizers:
            optimizer.tell_of_state()
        names = link.joined.writes.left_over() if link.joined is not None else ""
        if not names:
            return
        if link.local_step == 0 and not link.stopped:
            raise ConfigError(
                f"{self._setup.task}: {names}: written to inside the session, and optimizer.step() was never called: nothing of it is in "
                "the run. Where a program updates its parameters by hand, as with p.data.add_(p.grad, alpha=-lr), write "
                "optimizer.param_groups[0]['lr'] = lr and optimizer.step() instead"
            )
        self._setup.say(
            f"{names}: written to after this worker's last step, which is in its own copy only and in no checkpoint; session.assign() "
            "would make it the run's"
        )

    def _see_that_it_is_saved(self) -> None:
        """The run is over: this worker's part counts when the last step is saved, by the chief or in its place.

        Raises:
            TorchQuorumError: It is not, and will not be.
        """
        setup, link = self._setup, self.link
        if setup.logdir is None or not setup.save.required or not link.stopped or self.signals.asked:
            return
        try:
            why = wait_until_saved(link.channels)
        except (TaskLostError, LostPlaceError, DeadlineError) as error:
            setup.say(f"it is not known here whether the last step was saved: {error}")
            return
        if why:
            raise TorchQuorumError(f"{setup.task}: {why}")

    def _describe_interrupt(self) -> str:
        """Returns what became of a run that a signal has ended for this task."""
        task, step = self._setup.task, self.link.version
        if not task.is_chief:
            return f"{task}: {self.signals.name}: has left the run at global step {step}"
        step = max(step, self.run.saved_step)  # without rounds others may have pushed since this worker's last answer
        saved = "saved" if self.run.saved_step == step else "not saved"
        more = "; the next start goes on from there" if self.run.saved_step == step else ""
        return f"{task}: {self.signals.name}: the run was stopped at global step {step}, which is {saved}{more}"

    def _close(self) -> None:
        self._determinism.end()
        self._devices.close()
        self.signals.remove()
        for hook in self._hooks.all:
            if isinstance(hook, Share):
                hook.close()
        self._connection.close()
        self._attachment.initializer.release()
        if self._setup.task.alone is not None:
            self._setup.task.alone.finish()

    def should_stop(self) -> bool:
        """Whether the run is over for this worker, whose loop begins anew."""
        if self.states.state is SessionState.RUNNING:
            self.run.loop_begins()
        self.requests.check(loop_begins=True)
        over = self.requests.stop or self.running_link.stopped
        if over:
            self.running_link.positions.before_push()
        return over

    def request_stop(self) -> None:
        """Ends this worker's loop."""
        self.requests.stop = True

    # -- where it stands ----------------------------------------------------------------------------------------------

    @property
    def link(self) -> Link:
        """Returns the link to the ps tasks, open or not; an error before the session has begun."""
        return self._connection.known

    @property
    def running_link(self) -> Link:
        """Returns the link of a session that is under way; an error before and after."""
        return self._connection.running

    @property
    def leads(self) -> bool:
        """Whether this worker does the chief's work: it is the chief, or stands in for it while it is dead."""
        return self._setup.task.index == self._connection.lead

    def assign(self, loaded: LoadedState | None = None, track: int = 0) -> bool:
        """What the chief has written to its parameters, and loaded for an optimizer, becomes the next version, for all workers.

        Returns:
            Whether what counts came from this worker.
        """
        assignment = self.running_link.member.writes.begin()
        gives = self._setup.task.is_chief or self.leads

        def ask() -> bool:
            return self.running_link.member.writes.assign(assignment, gives=gives, loaded=loaded, track=track)

        while not self.surviving(ask):
            gives = True  # the chief is dead, and this worker stands in for it
        return gives


def _lost_at_the_end(error: Exception) -> LostVariablesError:
    """Returns the error of a ps that was lost after the loop and did not come back: the steps not yet saved are lost."""
    return LostVariablesError(
        f"{error} The last step of the run is not saved: when the ps tasks are back, start the program again: it goes on from "
        "the last checkpoint."
    )
