"""What a run is and what befalls it, all drawn from one seed: a configuration, and a list of faults, each with all its details.

A schedule is data, so it can be cut down to the faults that matter and told to people. What always holds: the same seed draws the same
schedule; leaving faults out changes nothing about the others.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torchquorum as tq
from torchquorum.rules.presets import Rule

COMPUTE_S = 0.02
FULL_STEPS = 100
FOLDERS = 0.7
THEMES = 0.2
MOMENTS = 0.15
RULES = ("sync", "sync", "async", "async", "pipeline", "bounded", "buffered", "backup")


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run.

    Attributes:
        steps: The global step at which it is over.
        transport: tcp, or shm: gradients lie in memory that ps and worker share.
        watches: Whether ps 0 sees at once that a worker's process is gone.
        folder: Whether the run has one.
        durable: Its journal: none, write or fsync.
        save_every: Global steps between checkpoints.
        late_s: Within which time the tasks are started.
        optimizer: sgd, momentum or adam.
        changes_lr: Whether the program changes its rate as it goes.
        average: Whether moving averages are kept, and looked at now and then.
        second: The rule of a second optimizer, which the program steps after the first; empty for none.
        assigns: Whether workers write to the first one's parameters now and then, and call `session.assign()`.
        rows: Whether the first model has an embedding of which batches look some rows up.
        barriers: Whether they wait for each other now and then.
    """

    seed: int
    ps: int = 1
    workers: int = 2
    rule: str = "sync"
    steps: int = FULL_STEPS
    transport: str = "tcp"
    watches: bool = False
    folder: bool = False
    durable: str = ""
    save_every: int = 20
    late_s: float = 0.2
    optimizer: str = "sgd"
    changes_lr: bool = False
    average: bool = False
    second: str = ""
    assigns: bool = False
    rows: bool = False
    barriers: bool = False

    @property
    def in_step(self) -> bool:
        """Whether a version says where each worker is in its data."""
        return self.rule == "sync" and not self.second

    @property
    def exact(self) -> bool:
        """Whether all sums are exact, so that values are compared bit for bit."""
        return self.optimizer == "sgd" and not self.changes_lr

    @property
    def tasks(self) -> list[str]:
        """Returns the names of all tasks."""
        return [f"ps/{i}" for i in range(self.ps)] + [f"worker/{i}" for i in range(self.workers)]

    def make_rules(self) -> list[Rule]:
        """Returns the rule of each optimizer."""
        return [self._make_rule(name) for name in (self.rule, self.second) if name]

    def _make_rule(self, name: str) -> Rule:
        match name:
            case "sync":
                return tq.Sync()
            case "backup":
                return tq.Sync(max(1, self.workers - 1))
            case "bounded":
                return tq.Bounded(2)
            case "buffered":
                return tq.Buffered(2)
        return tq.Async(pipeline=name == "pipeline")

    def __str__(self) -> str:
        folder = f", folder, saved every {self.save_every} steps" if self.folder else ""
        durable = f", durable={self.durable}" if self.durable else ""
        more = (", rates change" if self.changes_lr else "") + (", averages" if self.average else "")
        more += (
            (", assignments" if self.assigns else "")
            + (", barriers" if self.barriers else "")
            + (", rows" if self.rows else "")
        )
        rules = " and ".join(map(str, self.make_rules()))
        return (
            f"{self.ps} ps, {self.workers} workers, {rules}, {self.optimizer}, {self.steps} steps, "
            f"{self.transport}{folder}{durable}{more}"
        )


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that goes wrong.

    Attributes:
        at: When, in seconds after the beginning.
        kind: What.
        task: To whom.
        other: The other end, where it is about a wire.
        for_s: How long.
        amount: How much: seconds, a chance, a count.
        back_s: After how long a killed task is started again.
        when: In which state of a task it happens, such as `ps/0: saving`, from `at` on; empty for at once.
    """

    at: float
    kind: str
    task: str = ""
    other: str = ""
    for_s: float = 0.0
    amount: float = 0.0
    back_s: float = 0.0
    when: str = ""

    def __str__(self) -> str:
        when = f"while {self.when}, " if self.when else ""
        return when + TEXTS[self.kind].format(self)


TEXTS = {
    "kill": "{0.task} is killed, and started again after {0.back_s:.1f} s",
    "vanish": "the host of {0.task} vanishes: no connection is closed; the task is started again after {0.back_s:.1f} s",
    "kill_at": "{0.task} will be killed at its effect number {0.amount:.0f} from now, and started again after {0.back_s:.1f} s",
    "pause": "{0.task} is frozen for {0.for_s:.1f} s",
    "cut": "the wire {0.task} - {0.other} is cut for {0.for_s:.1f} s; what is sent is lost",
    "hold": "the wire {0.task} - {0.other} is cut for {0.for_s:.1f} s; what is sent arrives afterwards",
    "deaf": "for {0.for_s:.1f} s {0.task} hears nothing from {0.other}, which hears it",
    "mute": "for {0.for_s:.1f} s {0.other} hears nothing from {0.task}, which hears it",
    "slow": "for {0.for_s:.1f} s every message between {0.task} and {0.other} takes {0.amount:.2f} s longer",
    "reset": "the connections {0.task} - {0.other} are reset",
    "noise": "for {0.for_s:.1f} s messages between {0.task} and {0.other} are lost, doubled or overtaken, {0.amount:.0%} of them",
    "clock": "the wall clock of {0.task} jumps by {0.amount:+.0f} s",
    "error": "the program of {0.task} raises an exception at its next step; it is started again after {0.back_s:.1f} s",
    "full": "the disk is full for {0.for_s:.1f} s",
    "slow_disk": "for {0.for_s:.1f} s everything that a saver writes takes {0.amount:.1f} s longer",
    "power": "the power fails: all tasks die, what was not synced is lost; they are started again after {0.back_s:.1f} s",
    "flip": "a bit flips in a file that nobody has open",
}
WIRE = ("cut", "hold", "deaf", "mute", "slow", "noise", "reset")
OF_A_TASK = ("kill", "vanish", "kill_at", "pause", "clock")
DISK = ("full", "slow_disk", "power", "flip")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A run and its faults."""

    config: Config
    faults: tuple[Fault, ...]

    def only(self, kept: list[int]) -> Schedule:
        """Returns the same with these faults alone."""
        return replace(self, faults=tuple(self.faults[k] for k in kept))


