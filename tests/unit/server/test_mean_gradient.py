"""The mean gradient of a recent update, kept for summaries."""

import pytest
import torch

from torchquorum.placement.layout import Variable, place
from torchquorum.server import mean_gradient
from torchquorum.server.mean_gradient import MeanGradient
from torchquorum.wire.frames import frame_tensor

VARIABLES = [
    Variable(name="a", shape=(3,), dtype="float32"),
    Variable(name="b", shape=(2, 2), dtype="float32"),
]


def kept(absent: frozenset[int] = frozenset()) -> MeanGradient:
    region = place(VARIABLES, 1).trained[0]
    values = torch.arange(region.sections[0].numel, dtype=torch.float32)
    mean = MeanGradient(region, VARIABLES)
    mean.keep(4, [values], absent)
    return mean


def numbers(mean: MeanGradient) -> list[float]:
    _, frames = mean.answer()
    return frame_tensor(frames[0], len(frames[0])).view(torch.float32).tolist()


def test_the_first_update_is_wanted_and_then_one_for_each_request() -> None:
    mean = MeanGradient(place(VARIABLES, 1).trained[0], VARIABLES)
    assert mean.wanted and mean.answer()[0].version == -1
    mean = kept()
    assert not mean.wanted
    message, _ = mean.answer(3)
    assert (message.version, message.request, mean.wanted) == (4, 3, True)


def test_each_variable_is_there_without_padding_and_absent_ones_are_not() -> None:
    assert [(p.name, p.start, p.count) for p in kept().answer()[0].pieces] == [("a", 0, 3), ("b", 0, 4)]
    assert numbers(kept()) == [0, 1, 2, 16, 17, 18, 19]  # b begins on the next cache line
    assert numbers(kept(frozenset({0}))) == [16, 17, 18, 19]


def test_of_large_pieces_an_even_sample_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mean_gradient, "SAMPLED", 4)
    monkeypatch.setattr(mean_gradient, "LEAST_SAMPLED", 1)
    assert numbers(kept()) == [0, 2, 16, 18]
