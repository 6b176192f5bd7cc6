"""DelayedNesterov: with N = 1 torch's SGD, with N the steps of the paper's algorithm."""

from typing import Any

import pytest
import torch

from torchquorum.update.delayed_nesterov import DelayedNesterov

GRADIENTS = [torch.randn(7, generator=torch.Generator().manual_seed(k)) for k in range(12)]


def descend(optimizer: Any, **options: float) -> torch.Tensor:
    parameter = torch.nn.Parameter(torch.ones(7))
    made = optimizer([parameter], **options)
    for gradient in GRADIENTS:
        parameter.grad = gradient.clone()
        made.step()
    return parameter.detach()


@pytest.mark.parametrize("nesterov", [True, False])
def test_with_every_update_it_is_sgd_with_momentum(nesterov: bool) -> None:
    ours = descend(DelayedNesterov, lr=0.1, momentum=0.9, nesterov=nesterov, every=1)
    torch.testing.assert_close(ours, descend(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=nesterov))


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("every", [2, 3, 4])
def test_a_round_of_updates_goes_as_far_as_one_of_their_mean(every: int, nesterov: bool) -> None:
    parameter = torch.nn.Parameter(torch.ones(7))
    plain = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, nesterov=nesterov)
    for k in range(0, 12, every):
        parameter.grad = torch.stack(GRADIENTS[k : k + every]).mean(0)
        plain.step()
    ours = descend(DelayedNesterov, lr=0.1, momentum=0.9, nesterov=nesterov, every=every)
    # Nesterov looks ahead with the mean at the end of a round, where it has taken a part of it each time: the same sum.
    torch.testing.assert_close(ours, parameter.detach())


def test_a_number_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="every=0: must be 1 or more"):
        DelayedNesterov([torch.nn.Parameter(torch.ones(1))], every=0)
