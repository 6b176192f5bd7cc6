"""What a session continues from: never from nothing where there was something, and never behind what a durable run promised."""

from pathlib import Path
from typing import Any

import pytest

from tests.unit.formats.checkpoints import flip, found_step, save
from tests.unit.formats.test_ledger import entry
from torchquorum.errors import ConfigError
from torchquorum.formats.checkpoint import CheckpointError, newest_good
from torchquorum.formats.journal import SUFFIX, Head, JournalError, Record
from torchquorum.formats.journal_write import JournalWriter
from torchquorum.formats.ledger import Event
from torchquorum.formats.ledger_write import LedgerWriter
from torchquorum.formats.storage import RemotePath, locate
from torchquorum.rules import Async
from torchquorum.server.journaling import plan_of_updates
from torchquorum.session.durable import Found, find_checkpoint, find_journal, read_durable, read_restore
from torchquorum.wire.messages import OptimizerSpec, Plan

GENERATION = 7


def plan(folder: Path, **more: Any) -> Plan:
    given: dict[str, Any] = {"durable": "write", "logdir": str(folder), "num_shards": 1, "num_workers": 1}
    return Plan(variables=[], optimizer=OptimizerSpec("SGD", [{"lr": 0.1}]), rule=Async(), **{**given, **more})


def durable_run(folder: Path, *, checkpoint: int = 2, updates: int = 6, ledger: bool = True) -> Path:
    """A run that was killed after some updates, each of which its worker was told of; returns its journal."""
    save(folder, checkpoint, num_ps=1, generation=GENERATION)
    head = Head(0, 1, GENERATION, 0, checkpoint, 1, plan_of_updates(plan(folder)))
    writer = JournalWriter(folder, head, "write")
    for version in range(checkpoint + 1, updates + 1):
        writer.append(Record(version, [], [(0, 5, version)], told=version - 1), bytes(200))
    writer.close()
    if ledger:
        lines = LedgerWriter(folder, pytest.fail)
        lines.write(Event("began", 1.0, checkpoint, values={"durable": "write"}))
        for met in range(checkpoint, updates):
            lines.write(entry(met + 1, version=met, met=met))
        lines.write(entry(updates + 1, version=updates, met=updates))  # computed at the last version, so that was told
        lines.close()
    return writer.path


def look(folder: Path, said: list[str], **more: Any) -> Any:
    found = find_checkpoint(str(folder), None, said.append)
    return find_journal(found, plan(folder), said.append, **more)