def draw(seed: int, *, steps: int = FULL_STEPS) -> Schedule:
    """Draws a schedule."""
    r = random.Random(f"hunt {seed}")
    folder = r.random() < FOLDERS
    config = Config(
        seed=seed,
        ps=r.choice((1, 1, 2, 2, 3)),
        workers=r.choice((1, 2, 2, 2, 3)),
        rule=r.choice(RULES),
        steps=steps,
        transport=r.choice(("tcp", "tcp", "shm")),
        watches=r.random() < 0.5,
        folder=folder,
        durable=r.choice(("", "", "write", "fsync")) if folder else "",
        save_every=r.choice((5, 20, 20, 40, 60)),
        late_s=r.choice((0.2, 0.2, 1.5)),
        optimizer=r.choice(("sgd", "sgd", "momentum", "adam")),
        changes_lr=r.random() < 0.25,
        average=r.random() < 0.2,
    )
    config = _draw_more(config)
    theme = r.random()
    if theme < THEMES:  # what is rare, and where much depends on the order of things
        return _draw_theme(r, config, rolls_back=theme < THEMES / 2)
    if (moments := _draw_moments(config)) is not None:
        return Schedule(config=config, faults=moments)
    tasks = config.tasks
    count = r.choice((0, 1, 2, 2, 3, 4, 6, 8))
    faults = [_draw_fault(r, config, tasks) for _ in range(count)]
    if count > 1 and r.random() < 0.5:  # misfortunes that come together: while one is dealt with, the next is there
        start, within_s = faults[0].at, r.choice((0.05, 0.3, 1.0))
        faults = [replace(fault, at=start + r.uniform(0.0, within_s)) for fault in faults]
    return Schedule(config=config, faults=tuple(sorted(faults, key=lambda fault: fault.at)))


def _draw_more(config: Config) -> Config:
    """Draws what else the program does."""
    r = random.Random(f"hunt more {config.seed}")
    second = r.choice(("", "", "", "sync", "async", "bounded"))
    if second:
        config = replace(config, average=False, rule="async" if config.rule == "pipeline" else config.rule)
    config = replace(config, second=second, assigns=r.random() < 0.15, barriers=r.random() < 0.15)
    if r.random() < 0.2:
        config = replace(config, rows=True, optimizer="sgd", average=False)
    return config


