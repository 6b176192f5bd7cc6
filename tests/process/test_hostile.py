"""Hostile peers at the port of a ps, while a real run trains beside them: it ends as it should, and memory stays bounded."""

import json
import sys
from pathlib import Path

import pytest

from tests.process.tasks import Started, by_hand
from tests.unknown_senders import KINDS
from torchquorum.cluster.secret import write_secret

UNKNOWN_SENDERS = Path(__file__).parent.parent / "unknown_senders.py"
MOST_GROWTH_BYTES = 300 << 20


def resident_bytes(pid: int) -> int:
    fields = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in fields if line.startswith("VmRSS"))


@pytest.mark.parametrize("locked", [False, True], ids=["open", "locked"])
def test_training_beside_every_kind_of_hostile_peer_ends_as_it_should(tmp_path: Path, locked: bool) -> None:
    """All kinds at once, before the run and during it; one worker comes by the door, one by TCP."""
    secret = tmp_path / "secret"
    write_secret(secret)
    flags = [f"--secret-file={secret}"] if locked else []
    with by_hand() as cluster:
        ps = cluster.start("ps", 0, *flags)
        ps.until("serving on")
        peers = Started([sys.executable, str(UNKNOWN_SENDERS), "all", cluster.ps_hosts])
        cluster.started.append(peers)
        for _ in KINDS:
            peers.until("begun")
        measured = tmp_path / "measured"
        options = (
            "--steps=150",
            f"--hold={measured}",
            "--rule=sync",
            "--size=50000",
            "--start=120",
            "--silence=60",
            "--liveness=60",
        )
        other = cluster.start("worker", 1, *options, "--transport=tcp", *flags)
        other.until("the chief to create the variables")
        chief = cluster.start("worker", 0, *options, *flags)
        chief.until("global 10 ")
        before = resident_bytes(ps.process.pid)
        chief.until("global 75 ")
        grown = resident_bytes(ps.process.pid) - before
        measured.touch()
        for task in (chief, other, ps):
            assert task.wait() == 0, task.tail()
        assert chief.lines[-1].endswith(": 150") and other.lines[-1].endswith(": 150")
        assert grown < MOST_GROWTH_BYTES
        assert any("turned a connection away" in line for line in ps.lines)
        assert peers.process.poll() is None, peers.tail()
        assert not any("Traceback" in line for task in (chief, other, ps) for line in task.lines)


def test_who_was_turned_away_is_in_the_status(tmp_path: Path) -> None:
    secret, other = tmp_path / "secret", tmp_path / "other"
    write_secret(secret)
    write_secret(other)
    with by_hand() as cluster:
        ps = cluster.start("ps", 0, f"--secret_file={secret}")
        ps.until("for those who know the secret")
        ask = [sys.executable, "-m", "torchquorum.cli.main", "status", cluster.ps_hosts, "--json", "--timeout=60"]
        for flags, said in (([f"--secret-file={other}"], "does not accept this task's secret"), ([], "given none")):
            wrong = Started([*ask, *flags])
            cluster.started.append(wrong)
            assert wrong.wait() == 2 and said in "\n".join(wrong.lines), wrong.tail()
        right = Started([*ask, f"--secret-file={secret}"])
        cluster.started.append(right)
        assert right.wait() == 0, right.tail()
        turned_away = json.loads("\n".join(right.lines))["turned_away"]
        # Who comes without one may see by himself that he is not wanted, and go before he is judged.
        assert turned_away["wrong secret"] >= 1
        assert turned_away.get("no secret", 0) + turned_away.get("hung up before the greeting", 0) >= 1
        ps.until("turned a connection away: ")
