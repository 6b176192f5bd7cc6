"""What a program has written into its parameter groups."""

from typing import Any

import pytest
import torch
from torch import nn

from torchquorum.errors import ConfigError
from torchquorum.worker.program_settings import ProgramSettings


def sgd(lr: Any = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=lr)


def test_settings_are_the_options_that_the_class_names() -> None:
    optimizer = sgd()
    optimizer.param_groups[0] |= {"name": "mine", "initial_lr": 1.0, "max_lr": 2.0}
    now = ProgramSettings(optimizer).now
    assert now[0]["lr"] == 0.1 and not {"params", "name", "initial_lr", "max_lr"} & set(now[0])
    assert ProgramSettings(optimizer, more=True).now[0]["name"] == "mine"
    assert "max_lr" not in ProgramSettings(optimizer, more=True).now[0]


def test_as_long_as_nothing_changes_it_is_the_same_object() -> None:
    optimizer = sgd()
    program = ProgramSettings(optimizer)
    first = program.look()
    assert program.look() is first
    optimizer.param_groups[0]["lr"] = 0.2
    second = program.look()
    assert second is not first and second[0]["lr"] == 0.2 and first[0]["lr"] == 0.1
    optimizer.param_groups[0]["lr"] = 0.1 * 2
    assert program.look() is second


def test_a_rate_that_is_a_tensor_is_looked_into() -> None:
    optimizer = sgd(torch.tensor(0.5))
    program = ProgramSettings(optimizer)
    first = program.look()
    assert program.look() is first
    optimizer.param_groups[0]["lr"].fill_(0.25)
    assert program.look()[0]["lr"] == {"tensor": 0.25, "dtype": "float32"}


def test_what_the_run_has_is_written_into_the_groups_and_is_no_change_of_the_program() -> None:
    optimizer = sgd()
    program = ProgramSettings(optimizer)
    run = [{**program.now[0], "lr": 0.3}]
    program.write(run)
    assert optimizer.param_groups[0]["lr"] == 0.3 and program.look() == run
    # A scheduler object that is made now starts from what the program gave.
    assert optimizer.param_groups[0]["initial_lr"] == 0.1


def test_what_is_equal_is_not_written() -> None:
    lr = torch.tensor(0.5)
    optimizer = sgd(lr)
    program = ProgramSettings(optimizer)
    program.write([dict(program.now[0])])
    assert optimizer.param_groups[0]["lr"] is lr and "initial_lr" not in optimizer.param_groups[0]


def test_lost_options_and_other_groups_are_errors() -> None:
    optimizer = sgd()
    program = ProgramSettings(optimizer)
    del optimizer.param_groups[0]["momentum"]
    with pytest.raises(ConfigError, match=r"param_groups\[0\] has no 'momentum' any more"):
        program.look()
    optimizer.param_groups.append({})
    with pytest.raises(ConfigError, match="has 2 parameter groups, and had 1"):
        program.look()


def test_other_parameters_in_a_group_are_an_error() -> None:
    optimizer = sgd()
    group, program = optimizer.param_groups[0], ProgramSettings(optimizer)
    group["params"] = list(group["params"])
    program.look()
    group["params"].pop()
    with pytest.raises(ConfigError, match=r"has 1 parameters, and others than the 2 when the run began"):
        program.look()


@pytest.mark.parametrize("value", [None, "0.1", (0.1, 0.2), True])
def test_a_value_of_another_kind_is_an_error_that_names_one(value: Any) -> None:
    optimizer = sgd()
    program = ProgramSettings(optimizer)
    optimizer.param_groups[0]["lr"] = value
    with pytest.raises(ConfigError, match=r"param_groups\[0\]\['lr'\] = .*: give a value such as 0.1"):
        program.look()
