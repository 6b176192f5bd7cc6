"""Examples per second that TFRecord files give, beside those that the mlp trains on, on one core and in one run.

    OMP_NUM_THREADS=1 python benchmarks/tfrecord.py [--examples 55000] [--rounds 3] [--peers]

Every measurement is repeated in turn, and the median printed. Seconds are those of the processor (all threads of this process
together), so that a busy machine changes little; the files come from the page cache. `--peers` adds protobuf's own parser on
the same records.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from work import BATCH, load, loss_of, make_model

import torchquorum as tq
from torchquorum.data import load_mnist
from torchquorum.formats import crc32c

LABEL = tq.data.FixedLenFeature([], torch.int64)
RAW = {"image_raw": tq.data.RawFeature([784], torch.uint8), "label": LABEL}
INTS = {"image": tq.data.FixedLenFeature([784], torch.int64), "label": LABEL}
FLOATS = {"image": tq.data.FixedLenFeature([784], torch.float32), "label": LABEL}


def write_files(folder: Path, examples: int) -> None:
    """Writes MNIST in several forms: bytes, bytes packed, whole numbers, floats."""
    split = load_mnist().train
    images, labels = split.images[:examples].numpy(), split.labels[:examples].tolist()
    forms: dict[str, tuple[str | None, Callable[[Any], dict[str, Any]]]] = {
        "raw": (None, lambda image: {"image_raw": image.tobytes()}),
        "gzip": ("GZIP", lambda image: {"image_raw": image.tobytes()}),
        "ints": (None, lambda image: {"image": image}),
        "floats": (None, lambda image: {"image": image / 255.0}),
    }
    for name, (compression, make) in forms.items():
        with tq.data.TFRecordWriter(folder / name, compression) as writer:
            for image, label in zip(images, labels, strict=True):
                writer.write(tq.data.Example({"pixels": 784, "label": label, **make(image)}))


def train(seconds: float = 2.0) -> float:
    """Returns the examples per second that the mlp is trained on."""
    images, labels = load()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps, began = -50, time.process_time()
    while True:
        if steps == 0:
            began = time.process_time()
        loss = loss_of(model, images, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
        if steps > 0 and time.process_time() - began > seconds:
            return steps * BATCH / (time.process_time() - began)


def read(path: Path, features: Any, **options: Any) -> float:
    """Returns the examples per second that a dataset delivers, in batches of 100."""
    dataset = tq.data.TFRecordDataset(path, features, batch_size=BATCH, **options)
    began = time.process_time()
    examples = sum(len(batch["label"]) for batch in dataset)
    return examples / (time.process_time() - began)


def read_for_training(path: Path) -> float:
    """Returns the same with images that are ready for the mlp: float32 in 0..1."""

    def transform(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"image": batch["image_raw"].to(torch.float32).div_(255), "label": batch["label"]}

    return read(path, RAW, shuffle=10_000, transform=transform)


def read_without_c(path: Path) -> float:
    """Returns the same with the checksums by NumPy, as where google-crc32c is not installed."""
    kept, crc32c._c = crc32c._c, None
    try:
        return read(path, RAW)
    finally:
        crc32c._c = kept


def count(examples: Iterable[Any]) -> float:
    """Returns how many there are per second."""
    began = time.process_time()
    number = sum(1 for _ in examples)
    return number / (time.process_time() - began)


def tutorials_parser(record: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    """Parses one record, as the tutorials do."""
    parsed = tq.data.parse_single_example(record, {"image_raw": tq.data.FixedLenFeature([], "string"), "label": LABEL})
    return tq.data.decode_raw(parsed["image_raw"]), parsed["label"]


def peers(folder: Path) -> dict[str, Callable[[], float]]:
    """Returns what others do with the same records."""
    import sys

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.unit.formats.protobuf_example import Example

    def protobuf(record: bytes, name: str, kind: str) -> Any:
        feature = Example.FromString(record).features.feature
        values = getattr(feature[name], kind).value
        return list(values), feature["label"].int64_list.value[0]

    return {
        "protobuf, image_raw": lambda: count(
            protobuf(record, "image_raw", "bytes_list") for record in tq.data.read_records(folder / "raw")
        ),
        "protobuf, 784 int64": lambda: count(
            protobuf(record, "image", "int64_list") for record in tq.data.read_records(folder / "ints")
        ),
    }


def main() -> None:
    """Measures in turn and prints a table, then JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=55_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder, args.examples)
        measures: dict[str, Callable[[], float]] = {
            "the mlp trains": train,
            "image_raw": lambda: read(folder / "raw", RAW),
            "image_raw, shuffle 10,000": lambda: read(folder / "raw", RAW, shuffle=10_000),
            "the same, prefetch 4": lambda: read(folder / "raw", RAW, shuffle=10_000, prefetch=4),
            "the same, as float32 in 0..1": lambda: read_for_training(folder / "raw"),
            "image_raw, half of one file": lambda: read(folder / "raw", RAW, share=(0, 2)),
            "image_raw, gzip": lambda: read(folder / "gzip", RAW),
            "image_raw, checksums by NumPy": lambda: read_without_c(folder / "raw"),
            "784 float32": lambda: read(folder / "floats", FLOATS),
            "784 int64": lambda: read(folder / "ints", INTS),
            "records only": lambda: count(tq.data.read_records(folder / "raw")),
            "one by one, parse=": lambda: count(tq.data.TFRecordDataset(folder / "raw", parse=tutorials_parser)),
            **(peers(folder) if args.peers else {}),
        }
        seen: dict[str, list[float]] = {name: [] for name in measures}
        for _ in range(args.rounds):
            for measured, measure in measures.items():
                seen[measured].append(measure())
    appetite = statistics.median(seen["the mlp trains"])
    for measured, values in seen.items():
        middle = statistics.median(values)
        print(f"{measured:32} {middle:10,.0f} examples/s   {middle / appetite:6.1f} of the mlp's appetite")
    print(json.dumps({measured: round(statistics.median(values)) for measured, values in seen.items()}))


if __name__ == "__main__":
    main()
