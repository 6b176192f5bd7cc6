"""A graph on its way: what can be exported, and what gives the same gradients after its journey."""

from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchquorum as tq
from torchquorum.errors import GraphError
from torchquorum.graph import graph_messages as g
from torchquorum.graph.runner import Program
from torchquorum.graph.tensors import pack

CPU = torch.device("cpu")
X, Y = torch.randn(4, 3), torch.randint(0, 2, (4,))


def travel(graph: tq.graph.Graph) -> Program:
    """A graph as it arrives: through msgpack and raw frames."""
    spec = msgspec.msgpack.decode(msgspec.msgpack.encode(graph.spec), type=g.GraphSpec)
    _, frames = pack(graph.values, copy=True)
    named = dict(graph.model.named_parameters())
    variables = {n: (tuple(p.shape), str(p.dtype).removeprefix("torch.")) for n, p in named.items()}
    program = Program(spec, [bytes(f) for f in frames], CPU, variables)
    with torch.no_grad():
        for name, parameter in program.variables.named_parameters():
            parameter.copy_(named[name])
    return program


def assert_same_gradients(
    model: nn.Module, graph: tq.graph.Graph, batch: tuple[torch.Tensor, ...], loss: torch.Tensor
) -> None:
    loss.backward()
    program = travel(graph)
    torch.manual_seed(0)
    (ours,) = program(batch)
    ours.backward()
    assert torch.equal(ours, loss)
    for name, parameter in program.variables.named_parameters():
        theirs = dict(model.named_parameters())[name].grad
        assert (parameter.grad is None) == (theirs is None), name
        assert parameter.grad is None or theirs is None or torch.equal(parameter.grad, theirs), name


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 6, batch_first=True, num_layers=2, dropout=0.1)
        self.attend = nn.TransformerEncoderLayer(6, 2, 12, batch_first=True)
        self.out = nn.Linear(6, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.attend(self.lstm(self.words(x))[0])).transpose(1, 2)


class Odd(nn.Module):
    """Sizes in arithmetic, a block without gradients, constants, an unused parameter, work in place on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.unused = nn.Parameter(torch.ones(2))
        self.table = torch.arange(6.0).view(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            middle = self.linear(x).mean(0)
        half = x.shape[0] // 2
        y = self.linear(x.add_(1.0)) - middle + x @ self.table
        return torch.cat([y[:half], y[half:] * 2]) + torch.arange(x.shape[0]).sum() / x.shape[0]


def test_a_recurrent_model_with_attention_gives_the_same_gradients_after_its_journey() -> None:
    model, x = Recurrent(), torch.randint(0, 11, (3, 5))
    graph = tq.graph.Graph(model, F.cross_entropy, example_inputs=(torch.randint(0, 11, (4, 5)),) * 2)
    torch.manual_seed(0)
    assert_same_gradients(model, graph, (x, x), F.cross_entropy(model(x), x))


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_sizes_constants_and_blocks_without_gradients_survive_the_journey(rows: int) -> None:
    model, x, y = Odd(), torch.randn(rows, 3), torch.randint(0, 2, (rows,))
    graph = tq.graph.Graph(model, F.cross_entropy, example_inputs=(X.clone(), Y))
    assert_same_gradients(model, graph, (x.clone(), y), F.cross_entropy(model(x.clone()), y))
    assert travel(graph).writes_in_place


def test_a_model_may_return_its_own_loss_and_a_loss_may_look_at_the_model() -> None:
    model = nn.Linear(3, 2)
    regularize = tq.tensorflow.l2_regularizer(0.1)

    def loss_fn(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out, y) + regularize(model)

    graph = tq.graph.Graph(model, loss_fn, example_inputs=(X, Y))
    assert_same_gradients(model, graph, (X, Y), loss_fn(model(X), Y))

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).square().mean()

    own = Own()
    assert_same_gradients(own, tq.graph.Graph(own, example_inputs=(X,)), (X,), own(X))


def test_an_example_batch_of_one_still_leaves_the_batch_size_open() -> None:
    graph = tq.graph.Graph(nn.Linear(3, 2), F.cross_entropy, example_inputs=(X[:1], Y[:1]))
    assert [i.shape for i in graph.inputs] == [[graph.inputs[0].shape[0], 3], [graph.inputs[0].shape[0]]]
    assert isinstance(graph.inputs[0].shape[0], str)


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean() if x.sum() > 0 else x.std()


class Untraceable(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.shape[0] > 3, lambda v: v.mean(), lambda v: v.std(), (x,))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: tq.graph.Graph(Branches(), example_inputs=(X,)), "no branches that depend on their values"),
        (lambda: tq.graph.Graph(nn.Linear(3, 2), example_inputs=(X,)), "must be one floating-point number"),
        (lambda: tq.graph.Graph(nn.Linear(3, 2), F.cross_entropy, example_inputs=(X,)), "needs two"),
        (lambda: tq.graph.Graph(nn.Linear(3, 2), F.cross_entropy, example_inputs=()), "tuple of tensors"),
        (lambda: tq.graph.Graph(F.relu, example_inputs=(X,)), "give it an nn.Module"),  # type: ignore[arg-type]
        (lambda: tq.graph.Graph(nn.Linear(3, 2), nn.PReLU(), example_inputs=(X, Y)), "parameters of its own"),
    ],
)
def test_what_cannot_be_a_graph_is_refused_where_it_is_made(make: Any, says: str) -> None:
    with pytest.raises(GraphError, match=says):
        make()


def test_an_operation_that_is_not_torchs_own_is_refused_on_the_client() -> None:
    @torch.library.custom_op("torchquorum_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @twice.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    class Custom(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return twice(x).mean()

    with pytest.raises(GraphError, match=r"twice.*compute tasks do not run"):
        tq.graph.Graph(Custom(), example_inputs=(X,))
