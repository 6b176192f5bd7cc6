"""The run's settings: what workers may send, and which update a change belongs to."""

from typing import Any

import pytest

from torchquorum.server.run_settings import RunSettings
from torchquorum.wire.settings import Settings


def settings(**options: Any) -> Settings:
    return [{"lr": 0.1, "betas": [0.9, 0.99], "foreach": None, **options}]


def test_what_was_offered_comes_with_the_next_update_and_only_with_that() -> None:
    run = RunSettings(settings())
    assert run.take() == [] and not run.pending
    run.offer(settings(lr=0.2))
    assert run.pending and run.now == settings()
    assert run.take() == [{"lr": 0.2}]
    assert not run.pending and run.take() == [] and run.now == settings(lr=0.2)


def test_the_last_offer_before_an_update_counts() -> None:
    run = RunSettings(settings())
    run.offer(settings(lr=0.2))
    run.offer(settings())
    assert not run.pending and run.take() == []


def test_rates_of_the_fast_path_are_settings_like_others() -> None:
    run = RunSettings(settings())
    run.offer_rates([0.1])
    assert run.take() == []
    run.offer_rates([0.3])
    assert run.take() == [{"lr": 0.3}] and run.now == settings(lr=0.3)


@pytest.mark.parametrize(
    "options",
    [
        {"lr": "fast"},
        {"lr": None},
        {"lr": True},
        {"betas": [0.9]},
        {"betas": 0.9},
        {"betas": [0.9, "x"]},
        {"foreach": [1]},
        {"lr": {"tensor": 0.1, "dtype": "load"}},
        {"lr": {}},
        {"more": 1},
    ],
    ids=str,
)
def test_settings_of_another_kind_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="settings of other|not a value of that kind"):
        RunSettings(settings()).check(settings(**options))


@pytest.mark.parametrize(
    "options", [{"lr": 1}, {"lr": {"tensor": 0.1, "dtype": "float32"}}, {"foreach": True}], ids=str
)
def test_settings_of_the_same_kind_are_taken(options: dict[str, Any]) -> None:
    taken = RunSettings(settings())
    taken.check(settings(**options))
    taken.check([])
    assert settings(**options) != settings()
