"""The fault matrix as data: which task, which fault, under which rule, at which moment, and what has to come of it.

`runner` makes each cell with real processes and checks the outcome; docs/faults.md says the same in prose.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

TASKS = ("ps", "chief", "worker")
# What is asked of every task, and two harder kinds of cut that are asked beside them.
FAULTS = ("kill -9", "SIGSTOP", "restart", "network cut", "network slow", "half-open", "stall")
RULES = {"Async": "async", "Sync": "sync", "Sync, a backup": "sync:2of3", "Bounded": "bounded:2"}
MOMENTS = ("before the first step", "in the middle", "during a checkpoint", "at the end")
# Pauses of several tasks at once, longer than every deadline; and of some for 40 s, with the deadlines of a user who sets none.
PAUSE, LONG_PAUSE = "pause", "pause of 40 s"
PAUSED = ("ps", "both ps", "all")
PAUSE_S = {PAUSE: 8.0, LONG_PAUSE: 40.0}
NAMESPACES = ("network cut", "network slow", "half-open")  # between hosts; a stall is made by a proxy


@dataclass(frozen=True)
class Outcome:
    """What a cell has to come to.

    Attributes:
        text: For people.
        ends: Whether the run makes its last step and the last checkpoint holds it.
        victim: The exit code of the task that met the fault; for a restarted one, of its second process.
        workers: The exit codes that the other workers may have.
        ps: The exit code of the other ps tasks.
        says: What one of the other workers has to have said, with the victim's name and address.
    """

    text: str
    ends: bool = True
    victim: int = 0
    workers: tuple[int, ...] = (0,)
    ps: int = 0
    says: str = ""


GAVE_UP = (
    r"waited \d+ s for {name} \({address}\) to answer at {name} \({address}\) and gave up\. Check that the task runs"
)
SILENT = r"{name} \({address}\) has (not answered for \d+ s|closed the connection) while this task waited for"

UNDISTURBED = Outcome("goes on, slower; nobody counts as dead; all steps are made")
WITHOUT_IT = Outcome("goes on without it; ps task 0 saves in a dead chief's place; all steps are made", victim=-9)
WELCOMED_BACK = Outcome(
    "counts as dead after the liveness timeout; the others go on; welcomed back, what it was computing is refused as expired"
)
IN_ITS_PLACE = Outcome("counts as dead; its successor takes its place at the current version")
LATE_GOODBYE = Outcome("counts as dead; the others end the run; it finds the run over and ends well")
FOUND_AGAIN = Outcome(
    "the workers notice the silence, wait, and go on from the very version; nothing is lost", says=SILENT
)
ROLLED_BACK = Outcome(
    "all ps tasks go back to the last checkpoint together; all steps are made",
    says=rf"{SILENT}|{{name}}: holds no variables yet|{{name}} does not know this process",
)
BOTH_FOUND_AGAIN = Outcome(
    "the workers notice the silence, wait, and go on from the very version; neither ps takes anybody for lost",
    says=r"/job:ps/task:[01] \([^)]*\) has (not answered for \d+ s|closed the connection) while this task waited for",
)
UNNOTICED = Outcome("nobody notices, for nobody was awake; all steps are made")
GIVEN_UP = Outcome(
    "every task ends with an error after `Patience.start_s`, which names the ps, its address, and what to do",
    ends=False,
    victim=-9,
    workers=(1,),
    ps=1,
    says=GAVE_UP,
)
UNSAVED = Outcome(
    "the chief ends with an error that says the last checkpoint could not be made; the others had nothing left to do",
    ends=False,
    victim=-9,
    workers=(0, 1),
    ps=1,
    says=GAVE_UP,
)
NOTHING_TO_RESTORE = Outcome(
    "an error: the variables are lost and there is no checkpoint yet; start_afresh=True would begin again",
    ends=False,
    victim=1,
    workers=(1,),
    ps=1,
    says=r"{name} was restarted and its variables are lost: there is no checkpoint to go on from",
)
BACK_BEFORE_THE_END = Outcome(
    "an error: the run is back at the last checkpoint and nobody is left to make the steps again; the next start does",
    ends=False,
    victim=1,
    workers=(0, 1),
    ps=1,
    says=r"the run is back at global step \d+ of \d+\. Start the program again: it goes on from there",
)

# (task, fault) -> the outcome at each moment; one entry stands for all four.
TABLE: dict[tuple[str, str], tuple[Outcome, ...]] = {
    ("ps", "kill -9"): (GIVEN_UP, GIVEN_UP, GIVEN_UP, UNSAVED),
    ("ps", "SIGSTOP"): (FOUND_AGAIN,),
    ("ps", "restart"): (NOTHING_TO_RESTORE, ROLLED_BACK, ROLLED_BACK, BACK_BEFORE_THE_END),
    ("ps", "network cut"): (FOUND_AGAIN,),
    ("ps", "network slow"): (UNDISTURBED,),
    ("ps", "half-open"): (NOTHING_TO_RESTORE, ROLLED_BACK, ROLLED_BACK, BACK_BEFORE_THE_END),
    ("ps", "stall"): (FOUND_AGAIN,),
    **{("ps", fault): (FOUND_AGAIN,) for fault in PAUSE_S},
    **{("both ps", fault): (BOTH_FOUND_AGAIN,) for fault in PAUSE_S},
    **{("all", fault): (UNNOTICED,) for fault in PAUSE_S},
    **{
        (task, fault): outcome
        for task in ("chief", "worker")
        for fault, outcome in {
            "kill -9": (WITHOUT_IT,),
            "SIGSTOP": (WELCOMED_BACK, WELCOMED_BACK, WELCOMED_BACK, LATE_GOODBYE),
            "restart": (IN_ITS_PLACE,),
            "network cut": (WELCOMED_BACK, WELCOMED_BACK, WELCOMED_BACK, LATE_GOODBYE),
            "network slow": (UNDISTURBED,),
            "half-open": (IN_ITS_PLACE,),
            "stall": (WELCOMED_BACK, WELCOMED_BACK, WELCOMED_BACK, LATE_GOODBYE),
        }.items()
    },
}


@dataclass(frozen=True)
class Cell:
    """One case."""

    task: str
    fault: str
    rule: str
    moment: str

    def __str__(self) -> str:
        return f"{self.task}, {self.fault}, {self.rule}, {self.moment}"

    @property
    def outcome(self) -> Outcome:
        """Returns what has to come of it."""
        outcomes = TABLE[self.task, self.fault]
        return outcomes[MOMENTS.index(self.moment) % len(outcomes)]

    @property
    def num_workers(self) -> int:
        """Returns how many workers the cluster has."""
        return 3 if "of3" in RULES[self.rule] else 2

    @property
    def num_ps(self) -> int:
        """Returns how many ps tasks it has: two where one of them meets the fault, so that both kinds of ps task do."""
        return 2 if self.task in PAUSED else 1

    @property
    def victim(self) -> tuple[str, int]:
        """Returns the job and the index of the task that meets the fault: of the ps tasks now the deciding one, now the other."""
        if self.task in PAUSED:
            return "ps", (list(RULES).index(self.rule) + MOMENTS.index(self.moment)) % 2
        return "worker", 0 if self.task == "chief" else 1

    @property
    def pause_s(self) -> float | None:
        """Returns how long tasks are paused, if they are."""
        return PAUSE_S.get(self.fault)

    def is_paused(self, job: str, index: int) -> bool:
        """Whether a pause is also that of a task."""
        return self.task == "all" or (job == "ps" and (self.task == "both ps" or (job, index) == self.victim))


PAUSES = [
    *(Cell(*of) for of in itertools.product(PAUSED, (PAUSE,), RULES, MOMENTS)),
    *(
        Cell(task, LONG_PAUSE, rule, MOMENTS[1])
        for task, rule in zip(PAUSED, ("Bounded", "Async", "Sync"), strict=True)
    ),
]
CELLS = [*(Cell(*of) for of in itertools.product(TASKS, FAULTS, RULES, MOMENTS)), *PAUSES]
# One per row, the rules and moments taking turns: what `make test` runs.
DIAGONAL = [
    Cell(task, fault, list(RULES)[(r + 1) % 4], MOMENTS[(r + r // 4 + 1) % 4])
    for r, (task, fault) in enumerate(itertools.product(TASKS, FAULTS[:5]))
]
