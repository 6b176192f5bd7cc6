import itertools
import random
from pathlib import Path

import pytest

from tests.unit.data.parts import write_parts
from torchquorum.data.record_stream import RecordSource, RecordStream, Shuffler
from torchquorum.data.shares import FileShare
from torchquorum.errors import DataError


def reading(
    paths: tuple[Path, ...], *, shuffle: int = 0, stride: int = 1, files: bool = False, seed: int = 0
) -> RecordSource:
    share = FileShare(tuple(range(len(paths))), stride, stride - 1)
    return RecordSource(paths, share, "0/1", seed, shuffle, files, "auto", True)


def drain(stream: RecordStream, count: int = 7) -> list[bytes]:
    records = []
    while some := stream.take(count):
        records += [record for record, _ in some]
    return records


def test_a_shuffle_buffer_works_as_the_one_of_tf_data() -> None:
    """An item leaves at a random place, and the next one takes that place; at the end the rest leaves in random order."""
    items = iter(range(100))
    shuffler = Shuffler(lambda count: list(itertools.islice(items, count)), 10, "seed")
    draw, buffer, expected = random.Random("seed"), list(range(10)), []
    for item in range(10, 100):
        slot = int(draw.random() * 10)
        expected.append(buffer[slot])
        buffer[slot] = item
    assert shuffler.take(90) == expected
    rest = shuffler.take(50)
    assert sorted(rest) == sorted(buffer) and rest != buffer
    assert shuffler.take(5) == []
    # With a buffer of 10 an item can come at most 9 places early.
    assert all(item <= place + 10 for place, item in enumerate(expected))


@pytest.mark.parametrize("shuffle", [0, 1, 2, 10, 39, 40, 41, 200])
@pytest.mark.parametrize(("stride", "files"), [(1, False), (3, False), (1, True), (2, True)])
def test_every_epoch_has_all_records_and_an_order_of_its_own(
    shuffle: int, stride: int, files: bool, tmp_path: Path
) -> None:
    paths = write_parts(tmp_path, [20, 0, 13, 7])
    epochs = []
    for epoch in range(3):
        epochs.append(
            drain(RecordStream(reading(paths, shuffle=shuffle, stride=stride, files=files), epoch, 0, epoch + 1))
        )
    if not files or stride == 1:
        assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert len(epochs[0]) == 40 // stride
    assert (not epochs[0] == epochs[1] == epochs[2]) == (shuffle > 1 or files)
    whole = drain(RecordStream(reading(paths, shuffle=shuffle, stride=stride, files=files), 0, 0, 3))
    assert whole == [record for epoch in epochs for record in epoch]
    other = drain(RecordStream(reading(paths, shuffle=shuffle, stride=stride, files=files, seed=1), 0, 0, 3))
    assert (other != whole) == (shuffle > 1 or files)


@pytest.mark.parametrize("shuffle", [0, 1, 10, 39, 40, 41, 200])
@pytest.mark.parametrize("stride", [1, 3])
def test_a_stream_goes_on_from_every_position(shuffle: int, stride: int, tmp_path: Path) -> None:
    paths = write_parts(tmp_path, [20, 0, 13, 7])
    how = reading(paths, shuffle=shuffle, stride=stride, files=True)
    stream = RecordStream(how, 0, 0, 2)
    positions, records = [(0, 0)], []
    while some := stream.take(1):
        records += [record for record, _ in some]
        positions.append((stream.epoch, stream.taken))
    assert len(records) == 2 * (40 // stride)
    for taken, (epoch, in_epoch) in enumerate(positions):
        assert drain(RecordStream(how, epoch, in_epoch, 2)) == records[taken:], (epoch, in_epoch)


def test_going_to_a_position_reads_only_what_is_in_the_buffer(tmp_path: Path) -> None:
    paths = write_parts(tmp_path, [200])
    body = bytearray(paths[0].read_bytes())
    body[12 + 3] ^= 255  # in the data of the first record
    whole = [record for record, _ in RecordStream(reading(paths, shuffle=8), 0, 0, 1).take(200)]
    paths[0].write_bytes(body)
    assert b"0/0" in whole[:100]
    rest = [record for record, _ in RecordStream(reading(paths, shuffle=8), 0, 100, 1).take(200)]
    assert rest == whole[100:]


def test_an_endless_stream_without_records_is_an_error_and_an_ended_one_is_empty(tmp_path: Path) -> None:
    paths = write_parts(tmp_path, [0, 0])
    assert drain(RecordStream(reading(paths), 0, 0, 5)) == []
    with pytest.raises(DataError, match=r"part-0 and 1 more: no records for this share \(0/1\), and repeat=None"):
        RecordStream(reading(paths), 0, 0, None).take(1)
