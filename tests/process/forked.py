"""A cluster whose tasks are forked from a process that has loaded torch: each a real process, up in milliseconds."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

from tests.ports import free_ports
from tests.process.zygote import Forked, fork_task

PROGRAM = Path(__file__).parent / "durable_program.py"
DEADLINE_S = 150.0
Limits = dict[tuple[str, int], dict[str, int]]


class Cluster:
    """Two workers and some ps tasks, each a process."""

    def __init__(
        self,
        folder: Path,
        ps: int,
        *options: str,
        logdir: Path | None = None,
        limits: Limits | None = None,
        program: Path = PROGRAM,
    ) -> None:
        self._program = program
        self.folder, self.logdir = folder, logdir or folder / "run"
        self._limits = limits or {}
        folder.mkdir()
        ports = free_ports(ps + 2)
        names = [f"127.0.0.1:{port}" for port in ports]
        self._flags = [f"--ps_hosts={','.join(names[:ps])}", f"--worker_hosts={','.join(names[ps:])}"]
        self._flags += [f"--logdir={self.logdir}", *options]
        self.lives: dict[tuple[str, int], Forked] = {}
        self._beside: list[Forked] = []
        self.ps = [("ps", k) for k in range(ps)]
        self.workers = [("worker", k) for k in range(2)]
        self.deadline = time.monotonic() + DEADLINE_S
        for task in [*self.ps, *self.workers]:
            self.start(task)

    def start(self, task: tuple[str, int]) -> None:
        job, index = task
        argv = [str(self._program), f"--job_name={job}", f"--task_id={index}", *self._flags]
        self.lives[task] = fork_task(argv, self.folder / f"{job}-{index}.txt", limits=self._limits.get(task))

    def start_beside(self, task: tuple[str, int]) -> tuple[Forked, Path]:
        """Starts a second process as a task that is there; returns it and the file with what it prints."""
        job, index = task
        argv = [str(self._program), f"--job_name={job}", f"--task_id={index}", *self._flags]
        output = self.folder / f"{job}-{index}-second.txt"
        self._beside.append(fork_task(argv, output))
        return self._beside[-1], output

    def text(self, task: tuple[str, int]) -> str:
        path = self.folder / f"{task[0]}-{task[1]}.txt"
        return path.read_text() if path.exists() else ""

    def told(self) -> int:
        """The latest version that a worker was told of."""
        found = [int(v) for task in self.workers for v in re.findall(r"^told (\d+)", self.text(task), re.M)]
        return max(found, default=0)

    def wait(self, what: str, happened: Callable[[], object]) -> None:
        while not happened():
            lines = "\n".join(f"--- {t}\n" + self.text(t)[-1500:] for t in self.lives)
            assert time.monotonic() < self.deadline, f"waited in vain for {what}\n{lines}"
            time.sleep(0.01)

    def kill(self, *tasks: tuple[str, int]) -> None:
        for task in tasks:
            self.lives[task].kill()
        for task in tasks:
            self.lives[task].wait(DEADLINE_S)

    def ended(self) -> bool:
        return None not in self.codes()

    def codes(self) -> list[int | None]:
        return [life.poll() for life in self.lives.values()]

    def close(self) -> None:
        self.kill(*self.lives)
        for life in self._beside:
            life.kill()
            life.wait(DEADLINE_S)