def _draw_moments(config: Config) -> tuple[Fault, ...] | None:
    """Draws faults that happen while something is done that takes a moment; None for most runs."""
    r = random.Random(f"hunt moments {config.seed}")
    if r.random() >= MOMENTS:
        return None
    states = {"ps/0": ["ending", "no variables"], "worker": ["connecting", "waiting", "recovering", "stopping"]}
    if config.folder:
        states["ps/0"] += ["saving", "saving", "publishing", "publishing"]
    faults = []
    for at in sorted(r.uniform(0.0, config.steps * COMPUTE_S) for _ in range(r.choice((1, 1, 2)))):
        name = r.choice(config.tasks)
        state = r.choice(states["worker"] + ["creating"] * (name == "worker/0") if name[0] == "w" else states["ps/0"])
        when = f"{name if name[0] == 'w' else 'ps/0'}: {state}"
        fault = _draw_fault(r, config, config.tasks)
        if fault.kind in OF_A_TASK and r.random() < 0.6:
            fault = replace(fault, task=name)
        faults.append(replace(fault, at=at if state in ("saving", "publishing") else 0.0, when=when))
    if any("recovering" in fault.when for fault in faults):
        loss = Fault(at=config.steps * COMPUTE_S / 2, kind="kill", task=f"ps/{config.ps - 1}", back_s=0.5)
        faults.append(loss)
    return tuple(faults)


def _draw_theme(r: random.Random, config: Config, *, rolls_back: bool) -> Schedule:
    """Draws a run that goes back while workers come and go, or one whose answers are lost while gradients arrive."""
    if rolls_back:
        config = replace(
            config,
            ps=r.choice((2, 3)),
            workers=r.choice((2, 3)),
            rule=r.choice(("sync", "sync", "async")),
            folder=True,
            durable="",
            save_every=r.choice((5, 20)),
        )
        at = r.uniform(0.3, config.steps * COMPUTE_S)
        loss = Fault(at=at, kind="kill", task=f"ps/{config.ps - 1}", back_s=r.choice((0.05, 0.5, 3.0)))
        more = Fault(
            at=at + r.uniform(0.0, 3.0), kind="pause", task=r.choice(config.tasks), for_s=r.choice((0.5, 2.0, 16.0))
        )
        return Schedule(config=config, faults=(loss, more) if r.random() < 0.5 else (loss,))
    config = replace(config, rule=r.choice(("async", "bounded", "buffered", "sync")))
    worker = f"worker/{r.randrange(config.workers)}"
    server = f"ps/{r.randrange(config.ps)}"
    at, kind = r.uniform(0.3, config.steps * COMPUTE_S), r.choice(("deaf", "reset"))
    return Schedule(
        config=config, faults=(Fault(at=at, kind=kind, task=worker, other=server, for_s=r.choice((7.5, 9.0, 15.0))),)
    )


def _draw_fault(r: random.Random, config: Config, tasks: list[str]) -> Fault:
    kinds = ["kill", "kill", "vanish", "kill_at", "kill_at", "pause", "pause", *WIRE, "clock", "error"]
    if config.folder:
        kinds += ["full", "slow_disk", "power", "flip"]
    kind = r.choice(kinds)
    at = r.uniform(0.0, config.steps * COMPUTE_S * r.choice((0.3, 1.0, 1.5)))
    task, for_s, amount = r.choice(tasks), r.choice((0.05, 0.5, 2.0, 7.0, 14.0)) * r.uniform(0.5, 1.5), 0.0
    other, back_s = "", r.choice((0.05, 0.5, 3.0, 12.0))
    if kind in WIRE:
        task = r.choice([t for t in tasks if t != "ps/0"])
        servers = ["ps/0"] if task.startswith("ps") else [t for t in tasks if t.startswith("ps")]
        other, amount = (
            r.choice(servers),
            r.choice((0.05, 0.3, 0.6)) if kind == "noise" else r.choice((0.1, 0.5, 1.5, 4.0)),
        )
    elif kind == "kill_at":
        amount = r.randrange(0, 60)
    elif kind == "clock":
        amount = r.choice((-86400.0, -3600.0, -5.0, 5.0, 3600.0, 86400.0))
    elif kind == "error":
        task = r.choice([t for t in tasks if t.startswith("worker")])
    elif kind in DISK:
        task, amount = "disk", r.choice((0.1, 1.0, 5.0)) if kind == "slow_disk" else float(r.randrange(1 << 30))
    return Fault(at=at, kind=kind, task=task, other=other, for_s=for_s, amount=amount, back_s=back_s)
