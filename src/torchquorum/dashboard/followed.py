"""A run that is followed: what ps task 0 says of it now, and what its folder has.

Owned by one thread each, which calls `poll`; the threads of the server read `shown`, an object that is never changed. What always
holds: a ps task or a folder that is gone is something to show, never an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from torchquorum.clock import SYSTEM, Clock
from torchquorum.errors import TorchQuorumError
from torchquorum.formats.ledger import NAME as LEDGER
from torchquorum.formats.storage import Location
from torchquorum.report.history import History, read_history

WINDOW_S = 10.0  # speeds are averages over this time
NAMED_S = 5.0  # for whom a worker waited is shown for so long
GONE_S = 5.0  # without an answer for so long, ps task 0 is said to be silent
MOST_POINTS = 600
READ_SHARE = 20  # the folder is read again after so many times as long as the last reading took
READ_EVERY_S = 2.0


class StatusSource(Protocol):
    """Asks ps task 0 for the status of a run: `torchquorum.launcher.watch.Watcher` or `RunWatcher`."""

    @property
    def status(self) -> dict[str, Any]: ...  # noqa: D102
    @property
    def silent_s(self) -> float: ...  # noqa: D102
    def poll(self, timeout_s: float = 0.0) -> bool: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102


@dataclass(frozen=True, kw_only=True)
class Point:
    """The run at one time: seconds since it is followed, its global step, batches, and, if known, loss and accuracy."""

    at: float
    step: int
    batches: int
    loss: float | None = None
    accuracy: float | None = None
    waited: Mapping[str, tuple[int, float]] = field(default_factory=dict)  # by worker: batches, seconds of waiting
    waits_for: Mapping[str, str] = field(default_factory=dict)  # by worker that waits: for whom


@dataclass(frozen=True, kw_only=True)
class RunOnPage:
    """What there is to show of a run.

    Attributes:
        name: What it is called: an address or a folder.
        state: `waiting`, for the chief or ps task 0; `running`; `silent`; `over`.
        note: A sentence about the state.
        status: What ps task 0 said last; empty without a cluster.
        points: What it has said over time, the last ones closest.
        history: What its folder has, if it can be read here.
    """

    name: str
    state: str = "waiting"
    note: str = ""
    status: Mapping[str, Any] = field(default_factory=dict)
    points: tuple[Point, ...] = ()
    history: History | None = None

    @property
    def updates_per_s(self) -> float:
        """Returns the speed over the last seconds."""
        recent = self._recent()
        return _slope(recent[0].at, recent[-1].at, recent[-1].step - recent[0].step) if recent else 0.0

    def speed_of(self, worker: str) -> tuple[float, float] | None:
        """Returns a worker's batches per second and the share of its time that it waited, over the last seconds."""
        recent = [p for p in self._recent() if worker in p.waited]
        if len(recent) < 2 or recent[-1].at - recent[0].at < 0.5:
            return None
        first, last = recent[0], recent[-1]
        passed = last.at - first.at
        batches, waited = (last.waited[worker][i] - first.waited[worker][i] for i in (0, 1))
        return max(0.0, batches / passed), min(1.0, max(0.0, waited / passed))

    def waits_for(self, worker: str) -> str:
        """Returns for whom a worker waits, or waited a moment ago: when it is looked at it may be computing."""
        return next((p.waits_for[worker] for p in reversed(self._recent(NAMED_S)) if worker in p.waits_for), "")

    def _recent(self, window_s: float = WINDOW_S) -> list[Point]:
        since = self.points[-1].at - window_s if self.points else 0.0
        return [p for p in self.points if p.at >= since]


def _slope(start: float, end: float, change: float) -> float:
    return max(0.0, change / (end - start)) if end - start >= 0.5 else 0.0


