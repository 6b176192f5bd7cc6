"""Hugging Face Trainer: `Trainer(..., optimizers=(tq.Optimizer(...), scheduler), callbacks=[QuorumCallback(task)])`.

Needs the extra: `pip install torchquorum[transformers]`. The callback begins a session when training begins, after the Trainer has loaded a
checkpoint, and ends it with the training. What always holds: every worker runs a Trainer of its own; only the chief saves and reports.
"""

from __future__ import annotations

from typing import Any

from torchquorum.errors import ConfigError
from torchquorum.session.accelerated import check_accelerate, unwrapped
from torchquorum.session.join import Task
from torchquorum.session.session import Session
from torchquorum.worker.optimizer import Optimizer

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:  # pragma: no cover
    raise ImportError("torchquorum.transformers needs transformers: pip install 'torchquorum[transformers]'") from error


class QuorumCallback(TrainerCallback):
    """Trains on the ps tasks of a cluster.

    Args:
        task: What `tq.join()` returned.
        **session: Arguments of `tq.Session`. Checkpoints are the Trainer's, so leave `logdir` out in a run that is resumed from them.
    """

    def __init__(self, task: Task, **session: Any) -> None:
        self.task, self._options = task, session
        self.session: Session | None = None

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Only the chief saves and reports."""
        if args.fp16:
            raise ConfigError(
                "TrainingArguments(fp16=True): its gradient scaler skips steps of this worker only; use bf16=True"
            )
        if args.deepspeed or args.world_size > 1:
            raise ConfigError(
                "the Trainer has processes or an engine of its own: start the workers with `torchquorum run` instead"
            )
        if not self.task.is_chief:
            state.is_world_process_zero = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begins the session: the chief creates the variables from what the Trainer has made or loaded."""
        optimizer = unwrapped(kwargs.get("optimizer"))
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                "Trainer without optimizers=(tq.Optimizer(...), scheduler): its own optimizer would train this worker alone; give it "
                "optimizers=(tq.Optimizer(torch.optim.AdamW(model.parameters(), lr=5e-5), rule=tq.Sync()), None)"
            )
        check_accelerate()
        self.session = Session(self.task, kwargs["model"], optimizer, **self._options).start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Ends the training when the run is over."""
        if self.session is not None and self.session.should_stop():
            control.should_training_stop = True
        self._keep_quiet(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Workers other than the chief save nothing."""
        self._keep_quiet(control)

    def _keep_quiet(self, control: TrainerControl) -> None:
        if not self.task.is_chief:
            control.should_save = False

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The model takes the last version of all workers, unless the Trainer has loaded its best one, and the session ends."""
        session, self.session = self.session, None
        if session is not None:
            if not session.should_stop():
                session.barrier()
            session.pull(keep_written=True)
            session.close()
