"""The fixture that fails a leaking test can fail: each kind of leak, in a suite of its own."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.leaks import SHM

ROOT = Path(__file__).parents[3]
LEAKS = {
    "process": ("subprocess.Popen(['sleep', '60'])", "process [0-9]+: sleep 60"),
    "thread": ("threading.Thread(target=gone.wait, args=(60,), name='lost').start()", "thread lost"),
    "daemon": ("threading.Thread(target=gone.wait, args=(60,), name='tq-beat', daemon=True).start()", "thread tq-beat"),
    "socket": ("kept.append(socket.socket())", r"descriptor of socket:\[[0-9]+\]"),
    "pipe": ("kept.append(os.pipe())", r"descriptor of pipe:\[[0-9]+\]"),
    "file": ("kept.append(open(tmp_path / 'open', 'w'))", "descriptor of .*/open"),
    "memory": ("kept.append(Slots.create('lost', REGION, 1))", "descriptor of /memfd:torchquorum-lost"),
    "mapping": ("kept.append(map_and_close())", "mapping of /memfd:lost"),
    "segment": ("kept.append(open(f'/dev/shm/tq-lost-{os.getpid()}-{LOST}', 'w'))", "segment /dev/shm/tq-lost-"),
    "folder": ("os.mkdir(f'/dev/shm/fuzz-{os.getpid()}-{LOST}')", "segment /dev/shm/fuzz-"),
    "temporary": ("tempfile.mkdtemp()", "temporary file "),
}
CONFTEST = """
import sys
import tests.conftest
from tests.conftest import *

tests.conftest.GRACE_S = 0.2

def pytest_unconfigure():
    sys.modules["test_leaky"].gone.set()  # or the interpreter would wait for the thread that was left behind
"""
SUITE = """
import ctypes, mmap, os, socket, subprocess, tempfile, threading
import pytest
from torchquorum.placement.layout import Variable, place
from torchquorum.memory.slots import Slots

REGION = place([Variable(name="a", shape=(10,), dtype="float32")], 1).trained[0]
LOST = os.environ["LOST"]
kept, gone = [], threading.Event()

def map_and_close():
    # mmap keeps a descriptor of its own; the C library does not.
    fd = os.memfd_create("lost")
    os.ftruncate(fd, 4096)
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    address = libc.mmap(None, ctypes.c_size_t(4096), 3, 1, fd, ctypes.c_long(0))
    os.close(fd)
    return address

@pytest.fixture
def clean():
    with socket.socket() as one, tempfile.TemporaryDirectory() as folder:
        yield one, folder, subprocess.run(["true"], check=True)

def test_clean(clean):
    Slots.create("used", REGION, 1).close()

def test_beside_others():
    os.mkdir(f"/dev/shm/fuzz-{os.getppid()}-{LOST}")  # as another pytest process makes it meanwhile
"""


@pytest.mark.long
def test_every_kind_of_leak_fails_the_test_that_made_it_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    tests = "".join(f"\ndef test_{name}(tmp_path):\n    {code}\n" for name, (code, _) in LEAKS.items())
    (tmp_path / "test_leaky.py").write_text(SUITE + tests + "\ndef test_after(clean):\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir=.", "."]
    # A process of its own group, which is ended with what the leaky tests have left.
    lost = f"lost-{os.getpid()}"
    paths = ":".join([str(ROOT), str(ROOT / "src"), *sys.path])
    environment = {"PYTHONPATH": paths, "PATH": "/usr/bin:/bin", "LOST": lost}
    shell = ["/bin/sh", "-c", '"$@"; code=$?; trap "" TERM; kill -TERM 0; exit $code', "sh"]
    try:
        done = subprocess.run(
            [*shell, *command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            start_new_session=True,
            check=False,
        )
    finally:
        for segment in SHM.glob(f"tq-lost-*-{lost}"):
            segment.unlink()
        for folder in SHM.glob(f"fuzz-*-{lost}"):
            shutil.rmtree(folder)
    assert done.returncode == 1, done.stdout + done.stderr
    for name, (_, expected) in LEAKS.items():
        found = re.search(rf"teardown of test_{name} _.*\nthe test left behind .*{expected}", done.stdout)
        assert found, f"{name}: {done.stdout}"
    assert f"{3 + len(LEAKS)} passed, {len(LEAKS)} errors" in done.stdout