class Followed:
    """One run that is followed.

    Args:
        name: What it is called.
        watcher: Asks ps task 0, if there is an address.
        folder: Where the run's files are, if that is known; else it is where ps task 0 says that it saves, if that is here.
        clock: Tells the time.
        read: Reads a folder.
    """

    def __init__(
        self,
        name: str,
        watcher: StatusSource | None,
        folder: Location | None = None,
        *,
        clock: Clock = SYSTEM,
        read: Callable[[Location], History] = read_history,
    ) -> None:
        self._watcher, self._folder, self._clock, self._read = watcher, folder, clock, read
        self._began, self._read_at = clock.now(), 0.0
        self._points: list[Point] = []
        self.shown = RunOnPage(name=name, note="waiting for ps task 0" if watcher is not None else "")
        self.seen_running = False

    @property
    def over(self) -> bool:
        """Whether the run has ended while it was followed."""
        return self.seen_running and self.shown.state == "over"

    def poll(self, timeout_s: float) -> None:
        """Looks once at what is new; waits for that for at most so long."""
        if self._watcher is not None:
            self._ask(self._watcher, timeout_s)
        else:
            self._clock.sleep(timeout_s)
        self._look_at_folder()
        self.seen_running = self.seen_running or self.shown.state == "running"

    def _ask(self, watcher: StatusSource, timeout_s: float) -> None:
        try:
            news = watcher.poll(timeout_s)
        except TorchQuorumError as error:
            self.shown = replace(self.shown, state="silent", note=str(error))
            return
        status = watcher.status
        if news and "per_worker" in status:
            self._take(status)
        elif news and status.get("ready"):
            note = f"{status['task']} holds a shard; only ps task 0 knows the run: give its address"
            self.shown = replace(self.shown, state="waiting", note=note, status=status)
        elif news and not self.shown.points:
            self.shown = replace(self.shown, note="waiting for the chief to create the variables", status=status)
        elif not news and watcher.silent_s > GONE_S and self.shown.state != "over":
            self._silent(watcher.silent_s)

    def _take(self, status: Mapping[str, Any]) -> None:
        waited = {index: (int(w["batches"]), float(w["waited_s"])) for index, w in status["per_worker"].items()}
        at = self._clock.now() - self._began
        if self._points and status["global_step"] < self._points[-1].step:
            self._points.clear()  # the run has gone back to a checkpoint
        names = {index: words for index, w in status["per_worker"].items() if (words := _names(w.get("waits_for")))}
        measured = {"loss": status.get("loss"), "accuracy": status.get("accuracy")}
        step, batches = int(status["global_step"]), int(status["batches"])
        self._points.append(Point(at=at, step=step, batches=batches, waited=waited, waits_for=names, **measured))
        if len(self._points) > MOST_POINTS:  # of the older half every second one stays
            half = MOST_POINTS // 2
            self._points[:half] = self._points[:half:2]
        over = bool(status.get("stopped")) and not status["live"]
        note = _end_of(status) if over else ""
        self.shown = replace(
            self.shown, state="over" if over else "running", note=note, status=status, points=tuple(self._points)
        )

    def _silent(self, silent_s: float) -> None:
        status = self.shown.status
        if status.get("stopped"):
            self.shown = replace(self.shown, state="over", note=_end_of(status))
        elif status:
            note = f"ps task 0 has not answered for {silent_s:.0f} s; this page waits for it to come back"
            self.shown = replace(self.shown, state="silent", note=note)
        else:
            self.shown = replace(self.shown, note=f"waiting for ps task 0 to answer: {silent_s:.0f} s")

    def _look_at_folder(self) -> None:
        folder = self._folder or _folder_here(self.shown.status)
        now = self._clock.now()
        if folder is None or now < self._read_at:
            return
        try:
            history = self._read(folder)
        except TorchQuorumError as error:
            self._read_at = now + READ_EVERY_S
            if self._watcher is None:
                self.shown = replace(self.shown, note=str(error))
            return
        took_s = self._clock.now() - now
        self._read_at = self._clock.now() + max(READ_EVERY_S, READ_SHARE * took_s)
        self.shown = replace(self.shown, history=history)
        if self._watcher is None:
            state = "running" if history.is_running else "over"
            note = "" if history.is_running else f"the run is over, at global step {history.last_version:,}"
            self.shown = replace(self.shown, state=state, note=note)

    def finish(self) -> None:
        """The run is over, as its launcher knows: ps task 0 may have gone before it was asked again."""
        if self.shown.status:
            self.shown = replace(self.shown, state="over", note=_end_of(self.shown.status))

    def close(self) -> None:
        """Closes the connection."""
        if self._watcher is not None:
            self._watcher.close()


def _end_of(status: Mapping[str, Any]) -> str:
    saved = f", saved as {status['saved']}" if status.get("saved") else ", not saved"
    return f"the run is over, at global step {status['global_step']:,}{saved}"


def _names(wait: Mapping[str, Any] | None) -> str:
    if not wait:
        return ""
    missing = list(wait["missing"])
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return f"worker {', '.join(map(str, missing[:3]))}{more}" if missing else "ps task 0"


def _folder_here(status: Mapping[str, Any]) -> Path | None:
    """Returns the run's folder, if it has one and that is a folder of this host."""
    folder = Path(str(status.get("logdir") or ""))
    return folder if folder.is_absolute() and (folder / LEDGER).is_file() else None
