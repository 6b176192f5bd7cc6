"""Optimizers of rows against torch.optim on sparse gradients, and against their equations."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchquorum.errors import ConfigError
from torchquorum.update.row_kernels import KERNELS, WHOLE, kernel_of

OPTIMIZERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], bool]] = {
    "Adagrad": (
        lambda p: torch.optim.Adagrad(p, lr=0.013, lr_decay=0.01, eps=1e-7, initial_accumulator_value=0.1),
        True,
    ),
    "Adagrad, maximize": (lambda p: torch.optim.Adagrad(p, lr=0.013, maximize=True), True),
    "SparseAdam": (lambda p: torch.optim.SparseAdam(p, lr=0.0123, betas=(0.8, 0.99), eps=1e-6), True),
    "SparseAdam, maximize": (lambda p: torch.optim.SparseAdam(p, maximize=True), True),
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.07), False),
    "SGD, maximize": (lambda p: torch.optim.SGD(p, lr=0.07, maximize=True), False),
}


def begin(name: str, options: dict[str, Any], rows: int, dim: int) -> dict[str, torch.Tensor]:
    kernel = KERNELS[name]
    shapes = {state: (rows, dim) if kind == WHOLE else (rows,) for state, kind in kernel.states.items()}
    return {state: torch.full(shape, kernel.initial(options, state)) for state, shape in shapes.items()}


@pytest.mark.parametrize("dim", [1, 3, 8, 17, 64])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_it_has_the_bits_of_torch(kind: str, dim: int) -> None:
    make, exact = OPTIMIZERS[kind]
    torch.manual_seed(dim)
    name, rows = kind.split(",")[0], 60
    ours = torch.randn(rows, dim)
    theirs = torch.nn.Parameter(ours.clone())
    optimizer = make([theirs])
    options = KERNELS[name].options(optimizer.param_groups[0])
    states = begin(name, options, rows, dim)
    for step in range(1, 9):
        ids = torch.randint(0, rows, (200,))
        gradient = torch.sparse_coo_tensor(ids[None], torch.randn(200, dim), (rows, dim), check_invariants=False)
        theirs.grad = gradient
        optimizer.step()
        merged = gradient.coalesce()
        where = merged.indices()[0]
        values, mine = ours[where], {state: held[where] for state, held in states.items()}
        KERNELS[name].step(options, step, values, merged.values(), mine)
        ours[where] = values
        for state in states:
            states[state][where] = mine[state]
    assert torch.equal(ours, theirs.detach()) if exact else torch.allclose(ours, theirs.detach(), atol=1e-5)


def test_rowwise_adagrad_keeps_one_number_a_row() -> None:
    options = KERNELS["RowwiseAdagrad"].options({"lr": 0.1, "eps": 0.0})
    states = begin("RowwiseAdagrad", options, 2, 3)
    rows, gradient = torch.zeros(2, 3), torch.tensor([[1.0, 2.0, 2.0], [0.0, 0.0, 3.0]])
    KERNELS["RowwiseAdagrad"].step(options, 1, rows, gradient, states)
    assert states["sum"].tolist() == [3.0, 3.0]
    assert torch.allclose(rows, -0.1 * gradient / 3.0**0.5)


def test_ftrl_is_the_equation() -> None:
    options = KERNELS["FTRL"].options({"lr": 0.5, "l1": 0.3, "l2": 0.1})
    states = begin("FTRL", options, 1, 1)
    row = torch.tensor([[0.2]])
    square, linear, weight = 0.1, 0.0, 0.2
    for step, gradient in enumerate((0.7, -0.4, 0.05), 1):
        KERNELS["FTRL"].step(options, step, row, torch.tensor([[gradient]]), states)
        new = square + gradient**2
        linear += gradient - (new**0.5 - square**0.5) / 0.5 * weight
        square = new
        sign = 1 if linear > 0 else -1
        weight = 0.0 if abs(linear) <= 0.3 else (sign * 0.3 - linear) / (square**0.5 / 0.5 + 0.2)
        assert row.item() == pytest.approx(weight, rel=1e-5)


def test_an_option_that_would_move_other_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match="weight_decay"):
        KERNELS["SGD"].check("SGD", {"weight_decay": 0.1}, "emb")
    with pytest.raises(ConfigError, match="SparseAdam, Adagrad or SGD"):
        kernel_of("Adam", "emb")
