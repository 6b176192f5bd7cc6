"""`torchquorum checkpoints` and `torchquorum export`: list what a run has saved, and export a plain state_dict."""

from __future__ import annotations

import time

import click
from rich.console import Console
from rich.table import Table

from torchquorum.cli.command import Command, option
from torchquorum.errors import ConfigError
from torchquorum.formats.storage import Location, is_there, locate
from torchquorum.lines import first_of


@click.command(cls=Command)
@click.argument("run")
@option("--verify", is_flag=True, help="read every file and verify its checksum")
def checkpoints(run: str, verify: bool) -> int:
    """List the checkpoints in the folder RUN, oldest first, with their problems if any.

    \b
    Examples:
      torchquorum checkpoints runs/mnist
      torchquorum checkpoints runs/mnist --verify
      torchquorum checkpoints s3://bucket/run1
    """
    from torchquorum.formats import checkpoint

    folder = _folder(run)
    infos = checkpoint.list_checkpoints(folder)
    console = Console(highlight=False)
    if not infos:
        console.print(f"no checkpoints in {folder}")
        return 0
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("checkpoint", "step", "saved", "size", "state"):
        table.add_column(name, justify="right" if name in ("step", "size") else "left", no_wrap=name != "state")
    bad = 0
    for info in infos:
        problem = info.problem or (checkpoint.verify(info.path) if verify else None)
        bad += problem is not None
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(info.created_at)) if info.created_at else ""
        strange = f"NaN or infinity in {first_of(info.nonfinite)}" if info.nonfinite else ""
        state = problem or ", ".join(filter(None, ["good" if verify else "complete", strange, _changes(info.path)]))
        table.add_row(info.path.name, str(info.step), when, f"{info.size_bytes / 1e6:.1f} MB", state)
    console.print(table)
    return 1 if bad else 0


@click.command(cls=Command)
@click.argument("run")
@click.argument("file")
@option("--averages", is_flag=True, help="export the moving averages instead of the variables")
@option("--step", type=int, metavar="N", help="step of the checkpoint; default: the newest good one")
def export(run: str, file: str, averages: bool, step: int | None) -> int:
    """Export a plain state_dict, which loads without torchquorum, to FILE (.safetensors or .pt).

    \b
    Examples:
      torchquorum export runs/mnist mlp.safetensors
      torchquorum export runs/mnist mlp.pt --averages
    """
    from torchquorum.formats import checkpoint, checkpoint_write
    from torchquorum.formats.checkpoint_manifest import PREFIX

    folder = _folder(run)
    if step is not None:
        path = folder / f"{PREFIX}{step}"
        if not path.is_dir():
            steps = ", ".join(str(i.step) for i in checkpoint.list_checkpoints(folder)) or "none"
            raise ConfigError(f"--step {step}: {folder} has no such checkpoint; it has {steps}")
    else:
        found, skipped = checkpoint.newest_good(folder)
        for info in skipped:
            click.echo(f"skipping {info.path}: {info.problem}", err=True)
        if found is None:
            raise ConfigError(f"{folder} has no good checkpoint; `torchquorum checkpoints {run}` lists what it has")
        path = found[0]
    if (nonfinite := checkpoint.load_manifest(path).nonfinite) and not averages:
        click.echo(f"{path} holds NaN or infinity in {first_of(nonfinite)}", err=True)
    target = checkpoint_write.export(path, locate(file), averages=averages)
    click.echo(f"wrote {target} from {path.name}")
    return 0


def _changes(path: Location) -> str:
    """Returns in words whether a checkpoint's rows are in several files: all of an earlier one, then changes."""
    from torchquorum.formats.checkpoint_manifest import load_manifest

    changes = max((len(table.files) - 1 for table in load_manifest(path).tables), default=0)
    return f"rows: all and {changes} times changes" if changes else ""


def _folder(run: str) -> Location:
    folder = locate(run)
    if not is_there(folder):
        raise ConfigError(f"{run}: no such folder; give a run's folder, such as runs/mnist")
    return folder
