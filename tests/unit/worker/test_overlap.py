"""Which gradients count as sent before the step. Here the copies are made at once; on a GPU a stream of its own makes them."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from torchquorum.memory.slots import section_views
from torchquorum.placement.layout import place
from torchquorum.worker import overlap as early
from torchquorum.worker.flat import FlatParameters, Pusher, describe
from torchquorum.worker.overlap import MOST_MISSES, Overlap

ROWS = torch.arange(12.0).view(4, 3)


class Setup:
    """A small model, memory for its gradients, and what is sent there early."""

    def __init__(self, model: nn.Module | None = None, *, shards: int = 1, slice_bytes: int | None = None) -> None:
        self.model = model or nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        variables, parameters = describe(self.model, torch.optim.SGD(self.model.parameters(), lr=0.1))
        layout = place(variables, shards, slice_bytes=slice_bytes)
        self.flat = FlatParameters(layout, parameters)
        self.memory = [torch.zeros(region.size_bytes, dtype=torch.uint8) for region in layout.trained]
        views = [section_views(r, m) for r, m in zip(layout.trained, self.memory, strict=True)]
        self.pushers = [Pusher(self.flat, r, v) for r, v in zip(layout.trained, views, strict=True)]
        self.allowed = True
        self.early = Overlap(self.flat, self.pushers, lambda: self.allowed)

    def backward(self, factor: float = 1.0) -> None:
        (self.model(ROWS) * factor).square().sum().backward()

    def fill(self) -> frozenset[int]:
        """Fills the memory as a step does, and returns what did not have to be copied; what is there is always right."""
        held = self.early.held()
        with torch.no_grad():
            absent = [pusher(held) for pusher in self.pushers]
            filled = [m.clone() for m in self.memory]
            assert [pusher() for pusher in self.pushers] == absent
        for before, now in zip(filled, self.memory, strict=True):
            assert torch.equal(before, now)
        return held


def hooks_on(parameter: nn.Parameter) -> int:
    return len(getattr(parameter, "_post_accumulate_grad_hooks", None) or {})


@pytest.fixture(autouse=True)
def follow_small_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "LEAST_PIECE_BYTES", 0)


@pytest.fixture
def setup() -> Iterator[Setup]:
    found = Setup()
    yield found
    found.early.close()


def test_what_backward_left_untouched_is_not_copied_again(setup: Setup) -> None:
    for _ in range(3):
        setup.model.zero_grad()
        setup.backward()
        assert any(bool(m.any()) for m in setup.memory), "it was there before the step"
        assert setup.fill() == {0, 1, 2, 3}


def _clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.001)


def _data(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad.data.clamp_(-0.01, 0.01)


def _negate(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad.data.neg_()


def _unscale(model: nn.Module) -> None:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    torch._amp_foreach_non_finite_check_and_unscale_(grads, torch.zeros(1), torch.full((1,), 0.5))


def _replace(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)


def _poison(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.full_like(p, float("nan"))


@pytest.mark.parametrize("change", [_clip, _data, _negate, _unscale, _replace, _poison])
def test_a_gradient_that_was_changed_in_whatever_way_is_copied_again(
    setup: Setup, change: Callable[[nn.Module], None]
) -> None:
    setup.backward()
    change(setup.model)
    assert setup.fill() == set()


def test_only_what_was_changed_is_copied_again(setup: Setup) -> None:
    setup.backward()
    first = setup.flat.parameters[0]
    assert first.grad is not None
    first.grad.data[0, 0] += 1.0
    assert setup.fill() == {1, 2, 3}


def test_clipping_that_changes_nothing_costs_no_second_copy(setup: Setup) -> None:
    setup.backward()
    nn.utils.clip_grad_norm_(setup.model.parameters(), 1e9)
    assert setup.fill() == {0, 1, 2, 3}


def test_of_several_backward_passes_the_last_is_sent_once_their_number_is_known(setup: Setup) -> None:
    found = []
    for passes in (3, 3, 3, 2, 2):
        setup.model.zero_grad()
        for k in range(passes):
            setup.backward(1.0 + k)
        found.append(len(setup.fill()))
    assert found == [0, 4, 4, 0, 4]


def test_gradients_that_are_gone_or_sparse_are_not_held(setup: Setup) -> None:
    setup.backward()
    setup.model.zero_grad(set_to_none=True)
    assert setup.fill() == set()
    setup.backward()
    setup.flat.parameters[0].grad = torch.ones(4, 3).to_sparse()
    assert setup.fill() == {1, 2, 3}


def test_an_exception_in_the_middle_of_backward_leaves_nothing_wrong_behind(setup: Setup) -> None:
    hook = setup.flat.parameters[0].register_hook(_fail)
    with pytest.raises(ArithmeticError):
        setup.backward(3.0)
    hook.remove()
    found = []
    for _ in range(3):
        setup.model.zero_grad()
        setup.backward()
        found.append(len(setup.fill()))
    assert found[0] < 4, "some had been sent before the exception, and others came instead"
    assert found[2] == 4, "for one step two passes seemed usual, then one again"


def _fail(gradient: torch.Tensor) -> None:
    raise ArithmeticError("in the middle")


def test_nothing_is_sent_while_the_memory_may_be_read(setup: Setup) -> None:
    setup.allowed = False
    setup.backward()
    assert not any(bool(m.any()) for m in setup.memory)
    assert setup.fill() == set()


def test_whoever_changes_every_gradient_is_followed_no_more(setup: Setup) -> None:
    for k in range(MOST_MISSES + 2):
        setup.model.zero_grad()
        for m in setup.memory:
            m.zero_()
        setup.backward()
        assert any(bool(m.any()) for m in setup.memory) is (k < MOST_MISSES)
        _clip(setup.model)
        assert setup.fill() == set()


def test_one_changed_gradient_now_and_then_ends_nothing(setup: Setup) -> None:
    found = []
    for k in range(8):
        setup.model.zero_grad()
        setup.backward()
        if k % 2:
            _clip(setup.model)
        found.append(len(setup.fill()))
    assert found == [4, 0] * 4


def test_small_gradients_wait_for_the_step(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "LEAST_PIECE_BYTES", 40)
    setup.backward()
    assert setup.fill() == {0}


def test_slices_go_to_all_shards() -> None:
    setup = Setup(shards=2, slice_bytes=8)
    setup.backward()
    assert setup.fill() == {0, 1, 2, 3}
    setup.early.close()


def test_a_layer_without_gradients_is_absent_and_a_frozen_one_has_no_hook() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2).requires_grad_(False))
    model.append(nn.Module())
    model[3].register_parameter("never", nn.Parameter(torch.ones(5)))
    setup = Setup(model)
    model[:3](ROWS).sum().backward()
    assert setup.fill() == {0, 1, 2, 3}
    assert setup.pushers[0](frozenset()) == [4, 5, 6]
    setup.early.close()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_gradients_with_a_graph_of_their_own_can_be_sent(setup: Setup) -> None:
    setup.model(ROWS).square().sum().backward(create_graph=True)
    assert setup.fill() == {0, 1, 2, 3}
    assert not any(m.requires_grad for m in setup.memory)
    setup.model.zero_grad()  # gradient and parameter hold each other


def test_hooks_of_the_program_still_run_and_count(setup: Setup) -> None:
    def halve(p: torch.Tensor) -> None:
        assert p.grad is not None
        p.grad.data.mul_(0.5)

    setup.flat.parameters[2].register_post_accumulate_grad_hook(halve)
    setup.backward()
    assert setup.fill() == {0, 1, 3}


def test_no_hook_is_left_at_the_end() -> None:
    setup = Setup()
    setup.early.close()
    setup.backward()
    assert not any(bool(m.any()) for m in setup.memory)
    assert not any(hooks_on(p) for p in setup.flat.parameters)
