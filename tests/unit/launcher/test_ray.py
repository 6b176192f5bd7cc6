"""What is said about Ray before there is one, and what a task's host on a machine does: neither needs Ray itself."""

import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

import torchquorum as tq
from torchquorum.cli.run import run
from torchquorum.errors import ConfigError
from torchquorum.launcher.ray_address import find_cluster
from torchquorum.launcher.ray_cluster import describe_resources
from torchquorum.launcher.ray_host import News, Order, TaskHost
from torchquorum.launcher.ray_lines import shorten

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


def order(script: Path, *arguments: str) -> Order:
    variables: dict[str, str | None] = {"MINE": "here"}
    return Order(
        command=(str(script), *arguments),
        folder=str(script.parent),
        cluster=CLUSTER,
        min_workers=1,
        transport="auto",
        variables=variables,
    )


def follow(host: TaskHost) -> News:
    """Returns all lines and the end."""
    lines: list[str] = []
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        news = host.follow(0.2)
        lines += news.lines
        if news.code is not None:
            return News(lines=lines, code=news.code)
    raise AssertionError(f"it has not ended; it printed {lines}")


def test_a_host_runs_the_program_as_the_task_it_is(script: Path):
    host = TaskHost("/job:worker/task:0", "127.0.0.1")
    host.start(order(script, "--flag"))
    news = follow(host)
    assert news.code == 0
    assert '"job":"worker","index":0' in news.lines[0]
    assert news.lines[0].endswith(f"here {script.parent} ['--flag']")


def test_a_host_holds_its_port_and_takes_an_old_one_again(script: Path):
    host = TaskHost("/job:ps/task:0", "127.0.0.1")
    place = host.place()
    assert host.place() == place
    address = ("127.0.0.1", int(place.address.split(":")[1]))
    socket.create_connection(address, 5).close()
    host._socket.close()  # type: ignore[union-attr]  # as by its death
    again = TaskHost("/job:ps/task:0", "127.0.0.1")
    assert again.place(place.address) == place
    third = TaskHost("/job:ps/task:0", "127.0.0.1")
    assert third.place(place.address) != place
    for other in (again, third):
        other._socket.close()  # type: ignore[union-attr]


def test_a_hosts_child_hears_signals_that_the_host_has_blocked(script: Path):
    host = TaskHost("/job:worker/task:0", "127.0.0.1")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        host.start(order(script, "wait"))
        while not host.follow(1.0).lines:
            pass
        host.signal(signal.SIGINT)
        assert follow(host).code == 7
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_machine_without_the_program_says_so(tmp_path: Path):
    absent = Order(
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
    host.start(order(script))
    pid = int(follow(host).lines[0])
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--address", "auto"], "--address auto: is about Ray's machines; say --on ray, too"),
        (["--gpus-per-worker", "1"], "--gpus-per-worker 1: is about Ray's machines"),
        (["--on", "ray", "--cpus-per-worker", "-1"], "cpus_per_worker=-1: must be 0 or more"),
        (["--on", "ray", "--gpus-per-worker", "1.5"], "gpus_per_worker=1.5: above 1 Ray gives whole ones only; say 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(arguments: list[str], text: str, script: Path):
    outcome = CliRunner().invoke(run, [*arguments, str(script)])
    assert isinstance(outcome.exception, ConfigError) and text in str(outcome.exception)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, script: Path):
    monkeypatch.setitem(sys.modules, "ray", None)
    outcome = CliRunner().invoke(run, ["--on", "ray", str(script)])
    assert "pip install 'torchquorum[ray]'" in str(outcome.exception)


def test_launch_takes_only_places_that_there_are():
    with pytest.raises(ConfigError, match=r"tq.launch\(on='mars'\): must be 'local', 'ray' or tq.Ray"):
        tq.launch(print, on="mars")


def test_resources_are_told_in_words():
    assert describe_resources({"CPU": 4.0, "GPU": 0.5, "memory": 1e9}) == "4 CPU, 0.5 GPU"
    assert describe_resources({}) == "no CPU"


@pytest.mark.parametrize(
    "address", ["rubbish", "host:", ":6379", "host:port", "host:99999", "http://host:8265", "ray://x"]
)
def test_an_address_of_another_form_is_refused(address: str):
    with pytest.raises(ConfigError, match="must be auto, host:port or ray://host:port"):
        find_cluster(address)


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_a_cluster_that_is_not_there_is_told_at_once(form: str):
    with socket.socket() as held:  # bound and not listening: nobody else can take the port meanwhile
        held.bind(("127.0.0.1", 0))
        address = form.format(held.getsockname()[1])
        with pytest.raises(ConfigError, match=f"--address {address}: no Ray cluster answers there .*ray start --head"):
            find_cluster(address)


def test_a_program_hears_an_interrupt_though_its_host_ignores_them(tmp_path: Path):
    script = tmp_path / "slow.py"
    script.write_text("import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    host = TaskHost("/job:worker/task:0", "127.0.0.1")
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        host.start(order(script))
        news = [host.follow(60.0)]
        host.signal(signal.SIGINT)
        while news[-1].code is None:
            news.append(host.follow(60.0))
    finally:
        signal.signal(signal.SIGINT, before)
    assert news[0].lines == ["up"] and news[-1].code == -signal.SIGINT


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("Raylet is terminated. Termination is unexpected. Last 20 lines:\n  [state-dump] a\n", None),
        (
            "The node with node id: fb01 and address: 10.0.0.3 and node name: x has been marked dead because\n(1) raylet",
            "Ray has lost the machine 10.0.0.3",
        ),
        ("Error: No available node types can fulfil it\nmore", "Ray: Error: No available node types can fulfil it"),
        ("", None),
    ],
)
def test_of_what_ray_prints_only_what_helps_is_kept(message: str, line: str | None):
    assert shorten(message) == line
