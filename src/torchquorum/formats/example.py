"""tf.train.Example: named lists of bytes, floats or integers, and their encoding.

Used by `data.parsing`, `data.convert` and users' programs. `Example` is one example in memory; `scan` finds each feature in the
bytes without decoding it. What always holds: features keep their order when written and read, so an example that TensorFlow
wrote is written again byte for byte; everything that protobuf accepts is accepted, with the same meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias

import numpy as np

from torchquorum.errors import ConfigError
from torchquorum.formats.protobuf import (
    BYTES,
    ExampleError,
    decode_varints,
    encode_field,
    encode_varints,
    fields,
    read_length,
)

Kind: TypeAlias = Literal["bytes_list", "float_list", "int64_list"]
KINDS: tuple[Kind, ...] = ("bytes_list", "float_list", "int64_list")
Scanned: TypeAlias = tuple[Kind | None, list[tuple[int, int]], bool]

_FIELD_1, _FIELD_2, _FIELD_3 = (number << 3 | BYTES for number in (1, 2, 3))
_KIND_OF_TAG: dict[int, Kind] = {_FIELD_1: "bytes_list", _FIELD_2: "float_list", _FIELD_3: "int64_list"}
_UNPACKED = {"bytes_list": _FIELD_1, "float_list": 1 << 3 | 5, "int64_list": 1 << 3 | 0}
_SHOWN = 4


class Feature:
    """One list of an example: of bytes, float32 or int64; without a kind, empty.

    Attributes:
        kind: "bytes_list", "float_list", "int64_list" or None.
        value: The list: of bytes, or a NumPy array of float32 or int64.
    """

    __slots__ = ("kind", "value")

    def __init__(self, *, bytes_list: Any = None, float_list: Any = None, int64_list: Any = None) -> None:
        given: dict[Kind, Any] = dict(zip(KINDS, (bytes_list, float_list, int64_list), strict=True))
        kinds: list[Kind] = [kind for kind in KINDS if given[kind] is not None]
        if len(kinds) > 1:
            raise ConfigError(f"Feature({', '.join(kinds)}): a feature has one kind; give one of them")
        self.kind: Kind | None = kinds[0] if kinds else None
        self.value: Any = [] if self.kind is None else _CONVERT[self.kind](given[self.kind])

    @classmethod
    def of(cls, value: Any) -> Feature:
        """Returns a feature whose kind follows from the type of the values.

        Text and bytes become a list of bytes, integers and booleans one of int64, floats one of float32; arrays and
        tensors are flattened.

        Raises:
            ConfigError: The type is another one, or unknown because there are no values.
        """
        if isinstance(value, Feature):
            return value
        if isinstance(value, bytes | bytearray | memoryview | str):
            return cls(bytes_list=[value])
        if isinstance(value, list | tuple):
            if not value:
                raise ConfigError(
                    "an empty list has no kind; write Feature(int64_list=[]), or float_list or bytes_list"
                )
            if all(isinstance(each, bytes | bytearray | memoryview | str) for each in value):
                return cls(bytes_list=value)
        array = _as_array(value)
        if array.dtype.kind in "iub":
            return cls(int64_list=array)
        if array.dtype.kind == "f":
            return cls(float_list=array)
        raise ConfigError(f"{_show(value)}: a feature must be bytes, text, integers or floats")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Feature) and self.kind == other.kind and _encode_list(self) == _encode_list(other)

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __len__(self) -> int:
        return len(self.value)

    def __repr__(self) -> str:
        if self.kind is None:
            return "Feature()"
        shown = ", ".join(_show(each) for each in self.value[:_SHOWN])
        more = f", and {len(self.value) - _SHOWN:,} more" if len(self.value) > _SHOWN else ""
        return f"Feature({self.kind}=[{shown}{more}])"


class Example:
    """A tf.train.Example: features by name.

    Args:
        features: Names and `Feature`s, or values whose kind follows from their type: `{"label": 7, "image_raw": b"..."}`.
            They are written in this order. None is an example without a features field.

    Raises:
        ConfigError: A name is not text, or a value cannot be a feature.
    """

    __slots__ = ("features",)

    def __init__(self, features: Mapping[str, Any] | None = None) -> None:
        self.features: dict[str, Feature] | None = None
        if features is None:
            return
        self.features = {}
        for name, value in features.items():
            if not isinstance(name, str):
                raise ConfigError(f"feature name {name!r}: must be text")
            try:
                self.features[name] = Feature.of(value)
            except ConfigError as error:
                raise ConfigError(f"feature {name!r}: {error}") from None

    def __getitem__(self, name: str) -> Feature:
        return (self.features or {})[name]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Example) and self.features == other.features

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        return f"Example({self.features!r})"

    def SerializeToString(self, deterministic: bool = False) -> bytes:
        """Returns the encoded example, with the features in their order.

        TensorFlow's own order differs in every process, unless it is deterministic.

        Args:
            deterministic: Sort the features by name, as TensorFlow does with this option.
        """
        if self.features is None:
            return b""
        entries = [(_encode_name(name), feature) for name, feature in self.features.items()]
        if deterministic:
            # protobuf's Python library sorts a name after longer names that begin with it.
            entries.sort(key=lambda entry: (*entry[0], 256))
        pieces = []
        for name, feature in entries:
            content = b""
            if feature.kind is not None:
                content = encode_field(1 + KINDS.index(feature.kind), _encode_list(feature))
            pieces.append(encode_field(1, encode_field(1, name) + encode_field(2, content)))
        return encode_field(1, b"".join(pieces))

    @classmethod
    def FromString(cls, record: bytes) -> Example:
        """Decodes an example.

        Raises:
            ExampleError: The bytes are not an example.
        """
        if not isinstance(record, bytes):
            record = bytes(record)
        example = cls()
        scanned = scan(record)
        if scanned is not None:
            example.features = {name: _decode(record, found) for name, found in scanned.items()}
        return example


def scan(record: bytes) -> dict[str, Scanned] | None:
    """Finds the features of an example: the kind of each, where its values are, and whether they are all packed.

    The values are not decoded. For a list of numbers, the pieces in order are its packed form, whether it was packed or
    not. Of several features with one name the last one counts. None means that there is no features field.

    Raises:
        ExampleError: The bytes are not an example.
    """
    try:
        usual = _scan_usual(record)
    except (IndexError, UnicodeDecodeError, ExampleError):
        usual = None  # the general way below reports the error, if any
    if usual is not None:
        return usual
    found: dict[str, Scanned] | None = None
    for tag, start, end in fields(record, 0, len(record)):
        if tag == _FIELD_1:
            if found is None:
                found = {}
            for inner_tag, inner_start, inner_end in fields(record, start, end):
                if inner_tag == _FIELD_1:
                    name, feature = _scan_entry(record, inner_start, inner_end)
                    found[name] = feature
    return found


def _scan_usual(record: bytes) -> dict[str, Scanned] | None:
    """Finds the features of an example in the usual encoding, in a third of the time; returns None for another encoding."""
    found: dict[str, Scanned] = {}
    size = len(record)
    if size == 0 or record[0] != _FIELD_1:
        return None
    length, at = read_length(record, 1)
    if at + length != size:
        return None
    while at < size:
        if record[at] != _FIELD_1:
            return None
        length, at = read_length(record, at + 1)
        end = at + length
        if end > size or record[at] != _FIELD_1:
            return None
        length, start = read_length(record, at + 1)
        at = start + length
        name = record[start:at].decode()
        if at >= end or record[at] != _FIELD_2:
            return None
        length, at = read_length(record, at + 1)
        if at + length != end:
            return None
        kind, pieces = None, []
        if length:
            kind = _KIND_OF_TAG.get(record[at])
            length, at = read_length(record, at + 1)
            if kind is None or at + length != end:
                return None
            while at < end:
                if record[at] != _FIELD_1:
                    return None
                length, start = read_length(record, at + 1)
                at = start + length
                pieces.append((start, at))
                if kind == "float_list" and length % 4:
                    return None
        if at != end:
            return None
        found[name] = (kind, pieces, True)
    return found


def _scan_entry(record: bytes, at: int, end: int) -> tuple[str, Scanned]:
    name: str = ""
    feature: Scanned = (None, [], True)
    for tag, start, stop in fields(record, at, end):
        if tag == _FIELD_1:
            try:
                name = record[start:stop].decode()
            except UnicodeDecodeError:
                raise ExampleError(
                    f"not a tf.train.Example: a name at byte {start} of the record is not UTF-8"
                ) from None
        elif tag == _FIELD_2:
            feature = _scan_feature(record, start, stop, feature)
    return name, feature


def _scan_feature(record: bytes, at: int, end: int, before: Scanned) -> Scanned:
    kind, pieces, packed = before
    for tag, start, stop in fields(record, at, end):
        this = _KIND_OF_TAG.get(tag)
        if this is None:
            continue
        if this != kind:  # the last kind counts; lists of one kind are concatenated
            kind, pieces, packed = this, [], True
        unpacked = _UNPACKED[this]
        for inner_tag, inner_start, inner_end in fields(record, start, stop):
            if inner_tag in (_FIELD_1, unpacked):
                if this == "float_list" and (inner_end - inner_start) % 4:
                    raise ExampleError(
                        f"not a tf.train.Example: at byte {inner_start} of the record, floats of {inner_end - inner_start} "
                        "bytes, which is not a multiple of 4"
                    )
                pieces.append((inner_start, inner_end))
                packed = packed and inner_tag == _FIELD_1
    return kind, pieces, packed


def _decode(record: bytes, scanned: Scanned) -> Feature:
    kind, pieces, _ = scanned
    feature = Feature()
    feature.kind = kind
    values = [record[start:end] for start, end in pieces]
    if kind == "bytes_list":
        feature.value = values
    elif kind == "float_list":
        feature.value = np.frombuffer(b"".join(values), "<f4").astype(np.float32)
    elif kind == "int64_list":
        feature.value = decode_varints(np.frombuffer(b"".join(values), np.uint8))[0]
    return feature


def _encode_name(name: str) -> bytes:
    try:
        return name.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"feature {name!r}: the name must be encodable as UTF-8") from None


def _encode_list(feature: Feature) -> bytes:
    if feature.kind == "bytes_list":
        return b"".join(encode_field(1, each) for each in feature.value)
    packed = (
        encode_varints(feature.value) if feature.kind == "int64_list" else np.asarray(feature.value, "<f4").tobytes()
    )
    return encode_field(1, packed) if packed else b""


def _as_array(value: Any) -> np.ndarray:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{_show(value)}: it cannot become an array: {error}") from None
    return array.reshape(-1)


def _to_bytes(values: Any) -> list[bytes]:
    if isinstance(values, bytes | bytearray | memoryview | str) or not isinstance(values, Iterable):
        raise ConfigError(f"bytes_list={_show(values)}: must be a list of bytes or text")
    converted = []
    for each in values:
        if isinstance(each, str):
            each = each.encode()
        elif not isinstance(each, bytes | bytearray | memoryview):
            raise ConfigError(f"bytes_list with {_show(each)}: must be a list of bytes or text")
        converted.append(bytes(each))
    return converted


def _to_floats(values: Any) -> np.ndarray:
    array = _as_array(values)
    if array.dtype.kind not in "fiub":
        raise ConfigError(f"float_list={_show(values)}: must be a list of numbers")
    with np.errstate(over="ignore"):  # beyond float32 is infinity, as in protobuf
        return array.astype(np.float32)


def _to_ints(values: Any) -> np.ndarray:
    array = _as_array(values)
    if array.dtype.kind not in "iub" and array.size:
        raise ConfigError(f"int64_list={_show(values)}: must be a list of whole numbers of at most 64 bits")
    if array.dtype == np.uint64 and array.size and int(array.max()) >= 1 << 63:
        raise ConfigError(f"int64_list with {array.max()}: must be from -2**63 to 2**63 - 1")
    return array.astype(np.int64)


_CONVERT = {"bytes_list": _to_bytes, "float_list": _to_floats, "int64_list": _to_ints}


def _show(value: Any) -> str:
    if isinstance(value, bytes) and len(value) > 16:
        return f"{value[:12]!r}... ({len(value):,} bytes)"
    text = repr(value.item() if isinstance(value, np.generic) else value)
    return text if len(text) <= 60 else f"{text[:56]}... ({type(value).__name__})"
