from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

import torchquorum as tq
from tests.unit.formats import protobuf_example as real
from torchquorum.errors import ConfigError
from torchquorum.formats.example import Example, Feature
from torchquorum.formats.protobuf import ExampleError, decode_varints, encode_varints
from torchquorum.formats.tfrecord import read_records

GOLDEN = Path(__file__).parents[2] / "golden"

INT64 = st.integers(-(2**63), 2**63 - 1) | st.integers(-1, 300)
FLOAT32 = st.floats(width=32)
FEATURES = st.one_of(
    st.builds(lambda v: Feature(int64_list=v), st.lists(INT64, max_size=20)),
    st.builds(lambda v: Feature(float_list=v), st.lists(FLOAT32, max_size=6)),
    st.builds(lambda v: Feature(bytes_list=v), st.lists(st.binary(max_size=200), max_size=4)),
    st.builds(Feature),
)
EXAMPLES = st.dictionaries(st.text(max_size=8), FEATURES, max_size=5)


def to_real(features: dict[str, Feature], kind: Any = real.Example) -> Any:
    message = kind()
    message.features.SetInParent()
    for name, feature in features.items():
        entry = message.features.feature[name]
        if feature.kind is not None:
            target = getattr(entry, feature.kind)
            target.SetInParent()
            target.value.extend(feature.value if feature.kind == "bytes_list" else feature.value.tolist())
    return message


def from_real(message: Any) -> Example:
    example = Example()
    if message.HasField("features"):
        example.features = {}
        for name, entry in message.features.feature.items():
            kind = entry.WhichOneof("kind")
            example.features[name] = Feature(**({kind: list(getattr(entry, kind).value)} if kind else {}))
    return example


@settings(deadline=None)
@given(EXAMPLES)
def test_protobuf_reads_what_is_written_and_writes_the_same_in_order_of_names(features: dict[str, Feature]) -> None:
    record = Example(features).SerializeToString()
    assert from_real(real.Example.FromString(record)) == Example(features)
    ours = Example(features).SerializeToString(deterministic=True)
    assert ours == to_real(features).SerializeToString(deterministic=True)


@settings(deadline=None)
@given(EXAMPLES, st.sampled_from([real.Example, real.Unpacked]))
def test_what_protobuf_writes_is_read_packed_or_not(features: dict[str, Feature], kind: Any) -> None:
    record = to_real(features, kind).SerializeToString()
    assert Example.FromString(record) == Example(features)


@settings(deadline=None)
@given(EXAMPLES)
def test_what_was_read_is_written_again_byte_for_byte(features: dict[str, Feature]) -> None:
    record = to_real(features).SerializeToString()
    assert Example.FromString(record).SerializeToString() == record


def assert_same_verdict(record: bytes) -> None:
    try:
        expected = from_real(real.Example.FromString(record))
    except DecodeError:
        with pytest.raises(ExampleError, match="not a tf.train.Example"):
            Example.FromString(record)
    else:
        assert Example.FromString(record) == expected


# Bytes that often are tags, lengths and small messages, so that some of them mean something.
LIKELY = st.sampled_from(
    [0x08, 0x0A, 0x0B, 0x0C, 0x0D, 0x09, 0x12, 0x1A, 0x1B, 0x1C, 0x80, 0xFF, 0x01, 0x00, 0x02, 0x04]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(LIKELY | st.integers(0, 255), max_size=40).map(bytes))
def test_arbitrary_bytes_get_the_verdict_that_protobuf_gives(record: bytes) -> None:
    assert_same_verdict(record)


