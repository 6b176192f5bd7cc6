"""Reads a run's folder into columns: ledger, measures, report, TensorBoard's scalars, checkpoints.

Called by `torchquorum report` and `torchquorum compare`. What always holds: missing or damaged files never make it fail;
`missing` lists them in words. A run that was stopped and resumed is one history: its clock skips the time in which nothing
ran, and gradients whose updates were rolled back are not `kept`. Of several optimizers each has versions of its own.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from torchquorum.clock import SYSTEM, Clock
from torchquorum.errors import ConfigError
from torchquorum.formats.checkpoint import CheckpointInfo, list_checkpoints
from torchquorum.formats.ledger import NAME, Entry, Event, read_records
from torchquorum.formats.ledger_segments import fetch_run
from torchquorum.formats.measures import NAME as MEASURES
from torchquorum.formats.measures import Measure, read_measures
from torchquorum.formats.storage import Location, RemotePath, is_there

REPORT = "report.json"
START = "start.json"
PAUSE_S = 30.0  # in an old ledger without events, a longer gap separates two starts of the run
FRESH_S = 20.0  # a ledger that was written to so recently belongs to a running run
_EVENT_FILES = "*.tfevents.*"


@dataclass(frozen=True)
class Attempt:
    """One start of the run: it began at `begun_at`, trained for `length_s` from `zero_at`, which is second `first_s` of training."""

    begun_at: float
    zero_at: float
    first_s: float
    length_s: float


@dataclass(kw_only=True)
class History:
    """A run as its folder records it. The arrays have one element per gradient, in the order of the decisions.

    Attributes:
        folder: The run's folder.
        worker: Which worker computed it.
        version: The version it was computed at.
        met: The version it met on arrival.
        accepted: Whether it was accepted.
        reason: Why it was accepted or refused.
        loss: Its loss, NaN where none was recorded.
        took_s: Seconds to compute and send it; NaN in old ledgers, and for the first of an incarnation, which may have waited.
        at: When it arrived, seconds since the epoch.
        norm: Its norm, NaN where it is not finite or not known.
        local_step: Its number in its incarnation.
        track: Which optimizer's it is; 0 for the first, or the only one.
        clock: When it arrived, in seconds of training since the run began.
        kept: Whether its update was not rolled back later.
        events: The other records of the ledger.
        measures: What the run measured.
        report: The report at the end of the run, if there is one.
        start: How the run was started, if that was noted.
        checkpoints: The saved checkpoints.
        missing: What could not be read, in words.
        is_running: Whether the run seems to be running now.
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
    norm: np.ndarray
    local_step: np.ndarray
    track: np.ndarray
    clock: np.ndarray = field(init=False)
    kept: np.ndarray = field(init=False)
    events: list[Event]
    measures: list[Measure]
    report: dict[str, Any]
    checkpoints: list[CheckpointInfo]
    missing: list[str]
    start: dict[str, Any] = field(default_factory=dict)
    seen_names: dict[int, str] = field(default_factory=dict)
    is_running: bool = field(init=False, default=False)
    _attempts: list[Attempt] = field(init=False)

    def __post_init__(self) -> None:
        self._attempts = _find_attempts(self.at, self.events)
        self.clock = self.clock_of(self.at)
        self.kept = np.ones(len(self.met), dtype=bool)
        for k in range(len(self.optimizers)):
            of = self.track == k
            met = self.met[of]
            self.kept[of] = met <= np.minimum.accumulate(met[::-1])[::-1]

    def clock_of(self, at: np.ndarray) -> np.ndarray:
        """Returns seconds of training for times since the epoch."""
        if not self._attempts:
            return np.zeros_like(at)
        begun, zero, first, length = np.array(
            [(t.begun_at, t.zero_at, t.first_s, t.length_s) for t in self._attempts]
        ).T
        attempt = np.clip(np.searchsorted(begun, at, side="right") - 1, 0, None)
        # No time passes on this clock before the first gradient of an attempt and after its last.
        return first[attempt] + np.clip(at - zero[attempt], 0.0, length[attempt])

    @property
    def config(self) -> dict[str, Any]:
        """Returns the configuration, from the ledger's last `began`."""
        return next((e.values for e in reversed(self.events) if e.event == "began"), {})

    @property
    def rule(self) -> str:
        """Returns the rule, such as Sync(aggregate=2), or unknown."""
        return str(self.config.get("rule") or self.report.get("rule") or "unknown")

    @property
    def optimizers(self) -> list[str]:
        """Returns the names of the optimizers, in their order; the only one has no name."""
        names = dict(enumerate(self.config.get("versions") or {})) | self.seen_names
        return [names.get(k, f"opt{k}") for k in range(max(names) + 1)] if len(names) > 1 else [""]

    @property
    def rules(self) -> list[str]:
        """Returns the rule of each optimizer."""
        more = [str(spec.get("rule", "unknown")) for spec in self.config.get("more") or [] if isinstance(spec, dict)]
        rules = [self.rule, *more]
        return [rules[k] if k < len(rules) else "unknown" for k in range(len(self.optimizers))]

    @property
    def restarts(self) -> int:
        """Returns how many times the run was started again."""
        return max(0, len(self._attempts) - 1)

    @property
    def seconds(self) -> float:
        """Returns the seconds of training, from the first join to the last gradient."""
        return float(self.clock.max()) if len(self.clock) else 0.0

    @property
    def last_version(self) -> int:
        """Returns the global step that the run reached."""
        return self.last_version_of(0)

    def last_version_of(self, track: int) -> int:
        """Returns the version that an optimizer reached."""
        met = self.met[self.track == track]
        seen = [int(met.max())] if len(met) else []
        if track == 0:
            seen += [e.version for e in self.events[-3:]] + [int(self.report.get("global_step") or 0)]
        else:
            of = (self.report.get("optimizers") or {}).get(self.optimizers[track]) or {}
            seen.append(int(of.get("version") or 0))
        return max(seen, default=0)

    def first_version_of(self, track: int) -> int:
        """Returns the version with which an optimizer began."""
        begun = next((e for e in self.events if e.event == "began"), None)
        if begun is not None:
            versions = list((begun.values.get("versions") or {}).values())
            return int(versions[track]) if track < len(versions) else begun.version
        met = self.met[self.track == track]
        return int(met.min()) if len(met) else 0

    @property
    def last_step(self) -> int | None:
        """Returns the global step at which the run was to end, if there was one."""
        asked = self.config.get("last_step") or self.report.get("last_step")
        return int(asked) if asked else None

    @property
    def is_interrupted(self) -> bool:
        """Whether the run has stopped before its last step."""
        return not self.is_running and self.last_step is not None and self.last_version < self.last_step

    @property
    def accuracy(self) -> float | None:
        """Returns the accuracy that the chief recorded at the end, of its test set, if it did."""
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

    def update_times(self, track: int = 0) -> np.ndarray:
        """Returns when each update of an optimizer was made, in seconds of training: at the last accepted gradient of its round."""
        chosen = self.accepted & self.kept & (self.track == track) & (self.met < self.last_version_of(track))
        if not chosen.any():
            return np.array([])
        met, clock = self.met[chosen], self.clock[chosen]
        last = np.flatnonzero(np.diff(met, append=met[-1] + 1))
        return clock[last]


