"""Readers beside real tasks: ps tasks that die and come back, readers that freeze, the read-only secret, a folder alone."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import torchquorum as tq
from tests.process.tasks import ByHand, Started, by_hand
from torchquorum.errors import SecretError
from torchquorum.reader.reader import Reader

PROGRAM = Path(__file__).parent / "reader_run.py"
PATIENCE = tq.types.Patience(start_s=120.0, silence_s=20.0, say_s=2.0)
SECRET = "known-secret-of-the-tests-7d1e5b02c93f48aa"


def model() -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.zeros(n)) for n in (7, 40_000, 33)])


def is_whole(found: nn.ParameterList, version: int) -> bool:
    return all(bool((p == version).all()) for p in found)


def started(cluster: ByHand, tmp_path: Path, ps: int) -> list[Started]:
    options = (f"--logdir={tmp_path / 'run'}", f"--end={tmp_path / 'end'}")
    tasks = [cluster.start("ps", k, *options) for k in range(ps)]
    return [*tasks, cluster.start("worker", 0, *options)]


def until_version(reader: Reader, least: int) -> int:
    deadline = time.monotonic() + 100
    while (version := reader.pull()) < least:
        assert time.monotonic() < deadline, version
        time.sleep(0.05)
    return int(version)


@pytest.mark.parametrize("shared", [True, False])
def test_a_ps_that_dies_and_comes_back_is_survived_and_said(tmp_path: Path, shared: bool) -> None:
    lines: list[str] = []
    with by_hand(ps=2, workers=1, program=PROGRAM) as cluster:
        tasks = started(cluster, tmp_path, 2)
        with tq.Reader(cluster.ps_hosts, shared_memory=shared, patience=PATIENCE, say=lines.append) as reader:
            before = until_version(reader, 45)
            first = reader.pull(found := model())
            assert is_whole(found, first)
            os.kill(tasks[1].process.pid, signal.SIGKILL)
            tasks[1].wait()
            held = reader.pull(found)
            assert held >= before and is_whole(found, held)  # it goes on with what it has
            cluster.start("ps", 1, f"--logdir={tmp_path / 'run'}", f"--end={tmp_path / 'end'}")
            deadline, last = time.monotonic() + 100, held
            while (version := reader.pull(found)).generation == first.generation:
                assert version >= last, "versions go back within a generation"
                last = version
                assert time.monotonic() < deadline, lines
                time.sleep(0.05)
            assert version.new_generation and is_whole(found, version)
            assert any("a new generation of the run" in line for line in lines), lines
            until_version(reader, version + 5)
        (tmp_path / "end").touch()
        assert tasks[2].wait() == 0, tasks[2].tail()


def test_a_frozen_reader_costs_the_run_nothing(tmp_path: Path) -> None:
    program = (
        "import sys, torchquorum as tq\n"
        "for change in tq.Reader(sys.argv[1], shared_memory=False).follow(every_s=0.0):\n"
        "    print(int(change.version), flush=True)\n"
    )
    with by_hand(workers=1, program=PROGRAM) as cluster:
        tasks = started(cluster, tmp_path, 1)
        reads = Started([sys.executable, "-c", program, cluster.ps_hosts], forked=False)
        cluster.started.append(reads)
        reads.until("1")
        os.kill(reads.process.pid, signal.SIGSTOP)
        with tq.Reader(cluster.ps_hosts, patience=PATIENCE) as reader:
            now = until_version(reader, 0)
            until_version(reader, now + 100)
        (tmp_path / "end").touch()
        assert tasks[1].wait() == 0, tasks[1].tail()
        assert tasks[0].wait() == 0, tasks[0].tail()
        reads.kill()


def test_a_read_only_secret_reads_and_does_nothing_else(tmp_path: Path) -> None:
    secret, reading = tmp_path / "secret", tmp_path / "reading"
    secret.write_text(SECRET)
    made = Started(
        [
            sys.executable,
            "-m",
            "torchquorum.cli.main",
            "secret",
            "--read-only",
            f"--secret-file={secret}",
            f"--out={reading}",
        ]
    )
    assert made.wait() == 0, made.tail()
    made.end()
    assert SECRET not in reading.read_text() and reading.stat().st_mode & 0o077 == 0
    with by_hand(workers=1, program=PROGRAM) as cluster:
        options = (f"--end={tmp_path / 'end'}", f"--secret_file={secret}")
        tasks = [cluster.start(job, 0, *options) for job in ("ps", "worker")]
        with tq.Reader(cluster.ps_hosts, secret_file=str(reading), shared_memory=False, patience=PATIENCE) as reader:
            until_version(reader, 5)
        with tq.Reader(cluster.ps_hosts, patience=PATIENCE) as reader, pytest.raises(SecretError, match="given none"):
            reader.pull()
        other = cluster.start("worker", 0, f"--end={tmp_path / 'end'}", f"--secret_file={reading}")
        assert other.wait() != 0 and "read-only secret" in other.tail()
        (tmp_path / "end").touch()
        assert tasks[1].wait() == 0, tasks[1].tail()


def test_a_folder_alone_is_followed(tmp_path: Path) -> None:
    with by_hand(workers=1, program=PROGRAM) as cluster:
        tasks = started(cluster, tmp_path, 1)
        with tq.Reader(tmp_path / "run", patience=PATIENCE) as reader:
            versions, found = list[int](), model()
            for change in reader.follow():
                change.apply(found)
                versions.append(int(change.version))
                assert is_whole(found, change.version)
                if len(versions) == 2:
                    (tmp_path / "end").touch()
        assert versions == sorted(set(versions)) and len(versions) >= 2
        assert tasks[1].wait() == 0, tasks[1].tail()
