"""A run that is stopped and resumed equals the uninterrupted one, bit for bit, whatever the number of ps tasks."""

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchquorum as tq
from tests.equivalence.test_one_worker import OPTIMIZERS, Net, same
from tests.harness import PATIENCE, Cluster
from torchquorum.errors import InterruptedRunError, TorchQuorumError
from torchquorum.formats.checkpoint import list_checkpoints
from torchquorum.session.join import Task

_LOCK = threading.Lock()
X = torch.randn(600, 37, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 5, (600,), generator=torch.Generator().manual_seed(1))


def run(
    last_step: int | None,
    logdir: Path | None,
    *,
    name: str = "adam",
    ps: int = 1,
    workers: int = 2,
    rule: Any = None,
    noise: bool = False,
    stop_at: int | None = None,
    **options: Any,
) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    cluster = Cluster(ps=ps, workers=workers)
    all_in = threading.Barrier(workers)

    def work(task: Task) -> Any:
        with _LOCK:
            model = Net()
        batches = tq.Batches((X, Y), 10, worker=task.index, workers=workers)
        optimizer = tq.Optimizer(
            OPTIMIZERS[name](model),
            rule=rule or tq.Sync(),
            schedule=tq.ExponentialDecay(decay_steps=4, decay_rate=0.9),
            average=tq.ExponentialMovingAverage(0.9),
            placement="greedy",
            slice_bytes=2000,
        )
        session = tq.Session(
            task, model, optimizer, last_step=last_step, logdir=logdir, data=batches, patience=PATIENCE, **options
        )
        with pytest.raises(InterruptedRunError) if stop_at is not None and task.is_chief else nullcontext(), session:
            all_in.wait(20)
            started = session.global_step
            while not session.should_stop():
                x, y = next(batches)
                if noise:
                    x = x + 0.1 * torch.randn_like(x)
                optimizer.zero_grad()
                branch = batches.step_in_epoch % 3 != 1
                nn.functional.cross_entropy(model(x, branch), y).backward()
                optimizer.step()
                if stop_at is not None and session.global_step >= stop_at and task.is_chief:
                    session.signals.ask("SIGINT")
            session.pull()
            variables = [p.detach().clone() for p in model.parameters()]
            with session.averaged():
                averages = [p.detach().clone() for p in model.parameters()]
        return variables, averages, started  # pyright: ignore[reportPossiblyUnboundVariable]

    return cluster.run(*[work] * workers)[0]


@pytest.mark.parametrize("name", ["sgd", "nesterov", "adam", "amsgrad", "rmsprop", "adagrad", "groups"])
def test_a_sync_run_resumed_with_other_ps_tasks_equals_the_uninterrupted_one(name: str, tmp_path: Path) -> None:
    whole, averages, _ = run(14, None, name=name)
    run(5, tmp_path, name=name, ps=3)
    _, _, started = run(9, tmp_path, name=name, ps=1)
    assert started == 5
    resumed, resumed_averages, started = run(14, tmp_path, name=name, ps=5)
    assert started == 9
    assert same(resumed, whole) and same(resumed_averages, averages)
    assert [info.step for info in list_checkpoints(tmp_path)] == [5, 9, 14]


def test_a_sync_run_stopped_by_a_signal_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    whole, _, _ = run(14, None)
    run(14, tmp_path, stop_at=6)
    [info] = list_checkpoints(tmp_path)
    assert 6 <= info.step < 14
    resumed, _, started = run(14, tmp_path)
    assert started == info.step and same(resumed, whole)


def test_random_numbers_go_on_where_they_stopped(tmp_path: Path) -> None:
    torch.manual_seed(7)
    whole, _, _ = run(12, None, workers=1, noise=True)
    torch.manual_seed(7)
    run(5, tmp_path, workers=1, noise=True)
    torch.manual_seed(99)
    resumed, _, _ = run(12, tmp_path, workers=1, noise=True)
    assert same(resumed, whole)


