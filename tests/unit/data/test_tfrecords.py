import gc
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import torchquorum as tq
from torchquorum.errors import ConfigError, DataError
from torchquorum.formats.tfrecord import RecordError

GOLDEN = Path(__file__).parents[2] / "golden" / "mnist_200.tfrecords"
NUMBER = {"n": tq.data.FixedLenFeature([], torch.int64)}


def write(folder: Path, count: int, files: int = 1, compression: str | None = None) -> str:
    """Writes the numbers from 0 on, and returns a pattern of the files."""
    for number in range(files):
        with tq.data.TFRecordWriter(folder / f"part-{number:05d}", compression) as writer:
            for n in range(count * number // files, count * (number + 1) // files):
                writer.write(tq.data.Example({"n": n}))
    return str(folder / "part-*")


def flat(batches: Any) -> list[int]:
    return [n for batch in batches for n in batch["n"].tolist()]


def readers() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("torchquorum-reader-")]


def eventually_no_readers() -> bool:
    deadline = time.monotonic() + 60
    while readers() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not readers()


def test_golden_file_as_batches() -> None:
    features = {"image_raw": tq.data.RawFeature([784]), "label": tq.data.FixedLenFeature([], torch.int64)}
    batches = list(tq.data.TFRecordDataset(GOLDEN, features, batch_size=64))
    assert [len(batch["label"]) for batch in batches] == [64, 64, 64, 8]
    mnist = tq.data.load_mnist().validation
    assert torch.equal(torch.cat([batch["image_raw"] for batch in batches]), mnist.images[:200])
    assert torch.equal(torch.cat([batch["label"] for batch in batches]), mnist.labels[:200])


def test_the_tutorials_parser_works_with_few_changes() -> None:
    def parser(record: bytes) -> tuple[torch.Tensor, torch.Tensor]:
        features = tq.data.parse_single_example(
            record,
            features={
                "image_raw": tq.data.FixedLenFeature([], "string"),
                "pixels": tq.data.FixedLenFeature([], "int64"),
                "label": tq.data.FixedLenFeature([], "int64"),
            },
        )
        return tq.data.decode_raw(features["image_raw"], "uint8").reshape(784).to(torch.float32), features["label"]

    images, labels = next(iter(tq.data.TFRecordDataset([GOLDEN], parse=parser, shuffle=50, repeat=10, batch_size=32)))
    assert images.shape == (32, 784) and images.dtype == torch.float32 and labels.shape == (32,)


def test_transform_gets_the_batch_and_records_come_as_bytes_without_features(tmp_path: Path) -> None:
    files = write(tmp_path, 10)
    assert list(tq.data.TFRecordDataset(files))[3] == tq.data.Example({"n": 3}).SerializeToString()
    assert [len(batch) for batch in tq.data.TFRecordDataset(files, batch_size=4)] == [4, 4, 2]
    assert [x["n"].item() for x in tq.data.TFRecordDataset(files, NUMBER)] == list(range(10))
    double = tq.data.TFRecordDataset(files, NUMBER, batch_size=5, transform=lambda batch: 2 * batch["n"])
    assert [batch.tolist() for batch in double] == [[0, 2, 4, 6, 8], [10, 12, 14, 16, 18]]


@pytest.mark.parametrize("prefetch", [0, 3])
def test_batches_reach_over_epochs_and_the_remainder_may_be_dropped(prefetch: int, tmp_path: Path) -> None:
    files = write(tmp_path, 10)
    batches = list(tq.data.TFRecordDataset(files, NUMBER, batch_size=4, repeat=2, shuffle=4, prefetch=prefetch))
    assert [len(batch["n"]) for batch in batches] == [4, 4, 4, 4, 4]
    numbers = flat(batches)
    assert sorted(numbers[:10]) == sorted(numbers[10:]) == list(range(10)) and numbers[:10] != numbers[10:]
    dataset = tq.data.TFRecordDataset(files, NUMBER, batch_size=4, drop_remainder=True, prefetch=prefetch)
    assert [len(batch["n"]) for batch in dataset] == [4, 4]
    assert eventually_no_readers()


@pytest.mark.parametrize("compression", [None, "GZIP", "ZLIB"])
@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 7},
        {"batch_size": 7, "shuffle": 16, "repeat": 3},
        {"batch_size": 7, "shuffle": 16, "repeat": 3, "prefetch": 4, "shuffle_files": True},
        {"batch_size": 5, "shuffle": 500, "repeat": 2, "prefetch": 1, "share": (1, 3)},
        {"batch_size": 3, "shuffle": 7, "repeat": 3, "share": (3, 5)},
    ],
    ids=lambda options: " ".join(f"{k}={v}" for k, v in options.items()),
)
def test_a_run_that_goes_on_from_a_saved_position_equals_the_uninterrupted_one(
    options: dict[str, Any], compression: str | None, tmp_path: Path
) -> None:
    files = write(tmp_path, 83, 4, compression)
    dataset = tq.data.TFRecordDataset(files, NUMBER, **options)
    states, numbers = [json.dumps(dataset.state_dict())], [0]
    batches = []
    for batch in dataset:
        batches.append(batch)
        states.append(json.dumps(dataset.state_dict()))
        numbers.append(numbers[-1] + len(batch["n"]))
    whole = flat(batches)
    for state, taken in list(zip(states, numbers, strict=True))[::3]:
        again = tq.data.TFRecordDataset(files, NUMBER, **options)
        again.load_state_dict(json.loads(state))
        assert again.state_dict() == json.loads(state)
        assert flat(again) == whole[taken:]
    # Another batch size is no obstacle: the position counts records.
    again = tq.data.TFRecordDataset(files, NUMBER, **{**options, "batch_size": 11})
    again.load_state_dict(json.loads(states[2]))
    assert flat(again) == whole[numbers[2] :]


