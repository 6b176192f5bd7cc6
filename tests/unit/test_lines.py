"""A line and its end are one write, so that those of several threads or tasks never run into each other."""

import os
import socket
import subprocess
import sys

import pytest

from torchquorum.lines import line_of, text_of

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
write_line("a file \\udcff")
sys.stdout = sys.stderr = None
write_line("to nobody")
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_line_and_its_end_are_one_write(unbuffered: str) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # which keeps writes apart, as no pipe does
    with ours:
        with theirs:
            strict = {"PYTHONUNBUFFERED": unbuffered, "PYTHONIOENCODING": "utf-8:strict"}
            environment, out = os.environ | strict, theirs.fileno()
            task = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=out, stderr=out, env=environment)
        ours.settimeout(60.0)
        writes = []
        while write := ours.recv(1000):
            writes.append(write.decode())
        assert task.wait(60.0) == 0
    assert writes == [
        "of standard output\n",
        "of standard error\n",
        "torchquorum: once\n",
        "two\nlines\n",
        "a file \\udcff\n",
    ]


def test_the_text_of_an_error_can_be_sent_and_printed_whatever_the_error_is() -> None:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    assert text_of(Unspeakable()) == "RuntimeError where its text is made"
    assert text_of(FileNotFoundError(2, "No such file", "a\udcff.pt")) == r"[Errno 2] No such file: 'a\udcff.pt'"
    assert text_of(ValueError("\x1b[31mred\x00\nモデル")) == "\\x1b[31mred\\x00\nモデル"


def test_an_error_of_a_data_loaders_child_is_toldline_of_without_its_traceback() -> None:
    wrapped = OSError(
        "Caught OSError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        '  File "a.py", line 3, in b\n    raise OSError("damaged")\nOSError: damaged\n'
    )
    assert line_of(wrapped) == "OSError: Caught OSError in DataLoader worker process 0. OSError: damaged"
    assert line_of(ValueError("one\ntwo")) == "ValueError: one two" and line_of(KeyError()) == "KeyError"
