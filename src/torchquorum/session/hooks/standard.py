"""Ready-made hooks for the loop: stop at a step, count steps, guard against NaN, the tutorials' log line, progress.

Given to `tq.Session(hooks=[...])`; called on the thread of the training loop. Evaluation is in
`torchquorum.session.hooks.evaluation`, TensorBoard in `torchquorum.session.hooks.summaries`. What always holds: a hook belongs to one
session of one worker, prints its lines whole and at once on standard output, and starts no thread.
"""

from __future__ import annotations

import atexit
import math
import sys
from typing import TYPE_CHECKING, Any

import torch

from torchquorum.errors import ConfigError, NanLossError
from torchquorum.lines import write_line
from torchquorum.session.hooks.hook import Hook, HookSession, Ran, give_scalar
from torchquorum.session.join import say

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


def check_every(every: float, *, label: str = "every") -> None:
    """Raises a ConfigError unless a period is more than 0."""
    if isinstance(every, bool) or not every > 0:
        raise ConfigError(f"{label}={every!r}: must be more than 0")


class StopAtStepHook(Hook):
    """Asks this worker's session to stop at a global step, as tf.train.StopAtStepHook.

    With `last_step` the run ends there exactly, as with `tq.Session(last_step=...)`: gradients beyond it are refused. With
    `num_steps` every worker counts for itself, so asynchronous workers may pass the step by up to the number of the others.

    Args:
        last_step: The global step to stop at.
        num_steps: How many global steps to make from where this session starts; a recovery does not restart the count.
    """

    def __init__(self, last_step: int | None = None, num_steps: int | None = None) -> None:
        if (last_step is None) == (num_steps is None):
            raise ConfigError(
                f"StopAtStepHook(last_step={last_step}, num_steps={num_steps}): give exactly one of the two"
            )
        for name, value in (("last_step", last_step), ("num_steps", num_steps)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"StopAtStepHook({name}={value!r}): must be a whole number, 1 or more")
        self.last_step, self._num_steps = last_step, num_steps

    def begin(self, session: HookSession) -> None:
        """Makes it the last step of the run, for all workers."""
        if self.last_step is not None:
            session.end_at(self.last_step)

    def after_create_session(self, session: HookSession) -> None:
        """Fixes the last step; a run that has reached it already makes no further step."""
        if self.last_step is None:
            assert self._num_steps is not None
            self.last_step = session.global_step + self._num_steps
        if session.global_step >= self.last_step:
            session.request_stop()

    def after_run(self, session: HookSession, ran: Ran) -> None:
        """Stops when the step has been reached."""
        assert self.last_step is not None
        if ran.step.version >= self.last_step:
            session.request_stop()


class StepCounterHook(Hook):
    """Measures how fast the cluster and this worker go, and prints a line about it.

    Attributes:
        global_steps_per_s: Updates per second of the cluster, over the last `every` global steps.
        local_steps_per_s: Gradients per second of this worker, over the same time.

    Args:
        every: Global steps between two lines.
        quiet: Measure without printing.
    """

    def __init__(self, every: int = 100, *, quiet: bool = False) -> None:
        check_every(every)
        self._every, self._quiet = every, quiet
        self._from: tuple[float, int, int] | None = None
        self.global_steps_per_s: float | None = None
        self.local_steps_per_s: float | None = None

    def after_create_session(self, session: HookSession) -> None:
        """Starts to count; after a recovery, again."""
        self._from = (session.task.clock.now(), session.global_step, session.local_step)

    def after_run(self, session: HookSession, ran: Ran) -> None:
        """Counts."""
        assert self._from is not None
        at, global_step, local_step = self._from
        if ran.step.version - global_step < self._every:
            return
        now = session.task.clock.now()
        seconds = max(now - at, 1e-9)
        self._from = (now, ran.step.version, ran.step.local_step)
        self.global_steps_per_s = (ran.step.version - global_step) / seconds
        self.local_steps_per_s = (ran.step.local_step - local_step) / seconds
        give_scalar(session.hooks, "step_counter/global_steps_per_s", self.global_steps_per_s, ran.step.version)
        give_scalar(session.hooks, "step_counter/local_steps_per_s", self.local_steps_per_s, ran.step.version)
        if not self._quiet:
            write_line(
                f"worker {session.task.index}: global step {ran.step.version}, {self.global_steps_per_s:.1f} global "
                f"steps/s, {self.local_steps_per_s:.1f} local steps/s"
            )


