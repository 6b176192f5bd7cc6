"""load_mnist: the packaged set, folders of the user's, and what is said about incomplete ones."""

import gzip
import hashlib
import struct
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import torch

from torchquorum.data import Mnist, Split, load_mnist
from torchquorum.data.mnist import PACKAGED_FILES
from torchquorum.errors import DataError


@pytest.fixture(scope="module")
def mnist() -> Mnist:
    return load_mnist()


def images_bytes(rows: int, side: int = 28) -> bytes:
    """Images whose every pixel is their row number modulo 256."""
    pixels = b"".join(bytes([row % 256]) * (side * side) for row in range(rows))
    return struct.pack(">HBB3I", 0, 8, 3, rows, side, side) + pixels


def labels_bytes(rows: int) -> bytes:
    return struct.pack(">HBBI", 0, 8, 1, rows) + bytes(row % 10 for row in range(rows))


def write_set(folder: Path, train_rows: int = 50, test_rows: int = 7, joint: str = "-", packed: bool = False) -> Path:
    for prefix, rows in (("train", train_rows), ("t10k", test_rows)):
        for name, content in (
            (f"{prefix}-images{joint}idx3-ubyte", images_bytes(rows)),
            (f"{prefix}-labels{joint}idx1-ubyte", labels_bytes(rows)),
        ):
            if packed:
                (folder / f"{name}.gz").write_bytes(gzip.compress(content, compresslevel=1))
            else:
                (folder / name).write_bytes(content)
    return folder


def test_the_packaged_files_have_the_listed_checksums() -> None:
    listed = [line.split() for line in (PACKAGED_FILES / "SHA256SUMS").read_text().splitlines()]
    assert len(listed) == 4
    for digest, name in listed:
        content = gzip.decompress((PACKAGED_FILES / f"{name}.gz").read_bytes())
        assert hashlib.sha256(content).hexdigest() == digest, name


def test_the_packaged_files_come_with_authors_and_licence() -> None:
    text = (PACKAGED_FILES / "README.md").read_text()
    for word in ("Yann LeCun", "Corinna Cortes", "Christopher J. C. Burges", "CC BY-SA 3.0"):
        assert word in text


def test_the_packaged_set_has_the_split_of_the_tutorials(mnist: Mnist) -> None:
    assert (len(mnist.train), len(mnist.validation), len(mnist.test)) == (55_000, 5_000, 10_000)
    for split in (mnist.train, mnist.validation, mnist.test):
        assert (split.images.dtype, split.labels.dtype) == (torch.uint8, torch.int64)
        assert split.images.shape == (len(split), 784)
        assert split.labels.shape == (len(split),)
    # The first digits of the published training and test files, and row 5,000 of the training file.
    assert mnist.validation.labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert mnist.train.labels[:3].tolist() == [7, 3, 4]
    assert mnist.test.labels[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]


def test_inputs_are_the_pixels_divided_by_255(mnist: Mnist) -> None:
    rows = torch.tensor([3, 0, 3])
    inputs = mnist.test.inputs(rows)
    assert inputs.dtype == torch.float32
    assert torch.equal(inputs, mnist.test.images[[3, 0, 3]].to(torch.float32) / 255)
    assert inputs.min() == 0
    assert inputs.max() == 1


def test_tensors_are_all_inputs_and_labels_and_leave_the_pixels_alone(mnist: Mnist) -> None:
    before = mnist.test.images.clone()
    inputs, labels = mnist.test.tensors()
    assert torch.equal(inputs, mnist.test.inputs())
    assert torch.equal(labels, mnist.test.labels)
    inputs.zero_()
    assert torch.equal(mnist.test.images, before)


def test_a_split_cannot_be_changed(mnist: Mnist) -> None:
    with pytest.raises(FrozenInstanceError):
        mnist.train.labels = mnist.test.labels  # pyright: ignore[reportAttributeAccessIssue]


def test_a_split_of_unequal_parts_is_refused() -> None:
    with pytest.raises(DataError, match="3 images and 2 labels"):
        Split(torch.zeros(3, 784, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("joint", ["-", "."])
@pytest.mark.parametrize("packed", [True, False])
def test_a_folder_may_hold_plain_or_gzip_files_under_either_name(tmp_path: Path, joint: str, packed: bool) -> None:
    mnist = load_mnist(str(write_set(tmp_path, joint=joint, packed=packed)))
    assert (len(mnist.train), len(mnist.validation), len(mnist.test)) == (45, 5, 7)
    assert mnist.validation.images[:, 0].tolist() == list(range(5))
    assert mnist.train.images[:, 783].tolist() == list(range(5, 50))
    assert mnist.train.labels.tolist() == [row % 10 for row in range(5, 50)]


@pytest.mark.parametrize(("train_rows", "validation"), [(2, 1), (9, 1), (100, 10), (10_000, 1_000), (10_001, 5_000)])
def test_validation_is_5000_rows_of_a_large_set_and_a_tenth_of_a_small_one(
    tmp_path: Path, train_rows: int, validation: int
) -> None:
    mnist = load_mnist(write_set(tmp_path, train_rows=train_rows))
    assert (len(mnist.validation), len(mnist.train)) == (validation, train_rows - validation)


def test_a_missing_folder_is_named_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere: does not exist, expected a folder.*leave it out"):
        load_mnist(tmp_path / "nowhere")


def test_a_file_in_place_of_the_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"file: is a file, expected a folder"):
        load_mnist(tmp_path / "file")


def test_a_missing_file_lists_the_names_looked_for_and_what_is_there(tmp_path: Path) -> None:
    write_set(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").rename(tmp_path / "test-labels")
    with pytest.raises(DataError) as caught:
        load_mnist(tmp_path)
    message = str(caught.value)
    for name in ("t10k-labels-idx1-ubyte,", "t10k-labels.idx1-ubyte,", "t10k-labels-idx1-ubyte.gz", "test-labels"):
        assert name in message


def test_an_empty_folder_is_said_to_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no train-images file.*holds nothing"):
        load_mnist(tmp_path)


def test_a_crowded_folder_is_listed_in_part(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"other{number:02d}").touch()
    with pytest.raises(DataError, match="other11 and 18 more"):
        load_mnist(tmp_path)


def test_images_and_labels_of_different_length_are_told_with_both_files(tmp_path: Path) -> None:
    write_set(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(labels_bytes(49))
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte has 50 images but .*train-labels.* has 49 labels"):
        load_mnist(tmp_path)


def test_images_of_another_size_are_refused(tmp_path: Path) -> None:
    write_set(tmp_path)
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(images_bytes(7, side=20))
    with pytest.raises(DataError, match="20 x 20 pixels, expected 28 x 28"):
        load_mnist(tmp_path)


def test_a_label_that_is_no_digit_is_refused(tmp_path: Path) -> None:
    write_set(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(labels_bytes(7)[:-1] + bytes([26]))
    with pytest.raises(DataError, match="a label 26, expected digits from 0 to 9"):
        load_mnist(tmp_path)


@pytest.mark.parametrize(("train_rows", "test_rows", "message"), [(1, 5, "1 training image"), (5, 0, "no test images")])
def test_a_set_too_small_to_divide_is_refused(tmp_path: Path, train_rows: int, test_rows: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_mnist(write_set(tmp_path, train_rows=train_rows, test_rows=test_rows))


def test_a_damaged_file_in_the_folder_is_named(tmp_path: Path) -> None:
    write_set(tmp_path, packed=True)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz: starts as a gzip file"):
        load_mnist(tmp_path)