def test_checkpoints_by_steps_are_named_after_what_they_hold_and_five_are_kept(tmp_path: Path) -> None:
    run(200, tmp_path, workers=1, name="sgd", save_every_steps=8)
    infos = list_checkpoints(tmp_path)
    assert len(infos) <= 5 and infos[-1].step == 200
    assert all(info.problem is None for info in infos)


@pytest.mark.parametrize("rule", [tq.Async(), tq.Buffered(3), tq.Bounded(1)], ids=str)
def test_other_rules_resume_at_the_step_that_was_saved(rule: tq.Rule, tmp_path: Path) -> None:
    run(7, tmp_path, rule=rule)
    _, _, started = run(11, tmp_path, rule=rule)
    assert started == 7
    assert [info.step for info in list_checkpoints(tmp_path)] == [7, 11]


def test_a_damaged_checkpoint_is_skipped_for_the_one_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(5, tmp_path)
    run(9, tmp_path)
    part = next((tmp_path / "model.ckpt-9").glob("*.safetensors"))
    damaged = bytearray(part.read_bytes())
    damaged[-3] ^= 0xFF
    part.write_bytes(damaged)
    whole, _, _ = run(12, None)
    resumed, _, started = run(12, tmp_path)
    assert started == 5 and same(resumed, whole)
    assert f"skipping {tmp_path / 'model.ckpt-9'}" in capsys.readouterr().err


def test_a_folder_that_cannot_be_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(TorchQuorumError, match="run cannot be written to: Not a directory"):
        run(6, tmp_path / "file" / "run", workers=1)


def test_num_steps_counts_from_where_the_run_goes_on(tmp_path: Path) -> None:
    run(None, tmp_path, num_steps=4)
    _, _, started = run(None, tmp_path, num_steps=3)
    assert started == 4
    assert [info.step for info in list_checkpoints(tmp_path)] == [4, 7]


def test_a_run_ends_for_everybody_when_its_time_is_up(tmp_path: Path) -> None:
    _, _, started = run(10**9, tmp_path, max_seconds=0.5)
    assert started == 0
    assert list_checkpoints(tmp_path)[-1].step > 0


def train_on_records(files: str, last_step: int, logdir: Path | None) -> tuple[list[torch.Tensor], int]:
    """Two workers that read TFRecord files, each its share, shuffled and read ahead."""
    cluster = Cluster(workers=2)
    all_in = threading.Barrier(2)
    features = {"x": tq.data.FixedLenFeature([37], torch.float32), "y": tq.data.FixedLenFeature([], torch.int64)}

    def work(task: Task) -> Any:
        with _LOCK:
            model = Net()
        dataset = tq.data.TFRecordDataset(
            files, features, batch_size=8, shuffle=30, repeat=None, prefetch=3, share=(task.index, task.num_workers)
        )
        batches = iter(dataset)
        optimizer = tq.Optimizer(OPTIMIZERS["adam"](model), rule=tq.Sync())
        with tq.Session(
            task, model, optimizer, last_step=last_step, logdir=logdir, data=dataset, patience=PATIENCE
        ) as session:
            all_in.wait(20)
            started = session.global_step
            while not session.should_stop():
                batch = next(batches)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(batch["x"], True), batch["y"]).backward()
                optimizer.step()
            session.pull()
        return [p.detach().clone() for p in model.parameters()], started

    return cluster.run(work, work)[0]


def test_a_run_that_reads_tfrecord_files_is_resumed_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    for part in range(3):
        with tq.data.TFRecordWriter(tmp_path / f"train-{part}") as writer:
            for row in range(part * 40, part * 40 + 40):
                writer.write(tq.data.Example({"x": X[row], "y": int(Y[row])}))
    files = str(tmp_path / "train-*")
    whole, _ = train_on_records(files, 14, None)
    train_on_records(files, 3, tmp_path / "run")
    _, started = train_on_records(files, 8, tmp_path / "run")
    assert started == 3
    resumed, started = train_on_records(files, 14, tmp_path / "run")
    assert started == 8 and same(resumed, whole)