class TestDamagedCheckpoints:
    def test_that_all_are_damaged_is_an_error_and_they_stay(self, tmp_path: Path) -> None:
        for step in (3, 5):
            flip(save(tmp_path, step) / "part-00000-of-00003.safetensors", 300)
        before = sorted(p.name for p in tmp_path.iterdir())
        with pytest.raises(CheckpointError, match=r"all 2 checkpoints are damaged; .*its checksum .*start_afresh=True"):
            find_checkpoint(str(tmp_path), None, print)
        assert sorted(p.name for p in tmp_path.iterdir()) == before

    def test_with_start_afresh_they_are_moved_aside_and_never_written_over(self, tmp_path: Path) -> None:
        path = save(tmp_path, 5)
        flip(path / "part-00000-of-00003.safetensors", 300)
        was = (path / "part-00000-of-00003.safetensors").read_bytes()
        said: list[str] = []
        found = find_checkpoint(str(tmp_path), None, said.append, start_afresh=True)
        assert found.path is None and path.exists()
        found.set_damaged_aside(said.append)
        assert not path.exists() and any("is kept as model.ckpt-5.damaged" in line for line in said)
        save(tmp_path, 5)
        assert found_step(tmp_path) == 5
        assert (tmp_path / "model.ckpt-5.damaged" / "part-00000-of-00003.safetensors").read_bytes() == was

    def test_a_newer_damaged_one_is_moved_aside_where_an_older_one_is_used(self, tmp_path: Path) -> None:
        save(tmp_path, 3, created_at=1.0)
        for _ in range(2):
            flip(save(tmp_path, 5, created_at=2.0) / "part-00001-of-00003.safetensors", 300)
            found = find_checkpoint(str(tmp_path), None, print)
            assert found.path == str(tmp_path / "model.ckpt-3")
            found.set_damaged_aside(print)
        names = {p.name for p in tmp_path.iterdir()}
        assert names == {"model.ckpt-3", "model.ckpt-5.damaged", "model.ckpt-5.damaged-2"}

    def test_one_that_cannot_be_moved_is_said(self, tmp_path: Path) -> None:
        said: list[str] = []
        flip(save(tmp_path, 5) / "part-00000-of-00003.safetensors", 300)
        found = find_checkpoint(str(tmp_path), None, print, start_afresh=True)
        (tmp_path / "model.ckpt-5").rename(tmp_path / "gone")
        found.set_damaged_aside(said.append)
        assert "could not be moved aside (No such file or directory)" in said[0]

    def test_one_that_is_out_of_reach_is_not_taken_for_damaged(self, tmp_path: Path) -> None:
        save(tmp_path, 3, created_at=1.0)
        manifest = save(tmp_path, 5, created_at=2.0) / "manifest.json"
        manifest.write_bytes(manifest.read_bytes().replace(b'"format": 1', b'"format": 2'))
        with pytest.raises(CheckpointError, match=r"format 2.* it may be whole, and going on without it would lose"):
            find_checkpoint(str(tmp_path), None, print)

    def test_on_an_object_store_they_are_moved_aside_too(self, tmp_path: Path) -> None:
        folder = locate(f"memory://damaged-{tmp_path.name}")
        assert isinstance(folder, RemotePath)
        path = save(folder, 5)
        part = next(p for p in path.iterdir() if p.name.startswith("part-00000"))
        part.write_bytes(part.read_bytes()[:-1] + b"\xff")
        with pytest.raises(CheckpointError, match="all 1 checkpoints are damaged"):
            find_checkpoint(str(folder), None, print)
        find_checkpoint(str(folder), None, print, start_afresh=True).set_damaged_aside(print)
        save(folder, 5)
        found, damaged = newest_good(folder)
        assert found is not None and damaged == []
        assert len(list((folder / "model.ckpt-5.damaged").iterdir())) == 4


