"""The compressors: sizes, errors within what their equations say, nothing lost by error feedback, damaged bytes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchquorum.compress.blocks import Blockwise, Int4, Int8
from torchquorum.compress.compressor import read_compressor
from torchquorum.compress.feedback import Feedback
from torchquorum.errors import ConfigError

NAMES = ["int8", "int4", "bfloat16", "topk:4/32", "topk:64/4096", "topk:8/5000", "topk:64/4096+2bit", "topk:12/64+2bit"]
SIZES = [1, 7, 128, 255, 257, 4096, 70_001]


def numbers(seed: int, numel: int, scale: float = 1.0) -> torch.Tensor:
    """Returns numbers of very different magnitudes, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * torch.rand(numel, generator=generator) ** 6 * scale
    values[torch.rand(numel, generator=generator) < 0.1] = 0.0
    return values


def through(name: str, values: torch.Tensor) -> torch.Tensor:
    """Encodes and decodes."""
    compressor = read_compressor(name)
    message = torch.full((compressor.size_bytes(values.numel()),), 255, dtype=torch.uint8)
    compressor.encode(values, message)
    decoded = torch.full_like(values, torch.nan)
    compressor.decode(message, decoded)
    return decoded


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_decoded_numbers_are_finite_and_close(name: str, numel: int) -> None:
    values = numbers(1, numel)
    decoded = through(name, values)
    assert torch.isfinite(decoded).all()
    # Never further away than sending nothing, but for the rounding of levels.
    assert (decoded - values).norm() <= 1.01 * values.norm()


@pytest.mark.parametrize("kind", [Int8, Int4])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_an_error_of_a_block_is_half_a_level_at_most(kind: type[Blockwise], scale: float) -> None:
    values = numbers(2, 10 * kind.block, scale)
    decoded = through(kind.__name__.lower(), values).view(-1, kind.block)
    largest = values.view(-1, kind.block).abs().amax(dim=1, keepdim=True)
    assert ((decoded - values.view(-1, kind.block)).abs() <= largest * (0.5 / kind.levels) * (1 + 1e-5)).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0.0, 3.4028234663852886e38, -3.4028234663852886e38, 1e-45])
def test_the_ends_of_the_range_stay_finite(name: str, value: float) -> None:
    decoded = through(name, torch.full((300,), value))
    assert torch.isfinite(decoded).all()
    if value == 0.0:
        assert not decoded.any()


@pytest.mark.parametrize(("name", "kept", "chunk"), [("topk:4/32", 4, 32), ("topk:64/4096+2bit", 64, 4096)])
def test_top_k_sends_the_largest_of_each_chunk(name: str, kept: int, chunk: int) -> None:
    values = torch.randn(3 * chunk, generator=torch.Generator().manual_seed(3))
    decoded = through(name, values)
    largest = values.view(3, chunk).abs().topk(kept, dim=1).indices.sort(dim=1).values
    sent = decoded.view(3, chunk).nonzero()[:, 1].view(3, kept)
    assert torch.equal(sent, largest)
    assert torch.equal(decoded.sign()[decoded != 0], values.sign()[decoded != 0])


def test_messages_are_as_small_as_they_are_said_to_be() -> None:
    numel = 4096 * 100
    ratios = {name: 4 * numel / read_compressor(name).size_bytes(numel) for name in NAMES}
    assert ratios["int8"] > 3.9
    assert ratios["int4"] > 7.5
    assert ratios["bfloat16"] == 2.0
    assert ratios["topk:64/4096+2bit"] > 90


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 2**31), rounds=st.integers(1, 6))
def test_what_was_sent_and_what_is_left_are_what_was_given(name: str, seed: int, rounds: int) -> None:
    numel, feedback = 5001, Feedback(read_compressor(name), 5001)
    given_in_all, sent_in_all = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    for k in range(rounds):
        values, sent = numbers(seed + k, numel), torch.empty(numel)
        given_in_all += values
        feedback.send(values, sent)
        sent_in_all += sent
    error = (sent_in_all + feedback.residual - given_in_all).abs().max()
    assert error <= rounds * 2**-22 * max(1.0, float(given_in_all.abs().max()), float(feedback.residual.abs().max()))


@pytest.mark.parametrize("name", NAMES)
def test_two_of_a_kind_make_the_same_bytes(name: str) -> None:
    values, messages = numbers(5, 9000), []
    for _ in range(2):
        compressor = read_compressor(name)
        messages.append(torch.zeros(compressor.size_bytes(9000), dtype=torch.uint8))
        compressor.encode(values.clone(), messages[-1])
    assert torch.equal(*messages)


def test_what_is_sent_may_be_written_over_what_was_given() -> None:
    values = numbers(6, 1000)
    apart, alike = Feedback(read_compressor("int4"), 1000), Feedback(read_compressor("int4"), 1000)
    sent, same = torch.empty(1000), values.clone()
    apart.send(values, sent)
    alike.send(same, same)
    assert torch.equal(same, sent)
    assert torch.equal(apart.residual, alike.residual)


def test_what_was_not_used_is_sent_again() -> None:
    feedback, values, sent = Feedback(read_compressor("int8"), 256), numbers(7, 256), torch.empty(256)
    feedback.send(values, sent)
    left = feedback.residual.clone()
    feedback.give_back(sent)
    assert torch.equal(feedback.residual, left + sent)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_damaged_bytes_give_finite_numbers_or_an_error(name: str, data: st.DataObject) -> None:
    compressor, numel = read_compressor(name), 333
    size = compressor.size_bytes(numel)
    message = torch.frombuffer(bytearray(data.draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)
    decoded = torch.empty(numel)
    try:
        compressor.decode(message, decoded)
    except ValueError:
        return
    assert not decoded.isnan().any()


@pytest.mark.parametrize(
    "text", ["int16", "", "topk", "topk:64", "topk:5/64", "topk:64/8", "topk:0/64", "topk:4/99999999", "zip"]
)
def test_an_unknown_name_is_refused_with_the_names_that_there_are(text: str) -> None:
    with pytest.raises(ConfigError, match=r"compress=.*(allowed are int8|topk:K/N keeps K)"):
        read_compressor(text)
