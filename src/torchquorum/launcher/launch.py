"""`tq.launch`: runs a function of this process, for example of a notebook, on a cluster.

On this machine every task is a fork of this process, so the function and its data need not be pickled. On Ray, Ray sends the
function to its machines, where each task is a fork of its actor. What always holds: when `launch` returns, for whatever reason,
no process of the cluster is left; results come back as plain data.
"""

from __future__ import annotations

import inspect
import math
import os
import queue
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchquorum.cluster import TaskId
from torchquorum.errors import ConfigError, LaunchError
from torchquorum.launcher.fork import Forked, Result, decode_result, fork_task
from torchquorum.launcher.launched import LaunchedCluster, LaunchOptions, Note, TaskOutput
from torchquorum.launcher.local import LocalCluster
from torchquorum.launcher.on_ray import RayCluster
from torchquorum.launcher.progress_line import ProgressLine
from torchquorum.launcher.ray_cluster import Ray
from torchquorum.launcher.watch import RunWatcher
from torchquorum.lines import write_line
from torchquorum.update.updater import warm_up

LAST_LINES = 30


def launch(
    function: Callable[..., Any],
    *arguments: Any,
    workers: int | str | tuple[int, int] = 2,
    ps: int = 1,
    transport: str = "auto",
    logdir: str | None = None,
    report: str | None = None,
    max_restarts: int = 3,
    quiet: bool = False,
    output: Callable[[TaskId, str], None] | None = None,
    on: str | Ray = "local",
    **keywords: Any,
) -> list[Any]:
    """Runs a function on a cluster, once per worker, and waits for the end.

    The function calls `tq.join()` itself, as a script does. Its output appears here, prefixed with the worker's name.
    Each worker is a separate process with one thread per operation, so changes to global variables stay there. For more
    threads, for CUDA that this process has already used, and for other machines, write a script and use `torchquorum run`.

    Args:
        function: What every worker runs.
        *arguments: Its arguments.
        workers: Number of workers; (2, 8) or "2:8" starts two, and up to eight may join and leave.
        ps: Number of ps tasks.
        transport: auto, shm or tcp.
        logdir: The run's folder, for sessions that set none.
        report: Where ps task 0 writes the report.
        max_restarts: How many times each task is restarted after a signal ended it.
        quiet: Do not print the tasks' output.
        output: Receives every line that a task prints, instead of printing it.
        on: local, for processes on this machine; ray, for the machines of a Ray cluster, or of a Ray started here;
            `tq.Ray(...)` to choose the cluster and what a worker reserves. Ray transfers the function itself.
        **keywords: The function's keyword arguments.

    Returns:
        What the function returned on each worker, in order; with a range, on the workers that took part. Numbers, text,
        bytes, lists, dicts and tensors are allowed; anything else is an error.

    Raises:
        LaunchError: A task failed; the message has its last lines.
        ConfigError: This process cannot be forked, because it has used CUDA.
    """
    _check(function, arguments, keywords, on)
    shown = Output(output, quiet=quiet)
    options = LaunchOptions(
        command=(),
        ps=ps,
        workers=workers,
        transport=transport,
        threads=1,
        report=report,
        logdir=logdir,
        max_restarts=max_restarts,
    )
    call = partial(function, *arguments, **keywords)
    cluster: ForkedCluster | RayCluster
    if on == "local":
        warm_up()  # once here instead of in every fork
        cluster = ForkedCluster(options, shown.put, shown.note, call)
    else:
        cluster = RayCluster(options, on if isinstance(on, Ray) else Ray(), shown.put, shown.note, call)
    shown.progress = ProgressLine(RunWatcher(cluster.leader, access=lambda: cluster.access))
    try:
        cluster.start()
        code = cluster.wait(shown.show)
        if code == 130:
            raise KeyboardInterrupt
        if code != 0:
            shown.show()
            raise LaunchError(_what_failed(cluster, shown.last))
        return cluster.results()
    finally:
        cluster.stop(signal.SIGTERM)
        cluster.close()
        shown.close()


