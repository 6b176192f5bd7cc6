"""Batch norm's running statistics: where they live, what is saved and evaluated, and that a run resumes with them."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import torchquorum as tq
from tests.equivalence.test_one_worker import same
from tests.harness import PATIENCE, Cluster
from torchquorum.errors import ConfigError, RefusedError
from torchquorum.formats.checkpoint import CheckpointReader, list_checkpoints
from torchquorum.formats.checkpoint_write import export
from torchquorum.formats.storage import Location
from torchquorum.session.join import Task
from torchquorum.worker import local_buffers as worker_buffers

_LOCK = threading.Lock()
X = torch.randn(600, 8, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 5, (600,), generator=torch.Generator().manual_seed(1))
State = dict[str, torch.Tensor]


class Net(nn.Module):
    """Batch norm, tied weights, a frozen layer, a buffer that stays local, and odd ones."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, width), nn.BatchNorm1d(width)
        self.second, self.last = nn.Linear(width, width), nn.Linear(width, 5)
        self.second.weight = self.first.weight if width == 8 else self.second.weight
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("halves", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.register_buffer("absent", None)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.halves: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.halves = self.halves + 0.5  # another tensor every time
        return self.frozen(self.last(torch.relu(self.second(self.norm(self.first(x))))))


def state(model: nn.Module) -> State:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def equal(ours: State, theirs: State) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


def run(
    last_step: int,
    logdir: Path | None,
    *,
    ps: int = 1,
    workers: int = 2,
    rule: Any = None,
    model: Callable[[], nn.Module] = Net,
    at_end: Callable[[Task, tq.Session, nn.Module], Any] = lambda task, session, model: state(model),
    **options: Any,
) -> list[Any]:
    """Trains; returns what `at_end` says on each worker, by default its state_dict."""
    cluster = Cluster(ps=ps, workers=workers)
    all_in = threading.Barrier(workers)

    def work(task: Task) -> Any:
        with _LOCK:
            torch.manual_seed(task.index)  # every worker is initialised otherwise
            net = model()
        batches = tq.Batches((X, Y), 10, worker=task.index, workers=workers)
        optimizer = tq.Optimizer(
            torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1),
            rule=rule or tq.Sync(),
            average=tq.ExponentialMovingAverage(0.9),
        )
        session = tq.Session(
            task, net, optimizer, last_step=last_step, logdir=logdir, data=batches, patience=PATIENCE, **options
        )
        with session:
            all_in.wait(20)
            while not session.should_stop():
                x, y = next(batches)
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(x), y).backward()
                optimizer.step()
            found = at_end(task, session, net)
        return found

    return cluster.run(*[work] * workers)


def newest(logdir: Path) -> Location:
    info = list_checkpoints(logdir)[-1]
    assert info.problem is None
    return info.path


@pytest.mark.parametrize("mode", ["chief", "average"])
def test_a_sync_run_with_batch_norm_resumes_bit_for_bit_on_every_worker(mode: str, tmp_path: Path) -> None:
    whole = run(12, None, buffers=mode)
    assert not torch.equal(whole[0]["norm.running_mean"], whole[1]["norm.running_mean"])  # each has its own
    run(5, tmp_path, buffers=mode, ps=2)
    resumed = run(12, tmp_path, buffers=mode, ps=3)
    assert equal(resumed[0], whole[0]) and equal(resumed[1], whole[1])
    assert whole[0]["norm.num_batches_tracked"] == 12 and whole[0]["halves"][0] == 6


def test_buffers_that_are_too_large_to_be_captured_at_every_step_are_saved_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_buffers, "CAPTURED_BYTES", 8)
    ended = run(5, tmp_path)
    with CheckpointReader(newest(tmp_path)) as reader:
        assert equal(reader.state_dict(), ended[0])


def test_the_chiefs_buffers_are_saved_and_exported_under_every_name(tmp_path: Path) -> None:
    ended = run(7, tmp_path, ps=2)
    export(newest(tmp_path), tmp_path / "model.safetensors")
    export(newest(tmp_path), tmp_path / "model.pt")
    model = Net()
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert equal(state(model), ended[0])
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert equal(state(model), ended[0])
    export(newest(tmp_path), tmp_path / "averages.safetensors", averages=True)
    averaged = load_file(tmp_path / "averages.safetensors")
    assert torch.equal(averaged["second.weight"], averaged["first.weight"])
    assert not torch.equal(averaged["first.weight"], ended[0]["first.weight"])
    assert torch.equal(averaged["norm.running_var"], ended[0]["norm.running_var"])


def test_a_checkpoint_of_the_same_step_takes_the_place_of_the_one_before_with_its_buffers(tmp_path: Path) -> None:
    run(3, tmp_path)
    ended = run(3, tmp_path, restore=False, rule=tq.Sync(aggregate=1))
    with CheckpointReader(newest(tmp_path)) as reader:
        assert equal(reader.state_dict(), ended[0])
    assert sum(file.name.startswith("buffers") for file in newest(tmp_path).iterdir()) == 1


