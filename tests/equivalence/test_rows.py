"""Sparse embeddings whose rows are on the ps tasks, against plain PyTorch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import nn

import torchquorum as tq
import torchquorum.wire.messages as m
from tests.harness import PATIENCE, Cluster
from torchquorum.cli.tables import tables
from torchquorum.errors import ConfigError, GraphError
from torchquorum.formats.checkpoint_write import export
from torchquorum.session.join import Task
from torchquorum.worker.ps_channels import PsChannels

STEPS = 10
ONE_AT_A_TIME = threading.Lock()


class Model(nn.Module):
    """Embeddings with padding, two calls in one forward, bags with weights and offsets; dense layers beside them where asked."""

    def __init__(self, dense: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(101, 5, sparse=True, padding_idx=3)
        self.bags = nn.EmbeddingBag(53, 4, mode="sum", sparse=True, include_last_offset=True)
        self.mean = nn.EmbeddingBag(53, 3, mode="mean", sparse=True, padding_idx=0)
        self.last = nn.Linear(12, 1) if dense else None

    def forward(self, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        words = self.words(ids).sum(1) + self.words(ids[:, :1]).squeeze(1)
        offsets = torch.arange(0, ids.numel() + 1, ids.shape[1])
        bags = self.bags(ids.reshape(-1) % 53, offsets, per_sample_weights=weights.reshape(-1))
        found = torch.cat([words, bags, self.mean(ids % 53)], 1)
        return self.last(found) if self.last is not None else found.sum(1, keepdim=True)


def loss_of(model: nn.Module, worker: int, step: int, rows: int = 40) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + worker)
    ids = torch.randint(0, 101, (rows, 6), generator=generator)
    target, weights = (torch.randn(rows, k, generator=generator) for k in (1, 6))
    return ((model(ids, weights) - target) ** 2).mean()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.01),
    "SparseAdam": lambda p: torch.optim.SparseAdam(list(p), lr=0.1),
}


def plain(name: str, workers: int = 1, steps: int = STEPS) -> list[torch.Tensor]:
    model = Model(dense=name != "SparseAdam")
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        for worker in range(workers):
            (loss_of(model, worker, step) / workers).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def on_ps(
    name: str,
    *,
    ps: int = 1,
    workers: int = 1,
    transport: str = "auto",
    steps: int = STEPS,
    rule: Any = None,
    **options: Any,
) -> list[torch.Tensor]:
    cluster = Cluster(ps=ps, workers=workers, transport=transport)

    def work(task: Task) -> list[torch.Tensor]:
        with ONE_AT_A_TIME:  # threads share torch's random state
            model = Model(dense=name != "SparseAdam")
        optimizer = tq.Optimizer(OPTIMIZERS[name](model.parameters()), rule=rule or tq.Sync())
        with tq.Session(
            task, model, optimizer, last_step=steps, patience=PATIENCE, wait_for_workers=workers, **options
        ) as session:
            while not session.should_stop():
                optimizer.zero_grad()
                loss_of(model, task.index, session.global_step).backward()
                optimizer.step()
        return [p.detach() for p in model.parameters()]

    return cluster.run(*[work] * workers)[0]


@pytest.mark.parametrize("pool_bytes", [4096, 8192])
def test_rows_that_do_not_fit_into_shared_memory_travel(pool_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchquorum.worker.row_exchange.POOL_BYTES", pool_bytes)
    for mine, other in zip(on_ps("Adagrad", ps=2), plain("Adagrad"), strict=True):
        assert torch.equal(mine, other)


def test_on_one_host_no_row_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = list[int]()

    def post(self: PsChannels, k: int, message: Any, frames: Any = ()) -> None:
        if isinstance(message, m.PullRows | m.Push):
            sizes.append(sum(map(len, frames)))
        send(self, k, message, frames)

    send = PsChannels.post
    monkeypatch.setattr(PsChannels, "post", post)
    on_ps("Adagrad", ps=2, workers=2)
    assert len(sizes) > 2 * STEPS and not any(sizes)
    sizes.clear()
    on_ps("Adagrad", transport="tcp")
    assert any(sizes)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("ps", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_worker_equals_plain_pytorch(name: str, ps: int, transport: str) -> None:
    ours, theirs = on_ps(name, ps=ps, transport=transport), plain(name)
    for mine, other in zip(ours, theirs, strict=True):
        if name == "SGD":  # torch adds a row's duplicates one by one
            assert torch.allclose(mine, other, rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(mine, other)


@pytest.mark.parametrize("rule", [tq.Async(), tq.Bounded(2), tq.Buffered(1), tq.Async(pipeline=True)])
def test_every_rule_has_the_bits_of_one_worker(rule: Any) -> None:
    if rule.pipeline:
        on_ps("Adagrad", rule=rule)
        return
    for mine, other in zip(on_ps("Adagrad", rule=rule), plain("Adagrad"), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sync_of_two_equals_the_joined_batch(name: str) -> None:
    for mine, other in zip(on_ps(name, ps=2, workers=2), plain(name, workers=2), strict=True):
        assert torch.allclose(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("durable", [False, True])
def test_a_run_goes_on_with_the_same_bits_on_more_or_fewer_ps_tasks(tmp_path: Path, durable: bool) -> None:
    on_ps("SparseAdam", ps=1, steps=4, logdir=str(tmp_path), durable=durable)
    on_ps("SparseAdam", ps=3, steps=7, logdir=str(tmp_path), durable=durable)
    ours = on_ps("SparseAdam", ps=2, steps=STEPS, logdir=str(tmp_path), durable=durable)
    for mine, other in zip(ours, plain("SparseAdam"), strict=True):
        assert torch.equal(mine, other)


def test_a_weight_that_is_used_otherwise_is_an_error_that_says_so() -> None:
    def work(task: Task) -> str:
        model = Model()
        optimizer = tq.Optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1))
        with tq.Session(task, model, optimizer, last_step=1, patience=PATIENCE):
            assert model.words.weight.shape == (101, 5) and model.words.weight.grad is None
            assert "rows on the ps tasks" in repr(model.words.weight)
            said = []
            for use in (
                lambda: model.words.weight.norm(),
                lambda: model.words.weight[3],
                lambda: model.words.weight @ torch.ones(5),
                lambda: model.words.weight.data,
                lambda: model.state_dict(),
                lambda: nn.functional.linear(torch.ones(1, 5), model.words.weight),
            ):
                with pytest.raises(ConfigError, match=r"words\.weight: its rows are on the ps tasks") as error:
                    use()
                said.append(str(error.value))
            with pytest.raises(IndexError, match="rows 0 to 100, and 101 was asked for"):
                model.words(torch.tensor([101]))
            loss_of(model, 0, 0).backward()
            optimizer.step()
        assert type(model.words.weight) is nn.Parameter and model.words.weight.norm() > 0
        return said[0]

    assert "norm" in Cluster().run(work)[0]


def test_gradients_gather_over_backward_passes_and_are_cleared_as_in_torch() -> None:
    def work(task: Task) -> list[torch.Tensor]:
        model = Model()
        optimizer = tq.Optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1))
        with tq.Session(task, model, optimizer, last_step=3, patience=PATIENCE) as session:
            for step in range(3):
                loss_of(model, 5, 5).backward()
                model.zero_grad() if step % 2 else optimizer.zero_grad()
                for part in range(2):
                    loss_of(model, part, step).backward()
                optimizer.step()
                assert model.words.weight.grad is not None and model.words.weight.grad.is_sparse
                optimizer.zero_grad()
            assert session.global_step == 3
        return [p.detach() for p in model.parameters()]

    model = Model()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2):
            loss_of(model, part, step).backward()
        optimizer.step()
    for mine, other in zip(Cluster().run(work)[0], model.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: setattr(m.words, "max_norm", 1.0), "max_norm=1.0 would write to rows"),
        (lambda m: setattr(m.words, "scale_grad_by_freq", True), "not supported with sparse gradients"),
    ],
)
def test_what_rows_cannot_do_is_refused_when_the_session_begins(change: Any, said: str) -> None:
    def work(task: Task) -> None:
        model = Model()
        change(model)
        optimizer = tq.Optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1))
        with pytest.raises(ConfigError, match=said), tq.Session(task, model, optimizer, last_step=1, patience=PATIENCE):
            pass
        model = Model()
        adam = tq.Optimizer(torch.optim.Adam(model.parameters()))
        with (
            pytest.raises(ConfigError, match="Adam does not support sparse gradients"),
            tq.Session(task, model, adam, last_step=1, patience=PATIENCE),
        ):
            pass

    cluster = Cluster()
    work(cluster.task(0))
    cluster.stop()


class Words(nn.Module):
    """Two growing tables, one a bag with weights."""

    def __init__(self, optimizer: tq.rows.RowOptimizer | None = None, **options: Any) -> None:
        super().__init__()
        self.one = tq.Table(4, optimizer=optimizer, init=tq.rows.Uniform(-1, 1), **options)
        self.bag = tq.Table(3, optimizer=optimizer, mode="sum", init=tq.rows.Normal(0, 0.1))
        torch.manual_seed(0)
        self.last = nn.Linear(7, 1)

    def forward(self, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.last(torch.cat([self.one(keys).sum(1) + self.one(keys[:, 0]), self.bag(keys, weights=weights)], 1))


def keys_of(worker: int, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + worker)
    keys = torch.randint(-(1 << 40), 1 << 40, (300,), generator=torch.Generator().manual_seed(7))
    chosen = keys[torch.randint(0, 300, (30, 4), generator=generator)]
    return chosen, torch.randn(30, 4, generator=generator), torch.randn(30, 1, generator=generator)


def grow(
    *,
    ps: int = 1,
    workers: int = 1,
    steps: int = STEPS,
    make: Callable[[], Words] = Words,
    rule: Any = None,
    **options: Any,
) -> list[Any]:
    cluster = Cluster(ps=ps, workers=workers)

    def work(task: Task) -> Any:
        with ONE_AT_A_TIME:
            model = make()
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), rule=rule or tq.Sync())
        with tq.Session(
            task, model, optimizer, last_step=steps, patience=PATIENCE, wait_for_workers=workers, **options
        ) as session:
            while not session.should_stop():
                keys, weights, target = keys_of(task.index, session.global_step)
                optimizer.zero_grad()
                ((model(keys, weights) - target) ** 2).mean().backward()
                optimizer.step()
            every = torch.cat([keys_of(0, step)[0].reshape(-1) for step in range(30)]).unique()
            with torch.no_grad():
                return model.one(every), model.bag(every[:, None]), model.last.weight.detach(), model.one.evicted()

    return cluster.run(*[work] * workers)[0]


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "RowwiseAdagrad", "LazyAdam", "FTRL"])
def test_a_table_is_the_same_whatever_the_number_of_ps_tasks_and_restarts(tmp_path: Path, kind: str) -> None:
    def make() -> Words:
        return Words(getattr(tq.rows, kind)(lr=0.1))

    once = grow(make=make)
    again = grow(make=make, steps=4, ps=2, logdir=str(tmp_path))
    assert not torch.equal(again[0], once[0])
    again = grow(make=make, ps=3, logdir=str(tmp_path))
    for mine, other in zip(again[:3], once[:3], strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("durable", [False, True])
def test_evictions_agree_over_shards_journal_and_restart(tmp_path: Path, durable: bool) -> None:
    def make() -> Words:
        return Words(admit=2, ttl=3, capacity=90)

    once = grow(make=make, steps=14)
    assert len(once[3]) > 20
    grow(make=make, steps=9, logdir=str(tmp_path), durable=durable)
    again = grow(make=make, steps=14, logdir=str(tmp_path), durable=durable)
    for mine, other in zip(again[:3], once[:3], strict=True):
        assert torch.equal(mine, other)
    assert again[3] == once[3][-len(again[3]) :]


def test_a_table_says_what_it_cannot_do() -> None:
    with pytest.raises(ConfigError, match="use it inside"):
        tq.Table(4)(torch.tensor([1]))
    for said, make in {
        "dim=0": lambda: tq.Table(0),
        "allowed are sum, mean, max": lambda: tq.Table(4, mode="median"),
        "give tq.rows.Adagrad": lambda: tq.Table(4, optimizer="adam"),  # pyright: ignore[reportArgumentType]
        "must be a number, 0 or more": lambda: tq.rows.SGD(-1.0),
        "allowed are all, touching": lambda: tq.Table(4, average="some"),
    }.items():
        with pytest.raises(ConfigError, match=said):
            make()


@pytest.mark.parametrize("model", [nn.Embedding(9, 2, sparse=True), nn.Sequential(tq.Table(2))])
def test_in_graph_training_is_refused_in_words(model: nn.Module) -> None:
    with pytest.raises(GraphError, match="in-graph training sends whole variables, and no rows"):
        tq.graph.Graph(model, example_inputs=(torch.tensor([[1, 2]]),))


def test_an_export_has_the_whole_weight_again(tmp_path: Path) -> None:
    ours = on_ps("Adagrad", ps=2, steps=3, logdir=str(tmp_path / "run"))
    export(tmp_path / "run" / "model.ckpt-3", tmp_path / "model.safetensors")
    again = Model()
    again.load_state_dict(load_file(tmp_path / "model.safetensors"))
    for mine, other in zip(again.parameters(), ours, strict=True):
        assert torch.equal(mine.detach(), other)


def test_a_model_may_have_many_tables() -> None:
    def make() -> nn.ModuleList:
        torch.manual_seed(0)
        return nn.ModuleList(nn.EmbeddingBag(9, 3, mode="sum", sparse=True) for _ in range(40))

    def backward(model: nn.ModuleList, step: int) -> None:
        ids = torch.randint(0, 9, (5, 2), generator=torch.Generator().manual_seed(step))
        torch.stack([each(ids) for each in model]).square().sum().backward()

    def work(task: Task) -> list[torch.Tensor]:
        model = make()
        optimizer = tq.Optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1))
        with tq.Session(task, model, optimizer, last_step=3, patience=PATIENCE) as session:
            while not session.should_stop():
                optimizer.zero_grad()
                backward(model, session.global_step)
                optimizer.step()
        return [p.detach() for p in model.parameters()]

    model = make()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    for mine, other in zip(Cluster(ps=2).run(work)[0], model.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize(("dtype", "close"), [("float32", 0.0), ("float16", 1e-3), ("int8", 1e-2)])
def test_keys_and_rows_are_exported_and_shown(tmp_path: Path, dtype: str, close: float) -> None:
    rows = grow(steps=3, ps=2, logdir=str(tmp_path / "run"))[0]
    shown = CliRunner().invoke(tables, [str(tmp_path / "run")])
    assert shown.exit_code == 0 and "RowwiseAdagrad" in shown.output
    file = str(tmp_path / "rows.safetensors")
    assert CliRunner().invoke(tables, [str(tmp_path / "run"), "--export", file, "--dtype", dtype]).exit_code == 0
    found = load_file(file)
    every = torch.cat([keys_of(0, step)[0].reshape(-1) for step in range(30)]).unique()
    values = found["one/rows"].float() * (found["one/scales"].unsqueeze(1) if dtype == "int8" else 1)
    assert torch.allclose(values, rows[torch.isin(every, found["one/keys"])], atol=close, rtol=0)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_ps_that_is_lost_in_a_forward_pass_costs_no_bit_of_a_durable_run(tmp_path: Path, lost: int) -> None:
    cluster, restarted = Cluster(ps=2), []

    def work(task: Task) -> list[torch.Tensor]:
        model = Model()
        optimizer = tq.Optimizer(OPTIMIZERS["Adagrad"](model.parameters()))
        with tq.Session(
            task, model, optimizer, last_step=6, patience=PATIENCE, logdir=str(tmp_path), durable=True
        ) as session:
            while not session.should_stop():
                if session.global_step == 3 and not restarted:
                    restarted.append(lost)
                    cluster.restart(lost)
                optimizer.zero_grad()
                loss_of(model, 0, session.global_step).backward()
                optimizer.step()
        return [p.detach() for p in model.parameters()]

    for mine, other in zip(cluster.run(work)[0], plain("Adagrad", steps=6), strict=True):
        assert torch.equal(mine, other)


def test_a_module_on_meta_is_never_allocated() -> None:
    def work(task: Task) -> torch.Tensor:
        model = nn.Sequential(nn.Embedding(10**9, 16, sparse=True, device="meta"), nn.Flatten(), nn.Linear(48, 1))
        optimizer = tq.Optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1))
        ids = torch.tensor([[0, 5, 10**9 - 1]])
        with tq.Session(task, model, optimizer, last_step=2, patience=PATIENCE) as session:
            before = model[0](ids).detach()
            while not session.should_stop():
                optimizer.zero_grad()
                model(ids).square().mean().backward()
                optimizer.step()
            assert not torch.equal(model[0](ids), before)
        return before

    before = Cluster(ps=2).run(work)[0]
    assert torch.equal(before, Cluster().run(work)[0]) and 0.5 < before.std() < 2
