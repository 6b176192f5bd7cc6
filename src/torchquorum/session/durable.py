"""What survives a crash, as the session sees it: the option `durable`, how far a journal leads, what is saved.

The chief asks when it creates the variables again; the ps tasks then replay what it found. What always holds: every shard has the version
that is found, and no worker was ever answered with a later one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torchquorum import env
from torchquorum.clock import SYSTEM, Clock
from torchquorum.errors import ConfigError
from torchquorum.formats.checkpoint import CheckpointError, list_checkpoints, load_manifest, newest_good
from torchquorum.formats.journal import MODES, find_common
from torchquorum.formats.storage import is_remote, locate
from torchquorum.server.journaling import check_plan
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


def find_checkpoint(logdir: str, last_step: int | None, say: Callable[[str], None]) -> str | None:
    """Finds the newest good checkpoint of a run's folder, and prints which one, or what is wrong with newer ones."""
    try:
        found, skipped = newest_good(locate(logdir))
    except CheckpointError as error:
        say(str(error))
        return None
    for info in skipped:
        say(f"skipping {info.path}: {info.problem}")
    if found is None:
        return None
    say(f"restoring {found[0]} (global step {found[1].step})")
    if last_step is not None and found[1].step >= last_step:
        say(f"that run is over at step {last_step}; give another logdir, or a higher last step")
    return str(found[0])


def find_journal(path: str | None, plan: Plan, say: Callable[[str], None], clock: Clock = SYSTEM) -> JournalRef:
    """Finds how far the journal leads beyond a checkpoint, on all shards.

    Raises:
        JournalError: It was written by another number of ps tasks, or with another optimizer.
    """
    at = int(clock.wall() * 1e9)
    if path is None:
        return JournalRef(0, 0, 0, at)
    manifest = load_manifest(locate(path))
    if is_remote(path):  # there are no journals on object stores
        return JournalRef(manifest.step, manifest.generation, manifest.generation, at)
    line = find_common(Path(path).parent, plan.num_shards, manifest.generation, manifest.step)
    if line.version > manifest.step:
        if line.plan is not None:
            check_plan(line.plan, plan, Path(path).parent)
        say(f"the journal leads on to global step {line.version}")
    return JournalRef(line.version, manifest.generation, line.generations[-1], at)


def is_saved(logdir: str | None, step: int) -> bool:
    """Whether a step is saved in the run's folder: ps task 0 saves the last step if the chief counts as dead."""
    return logdir is not None and any(i.step >= step and i.problem is None for i in list_checkpoints(locate(logdir)))
