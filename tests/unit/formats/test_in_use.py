"""A folder that a run uses: others see it, it is free with the end of its process, and children do not hold it on."""

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchquorum.formats import in_use
from torchquorum.formats.in_use import Hold, user_of

HOLDS = """
import os, sys, time
from pathlib import Path
from torchquorum.formats.in_use import Hold
hold = Hold(Path(sys.argv[1]))
if os.fork() == 0:
    print(os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process, which holds the folder and has a child."""
    held = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert held.stdout is not None
    child = int(held.stdout.readline())
    yield held
    os.kill(child, signal.SIGKILL)
    held.kill()
    held.wait(60)
    held.stdout.close()


def test_a_folder_of_another_process_is_in_use_until_that_one_is_killed(
    tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    assert user_of(tmp_path) == f"process {other.pid}"
    mine = Hold(tmp_path)  # in vain
    assert user_of(tmp_path) == f"process {other.pid}"
    other.kill()
    other.wait(60)
    assert user_of(tmp_path) is None  # though its child lives
    mine.release()
    assert list(tmp_path.iterdir()) == []


def test_a_process_is_not_in_its_own_way(tmp_path: Path) -> None:
    first, second = Hold(tmp_path), Hold(tmp_path)
    assert user_of(tmp_path) is None
    first.release()
    first.release()
    second.release()
    third = Hold(tmp_path)
    assert third.held
    del third
    fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if it is still locked
    os.close(fd)


def test_a_folder_that_is_not_there_or_cannot_be_locked_is_in_nobodys_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert user_of(tmp_path / "nowhere") is None
    Hold(tmp_path / "nowhere").release()

    def no_locks(fd: int, how: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    assert user_of(tmp_path) is None
    Hold(tmp_path).release()


def test_a_holder_that_the_kernel_does_not_show_is_somebody_all_the_same(
    tmp_path: Path, other: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_use, "_holder", lambda key: None)
    assert user_of(tmp_path) == "a process that is not visible on this host"
    assert other.poll() is None
