"""Which optimizers workers can run, and that the kernels' arithmetic is torch.optim's, on any slice and in place."""

from typing import Any, ClassVar

import pytest
import torch

from torchquorum.update import kernels
from torchquorum.update.kernels import SLICED_IN, PlainSgd, kernel_for, mean
from torchquorum.wire.messages import OptimizerSpec


def spec(optimizer: torch.optim.Optimizer) -> OptimizerSpec:
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return OptimizerSpec(type(optimizer).__name__, groups)


def sgd(**options: Any) -> OptimizerSpec:
    return spec(torch.optim.SGD([torch.zeros(1)], **{"lr": 0.1, **options}))


@pytest.mark.parametrize(
    ("optimizer", "taken"),
    [
        (sgd(), True),
        (sgd(dampening=0.5), True),
        (OptimizerSpec("SGD", [{}]), True),
        (sgd(momentum=0.9), False),
        (sgd(weight_decay=0.1), False),
        (sgd(maximize=True), False),
        (sgd(foreach=True), False),
        (sgd(fused=True), False),
        (sgd(differentiable=True), False),
        (OptimizerSpec("SGD", [{"lr": {"tensor": 0.1, "dtype": "float32"}}]), False),
        (OptimizerSpec("SGD", [{"lr": 0.1}, {"lr": 0.1, "momentum": 0.9}]), False),
        (spec(torch.optim.Adam([torch.zeros(1)])), False),
    ],
)
def test_workers_run_sgd_without_options_in_all_groups_and_nothing_else(optimizer: OptimizerSpec, taken: bool) -> None:
    assert (kernel_for(optimizer) is not None) is taken


def test_a_kernel_with_state_is_not_run_by_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Momentum(PlainSgd):
        state: ClassVar[tuple[str, ...]] = ("momentum_buffer",)

        @staticmethod
        def takes(options: Any) -> bool:
            return True

    monkeypatch.setitem(kernels.KERNELS, "SGD", Momentum)
    assert kernel_for(sgd(momentum=0.9)) is None


@pytest.mark.parametrize("dtype", sorted(SLICED_IN))
@pytest.mark.parametrize("cut", [1, 7, 64, 129])
def test_slices_written_beside_or_in_place_have_the_bits_of_torch_optim(dtype: str, cut: int) -> None:
    generator = torch.Generator().manual_seed(cut)
    old, gradient = (torch.randn(1000, generator=generator, dtype=getattr(torch, dtype)) for _ in range(2))
    parameter = torch.nn.Parameter(old.clone())
    parameter.grad = gradient.clone()
    torch.optim.SGD([parameter], lr=0.3).step()
    beside, in_place = torch.empty_like(old), old.clone()
    for part in (slice(None, cut), slice(cut, None)):
        PlainSgd().write(old[part], gradient[part], 0.3, beside[part])
        PlainSgd().update(in_place[part], gradient[part], 0.3)
    assert torch.equal(beside, parameter.detach()) and torch.equal(in_place, parameter.detach())


def test_a_mean_is_the_sum_in_order_divided_once() -> None:
    gradients = [torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([-1e8])]
    assert mean(gradients, torch.empty(1)).item() == 0.0, "in float32 1e8 + 1 is 1e8"
    assert mean([gradients[0], gradients[2], gradients[1]], torch.empty(1)).item() == torch.tensor(1.0).div(3).item()
    out = torch.empty(1)
    assert mean(gradients, out) is out
    assert mean(gradients[:1], out) is gradients[0], "one gradient is its own mean"
