"""Tensors on the wire: what travels comes back as it was, and what cannot be is refused by name."""

import pytest
import torch

from torchquorum.graph import graph_messages
from torchquorum.graph.tensors import MAX_DIMENSIONS, TensorSpec, pack, unpack
from torchquorum.wire.codec import WireError


@pytest.mark.parametrize("copy", [False, True])
def test_tensors_of_all_shapes_come_back(copy: bool) -> None:
    given = [
        torch.arange(12.0).view(3, 4).t(),
        torch.tensor(5),
        torch.empty(0, 3, dtype=torch.bfloat16),
        torch.tensor([True, False]),
    ]
    found = unpack(*pack(given, copy=copy))
    assert [(t.dtype, t.shape) for t in found] == [(t.dtype, t.shape) for t in given]
    assert all(torch.equal(a, b) for a, b in zip(given, found, strict=True))


def test_copied_frames_stay_as_they_are_whatever_happens_to_the_tensor() -> None:
    tensor = torch.zeros(4)
    _, [kept] = pack([tensor], copy=True)
    _, [shared] = pack([tensor], copy=False)
    tensor.fill_(1.0)
    assert bytes(kept) == bytes(16) and bytes(shared) != bytes(16)


def test_a_dtype_that_does_not_travel_is_named() -> None:
    with pytest.raises(WireError, match="dtype uint16: tensors of it do not travel; allowed are float32"):
        pack([torch.zeros(2, dtype=torch.uint16)], copy=False)


@pytest.mark.parametrize(
    ("spec", "frames", "message"),
    [
        (TensorSpec("float32", [2]), [], "0 tensor frames, expected 1"),
        (TensorSpec("float32", [2]), [bytes(8), b""], "2 tensor frames, expected 1"),
        (TensorSpec("float32", [2]), [bytes(7)], "tensor frame of 7 bytes, expected 8"),
        (
            TensorSpec("float32", [-2, -1]),
            [bytes(8)],
            r"shape \[-2, -1\]: must have at most 64 dimensions, each 0 or more",
        ),
        (TensorSpec("float32", [1] * (MAX_DIMENSIONS + 1)), [bytes(4)], "must have at most 64 dimensions"),
        (TensorSpec("float32", [1 << 62, 8]), [bytes(8)], "tensor frame of 8 bytes, expected"),
        (TensorSpec("object", [2]), [bytes(8)], "dtype 'object': allowed are"),
    ],
)
def test_what_cannot_be_a_tensor_is_refused(spec: TensorSpec, frames: list[bytes], message: str) -> None:
    with pytest.raises(WireError, match=message):
        unpack([spec], frames)


def test_an_empty_message_between_client_and_compute_task_is_refused() -> None:
    with pytest.raises(WireError, match="an empty message"):
        graph_messages.split([])


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.uint8, torch.int64]
)
def test_tensors_of_every_kind_travel_unchanged(dtype: torch.dtype) -> None:
    tensors = [torch.randn(3, 4).to(dtype).t(), torch.ones((), dtype=dtype), torch.empty(0, 2, dtype=dtype)]
    specs, frames = pack(tensors, copy=True)
    for ours, theirs in zip(unpack(specs, [bytes(f) for f in frames]), tensors, strict=True):
        assert ours.dtype == dtype and torch.equal(ours, theirs)
