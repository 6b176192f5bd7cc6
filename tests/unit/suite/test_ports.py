"""Ports for tests: what one process is given, no other one is."""

import subprocess
import sys
from contextlib import ExitStack

from tests import ports

PROGRAM = "import sys; from tests import ports; print(*ports.free_ports(50), flush=True); sys.stdin.read()"


def test_processes_beside_each_other_are_given_different_ports() -> None:
    given = [ports.free_ports(50)]
    with ExitStack() as held:
        for _ in range(3):
            command = [sys.executable, "-c", PROGRAM]
            started = held.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            assert started.stdout is not None
            given.append([int(port) for port in started.stdout.readline().split()])
    assert all(len(each) == 50 for each in given)
    assert len({port for each in given for port in each}) == 200


def test_more_ports_than_a_block_has_are_given_again_and_no_more_than_it_has_at_once() -> None:
    first = ports.free_ports(150)
    assert set(first) & set(ports.free_ports(150))
    assert len({*first, *ports.free_ports(150)}) <= ports.SIZE
