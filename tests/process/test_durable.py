"""A durable run: the ps is killed at random instants, again and again, and nothing that a worker was told of is lost."""

import random
import re
import time
from pathlib import Path

import pytest
import torch

from tests.process.forked import Cluster
from torchquorum.formats.checkpoint import CheckpointReader, newest_good
from torchquorum.formats.journal import SUFFIX
from torchquorum.formats.ledger import Entry, read_records

LAST_STEP, KILLS = 120, 5


def saved(logdir: Path) -> dict[str, torch.Tensor]:
    """Everything that the last checkpoint holds, by name."""
    found, _ = newest_good(logdir)
    assert found is not None
    with CheckpointReader(found[0]) as reader:
        state = {f"variable {k}": v for k, v in reader.state_dict().items()}
        state |= {f"average {k}": v for k, v in reader.state_dict(averages=True).items()}
        for name in reader.variables():
            for state_name, spec in reader.states(name).items():
                numel = 1
                for n in spec.shape:
                    numel *= n
                state[f"optimizer {name} {state_name}"] = reader.read("optimizer", name, state_name, 0, numel).clone()
    return state


@pytest.mark.parametrize(("ps", "mode", "optimizer"), [(1, "write", "Adam"), (2, "fsync", "SGD")])
def test_a_ps_killed_at_random_instants_costs_nothing_and_the_result_is_the_uninterrupted_one_bit_for_bit(
    tmp_path: Path, ps: int, mode: str, optimizer: str
) -> None:
    options = (f"--optimizer={optimizer}", f"--steps={LAST_STEP}")
    plain = Cluster(tmp_path / "plain", ps, *options, "--pause=0")
    killed = Cluster(tmp_path / "killed", ps, *options, f"--durable={mode}")
    draw = random.Random(time.time_ns())
    kills = 0
    try:
        while kills < KILLS and killed.told() < LAST_STEP - 30:
            before, delay_s = killed.told(), draw.uniform(0.0, 0.05)
            killed.wait("progress", lambda before=before: killed.told() > before + 3 or killed.ended())
            time.sleep(delay_s)  # an instant that nobody has chosen
            victims = draw.sample(killed.ps, draw.randint(1, ps))
            killed.kill(*victims)
            kills += 1
            told = killed.told()
            for victim in victims:
                killed.start(victim)
            version, back = next_going_on(killed)
            assert int(version) >= told and not back, f"was told of {told}, is back at {version}{back}"
        killed.wait("the end", killed.ended)
        plain.wait("the end", plain.ended)
        assert killed.codes() == plain.codes() == [0] * (ps + 2), killed.text(("worker", 0))[-2000:]
    finally:
        killed.close()
        plain.close()
    assert kills > 1
    expected, found = saved(plain.logdir), saved(killed.logdir)
    assert expected.keys() == found.keys()
    for name, values in expected.items():
        assert torch.equal(values, found[name]), f"{name} differs after {kills} kills"
    check_ledger(killed.logdir, LAST_STEP, kills)


def next_going_on(cluster: Cluster) -> tuple[str, str]:
    """Waits until the chief goes on after a loss; returns the version, and what it says if that is an earlier one."""
    chief, pattern = ("worker", 0), r"going on at global step (\d+)(.*)"
    count = len(re.findall(pattern, cluster.text(chief)))
    cluster.wait("the run to go on", lambda: len(re.findall(pattern, cluster.text(chief))) > count)
    return re.findall(pattern, cluster.text(chief))[count]


def check_ledger(logdir: Path, last_step: int, kills: int) -> None:
    """Every update of the run is in the ledger once, whatever was killed."""
    began, version, entries = 0, 0, 0
    for record in read_records(logdir):
        if isinstance(record, Entry):
            entries += record.accepted
        elif record.event == "began":
            assert record.version <= version + entries // 2, "the variables have updates that the ledger does not know"
            began, version, entries = began + 1, record.version, 0
    assert version + entries // 2 == last_step and began == kills + 1
    assert not [p.name for p in logdir.iterdir() if p.name.startswith(".")]
    left = [p for p in logdir.glob(f"*{SUFFIX}") if p.stat().st_size > 10_000]
    assert not left, "the last checkpoint makes the journal superfluous"
