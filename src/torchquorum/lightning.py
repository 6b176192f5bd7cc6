"""Lightning: `Trainer(strategy=torchquorum.lightning.QuorumStrategy(rule=...))` trains a LightningModule with the ps tasks.

Needs the extra: `pip install torchquorum[lightning]`. The strategy wraps the module's optimizers, starts a session when training starts,
after Lightning has restored a checkpoint, and ends it with the training. What always holds: every worker runs a Trainer of its own on one
device; only the chief writes logs and checkpoints; `trainer.global_step` is the run's: the updates of all optimizers, as Lightning counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from torchquorum.errors import ConfigError
from torchquorum.rules import Rule
from torchquorum.session.join import Task, join
from torchquorum.session.session import Session
from torchquorum.worker.optimizer import Optimizer

try:
    from lightning.fabric.utilities.rank_zero import rank_zero_only
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import BaseFinetuning
    from lightning.pytorch.plugins.precision import MixedPrecision
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.trainer.states import RunningStage, TrainerFn
    from lightning.pytorch.utilities.data import _update_dataloader
except ImportError as error:  # pragma: no cover
    raise ImportError("torchquorum.lightning needs Lightning 2: pip install 'torchquorum[lightning]'") from error


class QuorumStrategy(SingleDeviceStrategy):
    """Trains on the ps tasks of a cluster.

    Args:
        rule: When gradients become an update; `tq.Sync()` by default. A module that returns `tq.Optimizer`s of its own may give each
            another.
        task: What `tq.join()` returned; by default the strategy calls it, and a ps task serves there until the job ends.
        device: The worker's device.
        optimizer: Further arguments of `tq.Optimizer`.
        **session: Arguments of `tq.Session`, such as `wait_for_workers` or `hooks`. Checkpoints are Lightning's, so `logdir` is for the
            ledger and the report of a run that is begun once.
    """

    strategy_name = "quorum"

    def __init__(
        self,
        rule: Rule | None = None,
        *,
        task: Task | None = None,
        device: str | torch.device = "cpu",
        optimizer: dict[str, Any] | None = None,
        **session: Any,
    ) -> None:
        super().__init__(device=device)
        self.task = task if task is not None else join()
        self._rule, self._more, self._options = rule, optimizer or {}, session
        self.session: Session | None = None
        self.global_rank, self.world_size = self.task.index, self.task.num_workers
        self._behind = 0  # Lightning's global step when the session's was 0
        self._kept: dict[
            int, dict[str, Any]
        ] = {}  # the optimizers' state at the end of the training, for a checkpoint made then
        setattr(rank_zero_only, "rank", self.task.index)  # noqa: B010

    # -- who it is ----------------------------------------------------------------------------------------------------

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the chief, which writes logs and checkpoints."""
        return self.task.is_chief

    # -- before training ----------------------------------------------------------------------------------------------

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Wraps the optimizers that the module has configured."""
        super().setup_optimizers(trainer)
        given = self.optimizers
        if not given:
            raise ConfigError(
                "configure_optimizers() returned no optimizer: QuorumStrategy trains with one, or with several"
            )
        if isinstance(self.precision_plugin, MixedPrecision) and self.precision_plugin.scaler is not None:
            raise ConfigError(
                "Trainer(precision='16-mixed'): its gradient scaler skips steps of this worker only; use 'bf16-mixed'"
            )
        self.optimizers = [
            o if isinstance(o, Optimizer) else Optimizer(o, rule=self._rule, **self._more) for o in given
        ]

    def process_dataloader(self, dataloader: object) -> object:
        """Gives every worker its part of the training data, as Lightning does where it has several processes."""
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        if trainer is None or self.world_size == 1 or not isinstance(dataloader, DataLoader):
            return dataloader
        evaluates = trainer.evaluating or trainer.sanity_checking or trainer.predicting
        if (
            trainer.state.fn is not TrainerFn.FITTING
            or evaluates
            or not trainer._accelerator_connector.use_distributed_sampler
        ):
            return dataloader
        if isinstance(dataloader.dataset, IterableDataset) or isinstance(dataloader.sampler, DistributedSampler):
            return dataloader
        shuffle = not isinstance(dataloader.sampler, torch.utils.data.SequentialSampler)
        sampler = DistributedSampler(dataloader.dataset, self.world_size, self.global_rank, shuffle=shuffle)
        return _update_dataloader(dataloader, sampler, mode=RunningStage.TRAINING)

    def on_train_start(self) -> None:
        """Begins the session: the chief creates the variables from what Lightning has made or restored."""
        module = self.lightning_module
        assert module is not None
        trainer = module.trainer
        self._kept = {}
        _check_callbacks(trainer)
        self._behind = trainer.global_step
        several = len(self.optimizers) > 1  # then max_steps counts the updates of all, and Lightning looks at it
        last_step = trainer.max_steps - self._behind if trainer.max_steps >= 0 and not several else None
        options = {"last_step": last_step, **self._options}
        self.session = Session(self.task, module, self.optimizers, **options).start()  # pyright: ignore[reportArgumentType]
        self._behind -= self._updates(self.session) if options.get("logdir") is None else 0

    # -- training -----------------------------------------------------------------------------------------------------

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Pushes the gradients and takes the version that follows."""
        if self.lightning_module is not None and self.lightning_module.trainer.fit_loop._skip_backward:
            return closure()  # the epoch of StochasticWeightAveraging that measures batch norms, and trains nothing
        found = super().optimizer_step(optimizer, closure, model, **kwargs)
        session, module = self.session, self.lightning_module
        if session is not None and module is not None:
            loop = module.trainer.fit_loop.epoch_loop
            if module.automatic_optimization:
                progress = loop.automatic_optimization.optim_progress.optimizer.step.total
                self._look_for_end()
            else:
                progress = loop.manual_optimization.optim_step_progress.total
            progress.completed = self._updates(session) + self._behind - 1  # Lightning adds this step
        return found

    def post_training_step(self) -> None:
        """A batch has been used: with manual optimization, by all steps that are made of it."""
        module = self.lightning_module
        if module is not None and not module.automatic_optimization:
            self._look_for_end()

    def _look_for_end(self) -> None:
        session, module = self.session, self.lightning_module
        if session is not None and module is not None and session.should_stop():
            module.trainer.should_stop = True

    @staticmethod
    def _updates(session: Session) -> int:
        return sum(optimizer.version for optimizer in session.optimizers)

    def on_validation_start(self) -> None:
        """Validation sees the current version, or what a callback has written to the model."""
        if self.session is not None:
            self.session.pull(keep_written=True)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Returns the optimizer's state for a checkpoint, gathered from the ps tasks; only the chief's is written."""
        if not self.is_global_zero:
            return {}
        return self._kept[id(optimizer)] if id(optimizer) in self._kept else super().optimizer_state(optimizer)

    # -- after training -----------------------------------------------------------------------------------------------

    def on_train_end(self) -> None:
        """The model takes the last version of all workers, unless a callback has written an average to it; the session ends."""
        if self.session is not None:
            if not self.session.should_stop():
                self.session.barrier()
            self.session.pull(keep_written=True)
            if self.is_global_zero:
                self._kept = {
                    id(optimizer): super(QuorumStrategy, self).optimizer_state(optimizer)
                    for optimizer in self.optimizers
                }
            self._end()

    def on_exception(self, exception: BaseException) -> None:
        """Leaves the run as a session is left by an exception."""
        self._end()

    def teardown(self) -> None:
        """Ends the session, if that has not been done."""
        self._end()
        super().teardown()

    def _end(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            session.close()


def _check_callbacks(trainer: Trainer) -> None:
    """Raises ConfigError if a callback adds parameters to an optimizer in the middle of the training."""
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        if not isinstance(callback, BaseFinetuning):
            continue
        names = type(callback).finetune_function.__code__.co_names
        if "add_param_group" in names or "unfreeze_and_add_param_group" in names:
            raise ConfigError(
                f"{type(callback).__name__} adds parameters to the optimizer in the middle of the training, and the ps tasks hold those "
                "that the run begins with: give configure_optimizers() all of them, and freeze and thaw them with requires_grad_(), or "
                "train in two calls of trainer.fit()"
            )
