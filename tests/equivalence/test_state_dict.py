"""A plain torch.optim optimizer loads `state_dict()` of a run, and goes on with the same bits."""

import copy
from typing import Any

import pytest
import torch

import torchquorum as tq
from tests.equivalence.test_one_worker import OPTIMIZERS, Net, backward, plain, same
from tests.harness import PATIENCE, Cluster

FIRST, LAST = 5, 12


@pytest.mark.parametrize(
    ("name", "ps", "transport", "slice_bytes"),
    [(name, 1, "auto", None) for name in OPTIMIZERS] + [("adam groups", 3, "tcp", 500), ("adafactor", 2, "auto", None)],
)
def test_plain_pytorch_goes_on_from_the_state_of_a_run(
    name: str, ps: int, transport: str, slice_bytes: int | None
) -> None:
    def work(task: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        model = Net()
        optimizer = tq.Optimizer(OPTIMIZERS[name](model), slice_bytes=slice_bytes)
        with tq.Session(task, model, optimizer, last_step=FIRST + 1, patience=PATIENCE) as session:
            for step in range(FIRST):
                optimizer.zero_grad()
                backward(model, 0, step)
                optimizer.step()
            state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            assert session.global_step == FIRST
            optimizer.step()
        return state

    [(variables, state)] = Cluster(ps=ps, transport=transport).run(work)
    model = Net()
    optimizer = OPTIMIZERS[name](model)
    model.load_state_dict(variables)
    optimizer.load_state_dict(state)
    for step in range(FIRST, LAST):
        optimizer.zero_grad()
        backward(model, 0, step)
        optimizer.step()
    assert same([p.detach() for p in model.parameters()], plain(OPTIMIZERS[name], steps=LAST))


def test_before_a_session_it_is_that_of_a_new_optimizer_and_after_it_there_is_none() -> None:
    def work(task: Any) -> None:
        model = torch.nn.Linear(2, 2)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = tq.Optimizer(inner)
        assert optimizer.state_dict() == inner.state_dict()
        with tq.Session(task, model, optimizer, patience=PATIENCE):
            assert optimizer.state_dict() == inner.state_dict()
        with pytest.raises(tq.errors.ConfigError, match="lives on the ps tasks; call it inside"):
            optimizer.state_dict()

    Cluster().run(work)


def test_reading_the_state_leaves_what_the_program_has_written_and_a_write_to_the_copy_is_noticed() -> None:
    def averages(model: Any, optimizer: Any) -> list[torch.Tensor]:
        """Every second step the averages of ASGD stand in the model for a while, taken in parameter by parameter."""
        seen = []
        for step in range(FIRST):
            optimizer.zero_grad()
            backward(model, 0, step)
            optimizer.step()
            own = [p.detach().clone() for p in model.parameters()]
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(optimizer.state[p].get("ax", p))
                seen += [p.detach().clone() for p in model.parameters()]
                optimizer.state_dict()
                for p, value in zip(model.parameters(), own, strict=True):
                    p.copy_(value)
        return seen

    def work(task: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        model = Net()
        optimizer = tq.Optimizer(torch.optim.ASGD(model.parameters(), t0=0))
        with tq.Session(task, model, optimizer, patience=PATIENCE):
            seen = averages(model, optimizer)
            optimizer.state[model.first.weight]["ax"].zero_()
            with pytest.raises(tq.errors.ConfigError, match=r"ax of first\.weight in optimizer\.state: written to"):
                optimizer.step()
        with pytest.raises(tq.errors.ConfigError, match="read it inside"):
            optimizer.state[model.first.weight]
        return seen, [p.detach() for p in model.parameters()]

    [(seen, ours)] = Cluster().run(work)
    model = Net()
    assert same(seen, averages(model, torch.optim.ASGD(model.parameters(), t0=0)))
    assert same(ours, [p.detach() for p in model.parameters()])
