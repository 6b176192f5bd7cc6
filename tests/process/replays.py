"""Records runs and replays them with forks of the zygote, each a real process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.process.tasks import run
from tests.process.zygote import Forked, the_zygote
from torchquorum.replay.replay import ReplayOptions, make_again

PROGRAM = Path(__file__).parent / "replayed_program.py"
EPOCHS_PROGRAM = Path(__file__).parent / "replayed_epochs_program.py"
ROWS_PROGRAM = Path(__file__).parent / "replayed_rows_program.py"


def spawn(command: Sequence[str], folder: str, environment: Mapping[str, str]) -> Forked:
    """Starts the process of a replayed life as a fork of the zygote."""
    out, child_out = os.pipe()
    try:
        process = the_zygote().fork(command, environment, Path(folder), [child_out, child_out], ends_with_zygote=True)
    finally:
        os.close(child_out)
    process.stdout = os.fdopen(out, "rb")  # type: ignore[assignment]
    return process


def record(
    folder: Path,
    *flags: str,
    workers: int = 2,
    ps: int = 1,
    more: Sequence[str] = (),
    program: Path = PROGRAM,
    **env: str,
) -> None:
    """Records a run to its end."""
    launch = ["run", "--record", "--logdir", str(folder), "--workers", str(workers), "--ps", str(ps), *more]
    done = run(*launch, str(program), *flags, env=env)
    assert done.returncode == 0, done.stdout + done.stderr


def replay(folder: Path, **options: object) -> list[str]:
    """Replays a run and compares it with its checkpoints; returns what was said."""
    said: list[str] = []
    code = make_again(
        ReplayOptions(folder=folder, check=True, **options),  # type: ignore[arg-type]
        said.append,
        lambda life, line: said.append(f"[worker {life.worker}] {line}"),
        spawn=spawn,  # type: ignore[arg-type]
    )
    assert code == 0, "\n".join(said)
    assert any("the same, bit for bit" in line for line in said), "\n".join(said)
    return said
