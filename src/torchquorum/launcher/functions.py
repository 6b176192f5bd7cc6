"""`tq.launch`: a function of this process, of a notebook for instance, run on a cluster.

On this machine every task is a fork of this process, so the function and all that it refers to are there without travelling:
nothing is pickled. On Ray, Ray itself brings the function to its machines, where each task is a fork of its actor.
What always holds: when `launch` returns, by whatever way, no process of the cluster is left; what the functions return comes
back as plain data.
"""

from __future__ import annotations

import inspect
import os
import queue
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec
import torch

from torchquorum import env
from torchquorum.cluster import TaskId
from torchquorum.errors import ConfigError, TorchQuorumError
from torchquorum.launcher.local import LaunchedCluster, LocalCluster, Options, die_with_parent
from torchquorum.launcher.progress import ProgressLine
from torchquorum.launcher.ray_cluster import Ray
from torchquorum.launcher.watch import RunWatcher
from torchquorum.lines import write_line
from torchquorum.server.update import warm_up

if TYPE_CHECKING:
    from torchquorum.launcher.on_ray import RayCluster

MAX_RESULT_BYTES = 1 << 30
LAST_LINES = 30


class LaunchError(TorchQuorumError):
    """A run that was launched from a function did not end well."""


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

    The function calls `tq.join()` itself, as a script does. What it prints appears here with the worker's name in front.
    Variables that it changes are its own: each worker is another process, with one thread for operations. For more threads,
    for CUDA that this process has used already, and for other machines, write a script and use `torchquorum run`.

    Args:
        function: What every worker runs.
        *arguments: Its arguments.
        workers: How many workers; (2, 8) or "2:8" begins with two and lets up to eight come and go.
        ps: How many ps tasks.
        transport: auto, shm or tcp.
        logdir: The run's folder, for sessions that name none.
        report: Where ps task 0 writes the report.
        max_restarts: How often each task may be started again after a signal ended it.
        quiet: Do not print the tasks' output.
        output: Takes every line that a task prints, instead of printing it.
        on: local, for processes of this machine; ray, for machines of a Ray cluster, or of a Ray that is started here;
            `tq.Ray(...)` to say which one and what a worker reserves. Ray brings the function there, by its own means.
        **keywords: The function's keyword arguments.

    Returns:
        What the function returned on each worker, in order, of a range on those that were there: numbers, text, bytes, lists,
        dicts, tensors; anything else is an error.

    Raises:
        LaunchError: A task failed; its last lines are in the message.
        ConfigError: This process cannot be forked: it has used CUDA.
    """
    _check(function, arguments, keywords, on)
    shown = Output(output, quiet=quiet)
    options = Options(
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
        from torchquorum.launcher.on_ray import RayCluster

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
    """The tasks' lines, printed by the thread that called `launch`: a notebook gives what others print to any cell.

    Args:
        output: Takes the lines instead.
        quiet: Print nothing.

    Attributes:
        last: The last lines of each task.
        progress: The line about the run as a whole.
    """

    def __init__(self, output: Callable[[TaskId, str], None] | None, *, quiet: bool) -> None:
        self._output, self._quiet = output, quiet
        self._lines: queue.SimpleQueue[tuple[TaskId | None, str]] = queue.SimpleQueue()
        self.last: dict[TaskId, list[str]] = {}
        self.progress: ProgressLine | None = None

    def put(self, task: TaskId, line: str) -> None:
        """Takes a line of a task, on the thread that reads it."""
        self._lines.put((task, line))

    def note(self, line: str) -> None:
        """Takes a line of the launcher's own."""
        self._lines.put((None, line))

    def show(self) -> None:
        """Prints what has come."""
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
        """Prints what is left."""
        self.show()
        if self.progress is not None:
            self.progress.close()


