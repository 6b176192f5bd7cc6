"""The seeds' weight decay sums accurately, however many weights there are."""

import torch

from torchquorum.worker.regularizer import l2_regularizer


def test_millions_of_weights_are_summed_accurately() -> None:
    weights = torch.full((20, 1_000_000), 0.1, requires_grad=True)
    penalty = l2_regularizer(1e-4)([weights])
    assert abs(float(penalty.detach()) - 10.0) < 1e-4
    penalty.backward()
    assert weights.grad is not None
    assert torch.equal(weights.grad[0, :5], 1e-4 * weights.detach()[0, :5])


def test_narrow_weights_are_squared_and_summed_in_single_precision() -> None:
    weights = torch.full((1000, 1000), 0.125, dtype=torch.bfloat16, requires_grad=True)
    penalty = l2_regularizer(1.0)([weights])
    assert float(penalty.detach()) == 1e6 * 0.125**2 / 2