@pytest.mark.parametrize("prefetch", [0, 4])
def test_a_pass_goes_where_the_dataset_is_sent(prefetch: int, tmp_path: Path) -> None:
    """As when a ps dies: the loop keeps its iterator, and the session loads the position of the checkpoint."""
    dataset = tq.data.TFRecordDataset(
        write(tmp_path, 60), NUMBER, batch_size=5, shuffle=20, repeat=None, prefetch=prefetch
    )
    batches = iter(dataset)
    first = [next(batches) for _ in range(4)]
    state = dataset.state_dict()
    expected = [flat([next(batches)]) for _ in range(30)]
    dataset.load_state_dict(state)
    assert [flat([next(batches)]) for _ in range(30)] == expected
    dataset.load_state_dict(state)
    assert flat([next(iter(dataset))]) == expected[0]
    assert flat(first) != expected[0]
    del batches
    gc.collect()
    assert eventually_no_readers()


def test_the_next_pass_comes_in_another_order_and_can_be_resumed_too(tmp_path: Path) -> None:
    files = write(tmp_path, 30)

    def make() -> tq.data.TFRecordDataset:
        return tq.data.TFRecordDataset(files, NUMBER, batch_size=4, shuffle=30)

    dataset = make()
    first, second = flat(dataset), flat(dataset)
    assert sorted(first) == sorted(second) and first != second
    twice = tq.data.TFRecordDataset(files, NUMBER, batch_size=4, shuffle=30, repeat=2)
    assert flat(twice) == first + second
    dataset = make()
    assert flat(dataset) == first
    between = dataset.state_dict()
    batches = iter(dataset)
    begun = flat([next(batches), next(batches)])
    inside = dataset.state_dict()
    for state, rest in ((between, second), (inside, second[8:])):
        again = make()
        again.load_state_dict(state)
        assert flat(again) == rest
    assert begun == second[:8]
    again = make()
    again.set_epoch(1)
    assert flat(again) == second and again.epoch == 2


def test_a_position_is_of_what_was_delivered_not_of_what_was_read_ahead(tmp_path: Path) -> None:
    dataset = tq.data.TFRecordDataset(write(tmp_path, 100), NUMBER, batch_size=5, prefetch=8)
    batches = iter(dataset)
    next(batches)
    deadline = time.monotonic() + 60
    ahead: Any = batches
    while ahead.waiting < 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ahead.waiting == 8
    assert dataset.state_dict()["taken"] == 5
    assert len(list(batches)) == 19  # and the reader ends with the data
    assert eventually_no_readers()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed=0: the saved position belongs to seed=1"),
        ({"share": "1/2"}, "share='0/1': the saved position belongs to share='1/2'"),
        ({"files": "other"}, "other files"),
        ({"shuffle": 3}, "shuffle=0"),
        ({"taken": -1}, "taken=-1 in the saved position: must be a whole number"),
        ({"epoch": "1"}, "epoch='1' in the saved position"),
        ({"first_epoch": None}, "first_epoch=None in the saved position"),
    ],
)
def test_a_position_of_something_else_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    dataset = tq.data.TFRecordDataset(write(tmp_path, 5), NUMBER)
    with pytest.raises(ConfigError, match=message):
        dataset.load_state_dict({**dataset.state_dict(), **change})


def test_a_position_follows_files_to_another_folder(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, other = (tq.data.TFRecordDataset(write(tmp_path / x, 20), NUMBER, batch_size=5) for x in "ab")
    next(iter(one))
    other.load_state_dict(one.state_dict())
    assert flat(other) == list(range(5, 20))


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("files", [1, 4])
def test_every_record_comes_once_also_through_data_loaders(workers: int, files: int, tmp_path: Path) -> None:
    pattern = write(tmp_path, 50, files)
    found = []
    for index in range(2):
        dataset = tq.data.TFRecordDataset(
            pattern, NUMBER, batch_size=4, shuffle=8, share=(index, 2), prefetch=workers % 2
        )
        found += flat(DataLoader(dataset, batch_size=None, num_workers=workers))
    assert sorted(found) == list(range(50))


def test_a_data_loader_behind_a_prefetcher_shuffles_every_epoch_anew_and_is_resumed(tmp_path: Path) -> None:
    pattern = write(tmp_path, 40, 4)

    def make() -> tq.data.Prefetcher[Any]:
        dataset = tq.data.TFRecordDataset(pattern, NUMBER, batch_size=5, shuffle=10)
        return tq.data.Prefetcher(DataLoader(dataset, batch_size=None, num_workers=2), epochs=2)

    batches = make()
    whole, states = [], []
    for batch in batches:
        whole.append(flat([batch]))
        states.append(batches.state_dict())
    epochs = [[n for batch in part for n in batch] for part in (whole[:8], whole[8:])]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(40)) and epochs[0] != epochs[1]
    again = make()
    again.load_state_dict(states[10])
    assert [flat([batch]) for batch in again] == whole[11:]


