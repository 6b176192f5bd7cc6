"""Feature specifications: what to read from an example, with TensorFlow's names.

Written by users, read by `parsing`. What always holds: an invalid specification is refused when it is created.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from torchquorum.errors import ConfigError
from torchquorum.formats.example import Kind

_KIND_OF_NAME: dict[str, Kind] = {
    "string": "bytes_list",
    "bytes": "bytes_list",
    "str": "bytes_list",
    "float32": "float_list",
    "float": "float_list",
    "int64": "int64_list",
    "int": "int64_list",
}
_RAW: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "float32",
        "float64",
        "uint16",
        "uint32",
        "uint64",
    )
}


def _name_of(dtype: Any) -> str:
    if isinstance(dtype, str):
        return dtype.removeprefix("torch.")
    if isinstance(dtype, torch.dtype):
        return str(dtype).removeprefix("torch.")
    if isinstance(dtype, type) and issubclass(dtype, np.generic):
        return np.dtype(dtype).name
    # np.dtype and TensorFlow's DType have a name, Python's own types a __name__.
    return str(getattr(dtype, "name", getattr(dtype, "__name__", dtype)))


def _kind_of(dtype: Any, where: str) -> Kind:
    kind = _KIND_OF_NAME.get(_name_of(dtype))
    if kind is None:
        raise ConfigError(
            f"{where}: dtype={dtype!r}: an example holds torch.int64, torch.float32 and 'string'; use one of these and "
            "convert afterwards, or RawFeature for numbers stored as bytes"
        )
    return kind


def _check_shape(shape: Any, where: str) -> tuple[int, ...]:
    sizes = (shape,) if isinstance(shape, int) else shape
    if not isinstance(sizes, Sequence) or isinstance(sizes, str):
        raise ConfigError(f"{where}: shape={shape!r}: must be a list of sizes, [] for a single value")
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ConfigError(
                f"{where}: shape={shape!r}: every size must be a whole number, 0 or more; VarLenFeature has no shape"
            )
    return tuple(sizes)


@dataclass(frozen=True, eq=False)
class FixedLenFeature:
    """A feature with a fixed number of values in every example; a batch of them is one tensor.

    Attributes:
        shape: The shape of one example's values; [] for a single value.
        dtype: torch.int64, torch.float32 or "string"; also by name, or as a type of NumPy, Python or TensorFlow.
        default_value: For examples without this feature: one value, or as many as `shape` holds. Without it they are an
            error.
    """

    shape: Sequence[int]
    dtype: Any
    default_value: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _check_shape(self.shape, "FixedLenFeature"))
        kind = self.kind
        if self.default_value is not None:
            object.__setattr__(self, "default_value", _fill(self.default_value, kind, math.prod(self.shape)))

    @property
    def kind(self) -> Kind:
        """Returns the kind of its list in an example."""
        return _kind_of(self.dtype, "FixedLenFeature")


@dataclass(frozen=True, eq=False)
class VarLenFeature:
    """A feature with any number of values, or none; a batch of them is a list with one tensor per example.

    Attributes:
        dtype: As for FixedLenFeature.
        pad_value: With it, a batch of numbers is one tensor as long as the longest example, padded with this value.
    """

    dtype: Any
    pad_value: float | None = None

    def __post_init__(self) -> None:
        if self.kind == "bytes_list" and self.pad_value is not None:
            raise ConfigError("VarLenFeature: pad_value is for numbers; strings are returned as lists")

    @property
    def kind(self) -> Kind:
        """Returns the kind of its list in an example."""
        return _kind_of(self.dtype, "VarLenFeature")


@dataclass(frozen=True, eq=False)
class RawFeature:
    """Numbers stored as one string of bytes, little-endian; as tf.io.decode_raw and a reshape.

    Attributes:
        shape: The shape of one example's numbers, such as [784].
        dtype: The type of the numbers, such as torch.uint8.
    """

    shape: Sequence[int]
    dtype: Any = torch.uint8

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _check_shape(self.shape, "RawFeature"))
        _ = self.numpy_dtype

    @property
    def kind(self) -> Kind:
        """Returns the kind of its list in an example."""
        return "bytes_list"

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Returns the type of the numbers."""
        name = _name_of(self.dtype)
        if name not in _RAW:
            raise ConfigError(f"RawFeature: dtype={self.dtype!r}: must be one of {', '.join(_RAW)}")
        return np.dtype(name).newbyteorder("<")


Spec: TypeAlias = FixedLenFeature | VarLenFeature | RawFeature
Specs: TypeAlias = Mapping[str, Spec]


def check_specs(features: Any) -> dict[str, Spec]:
    """Checks specifications, and returns them.

    Raises:
        ConfigError: They are empty, or something else.
    """
    if not isinstance(features, Mapping) or not features:
        raise ConfigError(f"features={features!r}: must be names with FixedLenFeature, VarLenFeature or RawFeature")
    for name, spec in features.items():
        if not isinstance(name, str) or not isinstance(spec, FixedLenFeature | VarLenFeature | RawFeature):
            raise ConfigError(
                f"features: {name!r}: {spec!r}: must be a name with FixedLenFeature, VarLenFeature or RawFeature"
            )
    return dict(features)


def decode_raw(data: bytes, dtype: Any = torch.uint8) -> torch.Tensor:
    """Decodes bytes as little-endian numbers, as tf.io.decode_raw.

    Raises:
        ConfigError: There is no such type, or the number of bytes is not a multiple of its size.
    """
    kind = RawFeature([], dtype).numpy_dtype
    if len(data) % kind.itemsize:
        raise ConfigError(
            f"decode_raw: {len(data):,} bytes are not a multiple of the {kind.itemsize} bytes of {kind.name}"
        )
    return torch.from_numpy(np.frombuffer(data, kind).astype(kind.newbyteorder("=")))


def _fill(value: Any, kind: Kind, count: int) -> Any:
    """Returns a default value as the list of an example."""
    if kind == "bytes_list":
        values = list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [value]
        values = [each.encode() if isinstance(each, str) else each for each in values]
        if not all(isinstance(each, bytes) for each in values):
            raise ConfigError(
                f"FixedLenFeature: default_value={value!r}: must be bytes or text, as its dtype is 'string'"
            )
    else:
        try:
            array = np.asarray(value).reshape(-1)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"FixedLenFeature: default_value={value!r}: {error}") from None
        if array.dtype.kind not in ("iub" if kind == "int64_list" else "fiub"):
            raise ConfigError(f"FixedLenFeature: default_value={value!r}: must be numbers of its dtype")
        values = array.astype(np.int64 if kind == "int64_list" else np.float32)
    if len(values) == 1 and count != 1:
        return [values[0]] * count if isinstance(values, list) else np.repeat(values, count)
    if len(values) != count:
        raise ConfigError(
            f"FixedLenFeature: default_value has {len(values)} values: must be one or {count}, as its shape"
        )
    return values
