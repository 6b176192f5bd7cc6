"""What a worker writes to the journal of a durable run, and when it is told that an update survives."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from torchquorum.fastpath.page import CLOSED, OPEN, FastPage
from torchquorum.fastpath.records import GradientId
from torchquorum.fastpath.update_journal import Giver, JournaledMean, RegionBytes, UpdateJournal
from torchquorum.formats.journal import GradientNote, Head, find_lineage, replay_lineage
from torchquorum.formats.journal_write import JournalWriter
from torchquorum.memory.lock import supported
from torchquorum.placement.layout import Variable, place

pytestmark = pytest.mark.skipif(not supported(), reason="this system has no locks between processes")
MEAN = JournaledMean.of([b"the mean"])


class Opened:
    """A page that a ps has opened, with its journal, and a worker's end of it."""

    def __init__(self, folder: Path, mode: str) -> None:
        self.folder = folder
        self.writer = JournalWriter(folder, Head(0, 1, 7, 0, 0, 1, {}), mode)
        self.page = FastPage.create(2, 1)
        self.open()
        self.journal = UpdateJournal(self.page)

    def open(self) -> None:
        fd, end = self.writer.lend()
        self.page.journal.lend(self.writer.number, fd, end, waits=self.writer.synced)
        self.page.words.opening_id += 1
        self.page.words.state = OPEN
        self.page.rates.hold(self.page.version, [0.5])

    def append(self, version: int, **more: Any) -> bool:
        giver = Giver(1, GradientId(9, version, version, version - 1, norm=2.0), 0.25)
        return self.journal.append(self.page.words.opening_id, version, [giver], [0.5], **{"mean": MEAN, **more})

    def publish(self, version: int) -> None:
        assert self.append(version)
        self.journal.count()
        self.page.publish(version, 0)

    def versions(self) -> list[int]:
        line = find_lineage(self.folder, 0, 1, 7, 0)
        assert not line.damage
        return [record.version for record, _ in replay_lineage(line, 0, line.version)]

    def close(self) -> None:
        self.journal.close()
        self.page.close()
        self.writer.close()


@pytest.fixture(params=["write"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opened]:
    made = Opened(tmp_path, request.param)
    yield made
    made.close()


def test_a_record_says_whose_gradients_they_are_with_which_rates_and_what_the_ledger_needs(opened: Opened) -> None:
    opened.publish(1)
    line = find_lineage(opened.folder, 0, 1, 7, 0)
    ((record, payload),) = replay_lineage(line, 0, 1)
    assert (record.keys, record.told, record.settings, bytes(payload)) == ([(1, 9, 1)], 0, [{"lr": 0.5}], b"the mean")
    assert record.given == [GradientNote(0, 0.25, record.given[0].wall, 2.0, [0.5])]


def test_what_does_not_count_is_cut_off_and_the_next_record_takes_its_place(opened: Opened) -> None:
    opened.publish(1)
    assert opened.append(2, mean=JournaledMean.of([b"far longer than the record that comes after it"]))
    opened.journal.undo()
    opened.journal.undo()  # once more changes nothing
    opened.publish(2)
    assert opened.versions() == [1, 2]


def test_a_record_that_cannot_be_written_is_cut_off(opened: Opened) -> None:
    opened.publish(1)
    size, limits = opened.writer.path.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]))
    try:
        assert not opened.append(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert opened.writer.path.stat().st_size == size and opened.versions() == [1]


def test_a_worker_follows_to_another_file_and_writes_to_none_in_an_opening_that_is_over(opened: Opened) -> None:
    opened.publish(1)
    before = opened.page.words.opening_id
    opened.page.words.state = CLOSED
    opened.writer.take_back(opened.page.journal.words.end, 1, settled=False)
    opened.open()
    giver = Giver(1, GradientId(9, 2, 2, 1), None)
    assert not opened.journal.append(before, 2, [giver], [0.5], MEAN)
    opened.publish(2)
    assert opened.versions() == [1, 2] and len(list(opened.folder.iterdir())) == 2


def test_nobody_is_told_of_an_update_that_was_published_while_the_ps_died(opened: Opened) -> None:
    ps = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        opened.page.journal.words.pid = ps.pid
        worker = UpdateJournal(opened.page)
        assert worker.survives(1)
        ps.kill()
        ps.wait()
        assert not worker.survives(1)
        worker.close()
    finally:
        with suppress(ProcessLookupError):
            ps.kill()
        ps.communicate()


@pytest.mark.parametrize("opened", ["fsync"], indirect=True)
def test_one_wait_for_the_disk_serves_all_that_was_published_before(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = list[int]()
    monkeypatch.setattr(os, "fdatasync", waits.append)
    opened.publish(1)
    opened.publish(2)
    assert opened.journal.survives(1) and opened.journal.survives(2) and len(waits) == 1
    opened.publish(3)
    assert opened.journal.survives(3) and len(waits) == 2


@pytest.mark.parametrize("opened", ["fsync"], indirect=True)
def test_an_update_that_the_disk_does_not_take_is_not_told(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: int) -> None:
        raise OSError(5, "Input/output error")

    opened.publish(1)
    monkeypatch.setattr(os, "fdatasync", broken)
    assert not opened.journal.survives(1)


def test_the_bytes_of_a_region_have_zeros_between_the_parts_and_for_those_that_are_missing() -> None:
    variables = [Variable(name="a", shape=(3,), dtype="float64"), Variable(name="b", shape=(2, 2), dtype="float32")]
    region = place(variables, 1).trained[0]
    cut = RegionBytes.of_pieces(region)
    a, b = torch.arange(1.0, 4.0, dtype=torch.float64), torch.ones(2, 2)
    whole = b"".join(map(bytes, cut.pieces([a, b])))
    assert len(whole) == region.size_bytes
    memory = torch.frombuffer(bytearray(whole), dtype=torch.uint8)
    for section in region.sections:
        values = memory[section.start_byte : section.start_byte + section.size_bytes]
        piece = section.pieces[0]
        given = a if section.dtype == "float64" else b.reshape(-1)
        assert torch.equal(values.view(given.dtype)[piece.offset : piece.offset + piece.numel], given)
    without = b"".join(map(bytes, cut.pieces([None, b])))
    assert len(without) == region.size_bytes and without.count(0) > whole.count(0)
