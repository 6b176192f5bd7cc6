"""MNIST with the tutorials' split, from the files in the package or from a user's folder.

Owns the file names and the split of the training images. Called by jobs and users' programs. What always holds: the three
splits of one `Mnist` share no row; pixels stay uint8 (47 MB instead of 188) until a batch is taken.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from torchquorum.data.idx import read_idx
from torchquorum.errors import DataError
from torchquorum.lines import counted

PACKAGED_FILES = Path(__file__).parent / "files"

_SIDE = 28
_CLASSES = 10
_VALIDATION_ROWS = 5_000
_SMALL_SET_ROWS = 10_000  # up to this size the validation part is a tenth, not 5,000
_LISTED_NAMES = 12


@dataclass(frozen=True, eq=False, slots=True)
class Split:
    """Images and their labels: `images` torch.uint8 [n, 784], `labels` torch.int64 [n]."""

    images: torch.Tensor
    labels: torch.Tensor

    def __post_init__(self) -> None:
        if len(self.images) != len(self.labels):
            raise DataError(f"{len(self.images):,} images and {len(self.labels):,} labels: expected the same number")

    def __len__(self) -> int:
        return len(self.labels)

    def inputs(self, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the images as float32 in 0..1: those of `rows` (an int64 tensor, in that order), or all."""
        images = self.images if rows is None else self.images.index_select(0, rows)
        return images.to(torch.float32).div_(255)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns all images as float32 in 0..1 and all labels, for instance for a TensorDataset."""
        return self.inputs(), self.labels


@dataclass(frozen=True, eq=False, slots=True)
class Mnist:
    """The three parts: `train` (55,000 rows in the packaged set), `validation` (5,000) and `test` (10,000)."""

    train: Split
    validation: Split
    test: Split


def load_mnist(data_dir: str | Path | None = None) -> Mnist:
    """Loads MNIST, or a set in the same format, and divides it as the tutorials do.

    The first 5,000 training images are for validation and the others for training; of a set with 10,000 training images
    or fewer the first tenth is for validation.

    Args:
        data_dir: A folder with the four idx files, plain or gzip, named `train-images-idx3-ubyte`,
            `train-images.idx3-ubyte` or either with `.gz`; the first that exists is used. None uses the files in the package.

    Raises:
        DataError: The folder or a file is missing, a file is damaged, or images and labels do not belong together.
    """
    folder = PACKAGED_FILES if data_dir is None else Path(data_dir).expanduser()
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        raise DataError(
            f"{folder}: {found}, expected a folder with the four MNIST idx files; "
            "leave it out to use the MNIST in the package"
        )
    training = _load_part(folder, "train")
    test = _load_part(folder, "t10k")
    if len(training) < 2:
        raise DataError(
            f"{folder}: {counted(len(training), 'training image')}, expected 2 or more: one is for validation"
        )
    if len(test) == 0:
        raise DataError(f"{folder}: no test images, expected 1 or more")
    divide = _VALIDATION_ROWS if len(training) > _SMALL_SET_ROWS else max(1, len(training) // 10)
    return Mnist(
        train=Split(training.images[divide:], training.labels[divide:]),
        validation=Split(training.images[:divide], training.labels[:divide]),
        test=test,
    )


def _load_part(folder: Path, prefix: str) -> Split:
    images_path = _find_file(folder, f"{prefix}-images", "idx3-ubyte")
    labels_path = _find_file(folder, f"{prefix}-labels", "idx1-ubyte")
    images = read_idx(images_path, ndim=3)
    labels = read_idx(labels_path, ndim=1)
    rows, height, width = images.shape
    if (height, width) != (_SIDE, _SIDE):
        raise DataError(f"{images_path}: images of {height} x {width} pixels, expected {_SIDE} x {_SIDE}")
    if rows != len(labels):
        raise DataError(
            f"{images_path} has {rows:,} images but {labels_path} has {len(labels):,} labels: expected the same "
            "number. Use both files of the same set"
        )
    if rows and int(labels.max()) >= _CLASSES:
        raise DataError(f"{labels_path}: a label {int(labels.max())}, expected digits from 0 to {_CLASSES - 1}")
    return Split(images.view(rows, _SIDE * _SIDE), labels.to(torch.int64))


def _find_file(folder: Path, stem: str, ending: str) -> Path:
    names = [f"{stem}{joint}{ending}{packed}" for packed in ("", ".gz") for joint in ("-", ".")]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    present = sorted(entry.name for entry in folder.iterdir())
    listed = ", ".join(present[:_LISTED_NAMES]) or "nothing"
    more = f" and {len(present) - _LISTED_NAMES} more" if len(present) > _LISTED_NAMES else ""
    raise DataError(
        f"{folder}: no {stem} file. Looked for {', '.join(names)}; the folder holds {listed}{more}. "
        "Add one, or give another folder"
    )
