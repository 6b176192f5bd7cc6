"""The worker inside a compute task: an ordinary `tq.Session`, made from what a client sends instead of a user's program.

Made by `torchquorum.graph.compute`, used by `torchquorum.graph.compute_run`. What always holds: model and optimizer follow from
the graph and the plan alone; the session creates no variables that the client has created.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchquorum.graph import graph_messages as g
from torchquorum.graph.runner import Program
from torchquorum.placement.layout import CONSTANT
from torchquorum.session.join import Task
from torchquorum.session.lifecycle import Lifecycle
from torchquorum.session.session import Session
from torchquorum.wire.messages import OptimizerSpec, Plan
from torchquorum.wire.rpc import Patience
from torchquorum.worker.link import Link
from torchquorum.worker.optimizer import Optimizer


class PlannedOptimizer(Optimizer):
    """The client's optimizer in a compute task: the plan describes it, and the ps tasks run it."""

    def __init__(self, plan: Plan, parameters: Sequence[torch.nn.Parameter]) -> None:
        groups: list[dict[str, Any]] = [{"params": []} for _ in plan.optimizer.groups]
        for variable, parameter in zip(plan.variables, parameters, strict=True):
            if variable.group != CONSTANT:
                groups[variable.group]["params"].append(parameter)
        super().__init__(
            torch.optim.SGD(groups, lr=0.0),
            plan.rule,
            schedule=plan.schedule,
            placement=plan.placement,
            slice_bytes=plan.slice_bytes,
            average=plan.average,
        )
        self._planned = plan.optimizer
        self._program = None  # the client's program sets what is set, not this one

    def spec(self, num_workers: int = 1) -> OptimizerSpec:
        """Returns the client's optimizer."""
        return self._planned


class ComputeSession(Session):
    """A worker's session that calls `meanwhile` while it waits for a round."""

    def __init__(self, task: Task, model: torch.nn.Module, optimizer: Optimizer, **options: Any) -> None:
        super().__init__(task, model, optimizer, **options)
        self._lifecycle.confirms = False  # the client has created the variables, as it should

    @property
    def _lifecycle(self) -> Lifecycle:
        assert isinstance(self._part, Lifecycle), "a compute task is a worker"
        return self._part

    @property
    def meanwhile(self) -> Callable[[], None]:
        """Is called at every step and while the session waits."""
        return self._lifecycle.requests.meanwhile

    @meanwhile.setter
    def meanwhile(self, function: Callable[[], None]) -> None:
        self._lifecycle.requests.meanwhile = function

    @property
    def client(self) -> Link:
        """Returns the link to the ps tasks."""
        return self._lifecycle.link

    @property
    def interrupted(self) -> bool:
        """Whether a signal has asked this task to stop."""
        return self.signals.asked


def make_session(task: Task, plan: Plan, options: g.RunOptions, program: Program) -> ComputeSession:
    """Returns a session, not yet begun, that trains a client's graph as this worker."""
    return ComputeSession(
        task,
        program.variables,
        PlannedOptimizer(plan, [p for _, p in program.variables.named_parameters()]),
        logdir=plan.logdir,
        last_step=plan.last_step,
        liveness_s=plan.liveness_s,
        save_every_s=options.save_every_s,
        save_every_steps=options.save_every_steps,
        keep=options.keep,
        durable=plan.durable,
        buffers=plan.buffers_mode,
        wait_for_workers=None if task.cluster.elastic else 1,  # the client has waited for those that it wants
        log_device_placement=options.log_device_placement,
        patience=Patience(start_s=options.start_s, round_s=options.round_s, probe_s=0.5),
    )