def _find_attempts(at: np.ndarray, events: list[Event]) -> list[Attempt]:
    """Finds every start of the run; in an old ledger without events, by long gaps."""
    times = np.sort(np.concatenate([at, np.array([e.at for e in events], dtype=float)]))
    if not len(times):
        return []
    begun = sorted(e.at for e in events if e.event == "began")
    if not begun or (len(at) and at.min() < begun[0] - 1e-3):
        old = times[times < begun[0]] if begun else times
        begun = [float(old[0]), *(float(t) for t in old[1:][np.diff(old) > PAUSE_S]), *begun]
    joined = np.array([e.at for e in events if e.event == "joined"], dtype=float)
    attempts: list[Attempt] = []
    done = 0.0
    for i, start in enumerate(begun):
        end = begun[i + 1] if i + 1 < len(begun) else np.inf
        inside = at[(at >= start) & (at < end)]
        first, last = (float(inside.min()), float(inside.max())) if len(inside) else (start, start)
        before = joined[(joined >= start) & (joined <= first)]
        zero = float(before.max()) if len(before) else min(start, first)  # a run may wait until all workers have joined
        attempts.append(Attempt(start, zero, done, last - zero))
        done += last - zero
    return attempts


def read_history(folder: Location, clock: Clock = SYSTEM) -> History:
    """Reads a run's folder; from a remote one, fetches the small files first.

    Raises:
        ConfigError: There is no such folder, or it holds no run.
    """
    if not is_there(folder):
        raise ConfigError(f"{folder}: no such folder; give a run's folder, as in logdir= or --logdir")
    if not isinstance(folder, RemotePath):
        return _read_local(folder, folder, clock)
    with tempfile.TemporaryDirectory(prefix="torchquorum-run-") as copy:
        try:
            fetch_run(folder, Path(copy), (NAME, MEASURES))
        except OSError as error:
            raise ConfigError(f"{folder} cannot be read: {error.strerror}") from None
        return _read_local(Path(copy), folder, clock)


