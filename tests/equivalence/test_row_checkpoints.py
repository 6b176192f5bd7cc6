"""Checkpoints of changed rows: a chain of them restores to the same bits, is kept and read like any other, and is folded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import nn

import torchquorum as tq
from tests.harness import PATIENCE, Cluster
from torchquorum.cli.tables import tables
from torchquorum.errors import ConfigError
from torchquorum.formats.checkpoint import list_checkpoints, load_manifest, newest_good, verify
from torchquorum.formats.checkpoint_write import export
from torchquorum.session.join import Task

STEPS = 9


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.EmbeddingBag(300, 3, mode="mean", sparse=True)
        self.users = tq.Table(4, admit=2, ttl=4, optimizer=tq.rows.Adagrad(lr=0.1), mode="sum")
        self.top = nn.Linear(7, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([self.words(ids), self.users(ids * 7919)], 1))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 20 + 10 * step, (8, 3), generator=generator)  # few rows change, some never again
    return (model(ids) - torch.randn(8, 1, generator=generator)).square().mean()


def train(
    folder: Path | None, steps: int, ps: int = 1, model_of: type[nn.Module] = Model, times: int = 1, **options: Any
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Trains with a checkpoint after every step; returns the rows of the table, and the parameters."""

    def work(task: Task) -> tuple[torch.Tensor, list[torch.Tensor]]:
        model: Any = model_of()
        optimizer = tq.Optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1), rule=tq.Sync())
        more = {"logdir": str(folder), **options} if folder is not None else options
        with tq.Session(task, model, optimizer, last_step=steps, patience=PATIENCE, **more) as session:
            while not session.should_stop():
                optimizer.zero_grad()
                loss_of(model, session.global_step).backward()
                optimizer.step()
                for _ in range(times if folder is not None else 0):
                    session.save(wait_s=20.0)
            users = (
                model.users(torch.arange(100)[:, None] * 7919).detach().clone() if model_of is Model else torch.empty(0)
            )
        return users, [p.detach() for p in model.parameters() if p.numel()]

    return Cluster(ps=ps).run(work)[0]


def same(mine: tuple[torch.Tensor, list[torch.Tensor]], other: tuple[torch.Tensor, list[torch.Tensor]]) -> bool:
    return all(torch.equal(a, b) for a, b in zip([mine[0], *mine[1]], [other[0], *other[1]], strict=True))


def files(folder: Path) -> list[list[str]]:
    return [list(load_manifest(info.path).tables[0].files) for info in list_checkpoints(folder)]


@pytest.mark.parametrize("durable", [False, True])
def test_a_chain_restores_to_the_same_bits_on_any_number_of_ps_tasks(tmp_path: Path, durable: bool) -> None:
    for steps, ps in ((4, 2), (7, 1), (STEPS, 3)):
        ours = train(tmp_path, steps, ps, durable=durable)
        assert len(files(tmp_path)[-1]) > 1, "what it goes on from is a chain"
    assert same(ours, train(None, STEPS))


def test_changed_rows_are_less_than_all_and_every_checkpoint_is_whole_by_itself(tmp_path: Path) -> None:
    whole = train(tmp_path / "a", STEPS, full_every=1, keep=2)
    ours = train(tmp_path / "b", STEPS, full_every=5, keep=2)
    assert same(ours, whole)
    assert {len(f) for f in files(tmp_path / "a")} == {1}
    assert max(len(f) for f in files(tmp_path / "b")) > 1 and len(files(tmp_path / "b")) == 2
    for info in list_checkpoints(tmp_path / "b"):
        assert info.problem is None and verify(info.path) is None
        manifest = load_manifest(info.path)
        first, *others = (manifest.files[name].size_bytes for name in manifest.tables[0].files)
        assert all(other < first for other in others)
    exported = [load_file(str(export(newest_path(tmp_path / name), tmp_path / f"{name}.safetensors"))) for name in "ab"]
    assert all(torch.equal(exported[0][name], exported[1][name]) for name in exported[0])
    for name in "ab":
        target = str(tmp_path / f"{name}.rows.safetensors")
        assert CliRunner().invoke(tables, [str(tmp_path / name), "--export", target]).exit_code == 0
    rows = [load_file(tmp_path / f"{name}.rows.safetensors") for name in "ab"]
    assert all(torch.equal(rows[0][name], rows[1][name]) for name in rows[0])


def newest_path(folder: Path) -> Any:
    found, _ = newest_good(folder)
    assert found is not None
    return found[0]


def test_chains_are_folded_and_their_files_go_with_the_last_checkpoint_that_needs_them(tmp_path: Path) -> None:
    train(tmp_path, STEPS, full_every=3, keep=1)
    (chain,) = files(tmp_path)
    assert len(chain) <= 3
    assert len(list(tmp_path.glob("*/rows-*"))) == len(chain)


def test_a_checkpoint_that_is_not_finished_when_the_task_dies_costs_nothing(tmp_path: Path) -> None:
    train(tmp_path, 4)
    last = newest_path(tmp_path)
    half = tmp_path / f".{last.name.replace('-4', '-5')}.partial-0123456789ab-1-deadbeef"
    half.mkdir()
    for file in last.iterdir():
        (half / file.name).hardlink_to(file)
    (half / "rows-00000-of-00001-changes-003.safetensors").write_bytes(b"half")
    assert same(train(tmp_path, STEPS), train(None, STEPS))


def test_a_checkpoint_that_takes_the_place_of_one_of_the_same_step_is_whole(tmp_path: Path) -> None:
    train(tmp_path, 3, times=2)
    for info in list_checkpoints(tmp_path):
        assert info.problem is None and verify(info.path) is None
    assert same(train(tmp_path, STEPS), train(None, STEPS))


def test_a_number_that_has_no_effect_or_makes_no_sense_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="full_every=0: must be 1 or more"):
        train(tmp_path, 1, full_every=0)
    with pytest.raises(ConfigError, match="full_every=2: the model has no table"):
        train(tmp_path, 1, model_of=Plain, full_every=2)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Linear(3, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(ids.float())
