"""`make flake`: rounds in an order that the seed makes, a table, and for a failure the command that repeats it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FLAKE = Path(__file__).parents[3] / "tools" / "flake.py"
# Fails in the first order that has b before a: of several seeds, one brings it.
NEEDS_ITS_NEIGHBOUR = """
seen = []
def test_a():
    seen.append("a")
def test_b():
    assert seen == ["a"]
"""


def flake(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FLAKE), "--load", "1", *arguments, "--", "-p", "no:cacheprovider", "test_it.py"]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # it may disturb us
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.long
def test_a_test_that_needs_its_neighbour_is_found_with_the_seed_that_repeats_it(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(NEEDS_ITS_NEIGHBOUR)
    done = flake(tmp_path, "--times", "20", "--seed", "1")
    assert done.returncode == 1
    found = re.search(r"round (\d+) of 20 failed with seed (\d+); it is repeated by\n    (.+)", done.stdout)
    assert found is not None, done.stdout
    assert re.search(rf"^ +{found[1]} +{found[2]}  FAILED +\d+  1 failed", done.stdout, re.M)
    rows = re.findall(r"^ +(\d+) +\d+  (passed|FAILED|ended)", done.stdout, re.M)
    assert [int(number) for number, _ in rows] == list(range(1, len(rows) + 1))
    assert [result for _, result in rows].count("FAILED") == 1 and len(rows) < 20
    again = subprocess.run(found[3], shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert again.returncode == 1 and "1 failed" in again.stdout


@pytest.mark.long
def test_rounds_that_pass_are_all_in_the_table(tmp_path: Path) -> None:
    # Each waits for the other: they run beside each other, or not at all.
    meet = "import os, pathlib, time\ndef test_b():\n    pathlib.Path(str(os.getpid())).touch()\n"
    meet += "    while len(list(pathlib.Path().glob('[0-9]*'))) < 2:\n        time.sleep(0.01)\n"
    (tmp_path / "test_it.py").write_text(f"def test_a(): pass\n{meet}")
    done = flake(tmp_path, "--times", "2", "--seed", "7")
    assert done.returncode == 0
    table = done.stdout.splitlines()[-3:]
    assert table[0].split() == ["round", "seed", "result", "seconds", "tests"]
    assert [line.split()[:3] for line in table[1:]] == [["1", "7", "passed"], ["2", "8", "passed"]]
    assert all(line.endswith("2 passed") for line in table[1:])


DISTURBED = """
import os, subprocess, sys, threading, time
CHILD = "import threading; print(threading.Event.wait.__module__)"
def test_it():
    child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True).stdout.strip()
    here, file, begun = threading.Event.wait.__module__, os.open(".", os.O_RDONLY), time.monotonic()
    for _ in range(40):
        os.fsync(file)
        thread = threading.Thread(target=time.monotonic)
        thread.start()
        thread.join()
    late = time.monotonic() - begun > 0.5
    assert here == child == "threading", f"here: {here}, in a child: {child}, late: {late}"
"""


@pytest.mark.long
def test_with_disturb_the_processes_of_the_tests_are_late_now_and_then_and_the_command_says_so(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(DISTURBED)
    assert flake(tmp_path, "--times", "1").returncode == 0
    done = flake(tmp_path, "--times", "1", "--disturb")
    assert "here: sitecustomize, in a child: sitecustomize, late: True" in done.stdout, done.stdout
    assert re.search(r"repeated by\n    env PYTHONPATH=\S+disturb ", done.stdout)
