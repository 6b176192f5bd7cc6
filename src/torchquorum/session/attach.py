"""`attach`: the one path by which a task gets its place at the ps tasks.

hello -> the chief creates the variables, restores them or continues with live ones -> join -> buffers -> the other workers -> position.
`torchquorum.session.lifecycle` calls it at the beginning of a run and after a loss, the client of a graph to create the variables only.
What always holds: it tries until one deadline and no longer; every try starts with a new link of the same incarnation; a gradient that
was being pushed is pushed again only where the variables are as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torchquorum.errors import DeadlineError, LostCreationError, LostPlaceError, TaskLostError
from torchquorum.session import position, recording, scheduler_state
from torchquorum.session.buffers import SessionBuffers
from torchquorum.session.config import Setup
from torchquorum.session.connection import WorkerConnection
from torchquorum.session.initialize import Initializer
from torchquorum.session.join import say
from torchquorum.session.states import SessionState
from torchquorum.session.stop_condition import StopCondition
from torchquorum.wire.messages import Plan
from torchquorum.worker.link import Link
from torchquorum.worker.local_steps import RecordedStates
from torchquorum.worker.step import Step
from torchquorum.worker.worker_end import WorkerEnd

REJOIN_S = 10.0
RETRY_EVERY_S = 0.2
# A worker that begins reports a refused place or a late task at once; one that has trained tries again.
AT_START = (TaskLostError, LostCreationError)
AFTER_A_LOSS = (TaskLostError, LostPlaceError, DeadlineError)


def _ignore(_: object) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class AttachRequest:
    """Why a task attaches."""

    joins: bool = True  # becomes a worker; otherwise it only creates the variables
    creates: bool = False  # creates variables that are missing, as the chief does
    confirms: bool = (
        True  # the chief, at the start: confirms live variables to the ps tasks before it continues with them
    )
    before: Link | None = None  # the link that was lost; None at the start
    resumes: bool = True  # follows up the gradient that was being pushed; not after the loop
    # ps task 0 hands out data. A restored one does not know the batches in progress, so no gradient of them is pushed again.
    has_shares: bool = False
    on_state: Callable[[SessionState], None] = _ignore  # called with every state that the task reaches


@dataclass(frozen=True, kw_only=True)
class AttachResult:
    """Where the run stands for a task that has attached."""

    link: Link
    plan: Plan
    version: int  # that the run continues at
    steps_back: int = 0  # how many versions that this task has seen are lost, and may have been made anew by others
    resumed: Step | None = None  # what became of the gradient that was being pushed, if there was one


class Attachment:
    """One task's connection to the ps tasks, with what is needed to make it, and to make it again after a loss.

    Args:
        setup: What the task brings to the run.
        stop: When the run is over.
        while_waiting: Is called by the link while it waits; may raise to end the wait.
        make_link: Makes a link to the ps tasks.
    """

    def __init__(
        self,
        setup: Setup,
        stop: StopCondition,
        while_waiting: Callable[[], None] = lambda: None,
        make_link: Callable[[WorkerEnd], Link] = Link,
    ) -> None:
        self._setup, self._while_waiting = setup, while_waiting
        beat_every_s = min(1.0, setup.member.liveness_s / 4)
        self.connection = WorkerConnection(setup.task, setup.patience, beat_every_s, setup.clock, make_link)
        self._life = b""
        self.buffers = SessionBuffers(setup)
        self.initializer = Initializer(setup, self.buffers, stop)

    def attach(self, request: AttachRequest) -> AttachResult:
        """Takes the task's place; if a ps task is lost on the way, from the start, until `Patience.start_s` has passed.

        Raises:
            TaskLostError, LostPlaceError, DeadlineError: Of the last try, when the deadline has passed.
            LostVariablesError: There is nothing to continue from.
        """
        clock, start_s, first = self._setup.clock, self._setup.patience.start_s, request.before is None
        deadline, retried = clock.now() + start_s, AT_START if first else AFTER_A_LOSS
        while True:
            self.connection.close()
            try:
                return self._try(self.connection.open(self._prepare), request)
            except retried as error:
                if clock.now() > deadline:
                    raise
                if first:
                    say(f"{error}\n{self._setup.task}: trying to begin for {start_s:.0f} s")
                    request.on_state(SessionState.CONNECTING)
                clock.sleep(RETRY_EVERY_S)

    def _prepare(self, link: Link) -> None:
        link.while_waiting = self._while_waiting
        self.buffers.connect(link)

    def _try(self, link: Link, request: AttachRequest) -> AttachResult:
        before, first = request.before, request.before is None
        plan, flats = self.initializer.plan()
        created = self._greet(link, first=first)
        if first and request.joins and all(created):
            link.wait_for_place()
        # Every ps task answers. The chief makes sure that all of them hold variables of one creation.
        if request.creates and (not all(created) or (first and request.confirms)):
            request.on_state(SessionState.CREATING)
            told = before.total if before is not None else 0
            self.initializer.create(link, plan, created, recovering=not first, told=told)
        if not request.joins:
            return AttachResult(link=link, plan=plan, version=link.version)
        request.on_state(SessionState.WAITING)
        if first:
            self._begin_record(link)
        elif before is not None:
            link.lost = before.unsettled.push.local_step if before.unsettled is not None else 0
        self.connection.join(plan, flats)
        # Joined: the model holds the current version. If the run has gone back since, the buffers are older too, and so are
        # the gradients that this worker has given, even if others have made as many versions again.
        version = link.version
        steps_back = link.lost_since(before) if before is not None else 0
        if first or steps_back:
            self.buffers.load_first(link)
        # Workers that trained together continue together: otherwise the first one back would fill their rounds.
        chosen = self._setup.member.wait_for_workers is not None
        link.wait_for_workers(self._setup.wait_for_workers, None if first else REJOIN_S, begins=first and not chosen)
        resumed = self._resume(link, request) if not steps_back else None
        self._take_position(link, restore=first or steps_back > 0)
        return AttachResult(link=link, plan=plan, version=version, steps_back=steps_back, resumed=resumed)

    def _greet(self, link: Link, *, first: bool) -> list[bool]:
        """Greets the ps tasks; if this program had a session before, when that is over on all of them, for all workers."""
        presence, patience, clock = self._setup.task.presence, self._setup.patience, self._setup.clock
        created, started, said = link.hello(), clock.now(), 0.0
        while first and presence is not None and presence.generation is not None:
            if not link.waits_for_another_run(presence.generation):
                break
            waited_s = clock.now() - started
            if waited_s > patience.start_s:
                raise DeadlineError(
                    f"{self._setup.task}: waited {waited_s:.0f} s for the session before this one to end on all workers"
                )
            if waited_s - said >= patience.say_s:
                said = waited_s
                self._setup.say(f"waiting for the session before this one to end on all workers: {waited_s:.0f} s")
            clock.sleep(RETRY_EVERY_S)
            self._while_waiting()
            created = link.hello()
        return created

    def _begin_record(self, link: Link) -> None:
        """What this process is goes into the record of the run; one that is replayed is put where it was."""
        setup, replayed = self._setup, self._setup.task.replay
        if replayed is not None:
            position.restore(replayed.file.began, setup.data, setup.say)
        elif setup.member.record:
            self._life = self._life or recording.describe_life(setup.task.began, setup.data, setup.say)
            link.life = self._life

    def _resume(self, link: Link, request: AttachRequest) -> Step | None:
        """Learns what became of the gradient that was being pushed when the link was lost."""
        before = request.before
        if before is None or not request.resumes or (request.has_shares and link.generation != before.generation):
            return None
        return link.take_up(before.unsettled)

    def _take_position(self, link: Link, *, restore: bool) -> None:
        """Restores the position that came with a checkpoint, if there is one, and captures positions from now on."""
        data, local = self._setup.data, self.buffers.local
        if restore:
            self._take_settings(link)
        if restore and link.position is not None:
            position.restore(link.position, data, self._setup.say)
        self._take_local_state(link, restore=restore)
        if self._setup.logdir is not None:
            steps = [optimizer.local for optimizer in self._setup.optimizers if optimizer.local is not None]
            link.positions.begin(lambda: position.capture(data, local, self._look_at_settings, steps), link.place)

    def _look_at_settings(self) -> Any:
        """Returns what stands in the parameter groups; of several optimizers, of each."""
        found = [optimizer.look_at_settings() for optimizer in self._setup.optimizers]
        return found if len(found) > 1 else found[0]

    def _take_local_state(self, link: Link, *, restore: bool) -> None:
        """Under local steps every worker has state of its own, which is in no checkpoint."""
        for track, optimizer in enumerate(self._setup.optimizers):
            steps = optimizer.local
            if steps is not None:
                steps.attach(link, track)
                steps.open_states(self._setup.logdir, self._setup.save.keep, of=str(track) if track else "")
                if restore:
                    steps.restore(link.place, self._recorded_states())

    def _recorded_states(self) -> RecordedStates | None:
        """Returns how a recorded run keeps what this worker goes on with, or where a replay finds it."""
        if (replayed := self._setup.task.replay) is not None:
            return RecordedStates(replayed.file.recorded)
        return RecordedStates() if self._setup.member.record else None

    def _take_settings(self, link: Link) -> None:
        """Writes the run's settings into the optimizer's groups, or this worker's own, where they were saved with its schedulers."""
        optimizers, saved = self._setup.optimizers, link.position or {}
        if saved.get("version") != link.place:
            saved = {}
        own = scheduler_state.unpack(saved["settings"]) if "settings" in saved else None
        owns = own if len(optimizers) > 1 else [own]
        for k, optimizer in enumerate(optimizers):
            optimizer.take_settings((owns[k] if owns else None) or link.tracks[k].settings)
        if self._setup.task.is_chief and link.version > 0:
            self._tell_of_schedulers(link, scheduler_state.unpack(saved["schedulers"]) if "schedulers" in saved else {})

    def _tell_of_schedulers(self, link: Link, restored: Mapping[str, Any]) -> None:
        """Says that a scheduler object of a run that goes on begins anew, if one does."""
        schedulers = [name for name, source in self._setup.data.items() if scheduler_state.is_scheduler(source)]
        if all(name in restored for name in schedulers) and (
            schedulers or not any(optimizer.has_scheduler for optimizer in self._setup.optimizers)
        ):
            return
        why = (
            "was not saved at this step"
            if schedulers
            else "is not in tq.Session(data=...), which saves and restores it"
        )
        rates = ", ".join(f"{rate:g}" for track in link.tracks for rate in track.lr)
        self._setup.say(
            f"the run goes on at global step {link.version} with lr={rates}, and a scheduler object begins anew: it {why}"
        )


def create_variables(setup: Setup) -> Plan:
    """Creates or restores the variables without joining, as the client of a graph does; returns the run's plan."""
    attachment = Attachment(setup, StopCondition(setup.stop, setup.clock))
    try:
        return attachment.attach(AttachRequest(joins=False, creates=True)).plan
    finally:
        attachment.connection.close()