def _check(function: Any, arguments: Sequence[Any], keywords: Mapping[str, Any], on: Any) -> None:
    if not callable(function):
        raise ConfigError(f"tq.launch({function!r}): give it a function, such as tq.launch(train, workers=2)")
    if on not in ("local", "ray") and not isinstance(on, Ray):
        raise ConfigError(f"tq.launch(on={on!r}): must be 'local', 'ray' or tq.Ray(...)")
    if not hasattr(os, "fork"):
        raise ConfigError("tq.launch needs a system that can fork; here, write a script and use `torchquorum run`")
    if on == "local" and torch.cuda.is_initialized():
        raise ConfigError(
            "tq.launch: this process has used CUDA, which does not survive a fork. Restart the notebook and touch the GPU "
            "only inside the function"
        )
    if on == "local" and _autograd_has_threads():
        raise ConfigError(
            "tq.launch: this process has computed gradients on a machine with a GPU, and PyTorch lets no fork of it compute any "
            "after that. Restart the notebook and call backward() only inside the function"
        )
    try:
        inspect.signature(function).bind(*arguments, **keywords)
    except TypeError as error:
        name = getattr(function, "__name__", "the function")
        raise ConfigError(f"tq.launch: {name} cannot be called like that: {error}") from None
    except ValueError:
        pass  # a builtin without a signature


def _autograd_has_threads() -> bool:
    """Whether torch has begun threads for the backward passes of devices, as it does once there is a GPU to be used."""
    for comm in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # a thread that has just ended
            if comm.read_text().startswith("pt_autograd"):
                return True
    return False


def _what_failed(cluster: LaunchedCluster, lines: Mapping[TaskId, Sequence[str]]) -> str:
    failed = cluster.failed
    first = failed[0] if failed else None
    if first is None and not any("joined" in line for line in lines.get(TaskId("ps", 0), ())):
        return "no worker began a session: the function shall call tq.join() and train inside `with tq.Session(...)`"
    if first is None:
        return "; ".join(cluster.messages) or "the run failed"
    shown = "\n".join(lines.get(first, ["it printed nothing"])[-15:])
    others = ", ".join(str(t) for t in failed if t != first)
    return f"{first} failed{f', and {others}' if others else ''}. Its last lines:\n{shown}"


class ForkedCluster(LocalCluster):
    """A local cluster whose tasks are forks of this process.

    A function that fails will not do better on the other workers: all end.
    """

    fails_together = True

    def __init__(
        self,
        options: Options,
        output: Callable[[TaskId, str], None],
        note: Callable[[str], None],
        call: Callable[[], Any],
    ) -> None:
        super().__init__(options, output, note)
        self._call = call
        self._results: dict[TaskId, Result] = {}

    def _spawn(self, task: TaskId, extra: dict[str, str | None], fds: list[int]) -> Forked:
        forked, self._results[task] = fork_task(self._call, task, extra)
        return forked

    def results(self) -> list[Any]:
        """Returns what each worker's function returned."""
        found: list[Any] = []
        for task in self.cluster.tasks("worker"):
            if task in self._results:  # of a range, some may never have come
                found.append(decode_result(self._results[task].get()))
        return found

    def close(self) -> None:
        """Waits for the threads that read results."""
        for result in self._results.values():
            result.get()


def fork_task(call: Callable[[], Any], task: TaskId, extra: Mapping[str, str | None]) -> tuple[Forked, Result]:
    """Forks this process to be a task.

    Args:
        call: What a worker runs.
        task: Which one it is.
        extra: What changes in its environment.

    Returns:
        The child, and what it will have returned.
    """
    out, child_out = os.pipe()
    result, child_result = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = fork()
    if pid == 0:
        os.close(out)
        os.close(result)
        _be_the_child(call, task, extra, child_out, child_result)
    os.close(child_out)
    os.close(child_result)
    return Forked(pid, os.fdopen(out, "rb", buffering=0)), Result(result)


