"""What survives a crash, as the session sees it: the option `durable`, how far a journal leads, what is saved.

The chief asks when it creates the variables again; the ps tasks then replay what it found. What always holds: every shard has the version
that is found, and no worker was ever answered with a later one, unless the user has accepted that loss; damaged checkpoints are
moved aside, and only once it is certain that the run goes on without them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torchquorum import env
from torchquorum.clock import SYSTEM, Clock
from torchquorum.errors import ConfigError
from torchquorum.formats.checkpoint import (
    CheckpointError,
    CheckpointInfo,
    Manifest,
    UnreadableError,
    list_checkpoints,
    load_manifest,
    newest_good,
)
from torchquorum.formats.checkpoint_write import set_aside
from torchquorum.formats.journal import MODES, JournalError, Lineage, find_common, keep_damaged, next_generation_at
from torchquorum.formats.ledger import told_in_ledger
from torchquorum.formats.storage import Location, is_remote, locate
from torchquorum.lines import first_of
from torchquorum.server.journaling import check_plan
from torchquorum.session.config import RestoreOptions
from torchquorum.wire.messages import JournalRef, Plan


def read_durable(option: bool | str | None, logdir: str | None) -> str:
    """Returns how updates are journalled: not at all (empty), write or fsync; by default as the launcher asks.

    Raises:
        ConfigError: The mode is unknown, or there is no folder for the journal.
    """
    chosen = env.durable() if option is None else option
    mode = "" if chosen in (None, False, "") else MODES[0] if chosen is True else str(chosen).strip().lower()
    if mode and mode not in MODES:
        raise ConfigError(f"durable={chosen!r}: must be one of {', '.join(MODES)}, or True for {MODES[0]}")
    if mode and logdir is None:
        raise ConfigError(f"durable={chosen!r}: the journal needs a folder; give the session a logdir too")
    if mode and logdir is not None and is_remote(logdir):
        raise ConfigError(
            f"durable={chosen!r}: a journal is appended to, which an object store cannot do; give a logdir on a file system, "
            f"not {logdir}"
        )
    return mode


def read_restore(durable: str, *, restore: bool, start_afresh: bool, accept_loss: bool) -> RestoreOptions:
    """Returns what a run continues from; what the launcher was asked to allow is allowed too."""
    return RestoreOptions(
        restore=restore,
        durable=durable,
        start_afresh=start_afresh or env.start_afresh(),
        accept_loss=accept_loss or env.accept_loss(),
    )


@dataclass(frozen=True)
class Found:
    """What a run's folder has to continue from.

    Attributes:
        path: The newest checkpoint that is whole; None if there is none.
        damaged: The newer ones that are not.
    """

    path: str | None = None
    damaged: tuple[CheckpointInfo, ...] = ()

    def set_damaged_aside(self, say: Callable[[str], None]) -> None:
        """Moves the damaged checkpoints out of the way of those that the run will make."""
        for info in self.damaged:
            try:
                say(f"{info.path} is damaged and is kept as {set_aside(info.path).name}")
            except OSError as error:
                say(f"{info.path} is damaged and could not be moved aside ({error.strerror})")


def find_checkpoint(
    logdir: str, last_step: int | None, say: Callable[[str], None], *, start_afresh: bool = False
) -> Found:
    """Finds the newest good checkpoint of a run's folder, and prints which one, or what is wrong with newer ones.

    Raises:
        CheckpointError: There are checkpoints and all of them are damaged, and starting afresh was not allowed; or a newer one
            cannot be read now.
    """
    try:
        found, damaged = newest_good(locate(logdir))
    except UnreadableError as error:
        raise CheckpointError(
            f"{error}, and going on without it would lose its updates. Make it readable, or move it out of the folder"
        ) from error
    for info in damaged:
        say(f"skipping {info.path}: {info.problem}")
    if found is None:
        if damaged and not start_afresh:
            raise CheckpointError(
                f"{logdir}: all {len(damaged)} checkpoints are damaged; the newest: {damaged[0].problem}. Put back good copies, "
                "or give another logdir; or pass start_afresh=True (--start-afresh) to begin again at step 0: the damaged ones are "
                "kept under other names"
            )
        return Found(None, tuple(damaged))
    say(f"restoring {found[0]} (global step {found[1].step})")
    if found[1].nonfinite:
        say(_describe_nonfinite(locate(logdir), found[1]))
    if last_step is not None and found[1].step >= last_step:
        say(f"that run is over at step {last_step}; give another logdir, or a higher last step")
    return Found(str(found[0]), tuple(damaged))


def _describe_nonfinite(folder: Location, found: Manifest) -> str:
    """Returns what a checkpoint holds that no gradient will mend, and how to go back to one that does not."""
    before = [
        info for info in list_checkpoints(folder) if info.step < found.step and not (info.problem or info.nonfinite)
    ]
    back = (
        f"to go back to {before[-1].path.name}, move the newer ones out of the folder" if before else "none before is"
    )
    return (
        f"the variables of step {found.step} are not all finite: {first_of(found.nonfinite)} hold NaN or infinity, and what is computed "
        f"from them may too; {back}"
    )


def find_journal(
    found: Found,
    plan: Plan,
    say: Callable[[str], None],
    clock: Clock = SYSTEM,
    *,
    told: int = 0,
    accept_loss: bool = False,
) -> JournalRef:
    """Finds how far the journal leads beyond a checkpoint, on all shards.

    Args:
        found: The checkpoint to continue from.
        plan: The run's plan.
        say: Prints a line for people.
        clock: Tells the time.
        told: The version that this task was told of; 0 if it begins.
        accept_loss: Whether to go on without updates that workers were told of.

    Raises:
        JournalError: It was written by another number of ps tasks, or with another optimizer; or updates of a durable run that
            workers were told of are missing.
    """
    logdir = locate(plan.logdir) if plan.logdir is not None else None
    at = next_generation_at(logdir, clock.wall()) if isinstance(logdir, Path) else int(clock.wall() * 1e9)
    line, generation, step = Lineage(), 0, 0
    if found.path is not None:
        manifest = load_manifest(locate(found.path))
        generation = manifest.generation
        place = manifest.place
        if is_remote(found.path):  # there are no journals on object stores
            return JournalRef(place, generation, generation, at, [(generation, place)], manifest.step)
        line = find_common(Path(found.path).parent, plan.num_shards, generation, place)
        step = manifest.step + line.steps_after(place)
        if line.version > place:
            if line.plan is not None:
                check_plan(line.plan, plan, Path(found.path).parent)
            say(f"the journal leads on to global step {step}")
    if isinstance(logdir, Path):
        _check_promise(logdir, line, found, max(told if plan.durable else 0, line.told), say, accept_loss=accept_loss)
    after = line.generations[-1] if line.generations else 0
    return JournalRef(line.version, generation, after, at, line.kept(), step)


def _check_promise(
    folder: Path, line: Lineage, found: Found, told: int, say: Callable[[str], None], *, accept_loss: bool
) -> None:
    """Compares where a durable run would go on with what its workers were told.

    Raises:
        JournalError: It would go back, and that was not accepted.
    """
    by_ledger = told_in_ledger(folder)
    if by_ledger is not None or line.files:  # the run was durable
        told = max([told, by_ledger or 0, *(info.step for info in found.damaged)])
    missing = told - line.version
    if missing <= 0 and not line.damage:
        return
    damage = "; ".join(text for _, text in line.damage)
    recorded = line.seen - line.version if line.damage else 0
    count = f"{missing} to {recorded} updates" if recorded > missing > 0 else f"{missing} updates"
    lost = f"workers were told of global step {told}, and the folder leads to {line.version}: {count} are missing"
    if missing <= 0:
        lost = f"up to {max(recorded, 1)} updates after global step {line.version}, of which workers may have been told, are missing"
    if not accept_loss:
        raise JournalError(
            f"{folder}: {lost}{f' ({damage})' if damage else ''}. This is a durable run, and does not go back by itself. Put back good "
            "copies of its checkpoints and .journal files; or pass accept_loss=True (--accept-loss) to go on from global step "
            f"{line.version}: damaged files are kept under other names"
        )
    say(f"{lost}{f' ({damage})' if damage else ''}; going on without them, as accept_loss says")
    for path in {path for path, _ in line.damage}:
        try:
            say(f"{path} is kept as {keep_damaged(path).name}")
        except OSError as error:
            say(f"{path} could not be kept ({error.strerror})")


def is_saved(logdir: str | None, step: int) -> bool:
    """Whether a step is saved in the run's folder: ps task 0 saves the last step if the chief counts as dead."""
    return logdir is not None and any(i.step >= step and i.problem is None for i in list_checkpoints(locate(logdir)))
