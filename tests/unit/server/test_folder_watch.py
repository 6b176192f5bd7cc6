"""Files of a run that are removed while it goes on: shard 0 saves again, another shard ends if nothing comes of it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchquorum.formats.journal import Head, JournalError
from torchquorum.formats.journal_write import JournalWriter
from torchquorum.server.folder_watch import REMOVED_S, FolderWatch


@pytest.fixture
def shard(tmp_path: Path) -> Any:
    """What the watch sees of a shard: a real journal."""
    journal = JournalWriter(tmp_path, Head(1, 2, 7, 0, 0, 1, {}), "write")
    yield SimpleNamespace(journal=journal)
    journal.close()


def test_a_journal_that_is_removed_is_told_until_a_checkpoint_begins_it_again(shard: Any) -> None:
    said: list[str] = []
    watch = FolderWatch(shard, said.append)
    assert not watch.has_to_save(0, saving=False)
    shard.journal.path.unlink()
    assert watch.has_to_save(0, saving=False) and "was removed while the run goes on" in said[0]
    assert not watch.has_to_save(0, saving=True)
    shard.journal.rotate(3)
    assert not watch.has_to_save(0, saving=False) and len(said) == 1


def test_a_ledger_that_was_lost_is_a_reason_to_save_once() -> None:
    watch = FolderWatch(SimpleNamespace(journal=None), pytest.fail)  # type: ignore[arg-type]
    assert [watch.has_to_save(losses, saving=False) for losses in (0, 1, 1, 2)] == [False, True, False, True]


def test_another_shard_waits_for_the_checkpoint_and_then_ends(shard: Any) -> None:
    watch = FolderWatch(shard, pytest.fail)
    watch.check(0.0)
    shard.journal.path.unlink()
    watch.check(1.0)
    watch.check(1.0 + REMOVED_S)
    with pytest.raises(JournalError, match="was removed while the run goes on"):
        watch.check(1.1 + REMOVED_S)
    shard.journal.rotate(3)
    watch.check(99.0)
    shard.journal.path.unlink()
    watch.check(100.0)
