"""Every moment counts alike: an age that lasts longer weighs more."""

import pytest

from tests.manual_clock import ManualClock
from torchquorum.reader.freshness import Freshness


def test_nothing_was_taken_yet() -> None:
    freshness = Freshness(ManualClock())
    assert freshness.ages() is None and freshness.age_s == 0.0


def test_the_age_grows_until_a_newer_version_comes() -> None:
    clock = ManualClock()
    freshness = Freshness(clock)
    freshness.took(0.5)
    clock.sleep(2.0)
    assert freshness.age_s == pytest.approx(2.5)
    freshness.took(0.1)
    assert freshness.age_s == pytest.approx(0.1)


def test_quantiles_are_over_time_and_not_over_versions() -> None:
    clock = ManualClock()
    freshness = Freshness(clock)
    for _ in range(100):  # 10 s of versions that are replaced after 0.1 s
        freshness.took(0.0)
        clock.sleep(0.1)
    freshness.took(0.0)
    clock.sleep(10.0)  # and one that is there for as long
    ages = freshness.ages()
    assert ages is not None
    assert ages.p50 == pytest.approx(0.1, abs=0.7) and ages.p99 > 9.0 and ages.now == pytest.approx(10.0)


def test_after_the_end_no_age_counts() -> None:
    clock = ManualClock()
    freshness = Freshness(clock)
    freshness.took(0.0)
    clock.sleep(1.0)
    freshness.took(0.2)
    freshness.stop()
    clock.sleep(1000.0)
    ages = freshness.ages()
    assert ages is not None and ages.p99 <= 1.0
