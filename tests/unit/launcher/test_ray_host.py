"""A task's host on a machine of Ray, without Ray itself."""

import signal
import socket
import time
from pathlib import Path

import pytest

from torchquorum.launcher.ray_host import ChildSpec, ChildStatus, TaskHost

CLUSTER = {"ps": ["127.0.0.1:1"], "worker": ["worker:1"]}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(7))\n"
        "print(os.environ['TORCHQUORUM_TASK'], os.environ.get('MINE'), os.getcwd(), sys.argv[1:], flush=True)\n"
        "time.sleep(600 if 'wait' in sys.argv else 0)\n"
    )
    return path


def spec(script: Path, *arguments: str) -> ChildSpec:
    variables: dict[str, str | None] = {"MINE": "here"}
    return ChildSpec(
        command=(str(script), *arguments),
        folder=str(script.parent),
        cluster=CLUSTER,
        min_workers=1,
        transport="auto",
        variables=variables,
    )


def follow(host: TaskHost) -> ChildStatus:
    """Returns all lines and the end."""
    lines: list[str] = []
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        news = host.follow(0.2)
        lines += news.lines
        if news.code is not None:
            return ChildStatus(lines=lines, code=news.code)
    raise AssertionError(f"it has not ended; it printed {lines}")


def test_a_host_runs_the_program_as_the_task_it_is(script: Path):
    host = TaskHost("/job:worker/task:0", "127.0.0.1")
    host.start(spec(script, "--flag"))
    news = follow(host)
    assert news.code == 0
    assert '"job":"worker","index":0' in news.lines[0]
    assert news.lines[0].endswith(f"here {script.parent} ['--flag']")


def test_a_host_holds_its_port_and_takes_an_old_one_again(script: Path):
    host = TaskHost("/job:ps/task:0", "127.0.0.1")
    place = host.endpoint()
    assert host.endpoint() == place
    address = ("127.0.0.1", int(place.address.split(":")[1]))
    socket.create_connection(address, 5).close()
    host.close()  # as by its death
    again = TaskHost("/job:ps/task:0", "127.0.0.1")
    assert again.endpoint(place.address) == place
    third = TaskHost("/job:ps/task:0", "127.0.0.1")
    assert third.endpoint(place.address) != place
    for other in (again, third):
        other.close()


def test_a_hosts_child_hears_signals_that_the_host_has_blocked(script: Path):
    host = TaskHost("/job:worker/task:0", "127.0.0.1")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        host.start(spec(script, "wait"))
        while not host.follow(1.0).lines:
            pass
        host.signal(signal.SIGINT)
        assert follow(host).code == 7
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_machine_without_the_program_says_so(tmp_path: Path):
    absent = ChildSpec(
        command=("absent.py",), folder=str(tmp_path), cluster=CLUSTER, min_workers=1, transport="auto", variables={}
    )
    with pytest.raises(FileNotFoundError, match=r"there is no absent.py in"):
        TaskHost("/job:worker/task:0", "127.0.0.1").start(absent)


def test_what_a_child_has_started_goes_with_it(tmp_path: Path):
    script = tmp_path / "starts.py"
    script.write_text(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
    )
    host = TaskHost("/job:worker/task:0", "127.0.0.1")
    host.start(spec(script))
    pid = int(follow(host).lines[0])
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_program_hears_an_interrupt_though_its_host_ignores_them(tmp_path: Path):
    script = tmp_path / "slow.py"
    script.write_text("import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    host = TaskHost("/job:worker/task:0", "127.0.0.1")
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        host.start(spec(script))
        news = [host.follow(60.0)]
        host.signal(signal.SIGINT)
        while news[-1].code is None:
            news.append(host.follow(60.0))
    finally:
        signal.signal(signal.SIGINT, before)
    assert news[0].lines == ["up"] and news[-1].code == -signal.SIGINT
