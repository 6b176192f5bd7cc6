"""A few hundred inputs per target, the same in every run, and what longer runs of `make fuzz` have found."""

import shutil
import signal
from collections.abc import Iterator

import pytest

from tests.fuzz import run, targets

NAMES = [
    "codec", "stream", "opening", "graph messages", "tfrecord", "example", "crc32c", "checkpoint", "idx", "ledger", "journal", "measures",
    "flags", "cluster", "environment", "words",
]  # fmt: skip
DEEP = b"[" * 20_000
FOUND = [
    ("environment", b'L{"cluster\xff'),  # bytes of the environment that are no UTF-8
    ("environment", b"L" + DEEP),
    ("environment", b"T" + DEEP),
    ("words", b"\1worker" + b"1" * 5000 + b":3x"),  # more digits than Python reads
    ("ledger", b'{"worker":' + DEEP + b"\n"),
    ("measures", b'{"name":' + DEEP + b"\n"),
    ("codec", b"\x91" * 20_000),
]


@pytest.fixture(autouse=True)
def scratch() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, run.too_slow)
    yield
    signal.signal(signal.SIGALRM, before)
    shutil.rmtree(targets.folder(), ignore_errors=True)


def test_no_target_is_left_out_here() -> None:
    assert list(targets.make_targets()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_damaged_inputs_are_understood_or_refused_with_the_errors_that_are_promised(name: str) -> None:
    result = run.fuzz(targets.make_targets()[name], seed=1, cases=300, seconds=60.0)
    assert result.cases == 300 and not result.finds, "\n".join(result.finds)


@pytest.mark.parametrize(("name", "body"), FOUND, ids=[f"{name} {n}" for n, (name, _) in enumerate(FOUND)])
def test_what_was_found_once_is_refused(name: str, body: bytes) -> None:
    _, find = run.try_one(targets.make_targets()[name], body)
    assert find is None, find


def test_a_target_that_breaks_or_hangs_is_a_find(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(body: bytes) -> None:
        while body:
            pass
        raise KeyError("broken")

    monkeypatch.setattr(run, "CASE_S", 0.2)
    target = targets.Target(breaks, (ValueError,), ())
    assert "KeyError" in (run.try_one(target, b"")[1] or "") and "took more" in (run.try_one(target, b"x")[1] or "")