def test_a_position_inside_data_loader_processes_is_refused_and_not_ignored(tmp_path: Path) -> None:
    dataset = tq.data.TFRecordDataset(write(tmp_path, 20), NUMBER, batch_size=5)
    next(iter(dataset))
    dataset.load_state_dict(dataset.state_dict())
    batches: Any = iter(DataLoader(dataset, batch_size=None, num_workers=1))
    for _ in range(2):
        with pytest.raises(ConfigError, match="the processes of a DataLoader cannot start at a position"):
            next(batches)
    batches._shutdown_workers()  # the exception still holds them
    assert flat(DataLoader(dataset, batch_size=None)) == list(range(5, 20))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_damage_is_raised_in_the_loop_with_file_and_offset(prefetch: int, tmp_path: Path) -> None:
    write(tmp_path, 40, 2)
    path = tmp_path / "part-00001"
    body = bytearray(path.read_bytes())
    size = len(body) // 20
    body[7 * size + 14] ^= 1
    path.write_bytes(body)
    dataset = tq.data.TFRecordDataset(str(tmp_path / "part-*"), NUMBER, batch_size=9, prefetch=prefetch)
    batches, message = iter(dataset), f"{path}: record 7, at byte {7 * size}: the data does not match"
    if prefetch == 0:  # a thread may meet the damage before the loop has taken what comes before it
        assert flat([next(batches), next(batches), next(batches)]) == list(range(27))
    with pytest.raises(RecordError, match=message):
        list(batches)
    with pytest.raises(RecordError, match=message):
        next(batches)
    assert eventually_no_readers()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_record_that_is_not_as_specified_is_named_by_file_and_offset(prefetch: int, tmp_path: Path) -> None:
    with tq.data.TFRecordWriter(tmp_path / "file") as writer:
        for n in range(30):
            writer.write(tq.data.Example({"n": n}) if n != 17 else b"\xff\xff")
    offset = 17 * (16 + len(tq.data.Example({"n": 0}).SerializeToString()))
    dataset = tq.data.TFRecordDataset(tmp_path / "file", NUMBER, batch_size=10, prefetch=prefetch, shuffle=5)
    with pytest.raises(DataError, match=f"{tmp_path / 'file'}: the record at byte {offset}: not a tf.train.Example"):
        list(dataset)
    dataset = tq.data.TFRecordDataset(tmp_path / "file", parse=lambda record: len(record) // (record[0] - 255))
    with pytest.raises(ZeroDivisionError) as caught:
        list(dataset)
    assert caught.value.__notes__[0] == f"raised by parse= for {tmp_path / 'file'}: the record at byte {offset}"


def test_threads_end_when_a_pass_is_left_early_or_forgotten(tmp_path: Path) -> None:
    dataset = tq.data.TFRecordDataset(write(tmp_path, 100), NUMBER, batch_size=2, repeat=None, prefetch=2)
    for _batch in dataset:
        break
    batches = iter(dataset)
    next(batches)
    assert len(readers()) >= 1
    del batches
    gc.collect()
    assert eventually_no_readers()


def test_an_endless_pass_over_an_empty_share_is_an_error_and_no_hang(tmp_path: Path) -> None:
    files = write(tmp_path, 2)
    assert list(tq.data.TFRecordDataset(files, NUMBER, batch_size=4, share=(2, 3))) == []
    for prefetch in (0, 2):
        dataset = tq.data.TFRecordDataset(files, NUMBER, batch_size=4, share=(2, 3), repeat=None, prefetch=prefetch)
        with pytest.raises(DataError, match=r"no records for this share \(2/3\), and repeat=None"):
            next(iter(dataset))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shuffle": -1}, "shuffle=-1: must be a whole number, 0 or more"),
        ({"shuffle": True}, "shuffle=True"),
        ({"repeat": 0}, "repeat=0: must be a whole number, 1 or more; None for no end"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 2.0}, "batch_size=2.0"),
        ({"prefetch": -1}, "prefetch=-1"),
        ({"seed": -1}, "seed=-1"),
        ({"share": (2, 2)}, "share="),
        ({"compression": "bz2"}, "compression='bz2'"),
        ({"drop_remainder": True}, "drop_remainder=True without batch_size"),
        ({"parse": len}, "features and parse: give only one"),
        ({"transform": 5}, "transform=5: must be a function"),
        ({"features": {}}, "features={}"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        tq.data.TFRecordDataset(write(tmp_path, 1), **{"features": NUMBER, **options})


def test_missing_files_are_named() -> None:
    with pytest.raises(DataError, match="nowhere: no such file"):
        tq.data.TFRecordDataset("nowhere", NUMBER)
