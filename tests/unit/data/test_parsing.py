import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchquorum as tq
from tests.unit.formats import protobuf_example as real
from torchquorum.data.parsing import BatchParser
from torchquorum.errors import ConfigError
from torchquorum.formats.protobuf import ExampleError
from torchquorum.formats.tfrecord import read_records

GOLDEN = Path(__file__).parents[2] / "golden"
MNIST = {"image_raw": tq.data.RawFeature([784], torch.uint8), "label": tq.data.FixedLenFeature([], torch.int64)}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        bits = {torch.float32: torch.int32, torch.float64: torch.int64, torch.float16: torch.int16}.get(one.dtype)
        if bits is not None:  # not by value: NaN is itself
            one, other = one.contiguous().view(bits), other.contiguous().view(bits)
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return type(one) is type(other) and one == other


def one_by_one(records: list[bytes], features: Any) -> dict[str, Any]:
    """A batch made of examples that were each parsed alone, without a template."""
    rows = [tq.data.parse_single_example(record, features) for record in records]
    return {
        name: torch.stack([row[name] for row in rows])
        if isinstance(rows[0][name], torch.Tensor) and not isinstance(spec, tq.data.VarLenFeature)
        else [row[name] for row in rows]
        for name, spec in features.items()
    }


def test_golden_images_and_labels_come_out() -> None:
    records = list(read_records(GOLDEN / "mnist_200.tfrecords"))
    batch = tq.data.parse_example(records, {**MNIST, "pixels": tq.data.FixedLenFeature([], "int64")})
    mnist = tq.data.load_mnist().validation  # the training file's first images
    assert torch.equal(batch["image_raw"], mnist.images[:200]) and batch["image_raw"].dtype == torch.uint8
    assert torch.equal(batch["label"], mnist.labels[:200]) and batch["label"].dtype == torch.int64
    assert batch["pixels"].tolist() == [784] * 200


# Values whose varints have few different lengths, so that many records look alike, and some do not.
NUMBERS = st.sampled_from([0, 5, 127, 128, 300, -1, -(2**63), 2**63 - 1, 2**35])


@st.composite
def data_sets(draw: Any) -> tuple[list[bytes], dict[str, Any]]:
    count = draw(st.integers(1, 3))
    features: dict[str, Any] = {
        "n": tq.data.FixedLenFeature([count], torch.int64),
        "x": tq.data.FixedLenFeature([2, count], torch.float32, default_value=1.5),
        "s": tq.data.FixedLenFeature([], "string"),
        "raw": tq.data.RawFeature([3], torch.int16),
        "some": tq.data.VarLenFeature(torch.int64),
        "reals": tq.data.VarLenFeature(torch.float32),
        "words": tq.data.VarLenFeature("string"),
    }
    wanted = draw(st.lists(st.sampled_from(list(features)), min_size=1, unique=True))
    with_x, unpacked = draw(st.booleans()), draw(st.booleans())
    records = []
    for _ in range(draw(st.integers(1, 24))):
        values: dict[str, Any] = {
            "n": tq.data.Feature(int64_list=draw(st.lists(NUMBERS, min_size=count, max_size=count))),
            "s": draw(st.binary(min_size=3, max_size=4)),
            "raw": draw(st.binary(min_size=6, max_size=6)),
            "some": tq.data.Feature(int64_list=draw(st.lists(NUMBERS, max_size=2))),
            "reals": tq.data.Feature(float_list=draw(st.lists(st.floats(width=32), max_size=2))),
            "words": tq.data.Feature(bytes_list=draw(st.lists(st.binary(max_size=2), max_size=2))),
        }
        if with_x:
            numbers = st.lists(st.floats(width=32), min_size=2 * count, max_size=2 * count)
            values["x"] = tq.data.Feature(float_list=draw(numbers))
        record = tq.data.Example(values).SerializeToString()
        if unpacked:
            record = real.Unpacked.FromString(record).SerializeToString(deterministic=True)
        records.append(record)
    return records, {name: features[name] for name in wanted}


@settings(deadline=None, max_examples=80)
@given(data_sets())
def test_batches_equal_examples_parsed_one_by_one(data_set: tuple[list[bytes], dict[str, Any]]) -> None:
    records, features = data_set
    parser = BatchParser(features)
    expected = one_by_one(records, features)
    for _ in range(2):  # the second time with the templates of the first
        batch = parser.parse(records)
        assert list(batch) == list(features)
        for name, values in batch.items():
            assert same(values, expected[name]), name