def mean_of(states: list[State]) -> State:
    found = {}
    for name in states[0]:
        values = torch.stack([s[name] for s in states])
        if values.dtype.is_floating_point:
            found[name] = values.double().mean(0).to(values.dtype)
        else:
            found[name] = values.any(0) if values.dtype == torch.bool else values.amax(0)
    return found


@pytest.mark.parametrize("rule", [tq.Sync(), tq.Async()], ids=str)
def test_the_average_over_the_workers_is_saved_and_evaluated(rule: tq.Rule, tmp_path: Path) -> None:
    def look(task: Task, session: tq.Session, model: nn.Module) -> tuple[State, State, State]:
        own = state(model)
        with session.shared_buffers():
            shared = state(model)
        return own, shared, state(model)

    ended = run(9, tmp_path, workers=3, rule=rule, buffers="average", at_end=look)
    names = [n for n in ended[0][0] if n.startswith(("norm.running", "norm.num", "halves", "mask", "nothing"))]
    expected = mean_of([{n: own[n] for n in names} for own, _, _ in ended])
    with CheckpointReader(newest(tmp_path)) as reader:
        saved = reader.state_dict()
    for own, shared, after in ended:
        assert equal({n: shared[n] for n in names}, expected)
        assert equal(own, after)  # training goes on with its own
    assert equal({n: saved[n] for n in names}, expected)
    if rule == tq.Sync():
        assert not torch.equal(expected["norm.running_mean"], ended[0][0]["norm.running_mean"])


def test_every_worker_evaluates_the_chiefs_buffers(tmp_path: Path) -> None:
    def look(task: Task, session: tq.Session, model: nn.Module) -> tuple[State, State]:
        own = state(model)
        with session.averaged():
            averaged = state(model)
        assert equal(own, state(model))
        return own, averaged

    (chief, _), (other, averaged) = run(6, None, at_end=look)
    for name in ("norm.running_mean", "norm.num_batches_tracked", "halves"):
        assert torch.equal(averaged[name], chief[name])
    assert not torch.equal(averaged["norm.running_mean"], other["norm.running_mean"])


def test_in_the_middle_of_a_sync_run_the_others_contribute_when_they_next_wait() -> None:
    """The chief evaluates while the others compute: it waits for their batch, not for a deadline."""
    found: list[State] = []

    class Evaluate(tq.Hook):
        def after_run(self, session: tq.hooks.HookSession, ran: tq.hooks.Ran) -> None:
            if session.task.is_chief and ran.step.version in (3, 6):
                with session.shared_buffers():
                    found.append(state(session.model))

    cluster = Cluster(workers=2)
    all_in = threading.Barrier(2)
    seen: dict[tuple[int, int], State] = {}

    def work(task: Task) -> None:
        with _LOCK:
            torch.manual_seed(task.index)
            net = Net()
        optimizer = tq.Optimizer(torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1))
        hooks = [Evaluate()]
        with tq.Session(
            task, net, optimizer, last_step=8, buffers="average", hooks=hooks, patience=PATIENCE
        ) as session:
            all_in.wait(20)
            while not session.should_stop():
                optimizer.zero_grad()
                net(X[10 * task.index :][:10]).square().mean().backward()
                seen[task.index, session.local_step + 1] = state(net)
                optimizer.step()

    cluster.run(work, work)
    # At version 3 the chief has computed 3 batches; the other waits with its 4th in hand.
    for shared, step in zip(found, (3, 6), strict=True):
        both = [seen[0, step]["norm.running_mean"], seen[1, step + 1]["norm.running_mean"]]
        assert torch.equal(shared["norm.running_mean"], torch.stack(both).double().mean(0).float())
        assert shared["norm.num_batches_tracked"] == step + 1
    assert not any("left out" in line for line in cluster.said)


def test_local_buffers_are_in_no_checkpoint_and_begin_as_each_worker_has_them(tmp_path: Path) -> None:
    def fresh() -> nn.Module:
        net = Net()
        net.get_buffer("norm.running_mean").fill_(float(torch.rand(())))
        return net

    def look(task: Task, session: tq.Session, model: nn.Module) -> State:
        with session.averaged():
            pass
        return state(model)

    ended = run(3, tmp_path, buffers="local", model=fresh, at_end=look)
    assert not torch.equal(ended[0]["norm.running_mean"], ended[1]["norm.running_mean"])
    with CheckpointReader(newest(tmp_path)) as reader:
        assert not reader.buffers() and "second.weight" in reader.state_dict()


