"""The step times of a real run, from its ledger: what a simulation with `--from RUN` begins with.

Called by the command line. What always holds: only the time in which all of the run's workers were there counts, for the times and
for the measured speed alike, so that a simulation of the same workers can be compared with it.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from torchquorum.errors import ConfigError
from torchquorum.formats.ledger import NAME, Entry, read_records
from torchquorum.formats.ledger_segments import fetch_run
from torchquorum.formats.storage import Location, RemotePath
from torchquorum.rules.presets import Rule, read_rule
from torchquorum.simulation.step_times import Recorded

LEAST = 10  # gradients of each worker, below which times say little


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """What a run's ledger says.

    Attributes:
        rule: Its rule.
        workers: How many workers it had.
        times: The seconds of each gradient of each worker, computing and sending, in order.
        seconds: The time in which all workers were there.
        updates: The updates in that time.
    """

    rule: Rule
    workers: int
    times: Recorded
    seconds: float
    updates: int

    @property
    def updates_per_s(self) -> float:
        """Returns the measured speed."""
        return self.updates / self.seconds


def read_run(folder: Location) -> RecordedRun:
    """Reads the ledger of a run's folder; of a run that was started several times, the longest attempt.

    Raises:
        ConfigError: There is no ledger, or too little in it.
    """
    try:
        if not isinstance(folder, RemotePath):
            return _read(folder, folder)
        with tempfile.TemporaryDirectory(prefix="torchquorum-run-") as copy:
            fetch_run(folder, Path(copy), (NAME,))
            return _read(Path(copy), folder)
    except OSError as error:
        raise ConfigError(f"--from {folder}: {NAME} cannot be read ({error.strerror}); give a run's folder") from None


def _read(path: Path, shown: Location) -> RecordedRun:
    rule, longest, entries = "", list[Entry](), list[Entry]()
    for record in read_records(path, lambda _line: None):
        if isinstance(record, Entry):
            if isinstance(record.track, int):
                raise ConfigError(
                    f"--from {shown}: that run has several optimizers, and a simulated run has one; give a run of one"
                )
            entries.append(record)
        elif record.event == "began":
            rule = str(record.values.get("rule") or rule)
            longest, entries = max(longest, entries, key=len), []
    entries = max(longest, entries, key=len)
    own: dict[int, list[Entry]] = {}
    for entry in entries:
        # The first gradient of an incarnation has its start-up in it; what came after the end of the run has no update.
        if entry.took_s is not None and entry.local_step > 1 and entry.reason != "past last step":
            own.setdefault(entry.worker, []).append(entry)
    begin = max((e[0].arrived_at for e in own.values()), default=0.0)
    end = min((e[-1].arrived_at for e in own.values()), default=0.0)
    within = {w: [e for e in found if begin <= e.arrived_at <= end] for w, found in own.items()}
    fewest = min((len(found) for found in within.values()), default=0)
    if fewest < LEAST or end <= begin:
        raise ConfigError(
            f"--from {shown}: at least {LEAST} timed gradients of every worker are needed, from the time in which all of them "
            f"were there; the fewest is {fewest}. Give a longer run"
        )
    met = [e.met for e in entries if begin <= e.arrived_at <= end]
    times = {w: [max(float(e.took_s or 0.0), 1e-9) for e in found] for w, found in sorted(within.items())}
    return RecordedRun(
        rule=read_rule(rule), workers=len(times), times=Recorded(times), seconds=end - begin, updates=met[-1] - met[0]
    )
