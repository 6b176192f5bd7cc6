"""A task as a fork of this process, which runs a function and returns plain data.

Used by `launch.ForkedCluster` on this machine and by `ray_host` on Ray's machines. What always holds: a forked child never
returns into its parent's code; its result travels as msgpack, never as a pickle.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import IO, Any

import msgspec
import torch

from torchquorum import env
from torchquorum.cluster import TaskId
from torchquorum.errors import ConfigError, TorchQuorumError
from torchquorum.launcher.process import die_with_parent
from torchquorum.lines import write_line

MAX_RESULT_BYTES = 1 << 30
RESULT_S = 10.0


def fork_task(call: Callable[[], Any], task: TaskId, extra: Mapping[str, str | None]) -> tuple[Forked, Result]:
    """Forks this process to be a task.

    Args:
        call: The function, if the task is a worker.
        task: Which task the child is.
        extra: Changes to its environment.

    Returns:
        The child, and its future result.
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
    """Forks. Callers record their interrupts, see interrupts.py; the child has the handlers of a new program, still blocked.

    Ctrl-C in a terminal reaches a child at once, and must not end it in the middle of its parent's code.
    """
    signals = (signal.SIGINT, signal.SIGTERM)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    parent = os.getpid()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about threads: the child uses none of its parent's
            pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return pid
    finally:
        if os.getpid() == parent:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Result:
    """What a forked task returns, read from a pipe by a separate thread.

    Args:
        fd: The pipe's reading end; closed here.
    """

    def __init__(self, fd: int) -> None:
        self._chunks: list[bytes] = []
        self._reader = threading.Thread(target=self._drain, args=(fd,), name="torchquorum-result", daemon=True)
        self._reader.start()

    def get(self) -> bytes:
        """Returns all bytes, after the task has ended."""
        self._reader.join(timeout=RESULT_S)
        return b"".join(self._chunks)

    def _drain(self, fd: int) -> None:
        size = 0
        with os.fdopen(fd, "rb") as pipe:
            while chunk := pipe.read(1 << 20):
                size += len(chunk)
                if size <= MAX_RESULT_BYTES:
                    self._chunks.append(chunk)


class Forked:
    """A forked child, as a `Process`."""

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
    """Runs a task in the forked child; never returns."""
    code = 1
    try:
        os.setsid()
        die_with_parent()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # `fork` has blocked some, and Ray's processes block others
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        # A notebook's streams need its kernel's threads, which do not exist in a fork.
        sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="replace")
        sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="replace")
        sys.argv = [task.job]  # a notebook's arguments belong to its kernel
        env.become_child(**extra, **{env.FORK: "1"})
        # The parent's thread pool has no threads in a fork: an operation on more than one thread would wait for ever.
        torch.set_num_threads(1)
        if task.job == "ps":
            from torchquorum.session.join import join

            join()  # serves until the job ends, then exits
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
        os._exit(code)  # exit handlers belong to the parent


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
            f"tq.launch: the function returned {type(value).__name__}; only plain data can be returned from another process: "
            "numbers, text, lists, dicts, tensors. Return model.state_dict() instead of a model"
        ) from None
    if len(encoded) > MAX_RESULT_BYTES:
        raise ConfigError(
            f"tq.launch: the function returned {len(encoded)} bytes; at most {MAX_RESULT_BYTES} can be returned"
        )
    return encoded


def decode_result(encoded: bytes) -> Any:
    """Returns the value that a task has returned."""

    def revive(found: Any) -> Any:
        if isinstance(found, dict):
            if "~tensor" in found:
                dtype = getattr(torch, found["~tensor"])
                raw = torch.frombuffer(bytearray(found["bytes"]), dtype=torch.uint8) if found["bytes"] else None
                return (torch.empty(0, dtype=dtype) if raw is None else raw.view(dtype)).view(found["shape"])
            return {key: revive(value) for key, value in found.items()}
        return [revive(value) for value in found] if isinstance(found, list) else found

    return revive(msgspec.msgpack.decode(encoded)) if encoded else None
