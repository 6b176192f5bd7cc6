"""`torchquorum replay` without its command line: reads the record, looks at the machine, follows the record, compares.

What always holds: the run's own folder is only read, unless a file in it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torchquorum.clock import SYSTEM
from torchquorum.formats.record_file import RunRecordError
from torchquorum.replay import checks, step_file
from torchquorum.replay.director import Director, Output, Spawn, new_scratch
from torchquorum.replay.progress import Place, ReplayProgress
from torchquorum.replay.script import Script, read_script
from torchquorum.wire.messages import Apply, Assigned
from torchquorum.wire.recorded import Began

SAY_EVERY_S = 5.0
SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """What is made again, and what is done with it.

    Attributes:
        folder: The run's folder.
        check: Whether the variables are compared with the run's checkpoints.
        to: The replay ends at this global step, and writes the variables.
        dump: The update to this global step is written with its gradients, and the replay ends.
    """

    folder: Path
    check: bool = False
    to: int | None = None
    dump: int | None = None


def make_again(
    options: ReplayOptions, say: Callable[[str], None], output: Output, *, spawn: Spawn | None = None
) -> int:
    """Makes a recorded run again; returns the exit code: 0 if it is the same, as far as was looked, 1 if it is not.

    Args:
        options: What is made again.
        say: Prints a line of the replay.
        output: Receives every line that a worker's process prints.
        spawn: Starts a process; by default as a new one.

    Raises:
        RunRecordError: There is no record, or it cannot be followed here.
    """
    folder = options.folder.resolve()
    script = read_script(folder)
    checks.check_machine(script)
    for path in checks.changed_files(script):
        say(f"{path} is not as it was when the run was recorded")
    for doubt in sorted({d for life in script.lives.values() for d in life.body.doubts}):
        say(f"may differ: {doubt}")
    saved = checks.comparable(folder) if options.check else {}
    last = options.dump if options.dump is not None else options.to
    nowhere = len(script.steps), (-1, -1), (-1, -1)
    end, place, before = find_end(script, last) if last is not None else nowhere
    if options.check and not saved:
        raise RunRecordError(
            f"{folder} has no good checkpoint to compare with; without --check the run is made again all the same"
        )
    updates = sum(isinstance(step.item, Apply | Assigned) for step in script.steps)
    lives = len([life for life in script.lives.values() if life.first >= 0])
    say(f"{updates} updates of {len({life.worker for life in script.lives.values()})} workers, {lives} processes")
    with new_scratch() as scratch:
        (logdir := Path(scratch) / "run").mkdir()
        wanted = script.bases | set(saved)
        progress = ReplayProgress(script=script, wanted=wanted, folder=str(logdir), recorded=folder, end=end)
        if last is not None:
            progress.wanted |= {place, before}
            progress.looked_at = (before, place) if options.dump is not None else progress.looked_at
        director = Director(script, progress, Path(scratch), say, output, spawn=spawn)
        started = SYSTEM.now()
        try:
            director.run(_teller(script, progress, say))
        finally:
            _tell_differences(progress, say)
        say(f"made again in {SYSTEM.now() - started:.1f} s")
    if last is not None:
        step_file.write(progress, place, before, folder, say)
    return _compare(progress, saved, say) if options.check else int(bool(progress.differences))


def find_end(script: Script, version: int) -> tuple[int, Place, Place]:
    """Returns after which step the variables are at a version for the last time, at which place, and where the version before began.

    Raises:
        RunRecordError: They never are.
    """
    newest, found, began = 0, None, dict[tuple[int, int], Place]()
    for number, (step, place) in enumerate(zip(script.steps, script.places(), strict=True)):
        item = step.item
        if number in script.passed_over or not isinstance(item, Apply | Assigned | Began):
            continue
        if isinstance(item, Began) or item.track == 0:
            newest, began[step.generation, item.version] = max(newest, item.version), place
            if item.version == version:
                found = number + 1, place
    if found is None:
        raise RunRecordError(f"step {version}: the record goes from step {script.began[0].version} to step {newest}")
    end, place = found
    return end, place, began.get((place[0], version - 1), (place[0], place[1] - 1))


def _teller(script: Script, progress: ReplayProgress, say: Callable[[str], None]) -> Callable[[], None]:
    """Says now and then how far a replay is."""
    said = SYSTEM.now()

    def tell() -> None:
        nonlocal said
        if SYSTEM.now() - said >= SAY_EVERY_S:
            said = SYSTEM.now()
            say(f"step {min(progress.at)} of {progress.end}; next: {progress.awaited.get(0, '')}")

    return tell


def _tell_differences(progress: ReplayProgress, say: Callable[[str], None]) -> None:
    for line in progress.differences[:SHOWN]:
        say(f"not the same: {line}")
    if len(progress.differences) > SHOWN:
        say(f"not the same: {len(progress.differences) - SHOWN} further gradients")


def _compare(progress: ReplayProgress, saved: dict[tuple[int, int], Path], say: Callable[[str], None]) -> int:
    """Compares what was kept with the run's checkpoints."""
    bad, seen = 0, 0
    for place, path in sorted(saved.items(), key=lambda entry: entry[0][1]):
        kept = progress.kept.get(place)
        if kept is None or not kept.complete:
            say(f"{path.name} is not of this record")
            continue
        seen += 1
        unequal = checks.compare(kept, path)
        bad += bool(unequal)
        more = f" and {len(unequal) - SHOWN} more" if len(unequal) > SHOWN else ""
        say(
            f"{path.name}: "
            + (f"differs in {', '.join(unequal[:SHOWN])}{more}" if unequal else "the same, bit for bit")
        )
    if not seen:
        raise RunRecordError("none of the run's checkpoints is of what was recorded")
    return int(bool(bad or progress.differences))
