"""`torchquorum data`: writes MNIST as TFRecord files, and inspects TFRecord files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from torchquorum.cli.command import Command, Named, option
from torchquorum.errors import ConfigError, TorchQuorumError

if TYPE_CHECKING:
    from torchquorum.data.convert import Inspection
    from torchquorum.data.mnist import Split

SPLITS = ("train", "validation", "test")
_SHOWN_VALUES = 8


@click.group()
def data() -> None:
    """Write MNIST as TFRecord files, and inspect TFRecord files.

    \b
    Examples:
      torchquorum data tfrecord --shards 4
      torchquorum data inspect mnist/train-00000-of-00004
    """


@data.command(cls=Command, short_help="Write MNIST as TFRecord files of tf.train.Example.")
@option("--output", metavar="PATH", help="output file; with --shards, output folder")
@option("--shards", type=click.IntRange(1, 1000), metavar="N", help="number of files; default: one file")
@option("--split", type=Named(*SPLITS), default="train", help="train, validation or test")
@option("--compression", type=Named("none", "gzip", "zlib"), default="none", help="none, gzip or zlib")
@option("--limit", type=click.IntRange(min=1), metavar="N", help="write only the first N images")
@option("--data", "folder", metavar="DIR", help="folder with MNIST's idx files; default: packaged")
@option("--force", is_flag=True, help="replace existing files")
def tfrecord(**given: Any) -> int:
    """Write MNIST as TFRecord files: each image is a tf.train.Example with pixels, label and image_raw.

    The default output is mnist-SPLIT.tfrecords; with --shards, the folder mnist.

    \b
    Examples:
      torchquorum data tfrecord --output output.tfrecords
      torchquorum data tfrecord --shards 4 --compression gzip
      torchquorum data tfrecord --split test --output data/test.tfrecords
    """
    from torchquorum.data.convert import write_split

    paths = _targets(given["output"], given["split"], given["shards"])
    stale = _find_stale(paths, given["split"], given["force"])
    split = _load(given["folder"], given["split"], given["limit"])
    if len(paths) > len(split):
        raise ConfigError(f"--shards {len(paths)}: there are only {len(split)} images; use at most as many shards")
    try:
        paths[0].parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{paths[0].parent}: the folder cannot be created: {error.strerror}; give another one"
        ) from None
    console = Console(highlight=False, soft_wrap=True)
    with _progress(console, f"writing {given['split']}", len(split)) as advance:
        write_split(split, paths, given["compression"], advance)
    for path in stale:
        path.unlink(missing_ok=True)
    _print_written(console, paths, len(split), given["shards"] is not None, given["split"])
    return 0


@data.command(cls=Command, short_help="Count records, verify checksums, show the first example.")
@click.argument("files", nargs=-1, required=True)
@option("--compression", default="auto", metavar="NAME", help="auto, none, gzip or zlib")
def inspect(files: tuple[str, ...], compression: str) -> int:
    """Read FILES (names or quoted patterns): count records, verify checksums, and show the first example.

    Damage is reported with file and offset; the exit code is then 1.

    \b
    Examples:
      torchquorum data inspect output.tfrecords
      torchquorum data inspect 'mnist/train-*'
    """
    from torchquorum.data.convert import inspect_file
    from torchquorum.data.shares import find_files

    console = Console(highlight=False, soft_wrap=True)
    bad = records = 0
    first: bytes | None = None
    paths = find_files(list(files))
    for path in paths:
        with _progress(console, f"reading {path.name}", None) as advance:
            found = inspect_file(path, compression, advance)
        _print_inspection(console, found)
        bad += bool(found.damage)
        records += found.records
        first = found.first if first is None else first
    if len(paths) > 1:
        console.print(f"{len(paths)} files, {records:,} records, {bad} damaged", markup=False)
    if first is not None:
        _show_example(console, first)
    return 1 if bad else 0


def _targets(output: str | None, split: str, shards: int | None) -> list[Path]:
    from torchquorum.data.convert import shard_paths

    if shards is None:
        path = Path(output or f"mnist-{split}.tfrecords")
        in_folder = path.is_dir() or (output or "").endswith("/")
        return [path / f"{split}.tfrecords" if in_folder else path]
    folder = Path(output or "mnist")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--output {folder}: is a file, and --shards needs a folder; give one, or leave --shards out")
    return shard_paths(folder, split, shards)


def _find_stale(paths: list[Path], split: str, force: bool) -> list[Path]:
    """Returns shards of an earlier run with another number of shards, to be removed at the end."""
    there = [path for path in paths if path.exists()]
    if there and not force:
        more = f" and {len(there) - 1} more" if len(there) > 1 else ""
        raise ConfigError(f"{there[0]}{more}: already exists; --force replaces it, --output chooses another path")
    pattern = re.compile(rf"{re.escape(split)}-\d{{5}}-of-\d{{5}}")
    if not pattern.fullmatch(paths[0].name) or not paths[0].parent.is_dir():
        return []
    stale = [p for p in sorted(paths[0].parent.iterdir()) if pattern.fullmatch(p.name) and p not in paths]
    if stale and not force:
        raise ConfigError(
            f"{stale[0]}: belongs to another number of shards, and {split}-* would match both; --force removes it, "
            "--output chooses another path"
        )
    return stale


def _load(folder: str | None, name: str, limit: int | None) -> Split:
    from torchquorum.data.mnist import Split, load_mnist

    split: Split = getattr(load_mnist(folder), name)
    return split if limit is None else Split(split.images[:limit], split.labels[:limit])


@contextmanager
def _progress(console: Console, what: str, total: int | None) -> Iterator[Any]:
    """Yields a function that reports progress: a bar in a terminal, nothing elsewhere."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