def _read_local(folder: Path, run: Location, clock: Clock) -> History:
    """Reads the files in `folder`, and the checkpoints of `run`, which is the same folder unless it is remote."""
    missing: list[str] = []
    columns, events, names = _read_ledger(folder, missing)
    report, start = _read_json(folder, REPORT, missing), _read_json(folder, START, missing)
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
            f"{run}: this folder holds no run. {found} Give the folder that was logdir= or --logdir{hint}"
        )
    history = History(
        folder=run,
        events=events,
        measures=measures,
        report=report,
        checkpoints=checkpoints,
        missing=missing,
        start=start,
        seen_names=names,
        **columns,
    )
    ended = bool(events) and events[-1].event == "ended"
    newest = max([*columns["at"][-1:], *(e.at for e in events[-1:])], default=0.0)
    history.is_running = not ended and clock.wall() - newest < FRESH_S
    _note_missing(history, ended=ended)
    _note_holes(history)
    return history


def _note_missing(history: History, *, ended: bool) -> None:
    if history.is_running:
        history.missing.append("The run is still running: this page shows its state when the page was written.")
    elif len(history.at) and history.events and not ended:
        history.missing.append("The ledger has no end: the run or ps task 0 was killed.")
    if len(history.at) and not history.events:
        history.missing.append(
            "The ledger was written by an older version: it has no configuration, no joins and deaths, and no time per gradient."
        )
    if len(history.at) and np.isnan(history.loss).all():
        history.missing.append("No gradient has a loss: call optimizer.step(loss=loss) to record it.")
    if not any(m.name == "accuracy" for m in history.measures):
        history.missing.append(
            "No accuracy was measured during the run: use tq.EvaluateHook, or session.measure(accuracy=...)."
        )


def _note_holes(history: History) -> None:
    """Tells what the ledger does not know: counted gaps, updates in no line, and checkpoints beyond its end."""
    begun = [e.version for e in history.events if e.event == "began"]
    if not begun:
        return  # an old ledger, or none
    gaps = [e for e in history.events if e.event == "gap"]
    for gap in gaps:
        history.missing.append(_describe_gap(gap))
    first = history.track == 0  # its versions are the global steps
    reached = max([*(e.version for e in history.events), *(history.met + history.accepted)[first][-1:]])
    assigned = [e.version for e in history.events if e.event == "assigned" and not e.values.get("track")]
    made = np.concatenate([history.met[history.accepted & first] + 1, assigned])
    firsts = np.concatenate([[1], made, [_whole(gap, "first") for gap in gaps]])
    lasts = np.concatenate([[min(begun)], made, [_whole(gap, "last") for gap in gaps]])
    order = np.argsort(firsts, kind="stable")
    firsts, known = np.append(firsts[order], reached + 1), np.maximum.accumulate(lasts[order])
    holes = np.clip(np.minimum(firsts[1:], reached + 1) - known - 1, 0, None)
    if holes.any():
        hole = int(known[np.flatnonzero(holes)[0]]) + 1
        history.missing.append(f"{int(holes.sum())} updates are in no line of {NAME}; the first is update {hole}.")
    newest = max((info for info in history.checkpoints if info.problem is None), key=lambda i: i.step, default=None)
    if newest is not None and newest.step > reached:
        history.missing.append(
            f"{NAME} ends at update {reached}, before {newest.path.name}: {newest.step - reached} updates are not in it."
        )