class NanGuardHook(Hook):
    """Stops the run when the loss is NaN or infinite; it needs `optimizer.step(loss=loss)`.

    Hooks see the loss after the push, when its gradient has already been sent. With `gradients=True` the gradients are
    checked before the push, so that the variables stay clean; that reads every gradient once per step.

    Args:
        fail: Raise a NanLossError; otherwise only ask the session to stop.
        gradients: Check the gradients too, before they are pushed. A bad one always raises: it must not be pushed.
    """

    every_optimizer = True

    def __init__(self, fail: bool = True, *, gradients: bool = False) -> None:
        self._fail, self._gradients = fail, gradients
        self._told = False

    def before_run(self, session: HookSession) -> None:
        """Checks the gradients, if the options ask for it."""
        if not self._gradients:
            return
        for name, parameter in session.model.named_parameters():
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad.detach().sum())):
                raise NanLossError(self._text(session, f"the gradient of {name} is not finite", "It was not pushed. "))

    def after_run(self, session: HookSession, ran: Ran) -> None:
        """Checks the loss."""
        if ran.loss is None:
            self._told = self._told or _tell_no_loss("NanGuardHook", session)
            return
        if math.isfinite(ran.loss):
            return
        of = f" of {ran.step.optimizer}" if ran.step.optimizer else ""
        text = self._text(session, f"the loss{of} is {ran.loss}")
        if self._fail:
            raise NanLossError(text)
        session.request_stop()
        if not self._told:
            self._told = True
            say(text)

    def _text(self, session: HookSession, what: str, more: str = "") -> str:
        rates = ", ".join(f"{lr:g}" for optimizer in session.optimizers for lr in optimizer.lr)
        return (
            f"{session.task}: {what} at local step {session.local_step}, global step {session.global_step}. {more}Try a "
            f"smaller learning rate (now {rates}) or a warm-up, clip the gradients (torch.nn.utils.clip_grad_norm_), and "
            "look at the batch; then go on from a checkpoint made before this step"
        )


class LogHook(Hook):
    """Prints the log line of the TensorFlow tutorials; it needs `optimizer.step(loss=loss)`.

    As there, sec/batch is the time since this session's start divided by the global step, so a worker that joins late shows
    less than its real time.

    Args:
        every: Local steps between two lines.
        singular: Write `global step` where some of the tutorials do, instead of `global steps`.
    """

    def __init__(self, every: int = 100, *, singular: bool = False) -> None:
        check_every(every)
        noun = "global step" if singular else "global steps"
        self._format = f"After %d training steps (%d {noun}), loss on training batch is %g. (%.3f sec/batch)"
        self._every = every
        self._started: float | None = None
        self._step = 0
        self._told = False

    def after_create_session(self, session: HookSession) -> None:
        """Starts the clock, once."""
        self._started = session.task.clock.now() if self._started is None else self._started

    def after_run(self, session: HookSession, ran: Ran) -> None:
        """Prints a line if one is due."""
        step, global_step = ran.step.local_step, ran.step.version
        if step == self._step:
            return  # the run was over: nothing was pushed
        before, self._step = self._step, step
        if step // self._every == before // self._every:
            return
        if ran.loss is None:
            self._told = self._told or _tell_no_loss("LogHook", session)
        assert self._started is not None
        sec_per_batch = (session.task.clock.now() - self._started) / max(1, global_step)
        loss = math.nan if ran.loss is None else ran.loss
        write_line(self._format % (step, global_step, loss, sec_per_batch))


class ProgressHook(Hook):
    """Shows the progress of this worker's run: a bar in a terminal, a plain line at intervals elsewhere.

    Args:
        last_step: The global step at which the bar is full; the session's by default.
        every_s: Seconds between two plain lines.
        console: Where to draw; standard output by default.
    """

    REFRESH_S = 0.2

    def __init__(self, *, last_step: int | None = None, every_s: float = 10.0, console: Console | None = None) -> None:
        check_every(every_s, label="every_s")
        self._last_step, self._every_s, self._console = last_step, every_s, console
        self._progress: Progress | None = None
        self._shown_at = 0.0
        self._from = (0.0, 0)

    def after_create_session(self, session: HookSession) -> None:
        """Draws the bar, if there is a terminal for it."""
        if self._last_step is None:
            self._last_step = session.last_step
        now = session.task.clock.now()
        self._shown_at, self._from = now, (now, session.local_step)
        terminal = self._console.is_terminal if self._console is not None else sys.stdout.isatty()
        if not terminal or self._progress is not None:
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
        )
        # Refreshed by the loop itself: a thread of rich's own would outlive a run that fails.
        self._progress = Progress(
            *columns, TextColumn("{task.fields[loss]}"), console=self._console, auto_refresh=False
        )
        self._progress.add_task(
            f"worker {session.task.index}", total=self._last_step, completed=session.global_step, loss=""
        )
        self._progress.start()
        atexit.register(self._close)  # gives the cursor back after a failure

    def after_run(self, session: HookSession, ran: Ran) -> None:
        """Shows the progress, if it is due."""
        now = session.task.clock.now()
        if now - self._shown_at >= (self.REFRESH_S if self._progress is not None else self._every_s):
            self._show(session, ran.loss, now)

    def end(self, session: HookSession) -> None:
        """Shows the end and leaves the bar as it is."""
        self._show(session, None, session.task.clock.now())
        self._close()

    def _show(self, session: HookSession, loss: float | None, now: float) -> None:
        self._shown_at = now
        if self._progress is not None:
            fields: dict[str, Any] = {} if loss is None else {"loss": f"loss {loss:.4g}"}
            task = self._progress.task_ids[0]
            self._progress.update(task, completed=session.global_step, refresh=True, **fields)
            return
        total = f"/{self._last_step}" if self._last_step else ""
        shown = f", loss {loss:.4g}" if loss is not None else ""
        speed = (session.local_step - self._from[1]) / max(now - self._from[0], 1e-9)
        line = (
            f"worker {session.task.index}: global step {session.global_step}{total}{shown}, {speed:.1f} local steps/s"
        )
        if self._console is not None:
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)
        else:
            write_line(line)

    def _close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
            atexit.unregister(self._close)


def _tell_no_loss(hook: str, session: HookSession) -> bool:
    say(f"{session.task}: {hook} has no loss to look at; write optimizer.step(loss=loss)")
    return True