def fork() -> int:
    """Forks. Callers note their interrupts, see interrupts.py; a child has those of a new program, blocked until it can be ended.

    An interrupt of the whole terminal reaches a child at once, and must not end it in the middle of its parent's code.
    """
    signals = (signal.SIGINT, signal.SIGTERM)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    parent = os.getpid()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the child uses none of this process's
            pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return pid
    finally:
        if os.getpid() == parent:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Result:
    """What a forked task returns, read by a thread of its own as it comes.

    Args:
        fd: The pipe's end, which becomes this object's.
    """

    def __init__(self, fd: int) -> None:
        self._chunks: list[bytes] = []
        self._reader = threading.Thread(target=self._drain, args=(fd,), name="torchquorum-result", daemon=True)
        self._reader.start()

    def get(self) -> bytes:
        """Returns all that came, after the task has ended."""
        self._reader.join(timeout=10.0)
        return b"".join(self._chunks)

    def _drain(self, fd: int) -> None:
        size = 0
        with os.fdopen(fd, "rb") as pipe:
            while chunk := pipe.read(1 << 20):
                size += len(chunk)
                if size <= MAX_RESULT_BYTES:
                    self._chunks.append(chunk)


class Forked:
    """A forked child, with the methods of subprocess.Popen that a cluster needs."""

    def __init__(self, pid: int, stdout: IO[bytes]) -> None:
        self.pid, self.stdout = pid, stdout
        self._code: int | None = None

    def poll(self) -> int | None:
        """Returns the exit code, negative for a signal, or None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid == self.pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def send_signal(self, sig: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        """Ends it at once."""
        self.send_signal(signal.SIGKILL)


def _be_the_child(
    call: Callable[[], Any], task: TaskId, extra: Mapping[str, str | None], out: int, result: int
) -> None:
    """Runs a task in a forked child; never returns."""
    code = 1
    try:
        os.setsid()
        die_with_parent()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # `fork` has blocked some, and so have Ray's processes
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        # A notebook's streams belong to its kernel's threads, which are not here.
        sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="replace")
        sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="replace")
        sys.argv = [task.job]  # the arguments of a notebook are its kernel's
        env.become_child(**extra)
        # A fork has the parent's thread pool in name only: more threads than one would wait for those that are not here.
        torch.set_num_threads(1)
        if task.job == "ps":
            from torchquorum.session.join import join

            join()  # serves until the job ends, and exits
        value = _encode(call())
        with os.fdopen(result, "wb") as pipe:
            pipe.write(value)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except KeyboardInterrupt:
        code = 130
    except TorchQuorumError as error:
        write_line(f"{task}: {error}", sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # what this process would do at its end is its parent's business


def _encode(value: Any) -> bytes:
    def tensors(found: Any) -> Any:
        if isinstance(found, torch.Tensor):
            flat = found.detach().cpu().contiguous()
            raw = flat.reshape(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b""
            return {"~tensor": str(flat.dtype).removeprefix("torch."), "shape": list(flat.shape), "bytes": raw}
        if hasattr(found, "item") and getattr(found, "ndim", 1) == 0:
            return found.item()
        raise TypeError

    try:
        encoded = msgspec.msgpack.encode(value, enc_hook=tensors)
    except (TypeError, ValueError):
        raise ConfigError(
            f"tq.launch: the function returned {type(value).__name__}, and only plain data comes back from another process: "
            "numbers, text, lists, dicts, tensors. Return model.state_dict() instead of a model"
        ) from None
    if len(encoded) > MAX_RESULT_BYTES:
        raise ConfigError(
            f"tq.launch: the function returned {len(encoded)} bytes; at most {MAX_RESULT_BYTES} come back"
        )
    return encoded


def decode_result(encoded: bytes) -> Any:
    """Returns what a task has returned."""

    def revive(found: Any) -> Any:
        if isinstance(found, dict):
            if "~tensor" in found:
                dtype = getattr(torch, found["~tensor"])
                raw = torch.frombuffer(bytearray(found["bytes"]), dtype=torch.uint8) if found["bytes"] else None
                return (torch.empty(0, dtype=dtype) if raw is None else raw.view(dtype)).view(found["shape"])
            return {key: revive(value) for key, value in found.items()}
        return [revive(value) for value in found] if isinstance(found, list) else found

    return revive(msgspec.msgpack.decode(encoded)) if encoded else None
