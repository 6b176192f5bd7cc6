"""The learning rates of the next update, of later ones that are asked for, and of the last one."""

import pytest
import torch

from torchquorum.update.rates import Rates
from torchquorum.wire.messages import ScheduleSpec

HALVES = ScheduleSpec("StepLR", {"step_size": 1, "gamma": 0.5})


def optimizer(*rates: float) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    made = torch.optim.SGD(groups)
    made.step()  # a schedule wants to see one
    return made


def in_groups(of: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in of.param_groups]


def test_without_a_schedule_the_rates_are_those_of_the_groups_and_stay() -> None:
    of = optimizer(0.5, 0.25)
    rates = Rates(of, None)
    assert not rates.scheduled and rates.now == rates.used == [0.5, 0.25]
    rates.advance()
    assert rates.now == [0.5, 0.25] and rates.ahead(3) == [0.5, 0.25]


def test_rates_that_the_program_writes_hold_from_the_next_update_on() -> None:
    of = optimizer(0.5)
    rates = Rates(of, None)
    rates.advance()
    of.param_groups[0]["lr"] = 0.125
    rates.changed()
    assert (rates.now, rates.used) == ([0.125], [0.5])
    rates.advance()
    assert rates.used == [0.125]


def test_a_schedule_sets_a_rate_per_update_whatever_is_written() -> None:
    of = optimizer(1.0)
    rates = Rates(of, HALVES)
    assert rates.scheduled
    rates.changed()
    found = []
    for _ in range(3):
        rates.advance()
        found.append((rates.used, rates.now))
    assert found == [([1.0], [0.5]), ([0.5], [0.25]), ([0.25], [0.125])]


def test_later_rates_may_be_asked_for_and_the_next_update_still_has_its_own() -> None:
    of = optimizer(1.0)
    rates = Rates(of, HALVES)
    assert [rates.ahead(update) for update in (0, 3, 2)] == [[1.0], [0.125], [0.25]]
    assert rates.now == [1.0] and in_groups(of) == [0.125]
    with rates.in_groups():
        assert in_groups(of) == [1.0]
    assert in_groups(of) == [0.125]
    rates.advance()
    assert rates.now == [0.5]


def test_a_schedule_that_ends_has_no_rates_after_that() -> None:
    of = optimizer(1.0)
    rates = Rates(of, ScheduleSpec("OneCycleLR", {"max_lr": 1.0, "total_steps": 3}))
    assert rates.ahead(2) is not None and rates.ahead(9) is None
    assert rates.now == rates.ahead(0)


@pytest.mark.parametrize(("version", "rate"), [(0, 1.0), (2, 0.25)])
def test_a_restored_run_has_the_rate_of_its_version(version: int, rate: float) -> None:
    rates = Rates(optimizer(1.0), HALVES)
    rates.begin_at(version)
    assert rates.now == rates.used == [rate]
