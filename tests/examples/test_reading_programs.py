"""The programs that read a run while it trains, as real processes: a server of predictions, and actors of a policy gradient."""

import json
import re
import sys
import time
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from tests.ports import free_ports
from tests.process.tasks import FORKING, Started, by_hand

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_server_answers_with_what_the_run_has_just_learnt(tmp_path: Path) -> None:
    port = free_ports(1)[0]
    with by_hand(workers=1, program=EXAMPLES / "serving" / "train.py") as cluster:
        for job in ("ps", "worker"):
            command = cluster.command(job, 0, f"--logdir={tmp_path / 'run'}")
            cluster.started.append(Started(command))
        command = [sys.executable, str(EXAMPLES / "serving" / "server.py"), cluster.ps_hosts, f"--port={port}"]
        server = Started([*command, "--every=0.1"])
        cluster.started.append(server)
        server.until("serving version", 120)
        found, clicks, deadline = dict[str, Any](), dict[str, float](), time.monotonic() + 100
        while time.monotonic() < deadline:
            with urlopen(f"http://localhost:{port}/predict?user=7&item=21&item=22", timeout=30) as answer:
                found = json.load(answer)
            clicks = found["clicks"]
            assert clicks.keys() == {"21", "22"}
            if clicks["21"] > 0.8 and clicks["22"] < 0.2:  # users like items that are odd or even as they are
                break
            time.sleep(0.2)
        assert clicks["21"] > 0.8 and clicks["22"] < 0.2, found
        assert found["age_s"] < 20, found
        with pytest.raises(HTTPError, match="400"):
            urlopen(f"http://localhost:{port}/predict?user=me", timeout=30)


def test_actors_play_with_newer_and_newer_weights_and_the_policy_learns() -> None:
    started = Started(
        [*FORKING, "run", "--workers=1", str(EXAMPLES / "actors" / "train.py"), "--steps=200"], forked=True
    )
    try:
        assert started.wait() == 0, started.tail()
        text = "\n".join(started.lines)
        returns = [float(found) for found in re.findall(r"step \d+: return ([\d.]+)", text)]
        behind = [int(found) for found in re.findall(r"weights (\d+) versions old", text)]
        assert len(returns) >= 3 and returns[-1] > returns[0] and returns[-1] > 0.5, text
        assert max(behind) < 60, text
    finally:
        started.end()
