"""What holds for every test: it leaves nothing behind, and it is the same test in every run.

The fixture compares what this process holds before and after a test (tests/leaks.py says how): processes, threads,
descriptors, shared memory, temporary files. What is on its way out gets a moment to go. Several pytest processes may run
beside each other (xdist).
"""

import gc
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.leaks import MARK, Holdings

# Before torch is imported: one thread per operation, in every thread of a test and in the processes that it starts, so
# that sums are always made in the same order and the cores are not fought over.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

GRACE_S = 3.0
POLL_S = 0.02
SLOW_COLLECTION_S = 0.05

# The same cases in every run, so that a red run is repeated by its command alone; `make fuzz` looks for new ones.
settings.register_profile("default", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("fuzz", derandomize=False, deadline=None, print_blob=True, max_examples=2000)
settings.load_profile("default")


def pytest_configure(config: pytest.Config) -> None:
    os.environ[MARK] = str(os.getpid())
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Started in the background of a script: the tasks would inherit it and be deaf to the Ctrl-C of a test.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # pytest's own folders, which outlive the run, stay where they were; all else goes to a folder that is watched.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix="tq-")
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


def collect_garbage() -> None:
    """Collects; what makes that slow, such as half of torch imported by a test, is there to stay and is not looked at again."""
    begun = time.process_time()
    gc.collect()
    if time.process_time() - begun > SLOW_COLLECTION_S:
        gc.freeze()


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaks a process, a thread, a descriptor, shared memory or a temporary file."""
    before = Holdings.look()
    yield
    request.node.funcargs.clear()  # by now every other fixture has ended, and only pytest holds what they made
    deadline = time.monotonic() + GRACE_S
    collected = False
    keeps = request.node.get_closest_marker("library_keeps_sockets") is not None
    while leaks := [
        leak
        for leak in Holdings.look().since(before)
        if not (keeps and leak.startswith(("descriptor of socket", "descriptor of pipe")))
    ]:
        if not collected:
            collect_garbage()  # what only a cycle of references holds is no leak
            collected = True
        elif time.monotonic() > deadline:
            pytest.fail("the test left behind " + "; ".join(leaks), pytrace=False)
        else:
            time.sleep(POLL_S)