@settings(max_examples=300, deadline=None)
@given(EXAMPLES, st.data())
def test_damaged_examples_get_the_verdict_that_protobuf_gives(features: dict[str, Feature], data: Any) -> None:
    record = bytearray(to_real(features).SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        if record:
            record[data.draw(st.integers(0, len(record) - 1))] = data.draw(LIKELY | st.integers(0, 255))
    assert_same_verdict(bytes(record[: data.draw(st.integers(0, len(record)))]))


@settings(deadline=None)
@given(st.lists(EXAMPLES, min_size=2, max_size=3))
def test_messages_after_one_another_are_merged_as_protobuf_merges_them(examples: list[dict[str, Feature]]) -> None:
    assert_same_verdict(b"".join(to_real(features).SerializeToString() for features in examples))


def field(number: int, content: bytes) -> bytes:
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content


@pytest.mark.parametrize(
    "value",
    [
        field(3, field(1, b"\x01")) + field(3, field(1, b"\x02\x03")),  # lists of one kind are joined
        field(3, field(1, b"\x01")) + field(2, field(1, bytes(4))),  # of two kinds the last one counts
        field(3, field(1, b"\x01") + b"\x08\x05" + field(1, b"\x06")),  # packed, unpacked, packed
        field(2, field(1, bytes(4)) + b"\x0d\x00\x00\x80\x3f"),
        field(2, field(1, bytes(5))),  # no multiple of four
        field(3, field(1, b"\x80")),  # a number that does not end
        field(3, field(1, b"\xff" * 9 + b"\x01")),
        field(3, field(1, b"\xff" * 9 + b"\x02")),
        field(3, field(1, b"\xff" * 10 + b"\x01")),
        field(3, b"\x08" + b"\xff" * 9 + b"\x01"),
        field(3, b"\x08" + b"\xff" * 9 + b"\x7f"),
        field(4, b"whatever") + field(3, field(1, b"\x01")),  # unknown fields
        b"\x23\x08\x01\x24" + field(3, field(1, b"\x01")),  # a group
        b"\x23\x08\x01",  # one that does not end
        b"\x24",
        b"\x07",
        b"\x00\x01",
        b"\x1a\x85\x80\x00",  # a length in more bytes than it needs
        field(1, b"\x08\x05"),  # a number where bytes are expected
    ],
)
@pytest.mark.parametrize("twice", [False, True])
def test_odd_encodings_mean_what_they_mean_to_protobuf(value: bytes, twice: bool) -> None:
    entry = field(1, field(1, b"a") + field(2, value) * (2 if twice else 1))
    assert_same_verdict(field(1, entry))
    assert_same_verdict(field(1, field(1, field(2, value)) + entry))  # the first one without a name
    assert_same_verdict(field(1, field(1, field(2, value) + field(1, b"a"))))  # the name after the value


def test_a_name_that_is_no_utf8_is_refused_as_by_protobuf() -> None:
    assert_same_verdict(field(1, field(1, field(1, b"\xff") + field(2, b""))))


def test_the_golden_examples_are_written_again_byte_for_byte() -> None:
    records = [*read_records(GOLDEN / "mnist_200.tfrecords"), *read_records(GOLDEN / "tf_mixed.tfrecords")]
    assert len(records) == 213
    for record in records:
        example = Example.FromString(record)
        assert example.SerializeToString() == record
        assert from_real(real.Example.FromString(record)) == example


def test_an_example_of_plain_values_is_what_tensorflow_wrote() -> None:
    record = next(iter(read_records(GOLDEN / "mnist_200.tfrecords")))
    image = Example.FromString(record)["image_raw"].value[0]
    assert tq.data.Example({"pixels": 784, "label": 5, "image_raw": image}).SerializeToString() == record


def test_every_kind_of_value_of_tensorflow_comes_out() -> None:
    examples = [Example.FromString(record) for record in read_records(GOLDEN / "tf_mixed.tfrecords")]
    assert examples[1]["a"].value.tolist() == [0, -1, 127, 128, 16383, 16384, -(2**63), 2**63 - 1]
    assert [examples[i]["a"].kind for i in (2, 3, 4, 5)] == ["int64_list", "bytes_list", "float_list", None]
    assert all(len(examples[i]["a"]) == 0 for i in (2, 3, 4, 5))
    assert examples[6].features == {}
    floats = examples[7]["x"].value
    assert (
        floats.dtype == np.float32 and np.isnan(floats[2]) and np.signbit(floats[1]) and floats[5] == np.float32(1e-45)
    )
    assert examples[8]["b"].value == [b"", b"abc", bytes(range(256))]
    assert examples[9][""].value.tolist() == [5]
    assert examples[10]["名前"].value == ["こんにちは".encode()]
    assert examples[11]["counts"].value.tolist() == list(range(300))
    assert examples[12].features is None


@pytest.mark.parametrize(
    ("value", "feature"),
    [
        (5, Feature(int64_list=[5])),
        (True, Feature(int64_list=[1])),
        (-0.5, Feature(float_list=[-0.5])),
        ("text", Feature(bytes_list=[b"text"])),
        (bytearray(b"raw"), Feature(bytes_list=[b"raw"])),
        (["a", b"b"], Feature(bytes_list=[b"a", b"b"])),
        ([1, 2.5], Feature(float_list=[1, 2.5])),
        (np.arange(4).reshape(2, 2), Feature(int64_list=[0, 1, 2, 3])),
        (np.float64(0.1), Feature(float_list=[np.float32(0.1)])),
        (torch.tensor([[1.5, 2.0]]), Feature(float_list=[1.5, 2.0])),
        (torch.tensor([3], dtype=torch.uint8), Feature(int64_list=[3])),
        (np.array([2**63 - 1], np.uint64), Feature(int64_list=[2**63 - 1])),
        (1e40, Feature(float_list=[float("inf")])),
    ],
)
def test_the_kind_of_a_feature_follows_from_the_value(value: Any, feature: Feature) -> None:
    example = Example({"x": value})
    assert example["x"] == feature and Example.FromString(example.SerializeToString()) == example


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "feature 'x': an empty list has no kind"),
        (None, "feature 'x': None"),
        ({"a": 1}, "feature 'x'"),
        (2**63, "feature 'x': int64_list with 9223372036854775808"),
        (-(2**63) - 1, "feature 'x'"),
        (2**64, "feature 'x'"),
        (1 + 2j, "feature 'x'"),
        (["a", 1], "feature 'x'"),
        ([[1], [2, 3]], "feature 'x'"),
    ],
)
def test_a_value_that_is_no_feature_is_refused_by_name(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Example({"x": value})


def test_mistakes_in_a_feature_are_told() -> None:
    with pytest.raises(ConfigError, match=r"Feature\(bytes_list, int64_list\): a feature has one kind"):
        Feature(bytes_list=[b"a"], int64_list=[1])
    with pytest.raises(ConfigError, match="must be a list of bytes"):
        Feature(bytes_list=b"not a list")
    with pytest.raises(ConfigError, match="whole numbers"):
        Feature(int64_list=[1.5])
    with pytest.raises(ConfigError, match="must be text"):
        Example({5: 1})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="UTF-8"):
        Example({"\ud800": 1}).SerializeToString()


