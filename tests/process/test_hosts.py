"""Tasks on different hosts: network namespaces joined by a bridge, one task each."""

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.tasks import by_hand
from torchquorum.cluster.secret import write_secret

PREFIX = f"tq{os.getpid() % 10000}"
TURN = itertools.count()


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Three hosts with an address each; yields their names."""
    if shutil.which("ip") is None:
        pytest.skip("needs the ip command (Debian: iproute2)")
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    prefix = f"{PREFIX}t{next(TURN)}"  # what the last test removed is there until the kernel comes to it
    names = [f"{prefix}n{i}" for i in range(3)]
    bridge = f"{prefix}br"
    try:
        try:
            ip("link", "add", bridge, "type", "bridge")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this kernel lets nobody make a bridge: {error.stderr.decode().strip()}")
        ip("link", "set", bridge, "up")
        for i, name in enumerate(names):
            ip("netns", "add", name)
            ip("link", "add", f"{prefix}v{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"{prefix}v{i}", "master", bridge, "up")
            ip("-n", name, "addr", "add", f"10.213.7.{i + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20, check=False)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True, timeout=20, check=False)


@pytest.mark.netns
@pytest.mark.parametrize("rule", ["sync", "async"])
def test_tasks_on_different_hosts_train_together(hosts: list[str], rule: str, tmp_path: Path) -> None:
    addresses = [f"10.213.7.{i + 1}:2222" for i in range(3)]
    secret = tmp_path / "cluster.secret"
    write_secret(secret)
    # Every other way to say it, too.
    flag = f"--secret-file={secret}" if rule == "sync" else "--insecure"
    with by_hand(hosts=addresses) as cluster:
        options = ("--steps=60", f"--rule={rule}", "--size=400000", flag)
        tasks = [
            cluster.start("ps", 0, flag, prefix=["ip", "netns", "exec", hosts[0]]),  # as a user starts it
            *(cluster.start("worker", i, *options, netns=hosts[i + 1]) for i in (0, 1)),
        ]
        for task in tasks:
            assert task.wait() == 0, task.tail()
        for task in tasks[1:]:
            assert "over tcp" in "\n".join(task.lines)
            assert task.lines[-1].endswith(": 60")


@pytest.mark.netns
def test_a_worker_on_another_host_that_dies_is_noticed(hosts: list[str]) -> None:
    addresses = [f"10.213.7.{i + 1}:2222" for i in range(3)]
    with by_hand(hosts=addresses) as cluster:
        options = ("--steps=100000", "--pause=0.01", "--liveness=1.5")
        refused = cluster.start("ps", 0, netns=hosts[0])
        assert refused.wait() != 0 and "torchquorum secret --out FILE" in "\n".join(refused.lines)
        ps = cluster.start("ps", 0, "--insecure", netns=hosts[0])
        chief = cluster.start("worker", 0, *options, netns=hosts[1])
        other = cluster.start("worker", 1, *options, netns=hosts[2])
        other.until("local 5 ")
        other.kill()
        ps.until("/job:worker/task:1 counts as dead (not heard of for")
        chief.until("accepted True")
