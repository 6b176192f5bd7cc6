"""Hostile peers at a ps's port, as a program: `python unknown_senders.py KIND HOST:PORT`; KIND `all` is all of them.

Each kind goes on until the process ends. Needs nothing of the cluster's secret; used by tests/process/
test_hostile.py and benchmarks/hostile.py. Prints `begun` when it has done its worst once.
"""

import os
import random
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import torchquorum.wire.messages as m
from torchquorum.wire import codec
from torchquorum.wire.opening import OPEN as GREETING
from torchquorum.wire.stream import pack

ZEROMQ = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL" + b"\0" * 48  # as torchquorum greeted before protocol 6
BEGUN_AFTER_S = 1.0


class Own(threading.local):
    """What a thread, that is one kind, has open."""

    def __init__(self) -> None:
        self.kept: list[socket.socket] = []
        self.talking: list[socket.socket] = []


OWN = Own()


def dial(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10.0)


def garbage(address: str) -> None:
    """Random bytes, an HTTP request, zeros, ZeroMQ; then the line is dropped."""
    chosen = random.choice([os.urandom(random.randrange(1, 5000)), b"GET / HTTP/1.1\r\n\r\n", b"\0" * 500, ZEROMQ])
    with dial(address) as peer:
        peer.sendall(chosen)
    time.sleep(0.005)


def half_greeting(address: str) -> None:
    """Begins a greeting, says no more, and keeps the line."""
    OWN.kept.append(dial(address))
    OWN.kept[-1].sendall(
        random.choice([GREETING[: random.randrange(1, 16)], hello_of_tls()[: random.randrange(1, 200)]])
    )
    if len(OWN.kept) > 200:
        OWN.kept.pop(0).close()
    time.sleep(0.01)


def half_message(address: str) -> None:
    """A whole greeting, then a frame that announces more bytes than ever come."""
    peer = dial(address)
    peer.sendall(GREETING + struct.pack("<IQQ", 2, 100, 1 << 20) + b"x" * 200)
    OWN.kept.append(peer)
    if len(OWN.kept) > 100:
        OWN.kept.pop(0).close()
    time.sleep(0.01)


def oversized(address: str) -> None:
    """A frame that announces an exabyte, and one of 200 MB of which 1 MB comes."""
    for size in (1 << 60, 200 << 20):
        peer = dial(address)
        with suppress(OSError):
            peer.sendall(GREETING + struct.pack("<IQQ", 2, 100, size) + b"x" * (1 << 20))
        OWN.kept.append(peer)
    while len(OWN.kept) > 20:
        OWN.kept.pop(0).close()
    time.sleep(0.05)


def thousand(address: str) -> None:
    """A thousand connections that are kept; lost ones are made again."""
    while len(OWN.kept) < 1000:
        OWN.kept.append(dial(address))
    OWN.kept.pop(random.randrange(len(OWN.kept))).close()
    time.sleep(0.02)


def hello_of_tls() -> bytes:
    """Returns the first words of somebody who speaks TLS, and knows no secret."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        strange_context().wrap_bio(incoming, outgoing).do_handshake()
    return outgoing.read()


def strange_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def handshakes(address: str) -> None:
    """TLS, as far as it goes without a certificate."""
    with dial(address) as plain, strange_context().wrap_socket(plain) as peer:
        peer.sendall(b"x" * 100)
        while peer.recv(100):
            pass
    time.sleep(0.01)


def flood(address: str, messages: list[list[bytes]], *, read: bool = True) -> None:
    """Says the same things as fast as it is let."""
    if not OWN.talking:
        OWN.talking.append(dial(address))
        OWN.talking[0].sendall(GREETING)
    peer = OWN.talking[0]
    peer.settimeout(0.05)
    try:
        for message in messages * 20:
            with suppress(TimeoutError):
                peer.sendall(
                    b"".join(pack(message))
                )  # part of it may be lost: then the rest is garbage, and we are hung up on
        peer.settimeout(0.001)
        with suppress(TimeoutError):
            while read and not peer.recv(1 << 16):
                raise ConnectionResetError
    except OSError:
        OWN.talking.pop().close()
        raise


def hello_flood(address: str) -> None:
    """Greetings of a worker that there is, each time of another life."""
    hello = m.Hello(m.PROTOCOL, "/job:worker/task:1", random.getrandbits(60), "elsewhere", 1, "9.9")
    flood(address, [[codec.encode(hello)]])


def join_flood(address: str) -> None:
    """Joins of workers that there are not, with memory that there is not."""
    joins = [
        m.Join(random.choice([-1, 7, 10**9]), 1, 1, None, None),
        m.Join(99, 1, 1, m.MemoryRef(1, 1, 4096, 1), None),
    ]
    flood(address, [[codec.encode(j)] for j in joins])


def status_flood(address: str) -> None:
    """Questions."""
    flood(address, [[codec.encode(m.StatusRequest())]])


def slow_reader(address: str) -> None:
    """Questions whose answers are never read."""
    flood(address, [[codec.encode(m.StatusRequest())], [codec.encode(m.MeanRequest())]], read=False)


def nonsense(address: str) -> None:
    """Messages of ours with values that make no sense, and frames that are no messages."""
    odd = [
        m.Push(0, 1, 1, 1, -5, 99, [10**9], float("nan")),
        m.Push(1, 2**62, 2**62, -1, 2**62, -1, [], None),
        m.Pull(-1, 0, 0, True),
        m.Probe(10**9, 1, 1),
        m.Leave(0, 123, None, None, True),
        m.Save(0, 1, 1, "/nowhere", -3),
        m.Stop(1, 1),
        m.Part(1, 1, 1, "x", [], {}, ""),
        m.Have(0, 0, 0, 0, 0, 0),
        m.Log(0, 0, []),
        m.FateOf(0, 0, 0),
        m.Hello(10**6, "/job:worker/task:0", 1, "", 1),
        m.Hello(m.PROTOCOL, "x" * 10_000, 1, "", 1),
    ]
    frames = [[codec.encode(message)] for message in odd] + [[os.urandom(100)], [b""], [b"", b"", b"x"]]
    flood(address, frames)


KINDS: dict[str, Callable[[str], None]] = {
    f.__name__: f
    for f in (
        garbage,
        half_greeting,
        half_message,
        oversized,
        handshakes,
        thousand,
        hello_flood,
        join_flood,
        status_flood,
        slow_reader,
        nonsense,
    )
}


def go_on(kind: str, address: str) -> None:
    started, told = time.monotonic(), False
    while True:
        try:
            KINDS[kind](address)
        except OSError:  # hung up on, or not let in: try again
            time.sleep(0.05)
        if not told and time.monotonic() - started > BEGUN_AFTER_S:
            told = True
            os.write(1, f"begun: {kind}\n".encode())  # at once: the threads print without waiting for each other


def main() -> None:
    kind, address = sys.argv[1:3]
    for one in KINDS if kind == "all" else [kind]:
        threading.Thread(target=go_on, args=(one, address)).start()


if __name__ == "__main__":
    main()
