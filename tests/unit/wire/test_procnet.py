"""Who holds a port of this host."""

import os
import socket
import subprocess
import sys

from torchquorum.wire.procnet import listening_process


def test_the_holder_of_a_port_is_named_in_one_line_whatever_its_command_is() -> None:
    program = """
import socket, sys
with socket.create_server(("127.0.0.1", 0)) as held:
    print(held.getsockname()[1], flush=True)
    sys.stdin.read()
"""
    command, pipe = ["python", "-c", program], subprocess.PIPE
    with subprocess.Popen(command, executable=sys.executable, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdin is not None and other.stdout is not None
        named = listening_process(int(other.stdout.readline()))
        other.stdin.close()
    assert named is not None and named.startswith(f"process {other.pid} (python -c import socket, sys")
    assert "\n" not in named


def test_the_holder_of_a_port_is_found_in_proc() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        assert listening_process(port) is None  # bound, but nobody listens yet
        holder.listen()
        found = listening_process(port)
    assert found is not None and found.startswith(f"process {os.getpid()} (")
    assert listening_process(port) is None
