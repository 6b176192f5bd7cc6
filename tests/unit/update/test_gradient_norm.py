"""The norm of a gradient: as plain PyTorch has it, finite if and only if every element is, and without overflow."""

import math
import sys

import pytest
import torch

from torchquorum.update.gradient_norm import norm_of, norms_of


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shapes", [[(1000,)], [(40, 25), (7,), ()], [(0,), (3, 2)]])
def test_it_is_the_norm_of_all_elements(dtype: torch.dtype, shapes: list[tuple[int, ...]]) -> None:
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    expected = torch.cat([t.double().reshape(-1) for t in tensors]).norm().item()
    assert norm_of(tensors) == pytest.approx(expected, rel=1e-5)


def test_dtypes_may_be_mixed_and_whole_numbers_do_not_count() -> None:
    mixed = [torch.tensor([3.0, 4.0], dtype=torch.half), torch.tensor([12.0], dtype=torch.double), torch.tensor([99])]
    assert norm_of(mixed) == 13.0
    assert norm_of([]) == norm_of([torch.tensor([7])]) == 0.0


@pytest.mark.parametrize(
    ("value", "dtype", "norm"),
    [
        (3e38, torch.float32, 3e38 * math.sqrt(1000)),
        (-3e38, torch.float32, 3e38 * math.sqrt(1000)),
        (60000.0, torch.half, 60000 * math.sqrt(1000)),
        (1e300, torch.float64, 1e300 * math.sqrt(1000)),
        (1.7e308, torch.float64, sys.float_info.max),
    ],
)
def test_one_whose_squares_are_too_large_is_finite_all_the_same(value: float, dtype: torch.dtype, norm: float) -> None:
    large = torch.full((1000,), value, dtype=dtype)
    for tensors in ([large], [large.view(10, 100), torch.ones(3, dtype=dtype)]):
        assert norm_of(tensors) == pytest.approx(norm, rel=1e-3) and math.isfinite(norm_of(tensors))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_an_element_that_is_not_finite_shows(bad: float, dtype: torch.dtype) -> None:
    one = torch.ones(100, dtype=dtype)
    one[7] = bad
    assert not math.isfinite(norm_of([one])) and not math.isfinite(norm_of([torch.ones(3, 3), one.view(10, 10)]))


@pytest.mark.filterwarnings("ignore:Sparse")
def test_of_a_sparse_gradient_each_place_counts_once() -> None:
    assert norm_of([torch.sparse_coo_tensor(torch.tensor([[0, 0, 2]]), torch.tensor([3.0, 1.0, 3.0]), (5,))]) == 5.0


def test_each_tensor_has_its_own() -> None:
    assert [float(n) for n in norms_of([torch.tensor([3.0, 4.0]), torch.ones(4)])] == [5.0, 2.0]
