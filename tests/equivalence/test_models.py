"""Any nn.Module: layers of many kinds, odd parameters and memory formats train as in plain PyTorch, bit for bit."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import torchquorum as tq
from tests.equivalence.test_one_worker import same
from tests.harness import PATIENCE, Cluster, train
from torchquorum.errors import ConfigError
from torchquorum.session.join import Task


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))).mean((2, 3)))


class Words(nn.Module):
    """An embedding (sparse gradients or not), a scalar and an empty parameter."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 6, sparse=sparse)
        self.scale, self.nothing = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.words(torch.arange(5)).sum() * self.scale * x.sum()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(5, 7, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cells(x)[0]


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(37, 53), nn.Tanh(), nn.Linear(53, 5))


Case = tuple[Callable[[], nn.Module], Callable[[nn.Module], torch.optim.Optimizer], tuple[int, ...], dict]
CASES: dict[str, Case] = {
    "convolution": (Convolutions, lambda m: torch.optim.Adam(m.parameters(), lr=0.01), (4, 3, 8, 8), {}),
    "channels_last": (
        lambda: Convolutions().to(memory_format=torch.channels_last),  # pyright: ignore[reportCallIssue]
        lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
        (4, 3, 8, 8),
        {},
    ),
    "sparse embedding": (lambda: Words(True), lambda m: torch.optim.SGD(m.parameters(), lr=0.1), (3,), {}),
    "embedding": (lambda: Words(False), lambda m: torch.optim.Adam(m.parameters()), (3,), {"ps": 2}),
    "lstm": (Recurrent, lambda m: torch.optim.RMSprop(m.parameters()), (4, 3, 5), {}),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0, batch_first=True),
        lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3),
        (2, 5, 16),
        {"ps": 3},
    ),
    "muon": (
        lambda: nn.Sequential(nn.Linear(9, 7, bias=False), nn.Linear(7, 3, bias=False)),
        lambda m: torch.optim.Muon(m.parameters(), lr=0.01),
        (4, 9),
        {"ps": 2},
    ),
    "a learning rate as a tensor": (
        linear,
        lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.01)),
        (11, 37),
        {},
    ),
    "fused": (linear, lambda m: torch.optim.AdamW(m.parameters(), fused=True), (11, 37), {}),
    "foreach": (linear, lambda m: torch.optim.SGD(m.parameters(), lr=0.1, foreach=True), (11, 37), {}),
    "named parameters": (linear, lambda m: torch.optim.SGD(m.named_parameters(), lr=0.1), (11, 37), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_any_module_equals_plain_pytorch(name: str) -> None:
    make, make_optimizer, shape, options = CASES[name]

    def seeded() -> nn.Module:
        torch.manual_seed(5)
        return make()

    def backward(model: nn.Module, worker: int, step: int) -> None:
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(step))
        model(x).pow(2).mean().backward()

    ours, _ = train(seeded, make_optimizer, backward, steps=6, **options)
    model = seeded()
    optimizer = make_optimizer(model)
    for step in range(6):
        optimizer.zero_grad()
        backward(model, 0, step)
        optimizer.step()
    assert same(ours, [p.detach() for p in model.parameters()])


def begin(model: nn.Module, optimizer: torch.optim.Optimizer, **options: object) -> None:
    cluster = Cluster()

    def work(task: Task) -> None:
        with tq.Session(task, model, tq.Optimizer(optimizer, **options), patience=PATIENCE):  # type: ignore[arg-type]
            pass

    try:
        cluster.run(work)
    finally:
        cluster.stop()


