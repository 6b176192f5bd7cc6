"""Every preset under every fault: a whole cluster in one process whose messages are lost, doubled, late or cut off.

The model counts: its gradient is minus one and its rate is one, so a parameter of version v is v, everywhere. A gradient
that was applied twice, or lost, or a pull that mixed two versions, shows in the value.
"""

import threading
import zlib
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import torchquorum as tq
from tests.harness import Cluster
from torchquorum.formats.ledger import Entry, read_ledger
from torchquorum.session.join import Task
from torchquorum.wire.channel import Channel
from torchquorum.wire.faulty import Faults, FaultyChannel
from torchquorum.wire.rpc import Patience

PATIENCE = Patience(start_s=25.0, round_s=25.0, silence_s=20.0, probe_s=0.05, say_s=60.0)
SIZE = 333
LAST_STEP = 12

PRESETS = {
    "sync": (tq.Sync(), 2),
    "backup": (tq.Sync(aggregate=2), 3),
    "async": (tq.Async(), 3),
    "bounded": (tq.Bounded(1), 2),
    "buffered": (tq.Buffered(3), 2),
}
FAULTS = {
    "drop": Faults(drop=0.15),
    "duplicate": Faults(duplicate=0.4),
    "delay": Faults(delay=0.3, delay_s=0.02),
    "cut": Faults(cut_at=14, cut_for=12),
    "all": Faults(drop=0.08, duplicate=0.15, delay=0.15, delay_s=0.015, cut_at=20, cut_for=8),
}
PLACES = {
    "1 shm": (1, "shm"),
    "1 frames": (1, "tcp"),
    "2 shm": (2, "shm"),
    "2 frames": (2, "tcp"),
    "3 shm": (3, "shm"),
    "3 frames": (3, "tcp"),
}
# Every preset meets every fault once with one shard and once with two, all at once also with three; transports take turns.
CASES = [
    (preset, fault, f"{shards} {('shm', 'frames')[(p + f + shards) % 2]}")
    for p, preset in enumerate(PRESETS)
    for f, fault in enumerate(FAULTS)
    for shards in ((1, 2, 3) if fault == "all" else (1, 2))
]


class Counting(nn.Module):
    """Two vectors, of which the longer one is sliced over the shards; they count updates."""

    def __init__(self) -> None:
        super().__init__()
        self.long = nn.Parameter(torch.zeros(SIZE))
        self.short = nn.Parameter(torch.zeros(5))
        for parameter in self.parameters():
            parameter.grad = -torch.ones_like(parameter)

    def value(self) -> tuple[int, int]:
        """The least and the greatest element."""
        return int(min(p.min() for p in self.parameters())), int(max(p.max() for p in self.parameters()))


class Wrap:
    """Puts faults around every channel, of workers, of their signs of life and of shards, each with a seed of its own."""

    def __init__(self, faults: Faults, seed: int) -> None:
        self.faults, self.seed = faults, seed
        self._made: Counter[bytes] = Counter()
        self._lock = threading.Lock()

    def __call__(self, channel: Channel, identity: bytes) -> Channel:
        who = b"/".join(identity.split(b"/")[:2])
        with self._lock:
            self._made[who] += 1
            turn = self._made[who]
        return FaultyChannel(channel, self.faults, zlib.crc32(who) + 1000 * turn + self.seed)


def train(
    rule: tq.Rule, workers: int, ps: int, transport: str, wrap: Wrap, logdir: Path
) -> tuple[Cluster, list[list[tq.types.Step]], list[str]]:
    """Counts to LAST_STEP; returns the cluster, each worker's steps and what was not one whole version."""
    cluster = Cluster(ps=ps, workers=workers, transport=transport, wrap=wrap)
    all_in = threading.Barrier(workers)
    mixed: list[str] = []

    def work(task: Task) -> list[tq.types.Step]:
        model = Counting()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = tq.Optimizer(inner, rule=rule, slice_bytes=100)
        seen: list[tq.types.Step] = []
        with tq.Session(
            task, model, optimizer, last_step=LAST_STEP, liveness_s=60.0, logdir=logdir, patience=PATIENCE
        ) as session:
            all_in.wait(20)
            while not session.should_stop():
                optimizer.step()
                seen.append(optimizer.last)
                if model.value() != (seen[-1].version, seen[-1].version):
                    mixed.append(f"worker {task.index}: version {seen[-1].version} holds {model.value()}")
            assert session.pull() == LAST_STEP
            assert model.value() == (LAST_STEP, LAST_STEP)
        return seen

    return cluster, cluster.run(*[work] * workers, timeout_s=50.0), mixed


def check_books(cluster: Cluster, rule: tq.Rule, steps: list[list[tq.types.Step]], ledger: list[Entry]) -> None:
    """The updates, the tally, the ledger and what the workers were told are the same story."""
    leader = cluster.leading().leader
    workers = len(steps)
    tally = cluster.servers[0].service.life.tally
    assert tally.updates == LAST_STEP == leader.quorum.version
    accepted = [e for e in ledger if e.accepted]
    assert len(accepted) == LAST_STEP * rule.needed(workers) + len(leader.quorum.round)
    assert not leader.quorum.round
    keys = [(e.worker, e.incarnation, e.local_step) for e in ledger]
    assert len(keys) == len(set(keys)), "a gradient was decided on twice"
    for index, mine in enumerate(steps):
        entries = [e for e in ledger if e.worker == index]
        assert sum(e.accepted for e in entries) == tally.worker(index).accepted
        assert len(entries) == tally.worker(index).batches == mine[-1].local_step
        assert [e.local_step for e in entries] == list(range(1, len(entries) + 1))
        assert [s.accepted for s in mine] == [e.accepted for e in entries], "a worker was told something else"
        assert [s.reason for s in mine] == [e.reason for e in entries]
        assert [s.version for s in mine] == sorted(s.version for s in mine)


@pytest.mark.parametrize(("preset", "fault", "place"), CASES, ids=[" ".join(case).replace(" ", "-") for case in CASES])
def test_training_through_faults_is_exact(preset: str, fault: str, place: str, tmp_path: Path) -> None:
    rule, workers = PRESETS[preset]
    ps, transport = PLACES[place]
    wrap = Wrap(FAULTS[fault], seed=zlib.crc32(f"{preset} {fault} {place}".encode()))
    cluster, steps, mixed = train(rule, workers, ps, transport, wrap, tmp_path)
    assert mixed == []
    check_books(cluster, rule, steps, list(read_ledger(tmp_path)))
    # What the other shards held, the workers have read: a shard other than 0 forgets a run that is over.
    assert cluster.leading().shard.version == LAST_STEP
    for server in cluster.servers:
        assert server.service.ended is not None and server.service.ended.ok
