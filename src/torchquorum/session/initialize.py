"""What a run's variables are, and what their values start from: live variables, a checkpoint, or the model's own values.

Owned by the attachment of a task: every worker describes the variables by the same plan, and the chief creates them, at the start and
when a ps task was lost. What always holds: live variables are never replaced while all ps tasks hold them; a run that lost its
variables begins again at step 0 only if the options allow it; the checkpoint that it continues from stays its newest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from msgspec.structs import asdict

from torchquorum.errors import ConfigError, LostVariablesError
from torchquorum.placement.layout import Variable
from torchquorum.session.buffers import SessionBuffers
from torchquorum.session.config import Setup
from torchquorum.session.durable import Found, find_checkpoint, find_journal
from torchquorum.session.folder import check_free
from torchquorum.session.models_and_optimizers import describe_each, owners
from torchquorum.session.prefetch import prefetch
from torchquorum.session.replayed import Replayed
from torchquorum.session.stop_condition import StopCondition
from torchquorum.update.constraints import check_after_update
from torchquorum.wire.messages import Create, JournalRef, Plan, TrackSpec
from torchquorum.wire.plan import OptimizerPlan
from torchquorum.worker.flat import FlatParameters
from torchquorum.worker.link import Link
from torchquorum.worker.local_buffers import tied_names
from torchquorum.worker.optimizer import Optimizer
from torchquorum.worker.polls import wait_until_settled
from torchquorum.worker.row_tables import RowTables, find_tables

FULL_EVERY = 8  # checkpoints, of which one has all rows


def _plan_of(optimizer: Optimizer, variables: list[Variable], tables: RowTables, num_workers: int) -> dict[str, Any]:
    """Returns what a plan has of one optimizer, by the names of its fields."""
    options = optimizer.options
    return asdict(
        OptimizerPlan(
            variables=variables,
            tables=tables.specs,
            optimizer=optimizer.spec(num_workers),
            rule=optimizer.rule,
            schedule=options.schedule,
            average=options.average,
            after_update=options.after_update,
            compress=options.compress or "",
            placement=options.placement,
            slice_bytes=options.slice_bytes,
        )
    )


class Initializer:
    """Where the variables of one session come from.

    Attributes:
        flats: The parameters of each optimizer in the plan's layout, from the first plan on.
        has_saved: Whether this session has asked for a checkpoint: what is in the folder is then this run's own.
    """

    def __init__(self, setup: Setup, buffers: SessionBuffers, stop: StopCondition) -> None:
        self._setup, self._buffers, self._stop = setup, buffers, stop
        self.flats: list[FlatParameters] = []
        self._tables: list[RowTables] = []
        self._initial: list[torch.Tensor] | None = None
        self._created = False  # by this session: others may have made steps since
        self.has_saved = False

    def plan(self) -> tuple[Plan, list[FlatParameters]]:
        """Describes the variables and what is done with them; the parameters move into the plan's layout once."""
        setup, (optimizer, *more) = self._setup, self._setup.optimizers
        if not self.flats:
            self._tables = self._find_tables()
            if not setup.task.is_chief:
                self._let_rows_go()
        described = describe_each(setup.model, setup.optimizers, self._tables)
        plan = Plan(
            **_plan_of(optimizer, described[0][0], self._tables[0], setup.task.num_workers),
            num_shards=setup.task.num_ps,
            num_workers=setup.task.num_workers,
            last_step=self._stop.last_step,
            liveness_s=setup.member.liveness_s,
            logdir=setup.logdir,
            keep=setup.save.keep,
            full_every=setup.save.full_every or FULL_EVERY,
            durable=setup.restore.durable,
            tied=tied_names(setup.model),
            min_workers=setup.task.min_workers if setup.task.cluster.elastic else 0,
            must_save=setup.save.required,
            record=setup.member.record,
            # The ps gives up before those who wait for it do, so that all hear the same.
            save_s=min(setup.patience.save_s, setup.patience.round_s / 2) if setup.save.required else 0.0,
        )
        if more:
            plan.name = optimizer.called
            plan.more = [
                TrackSpec(name=of.called, **_plan_of(of, variables, tables, setup.task.num_workers))
                for of, (variables, _), tables in zip(more, described[1:], self._tables[1:], strict=True)
            ]
        layouts = [of.layout() for of in plan.tracks()]
        for of, layout in zip(plan.tracks(), layouts, strict=True):
            check_after_update(of.after_update, layout)
        self._buffers.describe(plan)
        if not self.flats:
            own = [parameters for _, parameters in described]
            self.flats = [FlatParameters(*each) for each in zip(layouts, own, self._tables, strict=True)]
            if setup.restore.start_afresh:  # now: a chief that goes on with live variables loads those
                self._reset()
        return plan, self.flats

    def _find_tables(self) -> list[RowTables]:
        """Returns the tables of each optimizer; a `tq.Table` that none has is with the first's."""
        setup = self._setup
        owner = owners(setup.model, setup.optimizers) if len(setup.optimizers) > 1 else {}

        def of(k: int, optimizer: Optimizer) -> RowTables:
            whole = self._whole(optimizer)
            return RowTables(
                find_tables(
                    setup.model, optimizer.inner, setup.say, whole=whole, is_own=lambda p: owner.get(id(p), 0) == k
                ),
                setup.reading,
            )

        found = [of(k, optimizer) for k, optimizer in enumerate(setup.optimizers)]
        if setup.save.full_every is not None and not any(found):
            raise ConfigError(
                f"full_every={setup.save.full_every}: the model has no table of rows, so it has no effect; leave it out"
            )
        if setup.reading is not None:
            if not any(found):
                raise ConfigError(
                    "rows=tq.rows.Reading(...): the model has no table of rows, so it has no effect; leave it out"
                )
            if setup.reading.max_staleness:
                setup.say(str(setup.reading))
        return found

    def prefetch(self, ids: Any) -> None:
        """Asks for the rows of a later batch, see `tq.Session.prefetch`."""
        prefetch(self._setup.model, self._tables, ids)

    def _let_rows_go(self) -> None:
        for tables in self._tables:
            tables.let_go()

    def _whole(self, optimizer: Optimizer) -> str:
        """Returns why an optimizer's variables are all pulled and pushed whole, if so: something needs it that rows do not have."""
        reasons = {
            "tq.Local": optimizer.rule.local_steps is not None,
            "compress=": bool(optimizer.options.compress),
            "average=": optimizer.options.average is not None,
            "after_update=": bool(optimizer.options.after_update),
        }
        return next((name for name, holds in reasons.items() if holds), "")

    def release(self) -> None:
        """The session is over: the parameters leave the plan's layout."""
        for flat in self.flats:
            flat.release()
        self.flats = []

    def survive_by(self, surviving: Callable[[Callable[[], Any]], Any]) -> None:
        """From now on rows that a forward pass asks for come also if a ps task is lost meanwhile; the session recovers."""
        for tables in self._tables:
            tables.survive = surviving

    def give_rows_back(self) -> None:
        """The session ends well: the weights of sparse embeddings are whole again."""
        for tables in self._tables:
            tables.survive = lambda ask: ask()
            tables.give_back()

    def create(self, link: Link, plan: Plan, created: list[bool], *, recovering: bool, told: int = 0) -> None:
        """The chief continues with live variables, or restores, or initializes.

        Args:
            link: Connected to the ps tasks.
            plan: The run's plan; its last step is filled in here if it is counted from where the run continues.
            created: Which ps tasks hold live variables.
            recovering: Whether this session has trained already.
            told: The version that this session has trained at.

        Raises:
            ConfigError: Another run that is alive writes into the folder.
            LostVariablesError: A ps task has lost them, there is no checkpoint, and starting afresh was not allowed.
            CheckpointError: All checkpoints are damaged, and starting afresh was not allowed.
            JournalError: Updates of a durable run are missing, and that was not accepted.
        """
        assert self.flats, "planned before"
        if replayed := self._setup.task.replay:
            self._create_again(link, plan, replayed)
            return
        if all(created):
            link.create(Create(plan, only_existing=True), self.flats)
            self._created = True
            self._let_rows_go()
            self._setup.say("the ps tasks hold live variables already; going on with them")
            return
        recovering = recovering or self._created
        if not recovering and not any(created):
            check_free(self._setup.logdir, self._setup.say, self._setup.clock)
        if any(created):
            wait_until_settled(link.channels)
        # No checkpoint is being written: the newest in the folder stays the newest.
        found, afresh = self._newest(recovering=recovering), self._setup.restore.start_afresh
        if found.path is None and (any(created) or recovering) and not afresh:
            raise self._lost(created)
        if found.path is None and afresh:
            self._reset()
        journal = self._find_journal(found, plan, told)
        found.set_damaged_aside(self._setup.say)
        self._stop.count_from(journal.step)
        plan.last_step = self._stop.last_step
        generation = self._setup.task.random_bits(62)
        begins = [optimizer.begun_state() for optimizer in self._setup.optimizers]
        if found.path is None and any(optimizer.left_its_state for optimizer in self._setup.optimizers):
            self._setup.say(
                "the optimizer begins without the state that it had in the session before, which stayed with that run. To go on with it, "
                "take optimizer.state_dict() at the end of that session, and give it to optimizer.load_state_dict() before this one"
            )
        for state, flat, of in zip(begins, self.flats, plan.tracks(), strict=True):
            if state is None:
                continue
            state.check(flat.layout, flat.parameters, of.optimizer.groups)
            if found.path is not None:
                self._setup.say(
                    "the run goes on from its checkpoint, and so does the optimizer: the state that it had before is not used"
                )
        link.create(Create(plan, found.path, generation, replace=True, journal=journal), self.flats, begins)
        self._created = True
        if not afresh:
            self._let_rows_go()

    def _create_again(self, link: Link, plan: Plan, replayed: Replayed) -> None:
        """In a replay the ps tasks know what a creation begins from; the chief's own values count where they did."""
        if self._setup.restore.start_afresh:
            self._reset()
        plan.last_step = replayed.file.last_step
        if plan.last_step is not None and self._stop.last_step is None:
            self._stop.end_at(plan.last_step)
        begins = [optimizer.begun_state() for optimizer in self._setup.optimizers]
        generation = self._setup.task.random_bits(62)
        link.create(Create(plan, generation=generation, replace=True), self.flats, begins)

    def _find_journal(self, found: Found, plan: Plan, told: int) -> JournalRef:
        """How far the journal leads; a durable run goes back only if the options say so, or it was asked to begin anew."""
        setup, options = self._setup, self._setup.restore
        anew = found.path is None and (options.start_afresh or not options.restore)
        return find_journal(found, plan, setup.say, setup.clock, told=told, accept_loss=options.accept_loss or anew)

    def _reset(self) -> None:
        """Keeps the values that the run begins with, or returns to them; the buffers with them."""
        self._buffers.reset()
        parameters = [parameter for flat in self.flats for parameter in flat.parameters]
        if self._initial is None:
            self._initial = [p.detach().clone() for p in parameters]
            return
        with torch.no_grad():
            for parameter, value in zip(parameters, self._initial, strict=True):
                parameter.copy_(value)

    def _newest(self, *, recovering: bool) -> Found:
        """The chief looks for a checkpoint to continue from."""
        logdir, options = self._setup.logdir, self._setup.restore
        own = recovering and (self.has_saved or bool(options.durable))
        if logdir is None or not (options.restore or own):
            return Found()
        return find_checkpoint(logdir, self._stop.last_step, self._setup.say, start_afresh=options.start_afresh)

    def _lost(self, created: list[bool]) -> LostVariablesError:
        task, logdir = self._setup.task, self._setup.logdir
        lost = [str(ps) for ps, there in zip(task.cluster.tasks("ps"), created, strict=True) if not there]
        sooner = "Save sooner (save_every_s, save_every_steps), or every update (durable)"
        advice = sooner if logdir else "Give the session a logdir, so that it saves"
        if self._setup.restore.durable:  # its first checkpoint was there before the first update
            advice = "Its checkpoints are gone: put them back, if there are copies"
        return LostVariablesError(
            f"{task}: {', '.join(lost)} was restarted and its variables are lost: there is no checkpoint to go on "
            f"from{f' in {logdir}' if logdir else ''}. {advice}; or pass start_afresh=True to begin again at step 0."
        )
