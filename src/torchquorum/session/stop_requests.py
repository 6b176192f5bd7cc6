"""Who wants a worker to stop: a signal, the end of the run's time, ps task 0, or the program itself.

Owned by the session's lifecycle; on the thread of the training loop. What always holds: a request is seen at every step and during every
wait, and said once; the chief ends the run for all workers; a wait ends soon after a signal.
"""

from __future__ import annotations

from collections.abc import Callable

from torchquorum.cluster.signals import Signals
from torchquorum.errors import InterruptedRunError, SavedElsewhereError
from torchquorum.session.config import Setup
from torchquorum.session.connection import WorkerConnection
from torchquorum.session.durable import is_saved
from torchquorum.session.states import SessionState, StateMachine
from torchquorum.session.stop_condition import StopCondition

# How long a wait goes on after a signal: the chief's stop, or the next answer, usually ends it sooner.
SIGNAL_S = 5.0
COMPLETE_S = 3.0  # how long several optimizers may complete what the loop has begun


class StopRequests:
    """What asks one worker to stop.

    Attributes:
        stop: Whether its loop ends.
        interrupted: What was raised in the program's own code, or in a step that had nothing more to wait for: then the session
            still ends in good order.
        ended_at: The global step at which its loop ended, while it looks for ps tasks that were lost after that.
        meanwhile: Is called at every step and while the worker waits; a compute task looks after its inbox there.
    """

    def __init__(
        self,
        setup: Setup,
        condition: StopCondition,
        connection: WorkerConnection,
        states: StateMachine,
        signals: Signals,
    ) -> None:
        self._setup, self._condition, self._connection = setup, condition, connection
        self._states, self._signals = states, signals
        self.stop = False
        self.interrupted: InterruptedRunError | None = None
        self.ended_at: int | None = None
        self.meanwhile: Callable[[], None] = lambda: None
        self._signal_seen_at: float | None = None
        self._asked_at: float | None = None  # when that, or the end of its time, was seen first

    def check(self, *, loop_begins: bool = False) -> None:
        """Sees whether this worker has to stop.

        Called at every step and by the link while it waits, and where the program's loop begins anew. The chief ends the run for all
        workers; who stands in for it does so when the time is up. Of several optimizers the run ends where the loop begins.

        Raises:
            SavedElsewhereError: The run ended well while the chief, its loop over, was looking for the ps tasks.
            InterruptedRunError: A signal came some time ago, and what is waited for does not come.
            TorchQuorumError: The ps in this process, of a program that trains alone, has failed.
        """
        task, state = self._setup.task, self._states.state
        if task.alone is not None:
            task.alone.check()
        if self._connection.asked_to_leave and not self.stop:
            self.stop = True
            self._setup.say("asked to leave the run, because fewer workers are wanted")
        late = self._condition.is_late and task.index == self._connection.lead
        if not self.stop and (self._signals.asked or late):
            ends_run = task.is_chief or late
            if self._is_time(at_once=ends_run and loop_begins):
                self.stop = True
                if ends_run:
                    self._connection.known.stop()
        if self._signals.asked and state in (SessionState.RUNNING, SessionState.RECOVERING):
            self._end_wait()
        if state is SessionState.RECOVERING and self.ended_at is not None and task.is_chief:
            self._look_for_end(self.ended_at)
        self.meanwhile()

    def _is_time(self, *, at_once: bool) -> bool:
        """Whether a worker that was asked to stop does so now: of several optimizers the loop steps them all first.

        The others wait a little for the chief, which was probably asked too and ends the run for all at one place.
        """
        if at_once or not self._setup.more_optimizers:
            return True
        now = self._setup.clock.now()
        self._asked_at = now if self._asked_at is None else self._asked_at
        return now - self._asked_at >= COMPLETE_S

    def _end_wait(self) -> None:
        """Ends a wait, or a loop that does not ask `should_stop`, some time after a signal."""
        now = self._setup.clock.now()
        if self._signal_seen_at is None:
            self._signal_seen_at = now
        elif now - self._signal_seen_at > SIGNAL_S:
            error = self._leaves_early("without waiting any longer; what is not saved, ps task 0 saves if it can")
            if not self._connection.known.requests.is_open:
                self.interrupted = error
            raise error

    def overdue(self) -> InterruptedRunError | None:
        """Returns what to raise where the program is, after a signal that it does not look for; on a thread of its own."""
        if self._states.state not in (SessionState.RUNNING, SessionState.RECOVERING):
            return None
        error = self._leaves_early("in the middle of the program's own code, which had gone on for some seconds")
        if not self._connection.known.requests.is_open:
            self.interrupted = error
        return error

    def _leaves_early(self, how: str) -> InterruptedRunError:
        name, version = self._signals.name, self._connection.known.version
        return InterruptedRunError(f"{self._setup.task}: {name}: left the run at global step {version} {how}")

    def _look_for_end(self, step: int) -> None:
        """The chief's loop is over and a ps task is lost: the others may have saved the last step and ended."""
        if is_saved(self._setup.logdir, step):
            self._states.go(SessionState.STOPPING)
            raise SavedElsewhereError(f"step {step} was saved without this task; the ps tasks have ended")
