"""What the client's two threads share about a run: batches, questions, tasks, and the condition that says when something changed.

The user's thread (`torchquorum.graph.graph_session`) adds batches and questions and waits; the dispatcher's thread
(`torchquorum.graph.dispatcher`) sends them and enters the answers. What always holds: everything here is used only while `changed`
is held, except `version`; every wait has a deadline.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torchquorum.clock import SYSTEM, Clock, SeenTime
from torchquorum.errors import DeadlineError, TorchQuorumError
from torchquorum.graph import graph_messages as g
from torchquorum.graph.assignments import Assignments, GivenBatch
from torchquorum.graph.contact import Contact
from torchquorum.wire.codec import Frame

POLL_S = 0.5
BUSY_S = 8.0
START_ONE = " Start one: torchquorum join --job_name=worker --task_id=0, with the same --ps_hosts and --worker_hosts as this client."


@dataclass(slots=True)
class ContactTrouble:
    """Why a task cannot compute for this client, and since when it says so."""

    kind: str
    text: str
    since: float


@dataclass(slots=True)
class Question:
    """A Fetch or SaveNow that one task has to answer; `index` is the task that was asked, or -1."""

    message: g.Fetch | g.SaveNow
    index: int = -1
    asked_at: float = 0.0
    answer: Any = None
    frames: tuple[Frame, ...] = ()


class GraphRun:
    """The shared state of a run.

    Args:
        id: The run's name.
        contacts: The compute tasks, by index.
        assignments: Which task has which batch.
        say_s: How often a wait prints a line.
        say: Prints a line for people.
        clock: Tells the time.
    """

    def __init__(
        self,
        id: str,
        contacts: list[Contact],
        assignments: Assignments,
        *,
        say_s: float = 10.0,
        say: Callable[[str], None] = lambda _: None,
        clock: Clock = SYSTEM,
    ) -> None:
        self.id, self.contacts, self.assignments = id, contacts, assignments
        self.changed = threading.Condition()
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.questions: list[Question] = []
        self.troubles: dict[int, ContactTrouble] = {}
        self.told_all = False  # whether all tasks that are there were told that the run is over
        self.stop = False
        self.version = 0
        self.failure: BaseException | None = None
        self._asked = 0
        self._say_s, self._say, self._clock = say_s, say, clock

    # -- for the user's thread ----------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Tells the dispatcher that there is something to do."""
        os.eventfd_write(self.wake_fd, 1)

    def add(self, batch: GivenBatch) -> None:
        """Gives a batch to whichever task has room."""
        with self.changed:
            self.assignments.waiting.append(batch)
        self.wake()

    def expect(self, more: bool) -> None:
        """Says whether further batches come without the user's doing."""
        with self.changed:
            self.assignments.expecting = more

    def over_among(self, batches: Iterable[GivenBatch], *, settle: bool) -> list[GivenBatch]:
        """Returns the batches that have a result; with `settle`, those that wait for gradients that no task computes get one."""
        with self.changed:
            if settle:
                self.assignments.settle_stuck()
            return [batch for batch in batches if batch.over]

    def ask(self, what: str, limit_s: float, check: Callable[[], None]) -> Question:
        """Has a ready task send variables, averages or buffers, or make a checkpoint; returns the answered question.

        Raises:
            TorchQuorumError: The task could not.
            DeadlineError: There was no answer in time.
        """
        self._asked += 1
        saves = what == "checkpoint"
        question = Question(g.SaveNow(self.id, self._asked) if saves else g.Fetch(self.id, self._asked, what))
        shown = "a checkpoint" if saves else f"the {what}"
        with self.changed:
            self.questions.append(question)
        self.wake()
        try:
            self.wait(lambda: question.answer is not None, f"{shown} from a compute task", limit_s, check)
        finally:
            with self.changed:
                self.questions.remove(question)
        if question.answer.error:
            raise TorchQuorumError(f"{shown}: {question.answer.error}")
        return question

    def wait(self, done: Callable[[], bool], what: str, limit_s: float, check: Callable[[], None]) -> None:
        """Waits until something is so; prints now and then what it waits for.

        Args:
            done: Whether it is so; called with `changed` held.
            what: What is waited for: "waiting for {what}".
            limit_s: When to give up.
            check: Is called now and then, with `changed` held; may raise to end the wait.
        """
        seen = SeenTime(self._clock, 4 * POLL_S)
        started = said_at = seen.now()
        with self.changed:
            while not done():
                self.changed.wait(POLL_S)
                now = seen.turn()
                if self.failure is not None:
                    raise self.failure
                check()
                if now - started > limit_s:
                    advice = "" if self.ready else START_ONE
                    raise DeadlineError(
                        f"waited {now - started:.0f} s for {what} and gave up. {self._describe()}{advice}"
                    )
                if now - said_at >= self._say_s:
                    said_at = now
                    self._say(f"waiting for {what}: {now - started:.0f} s. {self._describe()}")

    # -- while `changed` is held --------------------------------------------------------------------------------------

    @property
    def ready(self) -> list[int]:
        """Returns the tasks that compute, by index."""
        return sorted(self.assignments.assignees)

    @property
    def all_left(self) -> bool:
        """Whether all tasks were told that the run is over, and none is in it any more."""
        return self.told_all and all(
            c.finished or not c.life or c.state in ("attached", "refused") for c in self.contacts
        )

    def check_hope(self) -> None:
        """Raises if no task can compute for us; one that is busy with a client that is gone becomes free after a while."""
        now = self._clock.now()
        sure = [t.text for t in self.troubles.values() if t.kind != "busy" or now - t.since > BUSY_S]
        if sure and len(sure) == len(self.contacts):
            raise TorchQuorumError(f"no compute task can join: {'; '.join(sure)}")

    def _describe(self) -> str:
        """Says how every compute task is doing."""
        assignments = self.assignments
        parts = []
        for contact in self.contacts:
            assignee = assignments.assignees.get(contact.task.index)
            batches = assignee.describe_queue() if assignee else ""
            parts.append(f"{contact}, has batch {batches}" if batches else str(contact))
        waiting = [str(b.number) for b in assignments.waiting]
        waiting += [f"{d.batch.number} (in doubt)" for d in assignments.doubts]
        return "; ".join(parts) + (f"; not given to any task: batch {', '.join(waiting)}" if waiting else "") + "."