def _print_written(console: Console, paths: list[Path], examples: int, sharded: bool, split: str) -> None:
    size = sum(path.stat().st_size for path in paths)
    files = f"{paths[0]} to {paths[-1].name}, {len(paths)} files" if len(paths) > 1 else str(paths[0])
    pattern = f"{paths[0].parent / split}-*" if sharded else str(paths[0])
    console.print(f"wrote         {files}: {examples:,} examples, {size / 1e6:.1f} MB", markup=False)
    console.print("each example  pixels (int64), label (int64), image_raw (784 bytes)", markup=False)
    console.print(f"in a program  tq.data.TFRecordDataset({pattern!r}, features=..., batch_size=100)", markup=False)
    console.print(f"try next      torchquorum data inspect {_quoted(pattern)}", markup=False)


def _quoted(pattern: str) -> str:
    import shlex

    return shlex.quote(pattern)


def _print_inspection(console: Console, found: Inspection) -> None:
    packed = ", packed" if found.packed else ""
    state = "all checksums good" if not found.damage else "DAMAGED"
    console.print(
        f"{found.path}: {found.records:,} records, {found.data_bytes / 1e6:.1f} MB of data, "
        f"{found.size_bytes / 1e6:.1f} MB on disk{packed}, {state}",
        markup=False,
    )
    for error in found.damage:
        console.print(f"  {error}", markup=False)


def _show_example(console: Console, record: bytes) -> None:
    from torchquorum.formats.example import Example

    try:
        features = Example.FromString(record).features or {}
    except TorchQuorumError as error:
        console.print(f"the first record, of {len(record):,} bytes, is {error}", markup=False)
        return
    console.print(f"the first example, {len(record):,} bytes:", markup=False)
    shown = {repr(name): feature for name, feature in features.items()}
    width = max(map(len, shown), default=0)
    for name, feature in shown.items():
        kind = feature.kind or "nothing"
        console.print(f"  {name:{width}}  {kind:10}  {len(feature):>6,}  {_beginning(feature)}", markup=False)


def _beginning(feature: Any) -> str:
    if feature.kind == "bytes_list":
        texts = [
            f"{value!r}" if len(value) <= 20 else f"{len(value):,} bytes" for value in feature.value[:_SHOWN_VALUES]
        ]
    elif feature.kind == "float_list":
        texts = [f"{value:g}" for value in feature.value[:_SHOWN_VALUES]]
    else:
        texts = [str(value) for value in feature.value[:_SHOWN_VALUES]]
    return ", ".join(texts) + (", ..." if len(feature) > _SHOWN_VALUES else "")
