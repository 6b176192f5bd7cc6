"""In-graph training gives what between-graph training, or plain PyTorch, gives on the same batches."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchquorum as tq
from tests import harness
from tests.graph_cluster import graph_cluster, session
from torchquorum.graph.graph_session import batch_seed


class Normed(nn.Module):
    """Convolution, batch norm, dropout, a tied weight and a parameter that the optimizer does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.first = nn.Linear(3 * 16, 8)
        self.drop = nn.Dropout(0.4)
        self.left = nn.Linear(8, 8, bias=False)
        self.right = nn.Linear(8, 8, bias=False)
        self.right.weight = self.left.weight
        self.scale = nn.Parameter(torch.full((8,), 1.5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(F.relu(self.first(F.relu(self.norm(self.conv(x))).flatten(1))))
        return self.right(self.left(hidden)) * self.scale


def normed_batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(5)
    sizes = [6, 6, 5, 1, 6, 7][:count] + [6] * max(0, count - 6)
    return [(torch.randn(n, 1, 6, 6), torch.randint(0, 8, (n,))) for n in sizes]


def make_normed() -> Normed:
    torch.manual_seed(3)
    return Normed()


@pytest.mark.parametrize("rule", [tq.Sync(), tq.Async(), tq.Bounded(1), tq.Buffered(1)], ids=str)
def test_one_compute_task_equals_plain_pytorch_bit_for_bit_with_dropout_and_batch_norm(rule: tq.Rule) -> None:
    batches = normed_batches(6)
    plain = make_normed()
    sgd = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    losses = []
    for number, (x, y) in enumerate(batches):
        torch.manual_seed(batch_seed(11, number))
        sgd.zero_grad()
        loss = F.cross_entropy(plain(x), y)
        loss.backward()
        sgd.step()
        losses.append(loss.item())

    model = make_normed()
    graph = tq.graph.Graph(model, F.cross_entropy, example_inputs=batches[0])
    inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    with graph_cluster() as cluster, session(cluster, graph, tq.Optimizer(inner, rule=rule), seed=11) as run:
        results = list(run.run(batches))
    assert [r.loss for r in results] == losses
    assert [(r.number, r.step, r.local_step, r.accepted) for r in results] == [
        (n, n + 1, n + 1, True) for n in range(6)
    ]
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    for (name, ours), (_, theirs) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.equal(ours, theirs), name


def make_mlp() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))


def test_sync_in_graph_equals_sync_between_graph_bit_for_bit_on_the_same_batches() -> None:
    torch.manual_seed(9)
    batches = [(torch.randn(4, 5), torch.randint(0, 3, (4,))) for _ in range(12)]

    def backward(model: nn.Module, worker: int, step: int) -> None:
        x, y = batches[2 * step + worker]
        F.cross_entropy(model(x), y).backward()

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.01)

    between, _ = harness.train(make_mlp, adam, backward, steps=6, workers=2, rule=tq.Sync())

    model = make_mlp()
    graph = tq.graph.Graph(model, F.cross_entropy, example_inputs=batches[0])
    with graph_cluster(workers=2) as cluster:
        options = {"wait_for_workers": 2, "last_step": 6}
        with session(cluster, graph, tq.Optimizer(adam(model), rule=tq.Sync()), **options) as run:
            results = list(run.run(batches))
    assert sorted(r.number for r in results) == list(range(12))
    assert {r.number: r.placement[-14] for r in results} == {n: str(n % 2) for n in range(12)}
    assert all(r.accepted for r in results)
    for ours, theirs in zip(model.parameters(), between, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("rule", [tq.Sync(aggregate=2), tq.Async(), tq.Async(pipeline=True), tq.Buffered(3)], ids=str)
def test_every_batch_is_computed_once_under_any_rule(rule: tq.Rule) -> None:
    torch.manual_seed(9)
    batches = [(torch.randn(4, 5), torch.randint(0, 3, (4,))) for _ in range(30)]
    model = make_mlp()
    graph = tq.graph.Graph(model, F.cross_entropy, example_inputs=batches[0])
    optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.05), rule=rule)
    with graph_cluster(workers=3) as cluster, session(cluster, graph, optimizer, wait_for_workers=3) as run:
        results = list(run.run(batches))
        version = run.pull()
    assert sorted(r.number for r in results) == list(range(30))
    if rule.pipeline:
        assert version >= 27  # the last push of each is told with the next one
    elif rule.aggregate == 1:
        assert all(r.accepted for r in results) and version == 30
    elif rule.aggregate == 3:
        assert all(r.accepted for r in results) and version == 10
    else:
        assert sum(bool(r.accepted) for r in results) >= 2 * version > 10
