"""Hooks that evaluate the model: at intervals of global steps on the chief, at each worker's end, on an evaluator every checkpoint.

Given to `tq.Session(hooks=[...])`; called on the thread of the training loop, which waits for the evaluation. What always
holds: the user's function gets the model in evaluation mode, without gradients; afterwards the model holds the variables
again and every module of it is in its former mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from torchquorum.errors import ConfigError
from torchquorum.lines import write_line
from torchquorum.session.hooks.hook import Hook, HookSession, Ran
from torchquorum.session.hooks.standard import check_every

Evaluate = Callable[[nn.Module], Mapping[str, float] | float]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside this block the model is in evaluation mode and no gradients are recorded."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def run_evaluation(session: HookSession, evaluate: Evaluate, *, averaged: bool) -> tuple[int, dict[str, float]]:
    """Runs the user's evaluation on the variables or their moving averages; returns the version and the results."""
    with session.averaged() if averaged else session.shared_buffers() as version, evaluating(session.model):
        results = evaluate(session.model)
    version = session.global_step if version is None else version
    if isinstance(results, Mapping):
        return version, {name: float(value) for name, value in results.items()}
    return version, {"accuracy": float(results)}


def has_averages(session: HookSession) -> bool:
    """Whether the run keeps moving averages of some of its variables."""
    return any(optimizer.options.average is not None for optimizer in session.optimizers)


class EvaluateHook(Hook):
    """Evaluates at intervals of global steps, on the chief or the worker that stands in for it, and prints a line per result.

    The moving averages are in place while the function runs, if `tq.Optimizer(average=...)` keeps them. The chief's loop
    waits for the evaluation, and with it every synchronous worker: keep the validation set small.

    Args:
        every: Global steps between two evaluations.
        evaluate: Gets the model, returns a mapping such as {"accuracy": 0.98, "loss": 0.07}, or the accuracy alone.
        averaged: Evaluate the moving averages where they are kept; otherwise the variables.

    Attributes:
        results: The last results.
        step: The global step that they belong to, -1 before the first.
    """

    def __init__(self, every: int, evaluate: Evaluate, averaged: bool = True) -> None:
        check_every(every)
        self._every, self._evaluate, self._averaged = every, evaluate, averaged
        self._next = 0
        self.results: dict[str, float] = {}
        self.step = -1

    def after_create_session(self, session: HookSession) -> None:
        """Finds the next global step to evaluate at."""
        self._next = (session.global_step // self._every + 1) * self._every

    def after_run(self, session: HookSession, ran: Ran) -> None:
        """Evaluates if it is due."""
        if ran.step.version >= self._next and session.leads:
            self._run(session, ran.step.version)

    def after_checkpoint(self, session: HookSession) -> None:
        """Evaluates every checkpoint."""
        self._run(session, session.global_step)

    def _run(self, session: HookSession, version: int) -> None:
        averaged = self._averaged and has_averages(session)
        self.step, self.results = run_evaluation(session, self._evaluate, averaged=averaged)
        # With other workers, the step may have skipped one or more multiples of `every`.
        self._next = (max(self.step, version) // self._every + 1) * self._every
        which = " using average model" if averaged else ""
        for name, value in self.results.items():
            write_line(f"After {self.step:d} training step(s),validation {name}{which} is {value:g}.")
            session.measure(self.step, **{name if name == "accuracy" else f"validation/{name}": value})


class FinalAccuracyHook(Hook):
    """Evaluates at this worker's own end, prints the accuracy and notes it for the report.

    Args:
        evaluate: Gets the model, returns the accuracy, or a mapping with `accuracy` and perhaps `loss`.
        averaged: Evaluate the moving averages where they are kept; otherwise the variables.
    """

    def __init__(self, evaluate: Evaluate, averaged: bool = False) -> None:
        self._evaluate, self._averaged = evaluate, averaged
        self.accuracy: float | None = None

    def after_checkpoint(self, session: HookSession) -> None:
        """Evaluates a checkpoint, unless an EvaluateHook does; an evaluator records nothing for the report."""
        if any(isinstance(hook, EvaluateHook) for hook in session.hooks):
            return
        averaged = self._averaged and has_averages(session)
        version, results = run_evaluation(session, self._evaluate, averaged=averaged)
        for name, value in results.items():
            write_line(f"checkpoint of step {version}: {name} = {value:g}")
            session.measure(version, **{name if name == "accuracy" else f"validation/{name}": value})

    def end(self, session: HookSession) -> None:
        """Takes the newest version, evaluates it and records the results."""
        averaged = self._averaged and has_averages(session)
        if not averaged:
            session.pull()
        version, results = run_evaluation(session, self._evaluate, averaged=averaged)
        if "accuracy" not in results:
            raise ConfigError(
                f"FinalAccuracyHook: the evaluation returned {', '.join(results) or 'nothing'}; it must return an accuracy"
            )
        self.accuracy = results["accuracy"]
        write_line(f"{session.task.job}={session.task.index}, final accuracy = {self.accuracy}")
        session.record(**{name: value for name, value in results.items() if name in ("accuracy", "loss")})
        session.measure(version, accuracy=self.accuracy)
