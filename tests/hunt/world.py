"""A machine room in one thread: processes with threads of their own, on a clock that moves only when all of them wait.

Each thread of a simulated process is a greenlet that gives control back whenever it waits. The world takes the next event from a heap,
sets the clock to its time and does it. What always holds: the same seed makes the same events in the same order; a process that is dead
does nothing more that others could see, whatever its `finally` blocks try.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from collections.abc import Callable
from typing import Any

from greenlet import getcurrent, greenlet  # pyright: ignore[reportMissingImports]

EPOCH = 1_700_000_000.0
LONG_S = 1e6
BEGINNING = 1000.0
LOOK_EVERY = 8
MOST_EVENTS = 400_000


class Killed(BaseException):
    """This process is dead: nothing that it does from here on counts."""


class Livelock(AssertionError):
    """A run makes events without end."""


class Fiber:
    """One thread of a process."""

    def __init__(self, process: Process, run: Callable[[], Any], name: str) -> None:
        self.process, self.name, self._run = process, name, run
        self.begun, self.done, self.waiting, self.token = False, False, False, 0
        self.ready: Callable[[], Any] | None = None
        self.greenlet: Any = greenlet(self._body)

    def _body(self) -> None:
        self.begun = True
        try:
            self._run()
        except Killed:
            pass
        except BaseException as error:
            self.process.errors.append(error)
        finally:
            self.done = True
            self.process.poke()


class Process:
    """One life of a task.

    Attributes:
        name: The task, such as ps/0; `life` counts its processes.
        alive: Whether it can still do something.
        paused_until: When a frozen process goes on.
        wall_offset: By how much its clock on the wall is wrong.
        dies_after: After how many more effects it is killed; None for never.
        errors: What its threads ended with.
    """

    def __init__(self, world: World, name: str, life: int) -> None:
        self.world, self.name, self.life = world, name, life
        self.alive, self.ended = True, False
        self.paused_until = self.wall_offset = 0.0
        self.dies_after: int | None = None
        self.errors: list[BaseException] = []
        self.fibers: list[Fiber] = []
        self.at_death: list[Callable[[], None]] = []
        self.clock = SimClock(self)
        self.state: Callable[[], str] = lambda: "starting"

    def __str__(self) -> str:
        return self.name if self.life == 1 else f"{self.name} (life {self.life})"

    def spawn(self, run: Callable[[], Any], name: str) -> Fiber:
        """Starts a thread."""
        fiber = Fiber(self, run, name)
        self.fibers.append(fiber)
        fiber.waiting = True
        self.world.wake(fiber)
        return fiber

    def effect(self, what: str = "") -> None:
        """Others are about to see something of this process: a message, a byte on disk.

        Raises:
            Killed: It is dead, or dies here.
        """
        if self.alive and self.dies_after is not None:
            self.dies_after -= 1
            if self.dies_after < 0:
                self.world.say(f"{self} is killed just before {what or 'an effect'}")
                self.die()
        if not self.alive:
            raise Killed

    def die(self) -> None:
        """The process is gone, wherever it was."""
        if self.alive:
            self.alive = False
            for action in self.at_death:
                action()

    def poke(self) -> None:
        """Wakes the threads whose condition has come true."""
        for fiber in self.fibers:
            if fiber.waiting and fiber.ready is not None and fiber.ready():
                self.world.wake(fiber)


class World:
    """The clock, the events and the processes.

    Attributes:
        now: Seconds since the world began, and some.
        lines: What happened, for people.
        folder: The run's folder, which has another name in every run; for people it is RUN.
        on_event: Called after every event.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now, self.events = BEGINNING, 0
        self.folder = ""
        self.processes: list[Process] = []
        self.lines: list[tuple[float, str]] = []
        self.on_event: Callable[[], None] = lambda: None
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._hub: Any = None
        self._current: Fiber | None = None

    # -- events -------------------------------------------------------------------------------------------------------

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        """Does something later."""
        heapq.heappush(self._heap, (self.now + delay_s, next(self._numbers), action))

    def say(self, line: str) -> None:
        """Notes what happened."""
        self.lines.append((self.now, line.replace(self.folder, "RUN") if self.folder else line))

    def run(self, over: Callable[[], bool], limit_s: float) -> bool:
        """Makes events happen until it is over; False if nothing can happen any more, or the time is up.

        Raises:
            Livelock: There is no end to the events.
        """
        self._hub = getcurrent()
        end = self.now + limit_s
        while self.events % LOOK_EVERY or not over():
            if not self._heap or self._heap[0][0] > end:
                return over()
            at, _, action = heapq.heappop(self._heap)
            self.now = max(self.now, at)
            self.events += 1
            if self.events > MOST_EVENTS:
                raise Livelock(f"{self.events} events, and no end")
            action()
            self.on_event()
        return True

    # -- processes ----------------------------------------------------------------------------------------------------

    def start(self, name: str, run: Callable[[Process], Any]) -> Process:
        """Starts a process: its main thread is the function."""
        life = 1 + sum(p.name == name for p in self.processes)
        process = Process(self, name, life)
        self.processes.append(process)

        def main() -> None:
            run(process)
            process.ended = True

        process.spawn(main, "main")
        return process

    @property
    def process(self) -> Process | None:
        """Returns the process that runs now; None outside of all."""
        return self._current.process if self._current is not None else None

    def wait(self, seconds: float, ready: Callable[[], Any] | None = None) -> None:
        """The thread that runs waits until something holds or time is up."""
        fiber = self._current
        assert fiber is not None, "only a thread of a process can wait"
        if not fiber.process.alive:
            raise Killed
        if seconds <= 0 or (ready is not None and ready()):
            return
        fiber.token += 1
        token, fiber.waiting, fiber.ready = fiber.token, True, ready
        self.at(min(seconds, LONG_S), lambda: self._resume(fiber, token))
        self._hub.switch()

    def wake(self, fiber: Fiber | None) -> None:
        """Ends the wait of a thread."""
        if fiber is not None and fiber.waiting:
            token = fiber.token
            self.at(0.0, lambda: self._resume(fiber, token))

    @property
    def fiber(self) -> Fiber | None:
        """Returns the thread that runs now."""
        return self._current

    def _resume(self, fiber: Fiber, token: int) -> None:
        process = fiber.process
        if not fiber.waiting or fiber.token != token or not process.alive:
            return
        if process.paused_until > self.now:
            self.at(process.paused_until - self.now, lambda: self._resume(fiber, token))
            return
        self._switch(fiber)

    def _switch(self, fiber: Fiber, *, kill: bool = False) -> None:
        fiber.waiting, fiber.ready = False, None
        before, self._current = self._current, fiber
        fiber.greenlet.parent = getcurrent()
        self._hub = getcurrent()
        try:
            if kill:
                fiber.greenlet.throw(Killed)
            else:
                fiber.greenlet.switch()
        finally:
            self._current = before

    def close(self) -> None:
        """Ends every thread of every process; nothing of that is seen by anyone."""
        self._hub = getcurrent()
        for process in self.processes:
            process.die()
        for process in self.processes:
            for fiber in process.fibers:
                if fiber.begun and not fiber.done:
                    self._switch(fiber, kill=True)