class Output:
    """Prints the tasks' lines on the thread that called `launch`: in a notebook, other threads print into any cell.

    Args:
        output: Receives the lines instead.
        quiet: Print nothing.

    Attributes:
        last: The last lines of each task.
        progress: The progress line of the run.
    """

    def __init__(self, output: TaskOutput | None, *, quiet: bool) -> None:
        self._output, self._quiet = output, quiet
        self._lines: queue.SimpleQueue[tuple[TaskId | None, str]] = queue.SimpleQueue()
        self.last: dict[TaskId, list[str]] = {}
        self.progress: ProgressLine | None = None

    def put(self, task: TaskId, line: str) -> None:
        """Takes a line of a task; called on the thread that reads it."""
        self._lines.put((task, line))

    def note(self, line: str) -> None:
        """Takes a line of the launcher itself."""
        self._lines.put((None, line))

    def show(self) -> None:
        """Prints the lines that have arrived."""
        while not self._lines.empty():
            task, line = self._lines.get()
            if task is not None:
                kept = self.last.setdefault(task, [])
                kept.append(line)
                del kept[:-LAST_LINES]
            if self._output is not None and task is not None:
                self._output(task, line)
            elif not self._quiet:
                if self.progress is not None:
                    self.progress.clear()
                write_line(f"[{task.job} {task.index}] {line}" if task is not None else f"torchquorum: {line}")
        if self.progress is not None and not self._quiet and self._output is None:
            self.progress.poll()

    def close(self) -> None:
        """Prints the remaining lines."""
        self.show()
        if self.progress is not None:
            self.progress.close()


def _check(function: Any, arguments: Sequence[Any], keywords: Mapping[str, Any], on: Any) -> None:
    if not callable(function):
        raise ConfigError(f"tq.launch({function!r}): give it a function, such as tq.launch(train, workers=2)")
    if on not in ("local", "ray") and not isinstance(on, Ray):
        raise ConfigError(f"tq.launch(on={on!r}): must be 'local', 'ray' or tq.Ray(...)")
    if not hasattr(os, "fork"):
        raise ConfigError("tq.launch needs a system with fork(); here, write a script and use `torchquorum run`")
    if on == "local" and torch.cuda.is_initialized():
        raise ConfigError(
            "tq.launch: this process has used CUDA, which does not survive a fork. Restart the notebook and touch the GPU "
            "only inside the function"
        )
    if on == "local" and autograd_has_threads():
        raise ConfigError(
            "tq.launch: this process has computed gradients on a machine with a GPU, and PyTorch then computes none in a fork "
            "of it. Restart the notebook and call backward() only inside the function"
        )
    try:
        inspect.signature(function).bind(*arguments, **keywords)
    except TypeError as error:
        name = getattr(function, "__name__", "the function")
        raise ConfigError(f"tq.launch: {name} cannot be called with these arguments: {error}") from None
    except ValueError:
        pass  # a builtin without a signature


def autograd_has_threads() -> bool:
    """Whether torch has started its autograd threads, as it does on the first backward pass where there is a GPU."""
    for comm in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # a thread that has just ended
            if comm.read_text().startswith("pt_autograd"):
                return True
    return False


def _what_failed(cluster: LaunchedCluster, lines: Mapping[TaskId, Sequence[str]]) -> str:
    failed = sorted(cluster.failed, key=lambda task: _order(cluster, task))
    first = failed[0] if failed else None
    if first is None and not any("joined" in line for line in lines.get(TaskId("ps", 0), ())):
        return "no worker began a session: the function must call tq.join() and train inside `with tq.Session(...)`"
    if first is None:
        return "; ".join(cluster.messages) or "the run failed"
    shown = "\n".join(lines.get(first, ["it printed nothing"])[-15:])
    others = ", ".join(str(t) for t in failed if t != first)
    return f"{first} failed{f', and {others}' if others else ''}. Its last lines:\n{shown}"


def _order(cluster: LaunchedCluster, task: TaskId) -> float:
    failure = cluster.failures.of(task)
    return failure.order if failure is not None else math.inf


class ForkedCluster(LocalCluster):
    """A local cluster whose tasks are forks of this process."""

    def __init__(self, options: LaunchOptions, output: TaskOutput, note: Note, call: Callable[[], Any]) -> None:
        super().__init__(options, output, note)
        self._call = call
        self._results: dict[TaskId, Result] = {}

    def spawn(self, task: TaskId, extra: dict[str, str | None], fds: list[int]) -> Forked:
        """Forks a task."""
        forked, self._results[task] = fork_task(self._call, task, extra)
        return forked

    def _find_no_task(self) -> str | None:
        """A function need not train: what it returns is what was asked for."""
        return None

    def results(self) -> list[Any]:
        """Returns what each worker's function returned."""
        found: list[Any] = []
        for task in self.cluster.tasks("worker"):
            if task in self._results:  # of a range, some workers may never have started
                found.append(decode_result(self._results[task].get()))
        return found

    def close(self) -> None:
        """Waits for the threads that read results."""
        for result in self._results.values():
            result.get()