def test_a_checkpoint_without_buffers_is_restored_and_that_is_said(tmp_path: Path) -> None:
    run(3, tmp_path, buffers="local")
    ended = run(5, tmp_path)
    assert ended[0]["norm.num_batches_tracked"] == 2
    with CheckpointReader(newest(tmp_path)) as reader:
        assert reader.buffers()


def test_more_workers_than_were_saved_begin_with_the_runs_buffers(tmp_path: Path) -> None:
    def begin(task: Task, session: tq.Session, model: nn.Module) -> State:
        return state(model)

    before = run(4, tmp_path, workers=2)
    after = run(4, tmp_path, workers=3, at_end=begin)  # that run is over: nobody computes
    assert equal(after[0], before[0]) and equal(after[1], before[1])
    assert torch.equal(after[2]["norm.running_mean"], before[0]["norm.running_mean"])


def test_a_worker_that_joins_late_begins_with_the_chiefs_buffers_as_they_are_then() -> None:
    cluster = Cluster(workers=2)
    halfway, known = threading.Event(), threading.Event()
    seen: dict[int, torch.Tensor] = {}
    begun: list[State] = []

    def work(task: Task) -> None:
        with _LOCK:
            net = Net()
        optimizer = tq.Optimizer(
            torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1), rule=tq.Async()
        )
        if task.index == 1:
            assert halfway.wait(20)
        with tq.Session(task, net, optimizer, patience=PATIENCE) as session:
            if task.index == 1:
                begun.append(state(net))
                known.set()
                return
            while not known.is_set():
                optimizer.zero_grad()
                net(X[:10]).square().mean().backward()
                now = state(net)
                seen[int(now["norm.num_batches_tracked"])] = now["norm.running_mean"]
                if session.global_step == 10:
                    halfway.set()
                optimizer.step()

    cluster.run(work, work)
    tracked = int(begun[0]["norm.num_batches_tracked"])
    assert tracked >= 10 and torch.equal(begun[0]["norm.running_mean"], seen[tracked])


def test_other_shapes_dtypes_and_modes_are_refused_by_name(tmp_path: Path) -> None:
    def counting(dtype: torch.dtype, size: int) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            net = nn.Sequential(nn.Linear(8, 5))
            net.register_buffer("count", torch.zeros(size, dtype=dtype))
            return net

        return make

    run(2, tmp_path, workers=1, model=counting(torch.float32, 3))
    for other in (counting(torch.float32, 4), counting(torch.int64, 3)):
        with pytest.raises(
            RefusedError, match=r"buffer count is float32 \[3\] in .*model.ckpt-2 and (float32 \[4\]|int64 \[3\]) here"
        ):
            run(4, tmp_path, workers=1, model=other)
    with pytest.raises(ConfigError, match="buffers='mean': must be one of 'chief', 'average', 'local'"):
        run(1, None, workers=1, buffers="mean")


def test_a_worker_with_other_buffers_than_the_chief_is_refused() -> None:
    cluster = Cluster(workers=2)

    def work(task: Task) -> None:
        net = nn.Sequential(nn.Linear(8, 5))
        if task.index == 1:
            net.register_buffer("mine", torch.zeros(2))
        optimizer = tq.Optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        with tq.Session(task, net, optimizer, last_step=1, patience=PATIENCE) as session:
            if task.index == 0:
                while not session.should_stop():
                    net(X[:3]).sum().backward()
                    optimizer.step()

    with pytest.raises(
        RefusedError, match=r"/job:worker/task:1 has other buffers than the chief: only there \['mine float32"
    ):
        cluster.run(work, work)


def test_a_buffer_that_changes_its_shape_in_the_loop_is_named(tmp_path: Path) -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 5)
            self.register_buffer("seen", torch.zeros(1))
            self.seen: torch.Tensor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = torch.zeros(len(self.seen) + 1)
            return self.fc(x)

    with pytest.raises(ConfigError, match=r"buffer seen is float32 \[2\] now and was float32 \[1\]"):
        run(3, tmp_path, workers=1, model=Growing)


def test_what_a_checkpoint_cannot_hold_stays_local_and_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def make() -> nn.Module:
        net = nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5))
        net.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
        return net

    run(2, tmp_path, workers=1, model=make)
    assert "buffer phase is complex64" in capsys.readouterr().err
    with CheckpointReader(newest(tmp_path)) as reader:
        assert set(reader.buffers()) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


def test_a_model_without_buffers_sends_none(tmp_path: Path) -> None:
    ended = run(2, tmp_path, model=lambda: nn.Linear(8, 5), workers=2)
    with CheckpointReader(newest(tmp_path)) as reader:
        assert same(list(reader.state_dict().values()), list(ended[0].values())) and not reader.buffers()
    assert sorted(path.name for path in newest(tmp_path).iterdir()) == [
        "manifest.json",
        "part-00000-of-00001.safetensors",
    ]
