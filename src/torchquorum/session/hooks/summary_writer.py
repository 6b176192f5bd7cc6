"""The thread that writes TensorBoard's event files, and asks the ps tasks what only they know.

Started by `tq.SummaryHook`. It owns the files. Its questions go over the worker's link, which belongs to the training loop: the loop sends
and receives them when it steps, and otherwise only puts moments into the queue. What always holds: a failure is printed in one line
and ends the summaries, never the training; every moment is on disk before the next is processed; the thread ends when it is closed,
or when the run has failed, of which no hook is told.
"""

from __future__ import annotations

import queue
import tempfile
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from torchquorum.clock import SYSTEM, Clock
from torchquorum.formats.storage import Location, RemotePath, locate
from torchquorum.session.hooks.summary_asks import MEAN_S, Asks

POLL_S = 0.5
STATUS_S = 1.0
CLOSE_S = 10.0
ATTEND_EVERY_S = 0.01
BINS = 64
SEND_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class StepValues:
    """What the loop knew at one global step; the arrays are copies that nothing else uses."""

    global_step: int
    wall: float
    scalars: dict[str, float]
    histograms: dict[str, np.ndarray] = field(default_factory=dict)
    with_status: bool = True
    last: bool = False


@dataclass(frozen=True, slots=True)
class RunHead:
    """What is written at the start: the configuration, and a copy of the model with an example of its input."""

    config: str
    model: Any = None
    example: Any = None


@dataclass(frozen=True, slots=True)
class ModelGraph:
    """The model as the program called it in its first step: a copy, with an input."""

    model: Any
    example: Any


@dataclass(frozen=True, slots=True)
class Rewind:
    """The run went back to an earlier step: what was written beyond it is void."""

    global_step: int


class SummaryThread:
    """Writes moments. `put` and `close` are called by the loop; all else happens on the thread.

    Args:
        folder: Where the event files go.
        first_step: The global step of the start; what an earlier run wrote from there on is void.
        asks: Questions to the ps tasks; owned by the thread from now on.
        over: Whether the run is over, asked from the thread now and then.
        batch_size: Examples per batch, if known.
        gradient_tag: The name of a gradient's histogram, with {} for the variable's name.
        say: Prints a line for people.
        clock: Tells the time.
    """

    def __init__(
        self,
        folder: str,
        first_step: int,
        asks: Asks,
        *,
        over: Callable[[], bool],
        batch_size: int | None,
        gradient_tag: str = "gradients/{}",
        say: Callable[[str], None],
        clock: Clock = SYSTEM,
    ) -> None:
        self._folder, self._first_step, self._asks = folder, first_step, asks
        self._spool = Spool(locate(folder), clock)
        self._say, self._clock = say, clock
        self._queue: queue.SimpleQueue[StepValues | RunHead | ModelGraph | Rewind | None] = queue.SimpleQueue()
        self._rates, self._gradient_tag = StatusRates(batch_size), gradient_tag
        self._over, self._loop = over, threading.current_thread()
        self.histogram_s = 0.0
        self._opened = 0
        self.failed = False
        self.thread = threading.Thread(target=self._run, name="torchquorum-summaries", daemon=True)
        self.thread.start()

    def put(self, item: StepValues | RunHead | ModelGraph | Rewind) -> None:
        """Queues something, without waiting."""
        if not self.failed:
            self._queue.put(item)

    @property
    def behind(self) -> int:
        """Returns how many things are in the queue."""
        return self._queue.qsize()

    def close(self) -> None:
        """Writes what is left and ends the thread; one that hangs is abandoned with a line for people."""
        self._queue.put(None)
        deadline = self._clock.now() + CLOSE_S
        while self.thread.is_alive() and self._clock.now() < deadline:
            self._asks.attend()  # the thread may be asking for its last numbers, over the link of this one
            self.thread.join(ATTEND_EVERY_S)
        if self.thread.is_alive():
            self._say(
                f"summaries: writing to {self._folder} takes more than {CLOSE_S:g} s; the last ones may be missing"
            )

    # -- on the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._write()
        except ImportError as error:
            self._give_up(f"no summaries: {error}; pip install tensorboard. Training goes on")
        except OSError as error:
            self._give_up(
                f"no summaries: {self._folder} cannot be written ({error.strerror or error}). Training goes on"
            )
        except Exception as error:
            self._give_up(f"no more summaries: {type(error).__name__}: {error}. Training goes on")
        finally:
            self._asks.close()
            self._spool.close()

    def _give_up(self, line: str) -> None:
        self.failed = True
        self._say(line)

    def _write(self) -> None:
        writer = self._open(self._first_step)
        try:
            while (item := self._next()) is not None:
                match item:
                    case StepValues():
                        self._write_values(writer, item)
                    case RunHead():
                        self._write_opening(writer, item)
                    case ModelGraph():
                        self._write_graph(writer, item.model, item.example)
                    case Rewind():
                        writer.close()
                        writer = self._open(item.global_step)
                writer.flush()
                self._spool.send()
        finally:
            writer.close()
            self._spool.send(now=True)

    def _open(self, first_step: int) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about libraries that are not needed here
            from torch.utils.tensorboard.writer import SummaryWriter
        # Readers order files by name, and names start with the second: two files of one second could be swapped.
        self._clock.sleep(max(0.0, self._opened + 1 - self._clock.wall()))
        self._opened = int(self._clock.wall())
        return SummaryWriter(str(self._spool.local), purge_step=first_step or None)

    def _next(self) -> StepValues | RunHead | ModelGraph | Rewind | None:
        while True:
            try:
                return self._queue.get(timeout=POLL_S)
            except queue.Empty:
                if self._over() or not self._loop.is_alive():
                    return None

    def _write_values(self, writer: Any, moment: StepValues) -> None:
        scalars = dict(moment.scalars)
        if moment.with_status:
            scalars |= self._rates.scalars(self._asks.status(), self._clock.now())
        for name, value in scalars.items():
            writer.add_scalar(name, value, moment.global_step, walltime=moment.wall)
        started = self._clock.now()
        self._write_histograms(writer, moment.histograms, moment.global_step, moment.wall)
        if moment.histograms:
            version, mean = self._asks.mean_gradient(0.0 if moment.last else MEAN_S)
            gradients = {self._gradient_tag.format(name): values for name, values in mean.items()}
            self._write_histograms(writer, gradients, version, self._clock.wall())
            self.histogram_s = self._clock.now() - started

    def _write_histograms(self, writer: Any, arrays: dict[str, np.ndarray], step: int, wall: float) -> None:
        for name, values in arrays.items():
            finite = values[np.isfinite(values)]
            if finite.size:
                writer.add_histogram(name, finite, step, bins=BINS, walltime=wall)

    def _write_opening(self, writer: Any, opening: RunHead) -> None:
        writer.add_text("configuration", opening.config, 0)
        if opening.example is not None:
            self._write_graph(writer, opening.model, opening.example)

    def _write_graph(self, writer: Any, model: Any, example: Any) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                writer.add_graph(model, example)
        except Exception as error:  # a model that cannot be traced is still trained
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self._say(f"summaries: no graph of the model: {reason}")


