"""Runs a replay: ps tasks on threads of this process, and for every life of a worker a process, which it starts and ends in its turn.

Used by `torchquorum replay`. What always holds: when `run` returns, for whatever reason, none of its processes and threads is left; the
run's own folder is only read.
"""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

import msgspec
import torch

from torchquorum import env
from torchquorum.clock import SYSTEM, Clock
from torchquorum.cluster import ClusterSpec
from torchquorum.formats.record_file import RunRecordError
from torchquorum.launcher.process import Process, describe_exit, die_with_parent
from torchquorum.replay.progress import ReplayProgress
from torchquorum.replay.ps import ReplayService
from torchquorum.replay.script import LifeKey, Script, ScriptedLife
from torchquorum.server.serve import PsTask, ServeOptions
from torchquorum.session.replayed import ReplayFile

POLL_S = 0.05
AHEAD_S = 1.0
STUCK_S = 120.0  # without a step, while nobody starts or computes for longer than that
END_S = 10.0

Say = Callable[[str], None]
Output = Callable[[ScriptedLife, str], None]
Spawn = Callable[[Sequence[str], str, Mapping[str, str]], Process]


@dataclass(slots=True)
class RunningLife:
    """The process of a life."""

    life: ScriptedLife
    process: Process
    reader: threading.Thread
    started_at: float
    reported: bool = False


