"""Which run writes to an object store: the beat of one that lives, the silence of one that is dead, and who gives way to whom."""

import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from tests.s3 import s3_server
from tests.unit.formats.test_ledger import entry
from tests.unit.formats.test_ledger_write import updates
from torchquorum.errors import ConfigError
from torchquorum.formats import ledger_segments, ledger_write, owner_object
from torchquorum.formats.ledger import Event
from torchquorum.formats.ledger_segments import fetch_run
from torchquorum.formats.ledger_write import LedgerWriter
from torchquorum.formats.owner_object import NAME, Owner, OwnerBeat, OwnerWatch, read_owner
from torchquorum.formats.storage import RemotePath, locate
from torchquorum.session import folder as session_folder
from torchquorum.session.folder import check_free

pytestmark = pytest.mark.library_keeps_sockets
ELSEWHERE = Owner("another", 1, "other-host", "other", 4711)


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    with s3_server() as variables:
        yield variables


@pytest.fixture
def store(server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> RemotePath:
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setattr(owner_object, "BEAT_S", 0.01)
    monkeypatch.setattr(session_folder, "LOOK_AT_STORE_S", 0.01)
    found = locate(f"s3://bucket/{secrets.token_hex(4)}")
    assert isinstance(found, RemotePath)
    return found


def put(store: RemotePath, owner: Owner) -> None:
    (store / NAME).write_bytes(msgspec.json.encode(owner))


def until(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_folder_is_somebodys_until_that_one_leaves(store: RemotePath) -> None:
    assert read_owner(store) is None and OwnerWatch(store).user() is None
    beat, watch = OwnerBeat(store), OwnerWatch(store)
    until(lambda: watch.user() is not None and watch.alive)
    owner = watch.user()
    assert owner is not None and owner.process == os.getpid() and f"process {os.getpid()} on " in str(owner)
    beat.release()
    beat.release()
    assert read_owner(store) is None and watch.user() is None


def test_one_that_is_silent_is_dead_and_one_whose_process_has_ended_at_once(
    store: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, ELSEWHERE)
    watch = OwnerWatch(store)
    assert watch.user() == ELSEWHERE and not watch.alive
    monkeypatch.setattr(owner_object, "SILENT_S", 0.0)
    assert watch.user() is None
    monkeypatch.undo()
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    put(store, msgspec.structs.replace(ELSEWHERE, host=owner_object.this_host(), process=child))
    assert watch.user() is None


def test_a_second_run_waits_a_moment_and_is_refused_and_begins_where_the_first_is_dead(
    store: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    first = LedgerWriter(store, pytest.fail)
    until(lambda: read_owner(store))
    with pytest.raises(
        ConfigError, match=rf"another run that is alive writes there \(process {os.getpid()} on .*another logdir"
    ):
        check_free(str(store), said.append, wait_s=0.1)
    assert len(said) == 1 and "is in use by another run" in said[0]
    first.close()
    check_free(str(store), pytest.fail)
    put(store, ELSEWHERE)
    monkeypatch.setattr(owner_object, "SILENT_S", 0.05)
    check_free(str(store), said.append, wait_s=0.0)
    assert "process 4711 on other" in said[1]


def test_a_store_that_does_not_answer_is_an_error(store: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setattr(RemotePath, "read_bytes", _away)
    with pytest.raises(ConfigError, match=r"cannot be read: away; check the address"):
        check_free(str(store), pytest.fail)


def _away(_: RemotePath) -> bytes:
    raise OSError(5, "away")


def test_who_was_taken_over_knows_and_leaves_the_other_alone(store: RemotePath) -> None:
    beat = OwnerBeat(store)
    until(lambda: read_owner(store))
    until(lambda: put(store, ELSEWHERE) or beat.taken_by)  # again and again: a beat may fall between
    assert beat.taken_by == "process 4711 on other"
    beat.release()
    assert read_owner(store) == ELSEWHERE


def test_objects_that_were_removed_are_a_gap_in_a_ledger_that_goes_on(
    store: RemotePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_segments, "PUT_EVERY_S", 0.01)
    monkeypatch.setattr(ledger_write, "LOOK_EVERY_S", 0.0)
    said: list[str] = []
    writer = LedgerWriter(store, said.append)
    writer.write(Event("began", 1.0, 0, values={"rule": "sync"}))
    for step in range(5):
        writer.write(entry(step))
    writer.flush()
    until(lambda: read_owner(store) and sum(e.name.startswith("ledger-") for e in store.iterdir()))

    def removed() -> int:
        for path in list(store.iterdir()) if store.exists() else []:
            path.unlink(missing_ok=True)
        writer.check()
        return writer.losses

    until(removed)
    for step in range(5, 8):
        writer.write(entry(step))
    writer.close()
    assert len(said) == 1 and "was removed while the run goes on" in said[0]
    fetch_run(store, tmp_path, ("ledger.jsonl",))
    assert updates(tmp_path) == list(range(1, 9)) and read_owner(store) is None