class SimClock:
    """The clocks of one process."""

    def __init__(self, process: Process) -> None:
        self._process, self._world = process, process.world

    def now(self) -> float:
        return self._world.now

    def wall(self) -> float:
        return EPOCH + self._world.now + self._process.wall_offset

    def sleep(self, seconds: float, /) -> None:
        self._world.wait(seconds)

    def wait(self, event: threading.Event, seconds: float) -> bool:
        self._world.wait(seconds, event.is_set)
        return event.is_set()


class SimThread(threading.Thread):
    """What the product takes for a thread."""

    def __init__(self, target: Callable[[], Any], name: str = "", *, process: Process, daemon: bool = True) -> None:
        super().__init__(target=target, name=name, daemon=daemon)
        self._process, self._work = process, target
        self._fiber: Fiber | None = None

    def start(self) -> None:
        self._fiber = self._process.spawn(self._work, self.name)

    def join(self, timeout: float | None = None) -> None:
        fiber = self._fiber
        assert fiber is not None, "joined before it was started"
        self._process.poke()
        self._process.world.wait(timeout or LONG_S, lambda: fiber.done)


class SimJobs:
    """Does a saver's jobs on a thread of its own, each after a while, as a disk does."""

    def __init__(self, process: Process, slow_s: Callable[[], float]) -> None:
        self._process, self._slow_s = process, slow_s
        self._jobs: list[Callable[[], None]] = []
        self._fiber: Fiber | None = None
        self._closing = False

    def put(self, job: Callable[[], None]) -> None:
        self._jobs.append(job)
        if self._fiber is None or self._fiber.done:
            self._fiber = self._process.spawn(self._work, "saver")

    def _work(self) -> None:
        while self._jobs:
            self._process.world.wait(self._slow_s())
            self._jobs[0]()
            del self._jobs[0]

    def finish(self, timeout_s: float) -> None:
        self._process.world.wait(timeout_s, lambda: not self._jobs)