@settings(deadline=None)
@given(st.lists(INT64, max_size=60))
def test_varints_come_back(numbers: list[int]) -> None:
    packed = encode_varints(np.array(numbers, np.int64))
    values, continued = decode_varints(np.frombuffer(packed, np.uint8))
    assert values.tolist() == numbers
    assert continued.tolist() == [place for place, byte in enumerate(packed) if byte > 127]


def test_examples_and_features_are_shown_shortly() -> None:
    example = Example({"pixels": list(range(9)), "name": b"a name that is long", "nothing": Feature()})
    assert repr(example["pixels"]) == "Feature(int64_list=[0, 1, 2, 3, and 5 more])"
    assert repr(example["name"]) == "Feature(bytes_list=[b'a name that '... (19 bytes)])"
    assert repr(Example({"nothing": Feature()})) == "Example({'nothing': Feature()})"
    assert len(example["pixels"]) == 9 and example["nothing"] == Feature() != example["pixels"]
    assert example != "example" and example["pixels"] != [0]


def test_any_bytes_are_read_not_only_those_of_the_type_bytes() -> None:
    record = Example({"label": 7}).SerializeToString()
    assert Example.FromString(bytearray(record)) == Example({"label": 7})  # pyright: ignore[reportArgumentType]
    assert Example.FromString(memoryview(record)) == Example({"label": 7})  # pyright: ignore[reportArgumentType]


def test_numbers_that_a_list_cannot_hold_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"bytes_list with 5: must be a list of bytes or text"):
        Feature(bytes_list=[b"a", 5])
    with pytest.raises(ConfigError, match=r"float_list=\['a'\]: must be a list of numbers"):
        Feature(float_list=["a"])
    with pytest.raises(ConfigError, match=r"int64_list with 9223372036854775808: must be from"):
        Feature(int64_list=np.array([2**63], np.uint64))
    assert Feature(bytes_list=["a", bytearray(b"b"), memoryview(b"c")]).value == [b"a", b"b", b"c"]
    assert Feature(int64_list=np.array([5], np.uint64)).value.tolist() == [5]


@pytest.mark.parametrize(
    "record",
    [
        b"\x0a\x04\x0a\x02\x0a\x00",  # an entry that is a name alone
        b"\x0a\x02\x12\x00",  # a set of features with one
        b"\x0a\x0b\x0a\x09\x0a\x00\x12\x05\x0a\x03\x0a\x05a",  # a value longer than its list
        b"\x0a\x0b\x0a\x09\x0a\x00\x12\x05\x0a\x03\x12\x01a",  # a list with one
        b"\xff\xff\xff\xff\x7f\x00",  # a field's number beyond all
        b"\x0b\x0c",  # a group, which is passed over
        b"\x0b\x12\x03abc\x0d1234\x119876543\x08\x80\x01\x0c",  # one with all kinds of fields
        b"\x0b\x12\x09abc\x0c",  # one with a field longer than all
        b"\x0b\x14",  # the end of another
        b"\x0b\x00\x0c",  # one with the field 0
        b"\x0b\x08\x01",  # one without end
        b"\x0b" * 99 + b"\x0c" * 99,
        b"\x0b" * 101 + b"\x0c" * 101,
        b"\x0c",
        b"\x0e\x00",  # a kind of field that there is not
        b"\x09abc",  # a number of eight bytes, of which there are three
    ],
)
def test_what_nobody_writes_gets_the_verdict_that_protobuf_gives(record: bytes) -> None:
    assert_same_verdict(record)


def test_a_field_that_nobody_knows_is_passed_over() -> None:
    # As TensorFlow's own protobuf does; the one for Python drops the whole feature.
    assert Example.FromString(b"\x0a\x06\x0a\x04\x0a\x00\x18\x05") == Example({"": Feature()})


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (b"\x80\x80\x80\x80\x10", "a field with too large a number at byte 0"),
        (b"\x0b" * 150, "more than 100 nested groups"),
        (b"\x0b\x14", "the end of another group"),
        (b"\x0b\x12\x09abc", "a field of 9 bytes where 3 are left"),
        (b"\x0b\x00", "a field with the number 0"),
        (b"\x0b", "a group that does not end"),
    ],
)
def test_bytes_that_are_no_example_are_named_by_their_place(record: bytes, message: str) -> None:
    with pytest.raises(ExampleError, match=f"not a tf.train.Example: .*{message}"):
        Example.FromString(record)
