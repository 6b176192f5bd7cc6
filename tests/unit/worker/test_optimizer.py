"""What users see of the worker: the optimizer, its schedule, and the weight decay of the seeds."""

import functools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import torchquorum as tq
from torchquorum.errors import ConfigError
from torchquorum.wire.messages import ScheduleSpec
from torchquorum.worker.regularizer import l2_regularizer

STEP = ScheduleSpec("StepLR", {"step_size": 30, "gamma": 0.5})


def sgd(lr: Any = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=lr)


# -- the optimizer as it travels ------------------------------------------------------------------------------------------


def test_an_optimizer_travels_as_its_name_and_the_arguments_of_each_group() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    inner = torch.optim.Adam(
        [{"params": first.parameters(), "lr": 0.5}, {"params": second.parameters(), "betas": (0.1, 0.2)}], lr=0.25
    )
    spec = tq.Optimizer(inner).spec()
    assert spec.name == "Adam"
    assert [g["lr"] for g in spec.groups] == [0.5, 0.25]
    assert [list(g["betas"]) for g in spec.groups] == [[0.9, 0.999], [0.1, 0.2]]
    assert all("params" not in g for g in spec.groups)


def test_named_parameters_and_a_schedulers_marks_do_not_travel() -> None:
    inner = torch.optim.SGD(nn.Linear(2, 2).named_parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(inner, 3)
    assert not {"params", "param_names", "initial_lr"} & set(tq.Optimizer(inner).spec().groups[0])


def test_the_learning_rate_is_known_before_the_session_begins_also_as_a_tensor() -> None:
    assert tq.Optimizer(sgd(0.5)).lr == [0.5]
    assert tq.Optimizer(sgd(torch.tensor(0.5))).lr == [0.5]


def test_an_optimizer_of_ones_own_that_is_not_registered_is_refused_with_the_line_to_write() -> None:
    class Mine(torch.optim.SGD):
        pass

    with pytest.raises(
        ConfigError, match=r"Mine is no class of torch\.optim: write tq\.register_optimizer\(Mine\) before"
    ):
        tq.Optimizer(Mine(nn.Linear(1, 1).parameters(), lr=0.1))


def test_what_cannot_run_on_a_ps_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="LBFGS cannot run on a ps: it evaluates the loss again"):
        tq.Optimizer(torch.optim.LBFGS(nn.Linear(1, 1).parameters()))
    inner = sgd()
    inner.param_groups[0]["lr"] = None
    with pytest.raises(ConfigError, match=r"param_groups\[0\]: lr=None; give the optimizer a number"):
        tq.Optimizer(inner)


def test_a_schedule_that_is_not_there_is_refused_at_once_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"schedule 'CosineAnealingLR': .*did you mean CosineAnnealingLR\?"):
        tq.schedule("CosineAnealingLR", T_max=3)
    with pytest.raises(ConfigError, match=r"schedule 'ReduceLR'"):
        tq.schedule("ReduceLR")


def test_an_option_that_cannot_travel_is_refused() -> None:
    inner = sgd()
    inner.param_groups[0]["momentum"] = object()
    with pytest.raises(ConfigError, match="cannot travel to a ps"):
        tq.Optimizer(inner).spec()


def test_what_a_program_notes_in_a_group_for_itself_stays_there() -> None:
    inner = sgd()
    inner.param_groups[0]["name"] = object()
    assert "name" not in tq.Optimizer(inner).spec().groups[0]


def test_what_is_no_optimizer_or_no_rule_is_refused_with_a_hint() -> None:
    with pytest.raises(ConfigError, match="wrap the torch.optim optimizer once"):
        tq.Optimizer(tq.Optimizer(sgd()))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="give it a torch.optim optimizer"):
        tq.Optimizer(nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="with parentheses"):
        tq.Optimizer(sgd(), rule=tq.Sync)  # type: ignore[arg-type]


def test_the_rule_is_sync_unless_another_is_given() -> None:
    assert tq.Optimizer(sgd()).rule == tq.Sync()
    assert tq.Optimizer(sgd(), tq.Async()).rule == tq.Async()


def test_a_step_outside_of_a_session_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no ps to push to"):
        tq.Optimizer(sgd()).step()


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("CosineAnnealingLR", {"T_maxx": 3}, r"unexpected keyword argument 'T_maxx'.*did you mean T_max\?"),
        ("CosineAnnealingLR", {}, "missing 1 required positional argument: 'T_max'"),
        ("OneCycleLR", {"max_lr": 0.1}, "total_steps"),
        ("ReduceLROnPlateau", {}, "it follows a metric"),
        ("SequentialLR", {"schedulers": [tq.schedule("StepLR", size=2)], "milestones": []}, "size"),
    ],
)
def test_arguments_that_a_schedule_does_not_take_are_refused_when_the_optimizer_is_made(
    name: str, arguments: dict[str, Any], text: str
) -> None:
    inner = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=text):
        tq.Optimizer(inner, schedule=tq.schedule(name, **arguments))


def test_a_loss_that_is_not_one_number_is_refused() -> None:
    def work(task: Any) -> None:
        model = torch.nn.Linear(2, 2)
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with tq.Session(task, model, optimizer), pytest.raises(ConfigError, match="a tensor of 3 elements"):
            optimizer.step(loss=torch.zeros(3))

    work(tq.join([]))


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_a_learning_rate_changed_beside_a_schedule_is_refused(lr: Any) -> None:
    inner = sgd(lr)
    optimizer = tq.Optimizer(inner, schedule=STEP)
    optimizer.spec()
    optimizer.attach(SimpleNamespace(tracks=[SimpleNamespace(lr=[0.1])]))  # type: ignore[arg-type]
    if isinstance(lr, torch.Tensor):
        inner.param_groups[0]["lr"].fill_(0.2)
    else:
        inner.param_groups[0]["lr"] = 0.2
    with pytest.raises(ConfigError, match="leave schedule= out, or the change"):
        optimizer.step()