class Spool:
    """The folder that TensorBoard's writer writes to: the run's own, or a local one whose files are sent to a remote run.

    TensorBoard appends, and objects cannot be appended to: a file that has grown is uploaded again, at most every few seconds.
    """

    def __init__(self, folder: Location, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._remote = folder if isinstance(folder, RemotePath) else None
        self._temporary = (
            tempfile.TemporaryDirectory(prefix="torchquorum-events-") if self._remote is not None else None
        )
        self.local = folder if isinstance(folder, Path) else Path(self._temporary.name if self._temporary else "")
        self._sent: dict[str, int] = {}
        self._sent_at = 0.0

    def send(self, *, now: bool = False) -> None:
        """Uploads what has grown; unless `now`, only if the last upload is long enough ago.

        Raises:
            OSError: It cannot be sent.
        """
        if self._remote is None or not (now or self._clock.now() - self._sent_at > SEND_EVERY_S):
            return
        self._sent_at = self._clock.now()
        for file in sorted(self.local.iterdir()):
            size = file.stat().st_size
            if self._sent.get(file.name) != size:
                (self._remote / file.name).put(file)
                self._sent[file.name] = size

    def close(self) -> None:
        """Removes the local folder, if it is only a spool."""
        if self._temporary is not None:
            self._temporary.cleanup()


class StatusRates:
    """Turns the counts of two statuses into rates; the rest of a status is taken as it is."""

    def __init__(self, batch_size: int | None) -> None:
        self._batch_size = batch_size
        self._before: tuple[float, dict[str, Any]] | None = None

    def scalars(self, status: dict[str, Any], now: float) -> dict[str, float]:
        """Returns the numbers of a status, by name."""
        if "per_worker" not in status:
            return {}
        workers: dict[str, Any] = status["per_worker"]
        found: dict[str, float] = {
            "staleness/mean": status["staleness_mean"],
            "staleness/max": status["staleness_max"],
            "refused/total": status["refused"],
            "workers/live": len(status["live"]),
        }
        reasons: dict[str, int] = {}
        for worker in workers.values():
            for reason, count in worker["refused_reasons"].items():
                reasons[reason] = reasons.get(reason, 0) + count
        found |= {f"refused/{reason.replace(' ', '_')}": count for reason, count in reasons.items()}
        for name, of in (status.get("optimizers") or {}).items():
            found |= {f"staleness/{name}": of["staleness_mean"], f"refused/{name}": of["refused"]}
        before, self._before = self._before, (now, status)
        if before is None or now - before[0] <= 0:
            return found
        seconds = now - before[0]
        for index, worker in workers.items():
            earlier = before[1]["per_worker"].get(index, {"batches": 0, "waited_s": 0.0})
            found[f"batches_per_s/worker_{index}"] = max(0, worker["batches"] - earlier["batches"]) / seconds
            waited_s = max(0.0, worker["waited_s"] - earlier["waited_s"])
            found[f"quorum_wait/worker_{index}"] = min(1.0, waited_s / seconds)
        for name, of in (status.get("optimizers") or {}).items():
            earlier = (before[1].get("optimizers") or {}).get(name, of)
            found[f"updates_per_s/{name}"] = max(0, of["version"] - earlier["version"]) / seconds
        if self._batch_size is not None:
            found["examples_per_s"] = self._batch_size * max(0, _batches(status) - _batches(before[1])) / seconds
        return found


def _batches(status: dict[str, Any]) -> int:
    """Returns how many batches were used: of several optimizers each may have made a gradient of the same one."""
    return max((of["batches"] for of in (status.get("optimizers") or {}).values()), default=status["batches"])
