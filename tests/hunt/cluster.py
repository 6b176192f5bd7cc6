"""A run in the simulated world: real ps tasks, real sessions, a program that trains a few numbers, and a launcher that starts tasks again.

What always holds: a task talks to others over the simulated network only, reads the world's clock, draws its ids from the world's seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torchquorum as tq
from tests.hunt.arithmetic import DECAY, make
from tests.hunt.book import Book
from tests.hunt.disk import Disk
from tests.hunt.network import Network
from tests.hunt.program import Numbers, Program, Source, UserError
from tests.hunt.schedule import Config
from tests.hunt.world import Killed, Process, SimJobs, SimThread, World
from torchquorum.cluster import ClusterSpec, TaskId
from torchquorum.errors import TorchQuorumError
from torchquorum.rules.quorum import Key
from torchquorum.server.leading import Leading
from torchquorum.server.processes import Pids
from torchquorum.server.serve import PsTask, ServeOptions
from torchquorum.session.join import Task
from torchquorum.wire.rpc import Patience

PATIENCE = Patience(start_s=90.0, round_s=120.0, silence_s=6.0, probe_s=1.0, say_s=10.0)
MOST_STARTS = 8
LIVENESS_S = 3.0


class Watch:
    """Sees which processes of workers have ended, as a pidfd does; or sees nothing, as from another host."""

    def __init__(self, pids: Pids, lives: dict[tuple[int, int], Process], *, sees: bool) -> None:
        self._pids, self._lives, self._sees = pids, lives, sees

    def ended(self) -> list[tuple[int, int]]:
        if not self._sees:
            return []
        return [who for who in self._pids if (p := self._lives.get(who)) is not None and (p.ended or not p.alive)]

    def close(self) -> None:
        pass


@dataclass
class Place:
    """One task over all its processes.

    Attributes:
        process: The one that runs, or the last.
        starts: How many processes there were.
        due: Whether another is to be started.
        program: What the last process of a worker runs.
        outcome: How the last one ended: well, or why not.
    """

    name: str
    process: Process | None = None
    starts: int = 0
    due: bool = False
    program: Program | None = None
    outcome: str = ""

    @property
    def running(self) -> bool:
        """Whether its process is there."""
        return self.process is not None and self.process.alive and not self.process.ended and not self.process.errors


class Cluster:
    """The tasks of one run."""

    def __init__(self, world: World, config: Config, book: Book, disk: Disk | None) -> None:
        self.world, self.config, self.book, self.disk = world, config, book, disk
        self.folder = disk.folder if disk is not None else None
        self.network = Network(world, config.seed)
        self.spec = ClusterSpec(
            {
                "ps": [f"localhost:{1000 + i}" for i in range(config.ps)],
                "worker": [f"localhost:{2000 + i}" for i in range(config.workers)],
            }
        )
        names = [f"ps/{i}" for i in range(config.ps)] + [f"worker/{i}" for i in range(config.workers)]
        self.places = {name: Place(name) for name in names}
        self.servers: dict[str, PsTask] = {}
        self.lives: dict[tuple[int, int], Process] = {}
        self.slow_disk_until = self.slow_disk_s = 0.0
        book.round = self._round
        self.network.on_answer = lambda holds, what: book.check("an answer is sent once at a time", holds, what)

    def begin(self) -> None:
        """Starts every task, at slightly different times."""
        for name in self.places:
            self._start_later(name, self.world.random.uniform(0.0, self.config.late_s))

    def _round(self) -> list[Key] | None:
        """Returns the gradients that wait for their round; None if nobody knows, as ps 0 is gone."""
        run = self.servers["ps/0"].service.run if self.places["ps/0"].running and "ps/0" in self.servers else None
        return [key for track in run.leader.quorum.tracks for key in track.round] if isinstance(run, Leading) else None

    @property
    def over(self) -> bool:
        """Whether no task runs and none is to be started."""
        return not any(place.running or place.due for place in self.places.values())

    # -- the launcher -------------------------------------------------------------------------------------------------

    def start_again(self, name: str, after_s: float) -> None:
        """A task was killed: another process takes its place."""
        self._start_later(name, after_s)

    def _start_later(self, name: str, after_s: float) -> None:
        place = self.places[name]
        if place.due:
            return
        if place.starts >= MOST_STARTS:
            self.world.say(f"{name} was started {place.starts} times; all tasks are ended")
            for other in self.places.values():
                if other.running and other.process is not None:
                    other.process.die()
            return
        place.due = True
        self.world.at(after_s, lambda: self._start(place))

    def _start(self, place: Place) -> None:
        place.due = False
        job, _, index = place.name.partition("/")
        if place.running or self._job_is_over():
            return
        place.starts += 1
        place.outcome = ""
        run = partial(self._serve if job == "ps" else self._train, index=int(index), place=place)
        place.process = self.world.start(place.name, lambda process: self._guard(place, process, run))

    def _guard(self, place: Place, process: Process, run: Callable[..., None]) -> None:
        try:
            run(process)
            place.outcome = "well"
            self.world.say(f"{process} ends well")
        except Killed:
            raise
        except (TorchQuorumError, UserError) as error:
            place.outcome = f"{type(error).__name__}: {error}"
            self.world.say(f"{process} ends with {place.outcome}")
            process.alive, process.ended = False, True
            if not self._job_is_over():
                self._start_later(place.name, 2.0 * place.starts)

    def _job_is_over(self) -> bool:
        """Whether the log has come to its end: nobody starts its tasks again."""
        return any(ps.service.ended is not None for ps in self.servers.values())

    # -- a ps ---------------------------------------------------------------------------------------------------------

    def _bits(self, process: Process) -> Callable[[int], int]:
        return random.Random(f"{self.config.seed} {self.config.steps} {process.name} {process.life}").getrandbits

    def _slow_s(self) -> float:
        more = self.slow_disk_s if self.world.now < self.slow_disk_until else 0.0
        return 0.005 + more

    def _serve(self, process: Process, *, index: int, place: Place) -> None:
        address = self.spec.address(TaskId("ps", index))
        bits, leader = self._bits(process), None
        if index > 0:
            first = self.spec.address(TaskId("ps", 0))
            leader = self.network.connect(process, first, f"ps/{index}/{bits(62):016x}".encode())
        options = ServeOptions(
            say=lambda line: self.world.say(line),
            clock=process.clock,
            random_bits=bits,
            jobs=SimJobs(process, self._slow_s),
            refuses=self.network.refuses,
        )
        listener = self.network.listen(process, address)
        ps = PsTask(self.spec, index, options, listener=listener, leader=leader)
        ps.processes.close()
        ps.processes = Watch(ps.service.pids, self.lives, sees=self.config.watches)  # pyright: ignore[reportAttributeAccessIssue]
        self.servers[place.name] = ps
        process.state = lambda: _state_of_ps(ps)
        try:
            if not ps.serve():
                raise tq.errors.TaskLostError(f"{ps.task}: the job did not end well")
        finally:
            ps.close()

    # -- a worker -----------------------------------------------------------------------------------------------------

    def _train(self, process: Process, *, index: int, place: Place) -> None:
        config, source = self.config, Source()
        task = Task(
            cluster=self.spec,
            id=TaskId("worker", index),
            transport=config.transport,
            connect=partial(self.network.connect, process),
            clock=process.clock,
            random_bits=self._bits(process),
            thread=partial(SimThread, process=process),
        )
        average = tq.ExponentialMovingAverage(DECAY, num_updates=False) if config.average else None
        rules = config.make_rules()
        models = [Numbers(track, rows=config.rows and not track) for track in range(len(rules))]
        optimizers = [
            tq.Optimizer(make(config.optimizer, model.parameters()), rule=rule, average=average)
            for model, rule in zip(models, rules, strict=True)
        ]
        several = len(rules) > 1
        session = tq.Session(
            task,
            {f"model{k}": model for k, model in enumerate(models)} if several else models[0],
            {f"opt{k}": optimizer for k, optimizer in enumerate(optimizers)} if several else optimizers[0],
            logdir=self.folder,
            last_step=config.steps,
            liveness_s=LIVENESS_S,
            save_every_steps=config.save_every if self.folder else None,
            keep=3,
            start_afresh=True,
            accept_loss=self.book.accepts_loss,
            data=source,
            durable=config.durable or False,
            patience=PATIENCE,
        )
        process.state = lambda: str(session.state)
        place.program = Program(self.world, self.book, config, str(process), process.life)
        with session:
            self.lives[index, session.incarnation] = process
            place.program.run(session, models, optimizers, source, index)


def _state_of_ps(ps: PsTask) -> str:
    run = ps.service.run
    if run is None:
        return "no variables"
    if isinstance(run, Leading):
        saving = run.checkpoints.saving
        if saving is not None:
            return "publishing" if saving.publishing else "saving"
        if run.leader.quorum.stopped:
            return "ending"
    return "leading" if isinstance(run, Leading) else "following"
