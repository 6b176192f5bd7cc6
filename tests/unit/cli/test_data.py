"""`torchquorum data`, called as the command line calls it, in this process."""

from pathlib import Path

import pytest
from click.testing import CliRunner

import torchquorum as tq
from torchquorum.cli.data import data
from torchquorum.errors import TorchQuorumError

GOLDEN = Path(__file__).parents[2] / "golden" / "mnist_200.tfrecords"


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> tuple[int, str]:
    """Returns the exit code and all that was printed, with errors as the command line prints them."""
    done = CliRunner().invoke(data, arguments, standalone_mode=False)
    if done.exception is not None and not isinstance(done.exception, TorchQuorumError):
        return 2, str(done.exception)
    return (2, str(done.exception)) if done.exception else (int(done.return_value or 0), done.output)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_shards_hold_every_image_once_and_are_not_overwritten_unasked(tmp_path: Path) -> None:
    done = run("tfrecord", "--split=test", "--limit=1003", "--shards=4", "--compression=gzip")
    assert done[0] == 0, done[1]
    assert names(tmp_path / "mnist") == [f"test-0000{i}-of-00004" for i in range(4)]
    assert "mnist/test-00000-of-00004 to test-00003-of-00004, 4 files: 1,003 examples" in done[1]
    features = {"label": tq.data.FixedLenFeature([], "int64")}
    labels = [x["label"].item() for x in tq.data.TFRecordDataset(str(tmp_path / "mnist" / "test-*"), features)]
    assert labels == tq.data.load_mnist().test.labels[:1003].tolist()

    again = run("tfrecord", "--split=test", "--limit=5", "--shards=4")
    assert again[0] == 2 and "and 3 more: already exists; --force replaces it" in again[1]
    other = run("tfrecord", "--split=test", "--limit=5", "--shards=2")
    assert other[0] == 2 and "belongs to another number of shards, and test-* would match both" in other[1]
    forced = run("tfrecord", "--split=test", "--limit=5", "--shards=2", "--force")
    assert forced[0] == 0, forced[1]
    assert names(tmp_path / "mnist") == ["test-00000-of-00002", "test-00001-of-00002"]


def test_inspect_names_all_damage_and_goes_on_where_it_can(tmp_path: Path) -> None:
    body = bytearray(GOLDEN.read_bytes())
    body[860 * 3 + 100] ^= 1
    body[860 * 150 + 100] ^= 1
    (tmp_path / "bad").write_bytes(body[: 860 * 180 + 7])
    (tmp_path / "text").write_text("no records, but some text that anybody may have written")
    done = run("inspect", "bad")
    assert done[0] == 1
    assert "bad: 180 records" in done[1] and "DAMAGED" in done[1]
    for record, offset in ((3, 860 * 3), (150, 860 * 150), (180, 860 * 180)):
        assert f"bad: record {record}, at byte {offset}: " in done[1]
    assert "the file ends in the record's length, after 7 of 12 bytes" in done[1]
    text = run("inspect", "text")
    assert text[0] == 1 and "text: record 0, at byte 0: " in text[1]
    assert "is this a TFRecord file" in text[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "nothing-*"], "nothing-*: no file matches"),
        (["inspect", "nowhere"], "nowhere: no such file"),
        (["tfrecord", "--limit=3", "--shards=5"], "--shards 5: there are only 3 images"),
        (
            ["tfrecord", "--limit=3", "--shards=2", "--output=file"],
            "--output file: is a file, and --shards needs a folder",
        ),
        (["tfrecord", "--limit=3", "--output=file/x"], "the folder cannot be created"),
        (["tfrecord", "--compression=bz2"], "bz2"),
        (["tfrecord", "--shards=0"], "0 is not in the range"),
    ],
)
def test_mistakes_are_told_without_a_traceback(arguments: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run(*arguments)
    assert done[0] == 2 and message in done[1]
    assert names(tmp_path) == ["file"]