def _describe_gap(gap: Event) -> str:
    first, last, torn, count = (_whole(gap, name) for name in ("first", "last", "torn_bytes", "gradients"))
    if torn:
        return f"An unfinished line of {torn} bytes was removed from {NAME} when the run was started again."
    if not first:
        return f"{NAME} has a gap: lines that made no update are missing ({gap.text})."
    gradients = f", {count} gradients," if count else ""
    return f"{NAME} has a gap: updates {first} to {last}{gradients} are only counted in it ({gap.text})."


def _whole(gap: Event, name: str) -> int:
    """Returns a number of a gap; 0 if it is not there or makes no sense."""
    value = gap.values.get(name)
    return value if isinstance(value, int) and 0 <= value < 1 << 62 else 0


def _read_ledger(folder: Path, missing: list[str]) -> tuple[dict[str, np.ndarray], list[Event], dict[int, str]]:
    """Returns the gradients in columns, the events, and the names of several optimizers as the gradients have them."""
    rows: list[tuple[Any, ...]] = []
    events: list[Event] = []
    optimizers: dict[int, str] = {}
    bad: list[int] = []
    torn: list[int] = []
    try:
        for record in read_records(folder, bad.append, torn.append):
            if isinstance(record, Entry):
                loss = np.nan if record.loss is None else record.loss
                took = np.nan if record.took_s is None or record.local_step == 1 else record.took_s
                met = (record.worker, record.version, record.met, record.accepted, record.reason)
                norm = record.norm if isinstance(record.norm, float) else np.nan
                track = record.track if isinstance(record.track, int) else 0
                if isinstance(record.optimizer, str):
                    optimizers[track] = record.optimizer
                rows.append((*met, loss, took, record.arrived_at, norm, record.local_step, track))
            else:
                events.append(record)
    except FileNotFoundError:
        missing.append(f"There is no {NAME}: nothing is known about single gradients.")
    except OSError as error:
        missing.append(f"{NAME} cannot be read ({error.strerror}).")
    else:
        if not rows:
            missing.append(f"{NAME} has no gradients yet.")
    if bad:
        lines = f"line {bad[0]}" if len(bad) == 1 else f"{len(bad)} lines, the first is line {bad[0]}"
        missing.append(f"{NAME} is damaged: {lines} cannot be read and is left out.")
    if torn:
        missing.append(f"The last line of {NAME} is torn: its writer was killed, or is writing it now.")
    names = ("worker", "version", "met", "accepted", "reason", "loss", "took_s", "at", "norm", "local_step", "track")
    kinds = (*[np.int64] * 3, np.bool_, np.object_, *[np.float64] * 4, *[np.int64] * 2)
    values = list(zip(*rows, strict=True)) if rows else [() for _ in names]
    return {n: np.array(v, dtype=k) for n, v, k in zip(names, values, kinds, strict=True)}, events, optimizers


def _read_json(folder: Path, name: str, missing: list[str]) -> dict[str, Any]:
    try:
        found = json.loads((folder / name).read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        missing.append(f"{name} cannot be read.")
        return {}
    return found if isinstance(found, dict) else {}


def _read_scalars(folder: Path, missing: list[str]) -> list[Measure]:
    """Reads accuracy and validation losses from TensorBoard's event files."""
    files = sorted(folder.glob(_EVENT_FILES))
    if not files:
        return []
    try:
        from tensorboard.backend.event_processing.event_accumulator import SCALARS, TENSORS, EventAccumulator
        from tensorboard.util import tensor_util

        events = EventAccumulator(str(folder), {SCALARS: 0, TENSORS: 0})
        events.Reload()
        found: list[Measure] = []
        for tag in filter(_is_wanted, events.Tags()["scalars"]):
            found += [Measure(tag, float(e.value), int(e.step), float(e.wall_time)) for e in events.Scalars(tag)]
        for tag in filter(_is_wanted, events.Tags()["tensors"]):
            for e in events.Tensors(tag):
                value = float(tensor_util.make_ndarray(e.tensor_proto))
                found.append(Measure(tag, value, int(e.step), float(e.wall_time)))
        return found
    except Exception as error:  # a damaged event file must not prevent the rest of the page
        missing.append(f"TensorBoard's event files cannot be read ({type(error).__name__}: {error}).")
        return []


def _is_wanted(tag: str) -> bool:
    return tag == "accuracy" or tag.startswith("validation/")
