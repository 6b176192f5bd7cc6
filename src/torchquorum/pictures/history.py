"""What a run's folder holds, read into columns: ledger, measures, report, TensorBoard's scalars, checkpoints.

Called by `torchquorum report` and `torchquorum compare`. What always holds: reading never fails for what is missing, torn or
damaged; `missing` says what that was, in words. A run that was stopped and resumed is one history: the time in which nothing
ran is taken out of its clock, and gradients whose updates were rolled back are not `kept`.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from torchquorum.errors import ConfigError
from torchquorum.formats.checkpoint import CheckpointInfo, list_checkpoints
from torchquorum.formats.ledger import NAME, Entry, Event, read_records
from torchquorum.formats.measures import NAME as MEASURES
from torchquorum.formats.measures import Measure, read_measures
from torchquorum.formats.segments import fetch_run
from torchquorum.formats.storage import Location, RemotePath, is_there

REPORT = "report.json"
PAUSE_S = 30.0  # in an old ledger, which has no events, a longer silence is the time between two runs
FRESH_S = 20.0  # a ledger written to so recently belongs to a run that goes on
_EVENT_FILES = "*.tfevents.*"


@dataclass(frozen=True)
class Turn:
    """One start of the run: when it was begun, and which moment is which second of training; it has `length_s` seconds."""

    begun_at: float
    zero_at: float
    first_s: float
    length_s: float


@dataclass(kw_only=True)
class History:
    """A run as its folder tells it. The arrays have one place per gradient, in the order of the decisions.

    Attributes:
        folder: The run's folder.
        worker: Who computed it.
        version: At which version.
        met: The version it met.
        accepted: Whether it was accepted.
        reason: Why.
        loss: Its loss, NaN where nobody said.
        took_s: Seconds it took to compute and send, NaN in old ledgers and of the first of a life, which may have waited.
        at: When it arrived, seconds since the epoch.
        clock: The same, in seconds of training since the run began.
        kept: Whether its update was not rolled back later.
        events: What else the ledger says.
        measures: Numbers that the run measured of itself.
        report: The report of the run's end, if there is one.
        checkpoints: What is saved.
        missing: What could not be read, in words.
        going_on: Whether the run seems to be running now.
    """

    folder: Location
    worker: np.ndarray
    version: np.ndarray
    met: np.ndarray
    accepted: np.ndarray
    reason: np.ndarray
    loss: np.ndarray
    took_s: np.ndarray
    at: np.ndarray
    clock: np.ndarray = field(init=False)
    kept: np.ndarray = field(init=False)
    events: list[Event]
    measures: list[Measure]
    report: dict[str, Any]
    checkpoints: list[CheckpointInfo]
    missing: list[str]
    going_on: bool = field(init=False, default=False)
    _turns: list[Turn] = field(init=False)

    def __post_init__(self) -> None:
        self._turns = _find_turns(self.at, self.events)
        self.clock = self.clock_of(self.at)
        later = np.minimum.accumulate(self.met[::-1])[::-1] if len(self.met) else self.met
        self.kept = self.met <= later

    def clock_of(self, at: np.ndarray) -> np.ndarray:
        """Returns seconds of training for times since the epoch."""
        if not self._turns:
            return np.zeros_like(at)
        begun, zero, first, length = np.array([(t.begun_at, t.zero_at, t.first_s, t.length_s) for t in self._turns]).T
        turn = np.clip(np.searchsorted(begun, at, side="right") - 1, 0, None)
        # Before the first gradient of a turn and after its last nobody trained: that takes no time on this clock.
        return first[turn] + np.clip(at - zero[turn], 0.0, length[turn])

    @property
    def config(self) -> dict[str, Any]:
        """Returns the configuration, as the ledger's last `began` has it."""
        return next((e.values for e in reversed(self.events) if e.event == "began"), {})

    @property
    def rule(self) -> str:
        """Returns the rule, such as Sync(aggregate=2), or unknown."""
        return str(self.config.get("rule") or self.report.get("rule") or "unknown")

    @property
    def restarts(self) -> int:
        """Returns how often the run was begun again."""
        return max(0, len(self._turns) - 1)

    @property
    def seconds(self) -> float:
        """Returns the seconds of training, from the first join to the last gradient."""
        return float(self.clock.max()) if len(self.clock) else 0.0

    @property
    def last_version(self) -> int:
        """Returns the version that the run came to."""
        seen = [int(self.met.max())] if len(self.met) else []
        seen += [e.version for e in self.events[-3:]]
        return max([*seen, int(self.report.get("global_step") or 0)], default=0)

    @property
    def accuracy(self) -> float | None:
        """Returns the accuracy that the chief found at the end, if it did."""
        for event in reversed(self.events):
            if event.event == "left" and event.worker == 0 and "accuracy" in event.values:
                return float(event.values["accuracy"])
        found = self.report.get("accuracy")
        return float(found) if isinstance(found, int | float) else None

    def measured(self, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns a measure's steps, clocks and values, in order of time."""
        found = [m for m in self.measures if m.name == name and m.value is not None]
        at = np.array([m.at for m in found], dtype=float)
        return (
            np.array([m.global_step for m in found]),
            self.clock_of(at),
            np.array([m.value for m in found], dtype=float),
        )

    def update_times(self) -> np.ndarray:
        """Returns when each update was made, in seconds of training: with the last accepted gradient of its round."""
        chosen = self.accepted & self.kept & (self.met < self.last_version)
        if not chosen.any():
            return np.array([])
        met, clock = self.met[chosen], self.clock[chosen]
        last = np.flatnonzero(np.diff(met, append=met[-1] + 1))
        return clock[last]


def _find_turns(at: np.ndarray, events: list[Event]) -> list[Turn]:
    """Finds when the run was begun, and begun again; of an old ledger, where it was silent for long."""
    times = np.sort(np.concatenate([at, np.array([e.at for e in events], dtype=float)]))
    if not len(times):
        return []
    begun = sorted(e.at for e in events if e.event == "began")
    if not begun or (len(at) and at.min() < begun[0] - 1e-3):
        old = times[times < begun[0]] if begun else times
        begun = [float(old[0]), *(float(t) for t in old[1:][np.diff(old) > PAUSE_S]), *begun]
    joined = np.array([e.at for e in events if e.event == "joined"], dtype=float)
    turns: list[Turn] = []
    done = 0.0
    for i, start in enumerate(begun):
        end = begun[i + 1] if i + 1 < len(begun) else np.inf
        inside = at[(at >= start) & (at < end)]
        first, last = (float(inside.min()), float(inside.max())) if len(inside) else (start, start)
        before = joined[(joined >= start) & (joined <= first)]
        zero = float(before.max()) if len(before) else min(start, first)  # a run may wait until all have joined
        turns.append(Turn(start, zero, done, last - zero))
        done += last - zero
    return turns


def read_history(folder: Location) -> History:
    """Reads a run's folder; of a remote one its small files are fetched first.

    Raises:
        ConfigError: There is no such folder, or nothing of a run is in it.
    """
    if not is_there(folder):
        raise ConfigError(f"{folder}: there is no such folder; give a run's folder, as in logdir= or --logdir")
    if not isinstance(folder, RemotePath):
        return _read_local(folder, folder)
    with tempfile.TemporaryDirectory(prefix="torchquorum-run-") as copy:
        try:
            fetch_run(folder, Path(copy), (NAME, MEASURES))
        except OSError as error:
            raise ConfigError(f"{folder} cannot be read: {error.strerror}") from None
        return _read_local(Path(copy), folder)


def _read_local(folder: Path, run: Location) -> History:
    """Reads the files in `folder`, and the checkpoints of `run`, which is the same unless that is remote."""
    missing: list[str] = []
    columns, events = _read_ledger(folder, missing)
    report = _read_report(folder, missing)
    measures = read_measures(folder)
    if not any(m.name == "accuracy" for m in measures):
        measures += _read_scalars(folder, missing)
    checkpoints = list_checkpoints(run)
    if not len(columns["at"]) and not events and not report and not measures and not checkpoints:
        inside = sorted(p.parent.name for p in folder.glob(f"*/{NAME}"))
        hint = f"; there are runs in it: {', '.join(inside[:5])}" if inside else ""
        found = (
            " ".join(missing)
            if (folder / NAME).exists()
            else f"No {NAME}, {REPORT}, checkpoints or TensorBoard events."
        )
        raise ConfigError(
            f"{run}: nothing of a run is in there. {found} Give the folder that was logdir= or --logdir{hint}"
        )
    history = History(
        folder=run,
        events=events,
        measures=measures,
        report=report,
        checkpoints=checkpoints,
        missing=missing,
        **columns,
    )
    ended = bool(events) and events[-1].event == "ended"
    newest = max([*columns["at"][-1:], *(e.at for e in events[-1:])], default=0.0)
    history.going_on = not ended and time.time() - newest < FRESH_S
    _note_missing(history, ended=ended)
    return history


def _note_missing(history: History, *, ended: bool) -> None:
    if history.going_on:
        history.missing.append("The run is still going on: this page shows it as it was when the page was made.")
    elif len(history.at) and history.events and not ended:
        history.missing.append("The ledger has no end: the run was killed, or ps task 0 was.")
    if len(history.at) and not history.events:
        history.missing.append(
            "The ledger is of an older version: it has no configuration, no joins and deaths, and no time per gradient."
        )
    if len(history.at) and np.isnan(history.loss).all():
        history.missing.append("No gradient has a loss: call optimizer.step(loss=loss) to have it recorded.")
    if not any(m.name == "accuracy" for m in history.measures):
        history.missing.append(
            "No accuracy was measured along the way: use tq.EvaluateHook, or session.measure(accuracy=...)."
        )


def _read_ledger(folder: Path, missing: list[str]) -> tuple[dict[str, np.ndarray], list[Event]]:
    rows: list[tuple[Any, ...]] = []
    events: list[Event] = []
    bad: list[int] = []
    try:
        for record in read_records(folder, bad.append):
            if isinstance(record, Entry):
                loss = np.nan if record.loss is None else record.loss
                took = np.nan if record.took_s is None or record.local_step == 1 else record.took_s
                rows.append(
                    (
                        record.worker,
                        record.version,
                        record.met,
                        record.accepted,
                        record.reason,
                        loss,
                        took,
                        record.arrived_at,
                    )
                )
            else:
                events.append(record)
    except FileNotFoundError:
        missing.append(f"There is no {NAME}: nothing is known of single gradients.")
    except OSError as error:
        missing.append(f"{NAME} cannot be read ({error.strerror}).")
    else:
        if not rows:
            missing.append(f"{NAME} has no gradients yet.")
    if bad:
        lines = f"line {bad[0]}" if len(bad) == 1 else f"{len(bad)} lines, the first is line {bad[0]}"
        missing.append(f"{NAME} is damaged: {lines} cannot be read and is left out.")
    names = ("worker", "version", "met", "accepted", "reason", "loss", "took_s", "at")
    kinds = (np.int64, np.int64, np.int64, np.bool_, np.object_, np.float64, np.float64, np.float64)
    values = list(zip(*rows, strict=True)) if rows else [() for _ in names]
    return {n: np.array(v, dtype=k) for n, v, k in zip(names, values, kinds, strict=True)}, events


def _read_report(folder: Path, missing: list[str]) -> dict[str, Any]:
    try:
        found = json.loads((folder / REPORT).read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        missing.append(f"{REPORT} cannot be read.")
        return {}
    return found if isinstance(found, dict) else {}


def _read_scalars(folder: Path, missing: list[str]) -> list[Measure]:
    """Reads accuracy, and losses of validation, from TensorBoard's event files."""
    files = sorted(folder.glob(_EVENT_FILES))
    if not files:
        return []
    try:
        from tensorboard.backend.event_processing.event_accumulator import SCALARS, TENSORS, EventAccumulator
        from tensorboard.util import tensor_util

        events = EventAccumulator(str(folder), {SCALARS: 0, TENSORS: 0})
        events.Reload()
        found: list[Measure] = []
        for tag in events.Tags()["scalars"]:
            if tag == "accuracy" or tag.startswith("validation/"):
                found += [Measure(tag, float(e.value), int(e.step), float(e.wall_time)) for e in events.Scalars(tag)]
        for tag in events.Tags()["tensors"]:
            if tag == "accuracy" or tag.startswith("validation/"):
                for e in events.Tensors(tag):
                    value = float(tensor_util.make_ndarray(e.tensor_proto))
                    found.append(Measure(tag, value, int(e.step), float(e.wall_time)))
        return found
    except Exception as error:  # a damaged event file must not cost the rest of the page
        missing.append(f"TensorBoard's event files cannot be read ({type(error).__name__}: {error}).")
        return []
