"""The same model has the same names, whatever it is wrapped in."""

import pytest
import torch
from torch import nn

import torchquorum as tq
from tests.harness import PATIENCE, Cluster
from torchquorum.worker.flat import describe
from torchquorum.worker.local_buffers import LocalBuffers, tied_names
from torchquorum.worker.variable_names import plain_names


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.out = nn.Linear(4, 3)
        self.tied = nn.Linear(4, 3)
        self.tied.weight = self.out.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.module(x)
        return self.out(h) + self.tied(h)


def compiled_part() -> nn.Module:
    model = Net()
    model.module[0] = torch.compile(model.module[0])  # type: ignore[assignment]
    return model


WRAPPED = {
    "torch.compile": lambda: torch.compile(Net()),
    "a compiled part": compiled_part,
    "DataParallel": lambda: nn.DataParallel(Net()),
    "both": lambda: nn.DataParallel(torch.compile(Net())),  # type: ignore[arg-type]
}


def names(model: nn.Module) -> tuple[list[str], dict[str, str], list[str]]:
    variables, _ = describe(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return [v.name for v in variables], tied_names(model), [s.name for s in LocalBuffers(model, print).specs]


@pytest.mark.parametrize("how", WRAPPED)
def test_wrapped_and_plain_have_the_same_names(how: str) -> None:
    assert names(WRAPPED[how]()) == names(Net())
    assert "module.0.weight" in names(Net())[0]  # a part of one's own that is called so keeps its name


def test_a_name_that_wraps_nothing_stays() -> None:
    model = nn.ModuleDict({"module": nn.Linear(1, 1)})
    assert plain_names(model)("module.weight") == "module.weight"


def test_a_run_saved_plain_goes_on_wrapped(tmp_path) -> None:
    def train(model: nn.Module, last_step: int) -> int:
        def work(task: tq.Task) -> int:
            optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
            with tq.Session(task, model, optimizer, logdir=tmp_path, last_step=last_step, patience=PATIENCE) as session:
                began = session.global_step
                while not session.should_stop():
                    for parameter in model.parameters():
                        parameter.grad = torch.ones_like(parameter)
                    optimizer.step()
            return began

        return Cluster().run(work)[0]

    assert train(Net(), 2) == 0
    assert train(nn.DataParallel(Net()), 4) == 2
    assert train(compiled_part(), 5) == 4
