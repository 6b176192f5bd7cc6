"""What a run's variables are, and what their values begin from: live ones, a checkpoint, or the model's own.

Owned by the session: every worker describes the variables by the same plan, and the chief makes them, at the start and when a
ps task was lost. What always holds: live variables are never replaced while all the ps tasks hold them, a run that lost its
variables begins again at step 0 only if it was told that it may, and the checkpoint that it goes on from stays its newest.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import torch
from torch import nn

from torchquorum.errors import LostVariablesError
from torchquorum.session.buffers import RunBuffers
from torchquorum.session.durable import find_checkpoint, find_journal
from torchquorum.session.folder import check_free
from torchquorum.session.goal import Goal
from torchquorum.session.join import say
from torchquorum.session.states import State
from torchquorum.transport.messages import Plan
from torchquorum.worker.asking import wait_until_settled
from torchquorum.worker.buffers import tied_names
from torchquorum.worker.client import Client
from torchquorum.worker.flat import FlatParameters, describe

if TYPE_CHECKING:
    from torchquorum.session.session import Session


class Origin:
    """Where the variables of one session come from; the options are the session's.

    Attributes:
        has_saved: Whether this session has asked for a checkpoint: what is in the folder is then this run's own.
    """

    def __init__(
        self,
        session: Session,
        buffers: RunBuffers,
        goal: Goal,
        *,
        restore: bool,
        start_afresh: bool,
        keep: int,
        durable: str,
        liveness_s: float,
    ) -> None:
        self._session, self._buffers, self._goal = session, buffers, goal
        self._restore, self._start_afresh = restore, start_afresh
        self._keep, self._durable, self._liveness_s = keep, durable, liveness_s
        self._initial: list[torch.Tensor] | None = None
        self._were_there = False
        self.has_saved = False

    def plan(self) -> tuple[Plan, list[nn.Parameter]]:
        """Describes the variables and what is done with them; returns the parameters in the plan's order too."""
        session, optimizer = self._session, self._session.optimizer
        variables, parameters = describe(session.model, optimizer.inner)
        plan = Plan(
            variables=variables,
            optimizer=optimizer.spec(),
            rule=optimizer.rule,
            schedule=optimizer.schedule,
            average=optimizer.average,
            num_shards=session.task.num_ps,
            num_workers=session.task.num_workers,
            placement=optimizer.placement,
            slice_bytes=optimizer.slice_bytes,
            last_step=self._goal.last_step,
            liveness_s=self._liveness_s,
            logdir=session.logdir,
            keep=self._keep,
            durable=self._durable,
            tied=tied_names(session.model),
            min_workers=session.task.min_workers if session.task.cluster.elastic else 0,
        )
        self._buffers.describe(plan)
        return plan, parameters

    def create(self, client: Client, plan: Plan, flat: FlatParameters, created: list[bool]) -> None:
        """The chief goes on with live variables, or restores, or initialises.

        Args:
            client: Connected to the ps tasks.
            plan: The run's plan; its last step is filled in here if it is counted from where the run goes on.
            flat: The values to begin with, where there is no checkpoint.
            created: Which ps tasks hold live variables.

        Raises:
            ConfigError: Another run that is alive writes into the folder.
            LostVariablesError: A ps task has lost them, there is no checkpoint, and starting afresh was not allowed.
        """
        task, logdir = self._session.task, self._session.logdir
        if all(created):
            client.create(plan, flat, only_existing=True)
            self._were_there = True
            self._say("the ps tasks hold live variables already; going on with them")
            return
        recovering = self._recovering
        if not recovering and not any(created):
            check_free(logdir, self._say)
        if any(created):
            wait_until_settled(client)
        path = self._newest()
        if path is None and (any(created) or recovering) and not self._start_afresh:
            lost = [str(ps) for ps, there in zip(task.cluster.tasks("ps"), created, strict=True) if not there]
            sooner = "Save sooner (save_every_s, save_every_steps), or every update (durable)"
            advice = sooner if logdir else "Give the session a logdir, so that it saves"
            raise LostVariablesError(
                f"{task}: {', '.join(lost)} was restarted and its variables are lost: there is no checkpoint to go on "
                f"from{f' in {logdir}' if logdir else ''}. {advice}; or pass start_afresh=True to begin again at step 0."
            )
        if path is None and self._start_afresh:
            self._first_values(flat)
            self._buffers.first_values()
        journal = find_journal(path, plan, self._say)
        self._goal.count_from(journal.version)
        plan.last_step = self._goal.last_step
        client.create(plan, flat, path, reign=secrets.randbits(62), replace=True, journal=journal)
        self._were_there = True

    @property
    def _recovering(self) -> bool:
        """Whether the variables were there, in this session: others may have made steps with them."""
        return self._were_there or self._session.state is State.RECOVERING

    def _first_values(self, flat: FlatParameters) -> None:
        """Keeps the values that the run begins with, or goes back to them."""
        if self._initial is None:
            self._initial = [p.detach().clone() for p in flat.parameters]
            return
        with torch.no_grad():
            for parameter, value in zip(flat.parameters, self._initial, strict=True):
                parameter.copy_(value)

    def _newest(self) -> str | None:
        """The chief looks for a checkpoint to go on from."""
        own = self._recovering and (self.has_saved or bool(self._durable))
        if self._session.logdir is None or not (self._restore or own):
            return None
        return find_checkpoint(self._session.logdir, self._goal.last_step, self._say)

    def _say(self, line: str) -> None:
        say(f"{self._session.task}: {line}")
