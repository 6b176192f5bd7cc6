import sys
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchquorum.formats import crc32c as module

# From RFC 3720, section B.4, and the check value of the polynomial's catalogue.
KNOWN = [
    (b"", 0x00000000),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
]


@pytest.mark.parametrize(("data", "crc"), KNOWN)
def test_known_values_come_out_of_both_implementations(data: bytes, crc: int) -> None:
    assert module.crc32c(data) == crc
    assert module.crc32c_numpy(data) == crc


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 255, 256, 257, 259, 260, 511, 512, 1000, 5_000, 1_100_000])
def test_numpy_agrees_with_the_library_at_every_length(size: int) -> None:
    library = pytest.importorskip("google_crc32c")
    data = np.random.default_rng(size).bytes(size)
    assert module.crc32c_numpy(data) == library.value(data)


@settings(deadline=None)
@given(st.binary(max_size=600))
def test_numpy_agrees_with_the_loop(data: bytes) -> None:
    assert module.crc32c_numpy(data) == module.crc32c_loop(data)


def test_many_at_once_are_the_same_as_one_by_one() -> None:
    pieces = [b"", b"a", bytes(1000), b"abc" * 500]
    assert module.masked_crc32c_many(pieces).tolist() == [module.masked_crc32c(piece) for piece in pieces]
    assert module.masked_crc32c_many([]).tolist() == []


def test_the_library_is_used_where_it_is_there() -> None:
    pytest.importorskip("google_crc32c")
    assert module.implementation() == "google-crc32c"


@pytest.mark.parametrize("there", [None, "python"])
def test_without_the_library_or_its_c_part_numpy_computes(there: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = None
    if there is not None:
        fake = ModuleType("google_crc32c")
        fake.implementation = there  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "google_crc32c", fake)
    monkeypatch.setattr(module, "library", module.find_library())
    assert module.implementation() == "numpy"
    assert module.crc32c(b"123456789") == 0xE3069283
    assert module.masked_crc32c_many([b"123456789"]).tolist() == [module.masked_crc32c(b"123456789")]
