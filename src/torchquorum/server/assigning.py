"""`session.assign()` on shard 0: given values become the next version, and those who wait for it are released.

Owned by the leader. `value_assignments` says whose values count and whose wait is over; here that becomes a version.
"""

from __future__ import annotations

from torchquorum.lines import first_of
from torchquorum.server.decision_effects import DecisionEffects
from torchquorum.server.value_assignments import ValueAssignments
from torchquorum.wire.messages import STANDS_IN, Assign, Assigned, Held, Outcome, TrackValues
from torchquorum.wire.recorded import ASSIGN


class Assigning:
    """The assignments of a run, made through its log."""

    def __init__(self, effects: DecisionEffects) -> None:
        self._effects, self._plan, self._quorum = effects, effects.plan, effects.quorum
        self._assignments = ValueAssignments()

    def ask(self, assign: Assign, wall: float) -> None:
        """A joined worker has come to an assignment, with its values or without."""
        assignments, quorum = self._assignments, self._quorum
        self._effects.asks(assign.worker, assign.incarnation, assign.request, ASSIGN, assign.number)
        assignments.wait(assign)
        if not quorum.stopped and assignments.is_due(assign, quorum):
            assignments.make(assign)
            first = TrackValues(assign.version, assign.variables, assign.state, assign.settings)
            for track, values in enumerate([first, *assign.more]):
                if values.variables or values.state:
                    self._make(assign, track, values, wall)
        self.release()

    def _make(self, assign: Assign, track: int, values: TrackValues, wall: float) -> None:
        """Given values become an optimizer's next version; with its state, its settings hold from the next update on."""
        effects, of = self._effects, self._quorum.tracks[track]
        met, settings = of.version, effects.settings[track]
        names = [effects.plans[track].variables[v].name for v in values.variables]
        actions = self._quorum.assign(track)
        version = of.version
        if values.state and values.settings:
            settings.offer(values.settings)
        change = settings.take() if values.state else []
        who = (assign.worker, assign.incarnation, assign.number)
        effects.log.append(Assigned(*who, version, values.variables, values.state, change, track))
        effects.follow(actions, wall)
        lost = met - values.version
        since = f"; in these, {lost} updates since version {values.version} are overwritten" if lost else ""
        names = ["the optimizer's state", *names] if values.state else names
        shown = first_of(names)
        name = f" of {self._plan.names[track]}" if self._plan.names[track] else ""
        text = f"{shown} became version {version}{name}{since}"
        effects.history.wall = wall
        effects.history.note("assigned", assign.worker, text, self._plan.naming(track))
        effects.note(f"/job:worker/task:{assign.worker} assigned values: {text}")

    def release(self) -> None:
        """Releases the workers whose wait for an assignment is over; one whose values count now is asked for them."""
        assignments, quorum, effects = self._assignments, self._quorum, self._effects
        asked = assignments.stand_in(quorum) if not quorum.stopped else None
        if asked is not None:
            effects.outcomes[asked.worker] = Outcome(False, STANDS_IN, quorum.version)
        over = assignments.over(stopped=quorum.stopped)
        for assign in over if asked is None else [*over, asked]:
            effects.release(assign.worker, assign.incarnation, assign.request)

    def forget(self, worker: int) -> None:
        """A worker has gone, or come back as another process."""
        self._assignments.forget(worker)

    @property
    def is_awaited(self) -> bool:
        """Whether a worker waits for an assignment."""
        return bool(self._assignments.waiting)

    def wait_of(self, worker: int, request: int) -> Held | None:
        """Returns what a worker's request waits for, if that is an assignment."""
        if worker not in self._assignments.waiting:
            return None
        who = self._assignments.assigner(self._quorum)
        return Held(request, f"/job:worker/task:{who} to assign values", 0, 1, [who])
