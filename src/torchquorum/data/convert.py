"""MNIST as TFRecord files, in the tutorials' format; and what is in a TFRecord file.

Called by `torchquorum data`. What always holds: files get their names when all of them are written, so that what an
interruption leaves behind has a hidden name or none.
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
    """Returns an image as the tutorials store it: `pixels` (how many), `label` and `image_raw`, in this order."""
    return Example({"pixels": len(pixels), "label": label, "image_raw": pixels})


def shard_paths(folder: Path, name: str, shards: int) -> list[Path]:
    """Returns train-00000-of-00004 and so on."""
    return [folder / f"{name}-{shard:05d}-of-{shards:05d}" for shard in range(shards)]


def write_split(
    split: Split, paths: list[Path], compression: str | None, advance: Callable[[int], None] = lambda count: None
) -> None:
    """Writes images and labels to one file, or to several with as even a part for each as goes, in order.

    Args:
        split: What to write.
        paths: The files; those that are there are replaced, when all are written.
        compression: "GZIP", "ZLIB" or None.
        advance: Told how many more examples have been written, now and then.

    Raises:
        DataError: A file cannot be written; none of them has been.
    """
    images, labels = split.images.numpy(), split.labels.tolist()
    with ExitStack() as stack:
        writers = []
        for shard, path in enumerate(paths):
            writer = TFRecordWriter(path, compression)
            stack.callback(writer.discard)  # of one that is published, nothing is left to discard
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
        records: How many records were found, damaged ones too.
        data_bytes: The sum of their lengths.
        first: The first good record.
        damage: What is wrong; the first of it, if there is much.
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
    """Reads a whole file and compares all checksums.

    Args:
        path: The file.
        compression: As for `tq.read_records`.
        advance: Told how many more records have been read, now and then.

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
            found.records = error.record + 1  # the damaged one is passed over by its length, which is good
        except DataError as error:
            found.damage.append(error)
            break
        finally:
            reader.close()
    return found
