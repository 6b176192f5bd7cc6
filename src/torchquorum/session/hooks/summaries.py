"""`tq.SummaryHook`: what TensorBoard shows of a run. The loop's side; the writing is in `summary_writer`.

Given to `tq.Session(hooks=[...])` of every worker; the chief writes, and while it counts as dead, the first live worker. What always
holds: the training loop copies numbers and tensors and continues; it never waits for the disk, for a histogram or for a ps task. When the
writer is behind, histograms are left out first, then whole moments.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchquorum import env
from torchquorum.clock import SYSTEM, Clock
from torchquorum.errors import ConfigError
from torchquorum.session.hooks.hook import Hook, HookSession, Ran
from torchquorum.session.hooks.seen_input import SeenInput
from torchquorum.session.hooks.standard import check_every
from torchquorum.session.hooks.summary_asks import Asks, OverLink
from torchquorum.session.hooks.summary_writer import ModelGraph, Rewind, RunHead, StepValues, SummaryThread
from torchquorum.session.join import Task, say
from torchquorum.session.states import SessionState
from torchquorum.worker.optimizer import Optimizer

SAMPLED = 2_000_000  # elements per histogram pass; larger models are sampled evenly
LEAST_SAMPLED = 10_000  # of each variable
HISTOGRAM_SHARE = 0.02  # of the writer's time, so that `every_steps=1` does not become a histogram per step
MOST_BEHIND, MOST_BEHIND_ALWAYS = 8, 200
ALWAYS = "always"
FIRST_STEPS = (1, 2, 5, 10, 20, 50, 100)
STATUS_EVERY_S = 0.5  # ps task 0 is not asked more often than this


class SummaryHook(Hook):
    """Writes TensorBoard event files into the run's folder in the background, from the chief or the worker that stands in for it.

    Scalars: the loss given to `optimizer.step(loss=...)`, what hooks measure, such as the validation accuracy, and at the end what is
    recorded (`final/accuracy`); learning rate per parameter group, global steps and examples per second; and, as ps task 0 counts
    them, staleness and refused gradients since the run's start, and per worker batches per second and the share of its time spent
    waiting for the quorum. Of several optimizers `loss/NAME`, `learning_rate/NAME`, `updates/NAME`, `updates_per_s/NAME`,
    `staleness/NAME` and `refused/NAME` are each one's. Histograms: `variables/<name>`, and `gradients/<name>`, the mean gradients that
    became updates, which only the ps tasks have. Then the model's graph, drawn from the input of the first step if no example is given,
    and the configuration as text.

    Put it after the hooks whose numbers it takes, such as `tq.EvaluateHook`.

    Args:
        every_s: Seconds between two moments; 10 by default. The first moments come by steps: 1, 2, 5, 10, 20, 50 and 100 after the start.
        every_steps: Global steps between two moments, instead of seconds.
        logdir: Where the files go; the session's folder by default.
        batch_size: Examples per batch, for examples_per_s; by default the example's first dimension, if there is one.
        example: An input of the model, or a tuple of inputs, from which its graph is drawn; by default that of the first step, where
            the program calls the model with tensors alone.
        histograms: Whether to write histograms. They take at most 2 % of the writer's time, unless this is "always".
        variable_tag: The name of a variable's histogram, with {} for the variable's name.
        gradient_tag: The same for its mean gradient.
    """

    every_optimizer = True

    def __init__(
        self,
        *,
        every_s: float | None = None,
        every_steps: int | None = None,
        logdir: str | Path | None = None,
        batch_size: int | None = None,
        example: Any = None,
        histograms: bool | str = True,
        variable_tag: str = "variables/{}",
        gradient_tag: str = "gradients/{}",
    ) -> None:
        if every_s is not None and every_steps is not None:
            raise ConfigError(f"SummaryHook(every_s={every_s}, every_steps={every_steps}): give one of the two")
        for name, value in (("every_s", every_s), ("every_steps", every_steps), ("batch_size", batch_size)):
            if value is not None:
                check_every(value, label=f"SummaryHook: {name}")
        self._every_s = every_s if every_s is not None or every_steps is not None else 10.0
        self._every_steps = every_steps
        self._logdir = logdir
        if histograms not in (True, False, ALWAYS):
            raise ConfigError(f"SummaryHook(histograms={histograms!r}): must be True, False or {ALWAYS!r}")
        for name, tag in (("variable_tag", variable_tag), ("gradient_tag", gradient_tag)):
            if tag.count("{}") != 1:
                raise ConfigError(f"SummaryHook({name}={tag!r}): must have {{}} once, for the variable's name")
        self._example, self._histograms = example, histograms
        self._variable_tag, self._gradient_tag = variable_tag, gradient_tag
        self._batch_size = batch_size if batch_size is not None else _first_dimension(example)
        self._thread: SummaryThread | None = None
        self._clock: Clock = SYSTEM
        self.noted = (0.0, 0)
        self._histograms_at = self._asked_at = 0.0
        self._histograms_of = -1  # the version whose histograms were noted last
        self._losses: dict[str, float] = {}  # by optimizer
        self._told_no_folder = False
        self._seen: SeenInput | None = None
        self._early: list[int] = []  # global steps of the first moments

    def after_create_session(self, session: HookSession) -> None:
        """Starts the writer; after a recovery, only notes the run's step."""
        if not session.leads:
            return
        if self._thread is not None:
            if session.global_step < self.noted[1]:
                self._thread.put(Rewind(session.global_step))
            self.noted = (session.task.clock.now(), session.global_step)
            return
        folder = self._logdir if self._logdir is not None else session.logdir
        if folder is None:
            self._told_no_folder = True
            say(
                f"{session.task}: no summaries: there is no folder for them; give tq.Session a logdir=. Training goes on"
            )
            return
        self.noted = (session.task.clock.now(), session.global_step)
        self._clock = session.task.clock
        self._thread = SummaryThread(
            str(folder),
            session.global_step,
            Asks(OverLink(lambda: session.optimizer.link), session.task.num_ps, self._clock),
            over=lambda: session.state in (SessionState.CLOSED, SessionState.FAILED),
            batch_size=self._batch_size,
            gradient_tag=self._gradient_tag,
            say=say,
            clock=self._clock,
        )
        # The graph is traced from a copy: tracing switches modes and must not run beside a training step.
        model = copy.deepcopy(session.model) if self._example is not None else None
        self._thread.put(RunHead(describe_run(session), model, self._example))
        if self._example is None:
            self._seen = SeenInput(session.model)
        if self._every_steps is None:
            self._early = [session.global_step + step for step in FIRST_STEPS]

    def after_run(self, session: HookSession, ran: Ran) -> None:
        """Notes the numbers of this step, if one is due."""
        if session.leads != (self._thread is not None) and not session.task.is_chief:
            self._stand_in(session)
        if self._thread is None or self._thread.failed:
            return
        if self._seen is not None:
            self._draw_graph(self._seen)
        if ran.loss is not None:
            self._losses[ran.step.optimizer] = ran.loss
        if ran.step.optimizer != session.optimizer.called:
            return  # moments are global steps, which the first optimizer makes
        if self._every_steps is not None:
            due = ran.step.version - self.noted[1] >= self._every_steps
        else:
            assert self._every_s is not None
            early = bool(self._early) and ran.step.version >= self._early[0]
            due = early or session.task.clock.now() - self.noted[0] >= self._every_s
            self._early = [step for step in self._early if step > ran.step.version]
        most = MOST_BEHIND_ALWAYS if self._histograms == ALWAYS else MOST_BEHIND
        if due and self._thread.behind < most:
            self._note(session, ran.step.version, histograms=self._thread.behind == 0)

    def _draw_graph(self, seen: SeenInput) -> None:
        """The first step has been made: its input is an example."""
        self._seen = None
        if (found := seen.take()) is not None and self._thread is not None:
            self._thread.put(ModelGraph(*found))

    def _stand_in(self, session: HookSession) -> None:
        """The chief has died: this worker writes in its place, until the chief is back."""
        if self._thread is not None:
            say(f"{session.task}: the chief is back; it writes the summaries again")
            self.close()
        elif self._told_no_folder:
            return
        else:
            say(f"{session.task}: the chief is dead; writing the summaries in its place")
            self.after_create_session(session)

    def end(self, session: HookSession) -> None:
        """Notes the last numbers, writes them and ends the writer."""
        if self._thread is None:
            return
        self._note(session, session.global_step, histograms=True, last=True)
        for name, value in session.results.items():
            self.scalar(f"final/{name}", value, session.global_step)
        self.close()

    def close(self, session: HookSession | None = None) -> None:
        """Ends the writer, if it runs."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.close()

    @property
    def behind(self) -> int:
        """Returns how many things wait for the writer."""
        return self._thread.behind if self._thread is not None else 0

    def scalar(self, name: str, value: float, global_step: int) -> None:
        """Writes a number of another hook, or of your own; without effect on workers other than the chief."""
        if self._thread is not None:
            self._thread.put(StepValues(global_step, self._clock.wall(), {name: float(value)}, with_status=False))

    def _note(self, session: HookSession, version: int, *, histograms: bool, last: bool = False) -> None:
        assert self._thread is not None
        now = session.task.clock.now()
        at, step = self.noted
        self.noted = (now, version)
        scalars: dict[str, float] = {}
        if version > step and now > at:
            scalars["global_steps_per_s"] = (version - step) / (now - at)
        for optimizer in session.optimizers:
            scalars |= self._of(optimizer)
        arrays: dict[str, np.ndarray] = {}
        rested = now - self._histograms_at >= self._thread.histogram_s / HISTOGRAM_SHARE
        due = self._histograms == ALWAYS or (histograms and (rested or last))
        if self._histograms and due and version != self._histograms_of:
            self._histograms_at, self._histograms_of = now, version
            arrays = take_variables(session.model, self._variable_tag)
        ask = last or now - self._asked_at >= STATUS_EVERY_S
        self._asked_at = now if ask else self._asked_at
        self._thread.put(StepValues(version, self._clock.wall(), scalars, arrays, with_status=ask, last=last))

    def _of(self, optimizer: Optimizer) -> dict[str, float]:
        """Returns the numbers of one optimizer; of several, with its name."""
        name, rates = optimizer.called, optimizer.used_lr
        of = f"/{name}" if name else ""
        found = {
            f"learning_rate{of}/group_{i}" if len(rates) > 1 else f"learning_rate{of}": lr for i, lr in enumerate(rates)
        }
        if name in self._losses:
            found[f"loss{of}"] = self._losses[name]
        if optimizer.local is not None:
            found[f"inner_step{of}"] = optimizer.inner_step
        if name:
            found[f"updates{of}"] = optimizer.version
        return found


def asked_hooks(task: Task, folder: str | None, hooks: Sequence[Hook]) -> list[Hook]:
    """Returns a SummaryHook where `torchquorum run` asks for TensorBoard's events and the program has none of its own."""
    asked = env.events() and not env.record() and task.replay is None
    if not asked or folder is None or task.job != "worker" or any(isinstance(hook, SummaryHook) for hook in hooks):
        return []
    return [SummaryHook()]