@settings(deadline=None, max_examples=80)
@given(data_sets(), st.data())
def test_a_batch_is_refused_exactly_if_one_of_its_examples_is(
    data_set: tuple[list[bytes], dict[str, Any]], data: Any
) -> None:
    records, features = data_set
    parser = BatchParser(features)
    parser.parse(records)
    row = data.draw(st.integers(0, len(records) - 1))
    damaged = bytearray(records[row])
    damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    records = [*records[:row], bytes(damaged), *records[row + 1 :]]
    try:
        expected = one_by_one(records, features)
    except ExampleError:
        with pytest.raises(ExampleError):
            parser.parse(records)
    else:
        batch = parser.parse(records)
        assert all(same(batch[name], expected[name]) for name in features)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.binary(max_size=40), min_size=1, max_size=8))
def test_arbitrary_bytes_raise_nothing_but_our_error(records: list[bytes]) -> None:
    features = {
        "a": tq.data.VarLenFeature(torch.int64),
        "b": tq.data.FixedLenFeature([], torch.float32, default_value=0.0),
    }
    try:
        tq.data.parse_example(records, features)
    except ExampleError as error:
        assert "not a tf.train.Example" in str(error) or "feature" in str(error)  # noqa: PT017


def test_the_error_of_a_batch_tells_the_row() -> None:
    records = [tq.data.Example({"n": row}).SerializeToString() for row in range(20)]
    records[13] = tq.data.Example({"n": [1, 2]}).SerializeToString()
    with pytest.raises(ExampleError, match=r"feature 'n' has 2 int64s, expected 1 for shape \[\]") as caught:
        tq.data.parse_example(records, {"n": tq.data.FixedLenFeature([], int)})
    assert getattr(caught.value, "row", None) == 13


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (tq.data.FixedLenFeature([], torch.float32), "'n' is a list of int64s, expected floats"),
        (tq.data.FixedLenFeature([3], torch.int64), r"'n' has 2 int64s, expected 3 for shape \[3\]"),
        (tq.data.VarLenFeature("string"), "'n' is a list of int64s, expected strings"),
        (tq.data.RawFeature([1]), "'n' is a list of int64s, expected strings"),
    ],
)
def test_a_feature_that_is_not_as_specified_is_named(spec: Any, message: str) -> None:
    record = tq.data.Example({"n": [1, 2], "s": b"abc"}).SerializeToString()
    with pytest.raises(ExampleError, match=message):
        tq.data.parse_single_example(record, {"n": spec})
    with pytest.raises(ExampleError, match=message):
        tq.data.parse_example([record] * 10, {"n": spec})
    with pytest.raises(ExampleError, match="feature 'm' is missing, and has no default_value"):
        tq.data.parse_example([record] * 10, {"m": tq.data.FixedLenFeature([], torch.int64)})
    with pytest.raises(ExampleError, match=r"'s' has 3 bytes, expected one string of 8 bytes for shape \[4\] of int16"):
        tq.data.parse_example([record] * 10, {"s": tq.data.RawFeature([4], torch.int16)})


def test_missing_features_get_their_default_as_in_tensorflow() -> None:
    records = [
        tq.data.Example({}).SerializeToString(),
        b"",
        tq.data.Example({"n": tq.data.Feature()}).SerializeToString(),
    ]
    features = {
        "n": tq.data.FixedLenFeature([2], torch.int64, default_value=-1),
        "x": tq.data.FixedLenFeature([2], torch.float32, default_value=[0.5, 1]),
        "s": tq.data.FixedLenFeature([], "string", default_value="none"),
        "v": tq.data.VarLenFeature(torch.int64, pad_value=0),
    }
    batch = tq.data.parse_example(records, features)
    assert batch["n"].tolist() == [[-1, -1]] * 3 and batch["x"].tolist() == [[0.5, 1]] * 3
    assert batch["s"] == [b"none"] * 3 and batch["v"].shape == (3, 0)
    with pytest.raises(ExampleError, match="has 0 int64s, expected 2"):  # an empty list is there, and too short
        tq.data.parse_single_example(
            tq.data.Example({"n": tq.data.Feature(int64_list=[])}).SerializeToString(), features
        )