class Director:
    """One replay.

    Args:
        script: What is followed.
        progress: How far it is.
        scratch: A folder for it alone.
        say: Prints a line of the replay.
        output: Receives every line that a worker's process prints.
        spawn: Starts a process.
        clock: Used for all waits.
    """

    def __init__(
        self,
        script: Script,
        progress: ReplayProgress,
        scratch: Path,
        say: Say,
        output: Output,
        *,
        spawn: Spawn | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        self._script, self._progress, self._scratch = script, progress, scratch
        self._say, self._output, self._clock = say, output, clock
        self._spawn = spawn or start_process
        self._sockets = [_listening_socket() for _ in range(script.num_shards)]
        self._ports = [held.getsockname()[1] for held in self._sockets]
        self._ps: list[PsTask] = []
        self._threads: list[threading.Thread] = []
        self._running: dict[LifeKey, RunningLife] = {}
        self._started: set[LifeKey] = set()
        progress.at = [0] * script.num_shards

    # -- the whole ----------------------------------------------------------------------------------------------------

    def run(self, each: Callable[[], None] = lambda: None) -> None:
        """Follows the record to its end; `each` is called now and then.

        Raises:
            RunRecordError: It cannot be followed.
        """
        try:
            self._start_ps()
            moved, at = self._clock.now(), 0
            while not self._progress.over and not self._progress.failed:
                self._start_due()
                self._end_due()
                self._look_at_exits()
                each()
                if (now := sum(self._progress.at)) != at:
                    at, moved = now, self._clock.now()
                elif self._clock.now() - moved > STUCK_S:
                    self._progress.fail(
                        f"nothing has happened for {STUCK_S:.0f} s: the replay waits for {self._awaited()}"
                    )
                self._clock.sleep(POLL_S)
            each()
            if self._progress.failed:
                raise RunRecordError(self._progress.failed)
            self._let_end()
        finally:
            self._stop()

    def _awaited(self) -> str:
        return self._progress.awaited.get(0, "its beginning")

    # -- ps tasks -----------------------------------------------------------------------------------------------------

    def _cluster(self, life: ScriptedLife | None = None) -> ClusterSpec:
        """Returns the replay's cluster as a life sees it: with as many ps tasks as it had."""
        shards = self._script.num_shards
        workers = self._script.num_workers
        if life is not None:
            plan = next(b.plan for b in self._script.began if b.generation == life.generations[0])
            shards, workers = plan.num_shards, plan.num_workers
        return ClusterSpec(
            {
                "ps": [f"127.0.0.1:{port}" for port in self._ports[:shards]],
                "worker": [f"127.0.0.1:{number}" for number in range(1, workers + 1)],
            }
        )

    def _start_ps(self) -> None:
        threads = self._script.began[0].task.get("threads", 1)
        for index, held in enumerate(self._sockets):
            options = ServeOptions(
                listen_fd=os.dup(held.fileno()),
                say=self._say,
                make_service=partial(ReplayService, progress=self._progress),
            )
            task = PsTask(self._cluster(), index, options)
            self._ps.append(task)
            thread = threading.Thread(
                target=self._serve, args=(task, threads), name=f"torchquorum-replay-{index}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _serve(self, task: PsTask, threads: int) -> None:
        torch.set_num_threads(threads)
        try:
            task.serve()
            if (failure := task.service.failure) is not None:
                self._progress.fail(str(failure))
        except BaseException as error:
            self._progress.fail(f"{task.task} of the replay failed: {type(error).__name__}: {error}")

    # -- workers ------------------------------------------------------------------------------------------------------

    def _start_due(self) -> None:
        """Starts the processes that are needed next: the first life of each worker, a later one when those before are over."""
        at = self._progress.at[0]
        for life in self._script.lives.values():
            if life.key in self._started or life.first < 0:
                continue
            before = [
                other
                for other in self._script.lives.values()
                if other.worker == life.worker and other.first < life.first
            ]
            if at >= life.first or not before or all(other.last < at for other in before if other.first >= 0):
                self._start(life)

    def _start(self, life: ScriptedLife) -> None:
        self._started.add(life.key)
        body = life.body
        plan = next(b.plan for b in self._script.began if b.generation == life.generations[0])
        file = ReplayFile(
            cluster=self._cluster(life).as_dict(),
            worker=life.worker,
            incarnation=life.incarnation,
            folder=self._progress.folder,
            joined=body.joined,
            began=body.began,
            last_step=plan.last_step,
            recorded=str(self._progress.recorded),
        )
        path = self._scratch / f"life-{life.worker}-{life.incarnation:016x}"
        path.write_bytes(msgspec.msgpack.encode(file))
        try:
            process = self._spawn(body.command, body.folder, env.for_replay(body.environment, str(path)))
        except OSError as error:
            self._progress.fail(f"{life}: its process cannot be started ({' '.join(body.command)}): {error.strerror}")
            return
        assert process.stdout is not None
        reader = threading.Thread(
            target=self._read, args=(life, process.stdout), daemon=True, name=f"torchquorum-output-{life}"
        )
        reader.start()
        self._running[life.key] = RunningLife(life, process, reader, self._clock.now())

    def _read(self, life: ScriptedLife, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                self._output(life, line.decode(errors="replace").rstrip("\r\n"))

    def _end_due(self) -> None:
        """Kills the processes whose lives ended in the record before their programs did."""
        at = min(self._progress.at)
        for running in self._running.values():
            life = running.life
            if life.how in ("died", "failed") and life.last < at and self._is_replaced(life, at):
                _kill(running.process)

    def _is_replaced(self, life: ScriptedLife, at: int) -> bool:
        """Whether nothing that this life has sent is needed any more: a later life of its worker has begun."""
        return any(o.worker == life.worker and life.last < o.first <= at for o in self._script.lives.values())

    def _look_at_exits(self) -> None:
        """A process that has ended before its part was over ends the replay, unless what the record needs of it is there."""
        for key, running in self._running.items():
            code = running.process.poll()
            if code is None or running.reported:
                continue
            running.reported = True
            if (
                key not in self._progress.left
                and running.life.last >= min(self._progress.at)
                and running.life.how != "failed"
            ):
                self._progress.fail(
                    f"{running.life}: its process {describe_exit(code)}, and in the record it goes on ({self._awaited()})"
                )

    # -- the end ------------------------------------------------------------------------------------------------------

    def _let_end(self) -> None:
        """The record is at its end: programs that left in it may do what they do after that."""
        deadline = self._clock.now() + END_S
        while self._clock.now() < deadline:
            if all(r.process.poll() is not None or r.life.how != "left" for r in self._running.values()):
                return
            self._clock.sleep(POLL_S)

    def _stop(self) -> None:
        for running in self._running.values():
            _kill(running.process)
        for running in self._running.values():
            while running.process.poll() is None:
                self._clock.sleep(POLL_S)
            running.reader.join(timeout=END_S)
        for task in self._ps:
            task.end("the replay is over")
        for thread in self._threads:
            thread.join(timeout=END_S)
        for task in self._ps:
            task.close()
        for held in self._sockets:
            held.close()


def start_process(command: Sequence[str], folder: str, environment: Mapping[str, str]) -> Process:
    """Starts the process of a life, in a group of its own, which ends with this process."""
    return subprocess.Popen(
        list(command),
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )


def _kill(process: Process) -> None:
    if process.poll() is None:
        process.kill()


def _listening_socket() -> socket.socket:
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.bind(("127.0.0.1", 0))
    held.listen(128)
    return held


def new_scratch() -> tempfile.TemporaryDirectory[str]:
    """Returns a folder for one replay, which is removed with it."""
    return tempfile.TemporaryDirectory(prefix="torchquorum-replay-")