def take_variables(model: torch.nn.Module, tag: str = "variables/{}") -> dict[str, np.ndarray]:
    """Returns copies of a model's variables, of large models an even sample of each."""
    named = [(name, p) for name, p in model.named_parameters() if p.dtype.is_floating_point]
    most = max(LEAST_SAMPLED, SAMPLED // max(1, len(named)))
    found: dict[str, np.ndarray] = {}
    for name, parameter in named:
        flat = parameter.detach().reshape(-1)
        sample = flat[:: -(-flat.numel() // most)] if flat.numel() > most else flat
        found[tag.format(name)] = sample.to("cpu", torch.float32, copy=True).numpy()
    return found


def describe_run(session: HookSession) -> str:
    """Returns the run's configuration as tables in Markdown."""
    task = session.task
    rows: list[tuple[str, str]] = []
    for optimizer in session.optimizers:
        of = f"{optimizer.called}: " if optimizer.called else ""
        rows += [(f"{of}{name}", value) for name, value in _describe_optimizer(optimizer)]
    for job in ("ps", "worker"):
        addresses = ", ".join(str(task.cluster.address(t)) for t in task.cluster.tasks(job))
        rows.append((f"{job} tasks", f"{task.cluster.num_tasks(job)}: {addresses}"))
    rows.append(("transport of the chief", ", ".join(session.transports)))
    rows.append(("torch", str(torch.__version__)))
    lines = ["| setting | value |", "| --- | --- |", *(f"| {name} | {_cell(value)} |" for name, value in rows)]
    lines += ["", "| variable | shape | dtype | ps tasks |", "| --- | --- | --- | --- |"]
    for layout in (optimizer.flat.layout for optimizer in session.optimizers if optimizer.flat is not None):
        for variable in layout.variables:
            shards = ", ".join(str(k) for k in layout.shard_of(variable.name))
            lines.append(f"| {_cell(variable.name)} | {list(variable.shape)} | {variable.dtype} | {shards} |")
    return "\n".join(lines)


def _describe_optimizer(optimizer: Optimizer) -> list[tuple[str, str]]:
    spec = optimizer.spec()
    rows = [("rule", str(optimizer.rule)), ("optimizer", spec.name)]
    for i, group in enumerate(spec.groups):
        given = {k: v for k, v in group.items() if v is not None and v is not False}
        rows.append((f"parameter group {i}", ", ".join(f"{k}={v}" for k, v in given.items())))
    schedule, average = optimizer.options.schedule, optimizer.options.average
    if schedule is not None:
        arguments = ", ".join(f"{k}={v}" for k, v in schedule.arguments.items())
        rows.append(("schedule", f"{schedule.name}({arguments})"))
    else:
        rows.append(("schedule", "none"))
    rows.append(("moving averages", f"decay {average.decay:g}" if average is not None else "none"))
    return [*rows, ("placement", optimizer.options.placement)]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _first_dimension(example: Any) -> int | None:
    first = example[0] if isinstance(example, tuple) and example else example
    return int(first.shape[0]) if isinstance(first, torch.Tensor) and first.dim() > 0 else None
