"""`torchquorum tables`: the tables of rows in a run's checkpoints: size, growth, found rows, evictions; and their export."""

from __future__ import annotations

import click
from rich.console import Console
from rich.table import Table

from torchquorum.cli.command import Command, option
from torchquorum.errors import ConfigError
from torchquorum.formats.storage import is_there, locate

DTYPES = ("float32", "float16", "int8")


@click.command(cls=Command)
@click.argument("run")
@option("--export", "file", metavar="FILE", help="write the newest keys and rows to FILE (.safetensors)")
@option("--table", "name", metavar="NAME", help="only this table")
@option("--dtype", type=click.Choice(DTYPES), default="float32", help="of exported rows; int8 has a scale for each row")
def tables(run: str, file: str | None, name: str | None, dtype: str) -> int:
    """Show the tables of the run in the folder RUN, as its checkpoints have them, or export their rows.

    \b
    Examples:
      torchquorum tables runs/clicks
      torchquorum tables runs/clicks --export rows.safetensors --dtype int8
    """
    from torchquorum.formats import checkpoint
    from torchquorum.formats.row_export import export_rows, sizes

    folder = locate(run)
    if not is_there(folder):
        raise ConfigError(f"{run}: no such folder; give a run's folder, such as runs/clicks")
    if file is not None:
        found, _ = checkpoint.newest_good(folder)
        if found is None:
            raise ConfigError(f"{folder} has no good checkpoint; `torchquorum checkpoints {run}` lists what it has")
        target = export_rows(found[0], file, dtype, name)
        click.echo(f"wrote {target} from {found[0].name}")
        return 0
    shown = Table(box=None, pad_edge=False, header_style="dim")
    heads = ("table", "step", "rows", "width", "optimizer", "memory", "found", "evicted")
    for head in heads:
        shown.add_column(head, justify="left" if head in ("table", "optimizer") else "right", no_wrap=True)
    count = 0
    for info in checkpoint.list_checkpoints(folder):
        for size in sizes(checkpoint.load_manifest(info.path)) if info.problem is None else ():
            if name in (None, size.name):
                hits = f"{size.found / size.pulled:.0%}" if size.pulled else ""
                memory = f"{size.size_bytes / 1e6:.1f} MB"
                cells = (f"{size.rows:,}", str(size.dim), size.optimizer, memory, hits, f"{size.evicted:,}")
                shown.add_row(size.name, str(info.step), *cells)
                count += 1
    Console(highlight=False).print(shown if count else f"no tables in the checkpoints of {folder}")
    return 0