@pytest.mark.parametrize("whose", ["inner", "outer"])
def test_a_schedule_and_a_scheduler_object_are_refused_when_a_session_begins(whose: str) -> None:
    inner = sgd()
    optimizer = tq.Optimizer(inner, schedule=STEP)
    torch.optim.lr_scheduler.StepLR(inner if whose == "inner" else optimizer, 3)
    with pytest.raises(ConfigError, match="both would set the learning rate"):
        optimizer.spec()


def test_it_is_a_torch_optimizer_with_the_groups_and_the_state_of_the_one_it_wraps() -> None:
    inner = sgd()
    optimizer = tq.Optimizer(inner)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups and optimizer.defaults == inner.defaults
    assert optimizer.state is inner.state
    optimizer.add_param_group({"params": nn.Linear(1, 1).parameters(), "lr": 0.5})
    assert [g["lr"] for g in inner.param_groups] == [0.1, 0.5] == [g["lr"] for g in optimizer.spec().groups]


def test_a_group_cannot_be_added_inside_a_session() -> None:
    optimizer = tq.Optimizer(sgd())
    optimizer.attach(SimpleNamespace(tracks=[SimpleNamespace(lr=[0.1])]))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="add the group before, or end the session"):
        optimizer.add_param_group({"params": nn.Linear(1, 1).parameters()})
    optimizer.attach(None)
    optimizer.add_param_group({"params": nn.Linear(1, 1).parameters()})


def test_before_the_first_step_there_is_no_last_one() -> None:
    with pytest.raises(ConfigError, match="no step has been made yet"):
        _ = tq.Optimizer(sgd()).last


def test_zero_grad_forgets_the_gradients() -> None:
    model = nn.Linear(2, 2)
    optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model.weight.grad = torch.ones(2, 2)
    optimizer.zero_grad()
    assert model.weight.grad is None


# -- schedules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        tq.schedule("StepLR", step_size=30, gamma=0.5),
        tq.schedule(torch.optim.lr_scheduler.StepLR, step_size=30, gamma=0.5),
        functools.partial(torch.optim.lr_scheduler.StepLR, step_size=30, gamma=0.5),
        ("StepLR", {"step_size": 30, "gamma": 0.5}),
        (torch.optim.lr_scheduler.StepLR, {"step_size": 30, "gamma": 0.5}),
    ],
    ids=["name", "class", "partial", "pair", "pair with a class"],
)
def test_a_schedule_may_be_given_in_several_forms(given: Any) -> None:
    assert tq.Optimizer(sgd(), schedule=given).options.schedule == STEP


def test_a_scheduler_object_is_refused() -> None:
    inner = sgd()
    with pytest.raises(ConfigError, match="a scheduler object belongs to one process"):
        tq.Optimizer(inner, schedule=torch.optim.lr_scheduler.StepLR(inner, 3))


def test_schedules_nest_as_plain_data() -> None:
    nested = tq.schedule("SequentialLR", schedulers=[tq.schedule("ConstantLR", factor=0.5)], milestones=(3,))
    assert nested.arguments == {
        "schedulers": [{"name": "ConstantLR", "arguments": {"factor": 0.5}}],
        "milestones": [3],
    }


def test_a_function_in_a_schedule_is_refused() -> None:
    with pytest.raises(ConfigError, match="a function cannot travel"):
        tq.schedule("LambdaLR", lr_lambda=lambda step: 0.5)


def test_exponential_decay_takes_the_seeds_arguments() -> None:
    spec = tq.ExponentialDecay(decay_steps=100, decay_rate=0.9, staircase=True)
    assert (spec.name, spec.arguments) == (
        "ExponentialDecay",
        {"decay_steps": 100, "decay_rate": 0.9, "staircase": True},
    )
    with pytest.raises(ConfigError, match="decay_steps=0"):
        tq.ExponentialDecay(decay_steps=0, decay_rate=0.9)


# -- weight decay ---------------------------------------------------------------------------------------------------------


def test_l2_is_half_the_sum_of_squares_of_the_weights_and_its_gradient_is_scale_times_weight() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Conv1d(2, 2, 3))
    value = l2_regularizer(0.25)(model)
    weights = [p for p in model.parameters() if p.dim() >= 2]
    expected = 0.25 * sum(float(w.detach().double().pow(2).sum()) for w in weights) / 2
    assert float(value.detach()) == pytest.approx(expected, rel=1e-6)
    value.backward()
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.testing.assert_close(parameter.grad, 0.25 * parameter.detach())
        else:
            assert parameter.grad is None


def test_l2_takes_tensors_and_leaves_frozen_ones_out() -> None:
    trained, frozen = torch.ones(2, 2, requires_grad=True), torch.ones(5, 5)
    assert l2_regularizer(1.0)([trained, frozen]).item() == 2.0
    assert float(l2_regularizer(1.0)([])) == 0.0
    assert l2_regularizer(0.0)([trained]).item() == 0.0


@pytest.mark.parametrize("scale", [1, True, -0.1, "0.1", None, -math.inf])
def test_a_scale_that_is_no_float_or_negative_is_refused(scale: Any) -> None:
    with pytest.raises(ConfigError, match="must be a float, 0.0 or more"):
        l2_regularizer(scale)
