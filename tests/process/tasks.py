"""Starts tasks as real processes, one per terminal as it were, and waits for what they print."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.ports import free_ports
from tests.process.zygote import Forked, fork_python, run_python

PROGRAM = Path(__file__).parent / "program.py"
TORCHQUORUM = [sys.executable, "-m", "torchquorum.cli.main"]
FORKING = [sys.executable, "-m", "tests.process.forking_launcher"]  # the same, whose tasks are forks
DEADLINE_S = 150.0  # generous: a busy machine is no failure


def run(
    *arguments: str, forked: bool = True, cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `torchquorum ...` to its end: forked, or in new processes as a user does."""
    environment = {**os.environ, **(env or {})}
    if forked:
        return run_python([*FORKING, *arguments], environment, timeout_s=DEADLINE_S, cwd=cwd)
    return subprocess.run(
        [*TORCHQUORUM, *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd=cwd,
        env=environment,
        check=False,
    )


class Started:
    """A process whose output is read as it comes.

    Args:
        command: Its command line.
        env: Variables of its environment beside those of this process.
        forked: Whether a Python command may be a fork of the zygote; otherwise it is a new process.
        netns: A network namespace for a fork to be in.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: dict[str, str] | None = None,
        *,
        forked: bool = False,
        netns: str | None = None,
    ) -> None:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})}
        self.process: Forked | subprocess.Popen[str]
        if forked:
            self.process = fork_python(command, environment, netns=netns)
        else:
            self.process = subprocess.Popen(
                list(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
            )
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(line.rstrip("\n"))
        self._queue.put(None)

    def until(self, text: str, timeout_s: float = DEADLINE_S) -> str:
        """Waits for a line that contains a text, and returns it."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"{text!r} did not come within {timeout_s} s; came:\n{self.tail()}") from None
            if line is None:
                raise AssertionError(f"ended before {text!r} came; came:\n{self.tail()}")
            self.lines.append(line)
            if text in line:
                return line

    def wait(self, timeout_s: float = DEADLINE_S) -> int:
        """Waits for the end and returns the exit code."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            while not self._queue.empty():
                self.lines.append(self._queue.get() or "")
            raise AssertionError(f"did not end within {timeout_s} s; came:\n{self.tail()}") from None
        self._reader.join(5)
        while (line := self._queue.get()) is not None:
            self.lines.append(line)
        return code

    def tail(self) -> str:
        """Returns the last lines, for a failing test."""
        return "\n".join(self.lines[-30:])

    def kill(self) -> None:
        """kill -9."""
        self.process.send_signal(signal.SIGKILL)

    def end(self) -> None:
        """Makes sure that nothing is left."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()


def last_step(*workers: Started) -> int:
    """Returns at which step a run of `program.py` ended that was stopped: the newest that one of its workers has seen."""
    ended: list[int] = []
    for worker in workers:
        found = re.findall(r"done at (\d+) after \d+ local steps: (\d+)", "\n".join(worker.lines))
        assert found and all(step == value for step, value in found), worker.tail()
        ended += [int(step) for step, _ in found]
    return max(ended)


class ByHand:
    """A cluster started by hand: every task gets the same host lists and its own name."""

    def __init__(
        self, *, ps: int = 1, workers: int = 2, program: Path = PROGRAM, hosts: Sequence[str] | None = None
    ) -> None:
        ports = free_ports(ps + workers)
        names = [f"localhost:{p}" for p in ports] if hosts is None else list(hosts)
        self.ps_hosts, self.worker_hosts = ",".join(names[:ps]), ",".join(names[ps:])
        self.program = program
        self.started: list[Started] = []

    def command(self, job: str, index: int, *arguments: str) -> list[str]:
        """Returns the command line of a task."""
        flags = [f"--job_name={job}", f"--task_id={index}", f"--ps_hosts={self.ps_hosts}"]
        return [sys.executable, str(self.program), *flags, f"--worker_hosts={self.worker_hosts}", *arguments]

    def start(
        self, job: str, index: int, *arguments: str, prefix: Sequence[str] = (), netns: str | None = None
    ) -> Started:
        """Starts a task, as a fork of the zygote unless there is a command in front of it."""
        task = Started([*prefix, *self.command(job, index, *arguments)], forked=not prefix, netns=netns)
        self.started.append(task)
        return task


@contextmanager
def by_hand(**options: object) -> Iterator[ByHand]:
    """A cluster that is cleaned up whatever happens."""
    cluster = ByHand(**options)  # type: ignore[arg-type]
    try:
        yield cluster
    finally:
        for task in cluster.started:
            task.end()
