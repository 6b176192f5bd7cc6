"""A line and its end are one write, so that those of several threads or tasks never run into each other."""

import os
import socket
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from torchquorum.lines import write_line
from torchquorum.session.join import say
from torchquorum.devices.inventory import say_once
write_line("of standard output")
say("of standard error")
say_once("once", key="it")
say_once("twice", key="it")
write_line("two\\nlines")
sys.stdout = sys.stderr = None
write_line("to nobody")
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_line_and_its_end_are_one_write(unbuffered: str) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # which keeps writes apart, as no pipe does
    with ours:
        with theirs:
            environment, out = {**os.environ, "PYTHONUNBUFFERED": unbuffered}, theirs.fileno()
            task = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=out, stderr=out, env=environment)
        ours.settimeout(60.0)
        writes = []
        while write := ours.recv(1000):
            writes.append(write.decode())
        assert task.wait(60.0) == 0
    assert writes == ["of standard output\n", "of standard error\n", "torchquorum: once\n", "two\nlines\n"]
