"""The programs of the smallest clusters, as a reader starts them."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ports import free_ports
from tests.process.tasks import Started

HELLO = Path(__file__).parents[2] / "examples" / "hello"
SLOW_S = 150.0


@pytest.mark.timeout(400)
def test_the_local_server_greets() -> None:
    ran = subprocess.run(
        [sys.executable, str(HELLO / "local_server.py")], capture_output=True, text=True, timeout=SLOW_S
    )
    assert (ran.returncode, ran.stdout) == (0, "Hello, distributed torchquorum!\n"), ran.stderr


@pytest.mark.timeout(400)
def test_of_two_tasks_the_first_waits_for_the_second_and_runs_what_both_define() -> None:
    addresses = ",".join(f"localhost:{port}" for port in free_ports(2))
    tasks = []
    try:
        for index in (0, 1):
            tasks.append(Started([sys.executable, str(HELLO / "two_tasks.py"), str(index), addresses], forked=True))
            if index == 0:
                tasks[0].until("waiting for /job:local/task:1 (localhost:", SLOW_S)
        for index, task in enumerate(tasks):
            task.until("cat: (aten.cat.default): /job:local/task:0/device:CPU:0", SLOW_S)
            task.until(f"Hello from server{index + 1}!", SLOW_S)
        tasks[0].until("cat: (aten.cat.default): /job:local/task:1/device:CPU:0", SLOW_S)
        for task in tasks:
            task.until("Ctrl-C ends it", SLOW_S)
        for task in tasks:
            task.process.send_signal(signal.SIGINT)
        assert [task.wait(SLOW_S) for task in tasks] == [0, 0], tasks[0].tail()
    finally:
        for task in tasks:
            task.end()


@pytest.mark.timeout(400)
def test_torchquorum_hello_shows_both_and_leaves_nothing_behind() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "torchquorum.cli.main", "hello"], capture_output=True, text=True, timeout=SLOW_S
    )
    assert ran.returncode == 0, ran.stderr
    for line in (
        "  Hello, distributed torchquorum!",
        "  /job:local/task:0 got: Hello from server 1! (computed by /job:local/task:0)",
        "  /job:local/task:0 got: Hello from server 2! (computed by /job:local/task:1)",
        "  /job:local/task:1 got: Hello from server 1! (computed by /job:local/task:0)",
    ):
        assert line in ran.stdout.splitlines(), ran.stdout
    assert "/job:local/task:0: waiting for /job:local/task:1" in ran.stderr
