"""Writes MNIST as TFRecord files, in the tutorials' format, and inspects TFRecord files.

Called by `torchquorum data`. What always holds: files get their names only when all of them are written, so an interruption
leaves hidden files or none.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from torchquorum.data.mnist import Split
from torchquorum.errors import DataError
from torchquorum.formats.compression import PackedSource
from torchquorum.formats.example import Example
from torchquorum.formats.tfrecord import RecordError, RecordReader, open_source
from torchquorum.formats.tfrecord_write import TFRecordWriter

_LISTED_DAMAGE = 10
_STEP = 1000


def make_example(pixels: bytes, label: int) -> Example:
    """Returns an image as the tutorials store it: `pixels` (their number), `label` and `image_raw`, in this order."""
    return Example({"pixels": len(pixels), "label": label, "image_raw": pixels})


def shard_paths(folder: Path, name: str, shards: int) -> list[Path]:
    """Returns the paths of the shards: train-00000-of-00004 and so on."""
    return [folder / f"{name}-{shard:05d}-of-{shards:05d}" for shard in range(shards)]


def write_split(
    split: Split, paths: list[Path], compression: str | None, advance: Callable[[int], None] = lambda count: None
) -> None:
    """Writes images and labels, in order, to one file or evenly to several.

    Args:
        split: What to write.
        paths: The files; existing ones are replaced when all are written.
        compression: "GZIP", "ZLIB" or None.
        advance: Called now and then with the number of examples written since.

    Raises:
        DataError: A file cannot be written; then none is.
    """
    images, labels = split.images.numpy(), split.labels.tolist()
    with ExitStack() as stack:
        writers = []
        for shard, path in enumerate(paths):
            writer = TFRecordWriter(path, compression)
            stack.callback(writer.discard)  # does nothing once the file is published
            first, end = (len(labels) * number // len(paths) for number in (shard, shard + 1))
            for row in range(first, end):
                writer.write(make_example(images[row].tobytes(), labels[row]))
                if (row + 1) % _STEP == 0:
                    advance(_STEP)
            writer.finish()
            writers.append(writer)
        advance(len(labels) % _STEP)
        for writer in writers:
            writer.publish()


@dataclass(slots=True)
class Inspection:
    """What a file holds.

    Attributes:
        path: The file.
        packed: Whether it is compressed.
        size_bytes: Its size on disk.
        records: Number of records, including damaged ones.
        data_bytes: The sum of their lengths.
        first: The first good record.
        damage: The errors; only the first ones if there are many.
    """

    path: Path
    packed: bool
    size_bytes: int
    records: int = 0
    data_bytes: int = 0
    first: bytes | None = None
    damage: list[DataError] = field(default_factory=list)


def inspect_file(
    path: Path, compression: str | None = "auto", advance: Callable[[int], None] = lambda count: None
) -> Inspection:
    """Reads a whole file and verifies all checksums.

    Args:
        path: The file.
        compression: As for `tq.data.read_records`.
        advance: Called now and then with the number of records read since.

    Raises:
        DataError: It cannot be read at all.
    """
    source = open_source(path, compression)
    found = Inspection(path, isinstance(source, PackedSource), path.stat().st_size)
    source.close()
    while len(found.damage) < _LISTED_DAMAGE:
        reader = RecordReader(path, compression)
        try:
            reader.skip(found.records)
            while block := reader.read():
                found.records += len(block)
                found.data_bytes += sum(len(record) for record, _ in block)
                found.first = block[0][0] if found.first is None else found.first
                advance(len(block))
            break
        except RecordError as error:
            found.damage.append(error)
            if not error.goes_on:
                break
            found.records = error.record + 1  # skip the damaged record: its length is good
        except DataError as error:
            found.damage.append(error)
            break
        finally:
            reader.close()
    return found
