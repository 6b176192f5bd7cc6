"""Files of records for the tests of readers: record R of file N says "N/R"."""

from pathlib import Path

from torchquorum.formats.tfrecord_write import TFRecordWriter


def write_parts(folder: Path, counts: list[int]) -> tuple[Path, ...]:
    """Writes a file with each number of records; returns their paths in order."""
    paths = []
    for number, count in enumerate(counts):
        paths.append(folder / f"part-{number}")
        with TFRecordWriter(paths[-1]) as writer:
            for record in range(count):
                writer.write(b"%d/%d" % (number, record))
    return tuple(paths)
