"""Tasks on one machine as if an ordinary line joined them: a network namespace for each worker, behind a link of a given rate.

Used by `LocalCluster` for `--link 20mbit`, on the launcher's main thread. Needs root, and the commands `ip` and `tc`. What always holds:
nothing leaves these namespaces, the ps tasks and the launcher are in one of them; closing removes all that was made.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from torchquorum.errors import ConfigError

SUBNET = "10.213.9"
MOST_HOSTS = 200
COMMAND_S = 60
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class LinkRate:
    """How fast a link is, each way."""

    bits_per_s: float

    @staticmethod
    def read(text: str) -> LinkRate:
        """Reads a rate, such as 20mbit.

        Raises:
            ConfigError: It is none.
        """
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)(?:/s|ps)?", text.strip().lower().replace(" ", ""))
        if match is None or float(match[1]) <= 0:
            raise ConfigError(f"--link {text}: must be a rate in kbit, mbit or gbit a second, such as 20mbit")
        return LinkRate(float(match[1]) * _UNITS[match[2]])

    @property
    def tc(self) -> str:
        """Returns it as `tc` takes it: a token bucket that holds a hundredth of a second, or 32 kB."""
        burst = max(32_000, int(self.bits_per_s / 8 / 100))
        return f"rate {self.bits_per_s:.0f}bit burst {burst}b latency 400ms"


def missing() -> str:
    """Returns what keeps this machine from making links, or nothing."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    lacking = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"needs the command {lacking[0]} (Debian: iproute2)" if lacking else ""


class LinkedHosts:
    """One host for the ps tasks and the launcher, and one for each worker, joined by a switch.

    Args:
        rate: Of each worker's link, each way.
        workers: How many workers there may be.

    Raises:
        ConfigError: The machine cannot make them.
    """

    def __init__(self, rate: LinkRate, workers: int) -> None:
        if why := missing():
            raise ConfigError(f"--link: {why}")
        if workers > MOST_HOSTS:
            raise ConfigError(f"--link with {workers} workers: at most {MOST_HOSTS}")
        prefix = f"tq{os.getpid()}-"
        self._switch = f"{prefix}switch"
        self._names = [f"{prefix}ps", *(f"{prefix}worker{i}" for i in range(workers))]
        self._addresses = [f"{SUBNET}.{i + 1}" for i in range(workers + 1)]
        self._before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            self._make(rate)
            self._enter(f"/run/netns/{self._names[0]}")
        except BaseException:
            self.close()
            raise

    def _make(self, rate: LinkRate) -> None:
        for name in (self._switch, *self._names):
            _run(f"ip netns add {name}")
        _run(f"ip -n {self._switch} link add br0 type bridge")
        _run(f"ip -n {self._switch} link set br0 up")
        for i, name in enumerate(self._names):
            _run(f"ip -n {self._switch} link add v{i} type veth peer name eth0 netns {name}")
            _run(f"ip -n {self._switch} link set v{i} master br0 up")
            _run(f"ip -n {name} addr add {self._addresses[i]}/24 dev eth0")
            _run(f"ip -n {name} link set eth0 up")
            _run(f"ip -n {name} link set lo up")
            if i > 0:
                _run(f"tc -n {name} qdisc add dev eth0 root tbf {rate.tc}")
                _run(f"tc -n {self._switch} qdisc add dev v{i} root tbf {rate.tc}")

    def _enter(self, path: str) -> None:
        namespace = os.open(path, os.O_RDONLY)
        try:
            _setns(namespace)
        finally:
            os.close(namespace)

    @property
    def ps_host(self) -> str:
        """Returns the address of the ps tasks' host."""
        return self._addresses[0]

    def worker_host(self, index: int) -> str:
        """Returns the address of a worker's host."""
        return self._addresses[index + 1]

    def command(self, job: str, index: int, command: Sequence[str]) -> list[str]:
        """Returns the command that runs a task's program on its host; the launcher's own is that of the ps tasks."""
        name = self._names[0 if job == "ps" else index + 1]
        return ["ip", "netns", "exec", name, *command] if job != "ps" else list(command)

    def bytes(self) -> list[tuple[int, int]]:
        """Returns how many bytes have gone over each worker's link so far, headers and all: up, and down."""
        found = []
        for name in self._names[1:]:
            stats = json.loads(_run(f"ip -n {name} -s -j link show eth0"))[0]["stats64"]
            found.append((stats["tx"]["bytes"], stats["rx"]["bytes"]))
        return found

    def close(self) -> None:
        """Leaves the hosts and removes them; harmless if that has been done."""
        if self._before < 0:
            return
        _setns(self._before)
        os.close(self._before)
        self._before = -1
        for name in (self._switch, *self._names):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=COMMAND_S, check=False)


def _setns(namespace: int) -> None:
    """This thread, and what it starts from now on, is in another network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter a network namespace: {os.strerror(ctypes.get_errno())}")


def _run(command: str) -> str:
    done = subprocess.run(command.split(), capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if done.returncode != 0:
        raise ConfigError(f"--link: `{command}` failed: {done.stderr.strip()}")
    return done.stdout