class TestDurable:
    def test_a_torn_tail_is_no_loss(self, tmp_path: Path) -> None:
        path = durable_run(tmp_path)
        with path.open("ab") as file:
            file.write(path.read_bytes()[-50:-10])  # no frame, and not a whole one
        path.write_bytes(path.read_bytes()[: path.stat().st_size - 30])
        assert look(tmp_path, []).version == 6

    @pytest.mark.parametrize("ledger", [True, False])
    def test_a_record_damaged_in_the_middle_is_an_error_that_counts_what_is_missing(
        self, tmp_path: Path, ledger: bool
    ) -> None:
        path = durable_run(tmp_path, ledger=ledger)
        flip(path, path.stat().st_size * 2 // 5)
        with pytest.raises(
            JournalError,
            match=rf"workers were told of .* leads to 3: {'3' if ledger else '2 to 3'} updates are missing .*update 4.*damaged",
        ) as e:
            look(tmp_path, [])
        assert "accept_loss=True (--accept-loss) to go on from global step 3" in str(e.value)
        said: list[str] = []
        assert look(tmp_path, said, accept_loss=True).version == 3
        assert any("going on without them" in line for line in said)
        assert (tmp_path / f"{path.name}.damaged").read_bytes() == path.read_bytes()

    def test_the_last_record_damaged_is_an_error_though_nobody_says_that_it_was_told(self, tmp_path: Path) -> None:
        path = durable_run(tmp_path, ledger=False)
        flip(path, path.stat().st_size - 1)
        with pytest.raises(
            JournalError, match="up to 1 updates after global step 5, of which workers may have been told"
        ):
            look(tmp_path, [])

    @pytest.mark.parametrize("lost", ["cut", "removed"])
    def test_a_journal_that_lost_its_end_is_found_out_by_the_ledger_or_by_a_worker(
        self, tmp_path: Path, lost: str
    ) -> None:
        path = durable_run(tmp_path)
        if lost == "cut":
            path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
        else:
            path.unlink()
        with pytest.raises(JournalError, match="workers were told of global step 6"):
            look(tmp_path, [])
        (tmp_path / "ledger.jsonl").unlink()
        with pytest.raises(JournalError, match="workers were told of global step 6"):
            look(tmp_path, [], told=6)

    def test_a_newest_checkpoint_that_is_damaged_takes_a_durable_run_back_only_if_that_is_accepted(
        self, tmp_path: Path
    ) -> None:
        durable_run(tmp_path, checkpoint=2, updates=2)
        later = save(tmp_path, 9, num_ps=1, generation=GENERATION, created_at=1e12)
        for path in tmp_path.glob(f"*{SUFFIX}"):
            path.unlink()  # as the checkpoint did
        flip(later / "part-00000-of-00001.safetensors", 300)
        with pytest.raises(
            JournalError, match=r"told of global step 9, and the folder leads to 2: 7 updates are missing"
        ):
            look(tmp_path, [])
        assert look(tmp_path, [], accept_loss=True).version == 2

    def test_checkpoints_that_are_gone_are_missed_where_the_ledger_knows_of_them(self, tmp_path: Path) -> None:
        durable_run(tmp_path)
        for path in (*tmp_path.glob(f"*{SUFFIX}"), tmp_path / "model.ckpt-2"):
            path.rename(tmp_path.parent / path.name)
        with pytest.raises(JournalError, match="told of global step 6, and the folder leads to 0"):
            find_journal(Found(), plan(tmp_path), print)
        assert find_journal(Found(), plan(tmp_path), print, accept_loss=True).version == 0

    def test_a_run_that_was_not_durable_goes_back_to_its_checkpoint(self, tmp_path: Path) -> None:
        save(tmp_path, 2, num_ps=1, generation=GENERATION)
        for durable in ("write", ""):  # the life before does not count
            lines = LedgerWriter(tmp_path, pytest.fail)
            lines.write(Event("began", 1.0, 2, values={"durable": durable}))
            lines.write(entry(9, version=8, met=8))
            lines.close()
        assert find_journal(find_checkpoint(str(tmp_path), None, print), plan(tmp_path, durable=""), print).version == 2

    def test_a_loss_that_was_accepted_is_not_told_again(self, tmp_path: Path) -> None:
        path = durable_run(tmp_path)
        flip(path, path.stat().st_size * 2 // 5)
        ref = look(tmp_path, [], accept_loss=True)
        JournalWriter(
            tmp_path, Head(0, 1, 8, ref.after, ref.version, 2, plan_of_updates(plan(tmp_path))), "write"
        ).close()
        lines = LedgerWriter(tmp_path, pytest.fail)
        lines.write(Event("began", 1.0, ref.version, values={"durable": "write"}))
        lines.close()
        assert look(tmp_path, []).version == ref.version


def test_what_the_launcher_was_asked_to_allow_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = read_restore("", restore=True, start_afresh=False, accept_loss=False)
    assert not plain.start_afresh and not plain.accept_loss
    monkeypatch.setenv("TORCHQUORUM_START_AFRESH", "1")
    monkeypatch.setenv("TORCHQUORUM_ACCEPT_LOSS", "1")
    asked = read_restore("write", restore=True, start_afresh=False, accept_loss=False)
    assert asked.start_afresh and asked.accept_loss and asked.durable == "write"


def test_durable_needs_a_folder_that_can_be_appended_to() -> None:
    assert (read_durable(True, "runs"), read_durable(None, "runs"), read_durable("FSYNC", "runs")) == (
        "write",
        "",
        "fsync",
    )
    for option, folder in (("sometimes", "runs"), (True, None), (True, "memory://run")):
        with pytest.raises(ConfigError, match="durable="):
            read_durable(option, folder)
