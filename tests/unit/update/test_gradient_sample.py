"""A sample of a gradient: the same for the same bits, another for others, quick for large ones."""

import pytest
import torch

from torchquorum.update.gradient_sample import sample_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_equal_bits_have_the_same_sample_and_others_another(dtype: torch.dtype):
    torch.manual_seed(0)
    one = torch.randn(1000).to(dtype)
    assert sample_of([one, one[:7]]) == sample_of([one.clone(), one[:7].clone()]) > 0
    assert sample_of([one]) != sample_of([one * 1.01])
    assert sample_of([torch.tensor(1.0, dtype=dtype)]) != sample_of([torch.tensor(-1.0, dtype=dtype)])


def test_the_small_ones_among_many_large_tensors_are_looked_at_too():
    tensors = [torch.zeros(10_000) for _ in range(100)]
    before = sample_of(tensors)
    tensors[0][0] = 1.0
    assert sample_of(tensors) != before


def test_nothing_has_a_sample_as_well():
    assert sample_of([]) == sample_of([torch.empty(0)]) == 1
