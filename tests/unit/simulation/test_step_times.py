"""Each distribution has the mean and the shape that its text says."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from torchquorum.errors import ConfigError
from torchquorum.simulation.step_times import Constant, Recorded, RecordedTimes, parse_seconds, parse_times

N = 40_000


def drawn(text: str, worker: int = 0, seed: int = 0, n: int = N) -> np.ndarray:
    return np.array(list(itertools.islice(parse_times(text).draws(worker, seed), n)))


def test_means_and_medians() -> None:
    assert set(drawn("0.25")) == {0.25} == set(drawn("constant:250ms"))
    assert drawn("exponential:0.2").mean() == pytest.approx(0.2, rel=0.03)
    assert drawn("exponential:0.2:1").mean() == pytest.approx(1.2, rel=0.01) and drawn("exponential:0.2:1").min() >= 1
    assert np.median(drawn("lognormal:0.1:0.5")) == pytest.approx(0.1, rel=0.03)
    assert np.log(drawn("lognormal:0.1:0.5")).std() == pytest.approx(0.5, rel=0.03)
    pareto = drawn("pareto:0.1:3")
    assert pareto.min() >= 0.1 and pareto.mean() == pytest.approx(0.15, rel=0.03)
    assert (pareto > 0.2).mean() == pytest.approx(0.5**3, rel=0.1)


def test_draws_follow_from_seed_and_worker() -> None:
    assert list(drawn("exponential:1", 3, 5, 200)) == list(drawn("exponential:1", 3, 5, 200))
    assert list(drawn("exponential:1", 3, 5, 200)) != list(drawn("exponential:1", 4, 5, 200))
    assert list(drawn("exponential:1", 3, 5, 200)) != list(drawn("exponential:1", 3, 6, 200))


def test_a_trace_of_times_and_one_of_workers(tmp_path: Path) -> None:
    path = tmp_path / "times"
    path.write_text("# seconds\n0.1\n\n200ms\n0.3\n")
    found = parse_times(f"trace:{path}")
    assert found == RecordedTimes((0.1, 0.2, 0.3)) and set(drawn(f"trace:{path}", n=100)) == {0.1, 0.2, 0.3}
    path.write_text("0,0.1\n1,0.5\n0,0.2\n")
    found = parse_times(f"trace:{path}")
    assert found == Recorded({0: [0.1, 0.2], 1: [0.5]})
    assert list(drawn(f"trace:{path}", 0, n=3)) == [0.1, 0.2, 0.1]
    assert set(drawn(f"trace:{path}", 2, n=4)) == {0.1, 0.2}  # a third worker is as the first


@pytest.mark.parametrize(
    ("content", "message"),
    [("0.1\nfast\n", "line 2"), ("", "has no times"), ("0.1\n1,0.1\n", "in one form"), ("0,-1\n", "line 1")],
)
def test_a_wrong_trace_names_the_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "times"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        parse_times(f"trace:{path}")
    with pytest.raises(ConfigError, match="cannot be read"):
        parse_times(f"trace:{tmp_path / 'none'}")


@pytest.mark.parametrize(
    "text", ["", "fast", "exponential", "exponential:0", "pareto:1", "lognormal:1:-1", "1:2", "inf"]
)
def test_a_wrong_text_says_what_is_allowed(text: str) -> None:
    with pytest.raises(ConfigError, match="allowed are 0.1, exponential:0.1"):
        parse_times(text)


def test_durations() -> None:
    assert [parse_seconds(t) for t in ("2", "2s", "5m", "1h")] == [2, 2, 300, 3600]
    assert math.isclose(parse_seconds("5ms"), 0.005) and math.isclose(parse_seconds("7us"), 7e-6)
    assert parse_times("3ms") == Constant(parse_seconds("3ms"))
    with pytest.raises(ConfigError, match="such as 0.1, 100ms"):
        parse_seconds("-1s")