def test_lists_of_any_length_are_padded_on_request() -> None:
    records = [tq.data.Example({"n": tq.data.Feature(int64_list=range(k))}).SerializeToString() for k in (2, 0, 3)]
    batch = tq.data.parse_example(records, {"n": tq.data.VarLenFeature(torch.int64, pad_value=-1)})
    assert batch["n"].tolist() == [[0, 1, -1], [-1, -1, -1], [0, 1, 2]]
    rows = tq.data.parse_example(records, {"n": tq.data.VarLenFeature(torch.int64)})["n"]
    assert [row.tolist() for row in rows] == [[0, 1], [], [0, 1, 2]]


def test_strings_of_a_shape_come_nested() -> None:
    record = tq.data.Example({"s": [b"a", b"b", b"c", b"d"]}).SerializeToString()
    assert tq.data.parse_single_example(record, {"s": tq.data.FixedLenFeature([2, 2], str)})["s"] == [
        [b"a", b"b"],
        [b"c", b"d"],
    ]


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"])
def test_raw_numbers_of_every_type_are_decoded(dtype: str) -> None:
    values = np.arange(6).astype(dtype).reshape(2, 3)
    records = [tq.data.Example({"raw": (values + row).tobytes()}).SerializeToString() for row in range(6)]
    batch = tq.data.parse_example(records, {"raw": tq.data.RawFeature([2, 3], getattr(torch, dtype))})["raw"]
    assert batch.dtype == getattr(torch, dtype) and batch.shape == (6, 2, 3)
    assert torch.equal(batch[4], torch.from_numpy(values + 4).to(batch.dtype))
    assert torch.equal(tq.data.decode_raw(values.tobytes(), dtype), torch.from_numpy(values.reshape(-1)))


class _TensorFlowType:
    name = "string"


@pytest.mark.parametrize("dtype", ["string", bytes, str, "bytes", _TensorFlowType()])
def test_types_are_taken_in_every_spelling(dtype: Any) -> None:
    assert tq.data.FixedLenFeature([], dtype).kind == "bytes_list"
    assert (
        tq.data.FixedLenFeature([], np.int64).kind
        == tq.data.FixedLenFeature([], np.dtype("int64")).kind
        == "int64_list"
    )
    assert tq.data.VarLenFeature(float).kind == tq.data.VarLenFeature(np.float32).kind == "float_list"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tq.data.FixedLenFeature([], torch.int32), "an example holds torch.int64, torch.float32 and 'string'"),
        (lambda: tq.data.FixedLenFeature([-1], torch.int64), "every size must be a whole number, 0 or more"),
        (lambda: tq.data.FixedLenFeature("3", torch.int64), "must be a list of sizes"),  # pyright: ignore
        (lambda: tq.data.FixedLenFeature([3], torch.int64, [1, 2]), "default_value has 2 values: must be one or 3"),
        (lambda: tq.data.FixedLenFeature([], torch.int64, 1.5), "must be numbers of its dtype"),
        (lambda: tq.data.FixedLenFeature([], "string", 5), "default_value"),
        (lambda: tq.data.RawFeature([3], "string"), "must be one of uint8"),
        (lambda: tq.data.VarLenFeature("string", pad_value=0), "pad_value is for numbers"),
        (lambda: tq.data.parse_single_example(b"", {}), "features={}: must be names with"),
        (lambda: tq.data.parse_single_example(b"", {"a": torch.int64}), "'a': torch.int64: must be a name with"),  # pyright: ignore
        (lambda: tq.data.parse_single_example("text", MNIST), "a serialized example is bytes, not str"),  # pyright: ignore
        (lambda: tq.data.decode_raw(b"abc", torch.int16), "3 bytes are not a multiple of the 2 bytes of int16"),
    ],
)
def test_a_specification_that_makes_no_sense_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_many_lengths_and_layouts_do_not_fill_the_memory() -> None:
    parser = BatchParser({"s": tq.data.FixedLenFeature([], "string")})
    for length in range(300):
        parser.parse([tq.data.Example({"s": bytes(length)}).SerializeToString()] * 4)
    assert parser.num_templates <= 64
    assert math.prod(parser.parse([tq.data.Example({"s": b"ab"}).SerializeToString()] * 4)["s"][0]) == 97 * 98