@pytest.mark.parametrize(
    ("model", "optimizer", "options", "expected"),
    [
        (linear(), torch.optim.LBFGS, {}, "LBFGS cannot run on a ps"),
        (nn.Linear(3, 3, dtype=torch.complex64), torch.optim.SGD, {}, "complex64: the ps tasks hold real numbers only"),
        (linear(), torch.optim.SGD, {"schedule": tq.schedule("LambdaLR")}, "LambdaLR cannot run on a ps"),
        (linear(), torch.optim.SGD, {"schedule": tq.schedule("StepLR", size=3)}, "StepLR"),
        (linear(), torch.optim.SGD, {"placement": "random"}, "round_robin, greedy"),
    ],
)
def test_what_cannot_run_is_refused_with_a_reason(
    model: nn.Module, optimizer: type, options: dict, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        begin(model, optimizer(model.parameters()), **options)


def test_a_lazy_module_without_shapes_is_refused() -> None:
    model = nn.LazyLinear(3)
    with pytest.raises(ConfigError, match="lazy module has no shape yet"):
        begin(model, torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize(
    ("parts", "refused"),
    [
        (lambda whole: (whole, whole), True),
        (lambda whole: (whole[:4], whole[3:]), True),
        (lambda whole: (whole[:, :3], whole[2:, 2:]), True),
        (lambda whole: (whole[:, :3], whole[:, 3:]), False),
        (lambda whole: (whole[:3], whole[3:]), False),
    ],
)
def test_two_parameters_in_the_same_memory_are_refused(parts: Callable, refused: bool) -> None:
    model = nn.ParameterList([nn.Parameter(part) for part in parts(torch.ones(6, 6))])
    optimizer = torch.optim.SGD(model.parameters())
    if not refused:
        return begin(model, optimizer)
    with pytest.raises(ConfigError, match="parameters 0 and 1 are two that lie in the same memory"):
        begin(model, optimizer)
    return None


def test_a_training_step_that_is_compiled_has_the_bits_of_one_that_is_not() -> None:
    def run(compiled: bool) -> list[torch.Tensor]:
        def work(task: Task) -> list[torch.Tensor]:
            torch.manual_seed(0)
            model = linear()
            optimizer = tq.Optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
            x, y = torch.randn(8, 37), torch.randn(8, 5)

            def step() -> None:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()

            do = torch.compile(step, backend="eager") if compiled else step
            with tq.Session(task, model, optimizer, patience=PATIENCE):
                for _ in range(4):
                    do()
            return [p.detach() for p in model.parameters()]

        return Cluster().run(work)[0]

    assert same(run(compiled=True), run(compiled=False))


def test_a_model_moved_inside_the_session_is_an_error_not_silence() -> None:
    cluster = Cluster()

    def work(task: Task) -> None:
        model = linear()
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with tq.Session(task, model, optimizer, patience=PATIENCE):
            model.double()
            model(torch.ones(2, 37, dtype=torch.float64)).sum().backward()
            optimizer.step()

    with pytest.raises(ConfigError, match="was moved after tq.Session began"):
        cluster.run(work)
    cluster.stop()


def test_the_parameters_stay_after_the_session() -> None:
    cluster = Cluster()
    model = linear()

    def work(task: Task) -> None:
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with tq.Session(task, model, optimizer, last_step=3, patience=PATIENCE) as session:
            while not session.should_stop():
                optimizer.zero_grad()
                model(torch.ones(2, 37)).sum().backward()
                optimizer.step()

    cluster.run(work)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    plain.zero_grad()
    model(torch.ones(2, 37)).sum().backward()
    before = model.state_dict()["0.bias"].clone()
    plain.step()
    assert not torch.equal(before, model.state_dict()["0.bias"])


def test_a_second_session_beside_the_first_and_another_optimizer_inside_it_are_refused_in_words() -> None:
    cluster = Cluster()

    def work(task: Task) -> None:
        model, other = linear(), linear()
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with tq.Session(task, model, optimizer, patience=PATIENCE) as session:
            with pytest.raises(ConfigError, match="is in a session already: end that first"):
                tq.Session(task, other, tq.Optimizer(torch.optim.SGD(other.parameters()))).start()
            later = tq.Optimizer(torch.optim.ASGD(model.parameters()))
            model(torch.ones(2, 37)).sum().backward()
            with pytest.raises(ConfigError, match="begun with another optimizer for these parameters"):
                later.step()
            optimizer.step()
            assert session.global_step == 1

    cluster.run(work)
