"""What differs between the chief's plan and another task's is named, all of it, with both values."""

import pytest

import torchquorum as tq
import torchquorum.wire.messages as m
from tests.protocol.by_hand import make_plan
from torchquorum.errors import RefusedError
from torchquorum.server.plan_difference import check_same_plan

WHO = "/job:worker/task:1"


def said(theirs: m.Plan, ours: m.Plan | None = None) -> str:
    with pytest.raises(RefusedError) as caught:
        check_same_plan(ours or make_plan(), theirs, WHO)
    return str(caught.value)


def test_equal_plans_are_equal_whatever_they_say_of_folders_and_ends() -> None:
    theirs = make_plan(logdir="elsewhere", last_step=7)
    check_same_plan(make_plan(), theirs, WHO)
    assert theirs != make_plan()


def test_all_that_differs_is_named_at_once_and_nothing_else() -> None:
    text = said(make_plan(rule=tq.Async(), placement="greedy"))
    assert text.startswith("/job:worker/task:1 has another rule, placement than the chief:\n")
    assert "  placement: greedy, the chief's is round_robin\n" in text
    assert "optimizer" not in text
    assert text.endswith("Start every task with the same program and the same arguments.")


def test_options_of_one_optimizer_are_told_by_name_and_group() -> None:
    ours = make_plan(optimizer=m.OptimizerSpec("SGD", [{"lr": 1.0}, {"lr": 2.0, "momentum": 0.5}]))
    theirs = make_plan(optimizer=m.OptimizerSpec("SGD", [{"lr": 1.0}, {"lr": 3.0}]))
    text = said(theirs, ours)
    assert "  optimizer SGD, group 1, lr: 3.0, the chief's is 2.0\n" in text
    assert "  optimizer SGD, group 1, momentum: nothing, the chief's is 0.5\n" in text
    assert "group 0" not in text


def test_another_class_is_told_by_its_name_and_another_number_of_groups_by_the_number() -> None:
    assert "  optimizer: Adam, the chief's is SGD\n" in said(make_plan(optimizer=m.OptimizerSpec("Adam", [{}])))
    more = make_plan(optimizer=m.OptimizerSpec("SGD", [{"lr": 1.0}, {"lr": 1.0}]))
    assert "  optimizer's parameter groups: 2, the chief's is 1\n" in said(more)


def test_a_long_list_is_cut() -> None:
    ours = make_plan(schedule=m.ScheduleSpec("StepLR", {str(i): 0 for i in range(12)}))
    theirs = make_plan(schedule=m.ScheduleSpec("StepLR", {str(i): 1 for i in range(12)}))
    text = said(theirs, ours)
    assert text.count("schedule StepLR") == 8 and "  and 4 more\n" in text
