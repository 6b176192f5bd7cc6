"""The networks of the fault matrix: hosts as network namespaces whose links go down or slow, and a proxy that stalls.

Needs root and the commands `ip` and `tc`. What always holds: closing a network removes every namespace that it made.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import socket
import subprocess
import threading
from collections.abc import Sequence

SLOW = ("rate", "1mbit", "burst", "4kb", "latency", "400ms")
SUBNET = "10.213.9"


def rate(mbit: float) -> tuple[str, ...]:
    """Returns the options of a link that passes so many megabits per second; at once, what it passes in some milliseconds."""
    return ("rate", f"{mbit:g}mbit", "burst", f"{max(32, int(mbit))}kb", "latency", "400ms")


def missing() -> str:
    """Returns what keeps this machine from making networks, or nothing."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    lacking = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"needs the command {lacking[0]} (Debian: iproute2)" if lacking else ""


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


class Hosts:
    """Hosts with an address each, joined by a switch.

    Args:
        prefix: Of the names of the namespaces, at most eight characters.
        count: How many hosts.
    """

    def __init__(self, prefix: str, count: int) -> None:
        self._switch = f"{prefix}s"
        self.names = [f"{prefix}n{i}" for i in range(count)]
        self.addresses = [f"{SUBNET}.{i + 1}" for i in range(count)]
        try:
            for name in (self._switch, *self.names):
                _run("ip", "netns", "add", name)
            self._in(self._switch, "ip link add br0 type bridge")
            self._in(self._switch, "ip link set br0 up")
            for i, name in enumerate(self.names):
                self._in(self._switch, f"ip link add v{i} type veth peer name eth0 netns {name}")
                self._in(self._switch, f"ip link set v{i} master br0 up")
                self._in(name, f"ip addr add {self.addresses[i]}/24 dev eth0")
                self._in(name, "ip link set eth0 up")
                self._in(name, "ip link set lo up")
        except BaseException:
            self.close()
            raise

    def _in(self, namespace: str, command: str) -> None:
        program, *rest = command.split()
        _run(program, "-n", namespace, *rest)

    def cut(self, host: int) -> None:
        """Takes a host's link down, as if its cable were pulled: connections stay open on both sides, and hear nothing."""
        self._in(self._switch, f"ip link set v{host} down")

    def mend(self, host: int) -> None:
        """Brings a host's link up again."""
        self._in(self._switch, f"ip link set v{host} up")

    def slow(self, host: int, up: Sequence[str] = SLOW, down: Sequence[str] = SLOW) -> None:
        """Makes a host's link slow, in both directions."""
        self._in(self.names[host], " ".join(("tc qdisc add dev eth0 root tbf", *up)))
        self._in(self._switch, " ".join((f"tc qdisc add dev v{host} root tbf", *down)))

    def link_bytes(self, host: int) -> tuple[int, int]:
        """Returns how many bytes have gone over a host's link so far, headers and all: up, and down."""
        shown = _run("ip", "-n", self.names[host], "-s", "-j", "link", "show", "eth0")
        stats = json.loads(shown)[0]["stats64"]
        return stats["tx"]["bytes"], stats["rx"]["bytes"]

    def close(self) -> None:
        """Removes the hosts."""
        for name in (self._switch, *self.names):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=60, check=False)


class Proxy:
    """Stands before a port of this host and passes everything on, late, or not at all for a while.

    Args:
        target: Where connections are passed on to.
        delay_s: How long it keeps each piece.
    """

    def __init__(self, target: tuple[str, int], delay_s: float = 0.002) -> None:
        self._target, self._delay_s = target, delay_s
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._stalled = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos-proxy", daemon=True)
        self._thread.start()

    def stall(self) -> None:
        """From now on nothing passes, also not the rest of a message that is half through."""
        self._stalled.set()

    def resume(self) -> None:
        """What was held back passes."""
        self._stalled.clear()

    def close(self) -> None:
        """Ends all connections."""
        self._closing.set()
        self._thread.join(10)

    def _run(self) -> None:
        watched = selectors.DefaultSelector()
        watched.register(self._listening, selectors.EVENT_READ)
        partner: dict[socket.socket, socket.socket] = {}
        while not self._closing.is_set():
            if self._stalled.is_set():
                self._closing.wait(0.02)
                continue
            ready = [key.fileobj for key, _ in watched.select(0.05)]
            for found in ready:
                assert isinstance(found, socket.socket)
                if found is self._listening:
                    self._accept(watched, partner)
                elif found in partner:
                    self._pass(found, watched, partner)
            self._closing.wait(self._delay_s)
        for one in (*partner, self._listening):
            one.close()
        watched.close()

    def _accept(self, watched: selectors.BaseSelector, partner: dict[socket.socket, socket.socket]) -> None:
        here, _ = self._listening.accept()
        try:
            there = socket.create_connection(self._target, 5)
        except OSError:
            here.close()
            return
        partner[here], partner[there] = there, here
        for one in (here, there):
            watched.register(one, selectors.EVENT_READ)

    def _pass(
        self, one: socket.socket, watched: selectors.BaseSelector, partner: dict[socket.socket, socket.socket]
    ) -> None:
        try:
            data = one.recv(700)  # small pieces: a stall then falls into the middle of a message
            if data:
                partner[one].sendall(data)
                return
        except OSError:
            pass
        other = partner.pop(one)
        partner.pop(other, None)
        for end in (one, other):
            watched.unregister(end)
            end.close()
