"""Which optimizers workers can run, and that the kernels' arithmetic is torch.optim's, on any slice, beside and in place."""

from typing import Any

import pytest
import torch

from torchquorum.update.kernels import SLICED_IN, Moment, kernels_for, mean, states_of
from torchquorum.wire.messages import OptimizerSpec

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"weight_decay": 0.1}),
    ("SGD", {"maximize": True}),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "dampening": 0.3}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01, "maximize": True}),
    ("Adam", {}),
    ("Adam", {"weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-6}),
    ("Adam", {"amsgrad": True, "maximize": True}),
    ("Adam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("AdamW", {}),
    ("AdamW", {"weight_decay": 0.0}),
    ("AdamW", {"amsgrad": True, "maximize": True}),
    ("Adagrad", {}),
    ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.5, "weight_decay": 0.1}),
    ("Adagrad", {"maximize": True}),
    ("RMSprop", {}),
    ("RMSprop", {"centered": True}),
    ("RMSprop", {"momentum": 0.5, "weight_decay": 0.1}),
    ("RMSprop", {"momentum": 0.5, "centered": True, "maximize": True}),
]


def spec(name: str, **options: Any) -> OptimizerSpec:
    optimizer = getattr(torch.optim, name)([torch.zeros(1)], **{"lr": 0.1, **options})
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return OptimizerSpec(name, groups)


@pytest.mark.parametrize(
    ("optimizer", "taken"),
    [
        *((spec(name, **options), True) for name, options in OPTIONS),
        (OptimizerSpec("SGD", [{}]), True),
        (spec("SGD", foreach=True), False),
        (spec("SGD", fused=True), False),
        (spec("Adam", differentiable=True), False),
        (OptimizerSpec("SGD", [{"lr": {"tensor": 0.1, "dtype": "float32"}}]), False),
        (OptimizerSpec("Adam", [{"betas": [{"tensor": 0.1, "dtype": "float32"}, 0.9]}]), False),
        (OptimizerSpec("SGD", [{"lr": 0.1}, {"lr": 0.1, "foreach": True}]), False),
        (spec("Adadelta"), False),
    ],
)
def test_workers_run_the_usual_optimizers_in_the_plain_implementation_of_all_groups(
    optimizer: OptimizerSpec, taken: bool
) -> None:
    assert (kernels_for(optimizer) is not None) is taken


@pytest.mark.parametrize("dtype", sorted(SLICED_IN))
@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_slices_written_beside_or_in_place_have_the_bits_of_torch_optim(
    name: str, options: dict[str, Any], dtype: str
) -> None:
    generator = torch.Generator().manual_seed(7)
    start, *gradients = (torch.randn(1000, generator=generator, dtype=getattr(torch, dtype)) for _ in range(5))
    parameter = torch.nn.Parameter(start.clone())
    reference = getattr(torch.optim, name)([parameter], lr=0.3, **options)
    kernels = kernels_for(spec(name, **options))
    assert kernels is not None
    (kernel,) = kernels
    state = [torch.full_like(start, kernel.initial) for _ in kernel.state]
    beside, in_place = (start.clone(), state), (start.clone(), [s.clone() for s in state])
    for step, gradient in enumerate(gradients):
        rate = 0.3 / (step + 1)
        reference.param_groups[0]["lr"] = rate
        parameter.grad = gradient.clone()
        reference.step()
        new, after = torch.empty_like(start), [torch.empty_like(start) for _ in kernel.state]
        kept = gradient.clone()
        for part in (slice(None, 129), slice(129, 136), slice(136, None)):
            at, given = Moment(rate, step), gradient[part]
            kernel.write(at, beside[0][part], given, new[part], [s[part] for s in beside[1]], [s[part] for s in after])
            mine = [s[part] for s in in_place[1]]
            kernel.write(at, in_place[0][part], given, in_place[0][part], mine, mine)
        beside = new, after
        assert torch.equal(gradient, kept), "a gradient is only read"
        for values, states in (beside, in_place):
            assert torch.equal(values, parameter.detach())
            for called, held in zip(kernel.state, states, strict=True):
                assert torch.equal(held, reference.state[parameter][called]), called
    assert ("step" in reference.state[parameter]) is kernel.counted


def test_groups_may_have_different_states_and_each_name_stands_once() -> None:
    kernels = kernels_for(OptimizerSpec("SGD", [{"lr": 0.1}, {"lr": 0.1, "momentum": 0.9}, {"momentum": 0.5}]))
    assert kernels is not None and [kernel.state for kernel in kernels] == [
        (),
        ("momentum_buffer",),
        ("momentum_buffer",),
    ]
    assert states_of(kernels) == ("momentum_buffer",)


def test_a_mean_is_the_sum_in_order_divided_once() -> None:
    gradients = [torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([-1e8])]
    assert mean(gradients, torch.empty(1)).item() == 0.0, "in float32 1e8 + 1 is 1e8"
    assert mean([gradients[0], gradients[2], gradients[1]], torch.empty(1)).item() == torch.tensor(1.0).div(3).item()
    out = torch.empty(1)
    assert mean(gradients, out) is out
    assert mean(gradients[:1], out) is gradients[0], "one gradient is its own mean"
