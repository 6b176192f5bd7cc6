"""Gradients that wait for the log: stored once, copied before their memory is written again, decided once."""

import pytest
import torch

from torchquorum.placement.layout import Variable, place
from torchquorum.rules.quorum import Key
from torchquorum.server.pending_gradients import PendingGradients
from torchquorum.wire.frames import tensor_frame
from torchquorum.wire.messages import Push

REGION = place([Variable(name="a", shape=(4,), dtype="float32")], 1).trained[0]
KEY = Key(0, 9, 1)


def push(step: int = 1, slot: int = -1) -> Push:
    return Push(0, 9, step + 1, step, 0, slot, [], None)


def stored(memory: torch.Tensor) -> PendingGradients:
    gradients = PendingGradients(REGION)
    gradients.store(KEY, push(), None, [tensor_frame(memory)])
    gradients.note_request(2, KEY)
    return gradients


def test_what_is_taken_for_an_update_is_decided_and_gone() -> None:
    gradients = stored(torch.zeros(REGION.size_bytes, dtype=torch.uint8))
    assert KEY in gradients and not gradients.is_decided(KEY)
    assert len(gradients.take([KEY])) == 1
    assert KEY not in gradients and len(gradients) == 0
    assert (
        gradients.is_decided(KEY) and not gradients.is_decided(Key(0, 9, 2)) and not gradients.is_decided(Key(0, 8, 1))
    )


def test_a_gradient_is_found_by_the_latest_request_that_pushed_it() -> None:
    gradients = stored(torch.zeros(REGION.size_bytes, dtype=torch.uint8))
    assert gradients.of_request(0, 9, 2) == KEY and gradients.of_request(0, 9, 3) is None
    gradients.note_request(3, KEY)
    assert gradients.of_request(0, 9, 3) == KEY and gradients.of_request(0, 9, 2) is None
    gradients.drop([KEY])
    assert gradients.of_request(0, 9, 3) is None


def test_memory_that_is_written_again_does_not_change_a_gradient_whose_worker_was_released() -> None:
    memory = torch.zeros(REGION.size_bytes, dtype=torch.uint8)
    borrowed, kept = stored(memory), stored(memory)
    kept.copy_borrowed(1)  # another worker's
    kept.copy_borrowed(0)
    memory.fill_(255)
    assert kept.take([KEY])[0].sections[0].count_nonzero() == 0
    assert borrowed.take([KEY])[0].sections[0].count_nonzero() > 0


def test_a_forgotten_incarnation_is_not_known_to_be_decided() -> None:
    gradients = PendingGradients(REGION)
    gradients.drop([KEY])
    assert gradients.is_decided(KEY)
    gradients.forget([(0, 9)])
    assert not gradients.is_decided(KEY)


@pytest.mark.parametrize("slot", [0, 3])
def test_a_slot_of_memory_that_the_worker_does_not_share_is_refused(slot: int) -> None:
    with pytest.raises(ValueError, match=rf"gradient slot {slot} of worker 0 is not known here"):
        PendingGradients(REGION).store(KEY, push(slot=slot), None, [])
