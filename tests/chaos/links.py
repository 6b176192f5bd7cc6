"""Slow links: what goes over them and how fast, with a model whose transfer takes longer than every deadline.

`python -m tests.chaos.links` measures with the deadlines of a user who sets none; the matrix runs the same in small. Each worker has a
link of its own, which passes the same rate in both directions; the ps task's link is fast. What is counted begins when all workers have
joined: bytes on the links, headers and all, against the bytes of gradients and variables; steps per second of each worker against
1 / (up bytes / up rate + down bytes / down rate).
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.network import Hosts, missing, rate
from tests.process.zygote import Forked, fork_task
from torchquorum.cluster.secret import make_secret

PROGRAM = Path(__file__).parent / "link_program.py"
MOST_BYTES, LEAST_STEPS = 1.1, 0.8
MOST_BYTES_IN_SMALL = 1.2  # beats are more often then, and models smaller
POLL_S = 0.01


@dataclass(frozen=True, kw_only=True)
class LinkCase:
    """One measurement.

    Attributes:
        rule: The rule, as on the command line.
        workers: How many.
        mbytes: The size of the model.
        mbit: The rate of each worker's link, in both directions.
        steps: How many each worker makes.
        divide: The deadlines are so much shorter than a user's.
        secret: Whether the cluster has one.
    """

    rule: str
    workers: int = 2
    mbytes: float = 4.2
    mbit: float = 2.0
    steps: int = 3
    divide: float = 1.0
    secret: bool = False

    def __str__(self) -> str:
        secret = "with a secret" if self.secret else "plain"
        return f"slow transfer, {self.mbytes:g} MB at {self.mbit:g} Mbit/s, {self.rule}, {secret}"

    @property
    def floor(self) -> float:
        """Returns how many steps per second the links would pass if nothing else did."""
        return self.mbit / 8 / (2 * self.mbytes)

    @property
    def limit_s(self) -> float:
        """Returns when to give up: three times what the links need, and a minute."""
        return 60 + 3 * (self.steps + 2) / self.floor


@dataclass
class Measured:
    """What came of it: steps per second of the slowest worker and bytes of the worst link, as parts of what the case needs."""

    case: LinkCase
    bytes_of_needed: float = 0.0
    steps_of_floor: float = 0.0
    problem: str = ""


# What `make chaos` runs: four seconds each way, where silence of two counts as a loss and of one as a death.
CASES = [
    LinkCase(rule=rule, mbytes=1.0, steps=2, divide=5.0, secret=secret)
    for rule in ("async", "sync", "bounded:2")
    for secret in (False, True)
]
# What `make test` runs of it.
SMALLEST = LinkCase(rule="async", workers=1, mbytes=0.5, mbit=1.0, steps=1, divide=5.0)


class Cluster:
    """One ps task and its workers, each on a host of its own."""

    def __init__(self, case: LinkCase, number: int, folder: Path) -> None:
        self.case, self.hosts = case, Hosts(f"k{os.getpid() % 10000}x{number}", 1 + case.workers)
        self.outputs = [folder / f"{i}.txt" for i in range(1 + case.workers)]
        self.tasks: list[Forked] = []
        self.began = time.monotonic()

    def start(self) -> None:
        """Starts all tasks."""
        case = self.case
        addresses = [f"{address}:2222" for address in self.hosts.addresses]
        env = {"TORCHQUORUM_SECRET": make_secret()} if case.secret else {"TORCHQUORUM_INSECURE": "1"}
        flags = [f"--ps_hosts={addresses[0]}", f"--worker_hosts={','.join(addresses[1:])}"]
        total = case.steps * (1 if case.rule.startswith("sync") else case.workers)
        own = [
            f"--rule={case.rule}",
            f"--steps={total}",
            f"--size={int(case.mbytes * 1e6 / 4)}",
            f"--divide={case.divide:g}",
        ]
        for i, name in enumerate(self.hosts.names):
            job = ["--job_name=ps", "--task_id=0"] if i == 0 else ["--job_name=worker", f"--task_id={i - 1}"]
            if i > 0:
                self.hosts.slow(i, rate(case.mbit), rate(case.mbit))
            self.tasks.append(fork_task([str(PROGRAM), *job, *flags, *own], self.outputs[i], netns=name, env=env))

    def text(self, task: int) -> str:
        """Returns what a task has printed."""
        return self.outputs[task].read_text(errors="replace")

    def wait(self, what: str, happened: object) -> None:
        """Waits for an event."""
        assert callable(happened)
        while not happened():
            if any(task.poll() for task in self.tasks):
                raise AssertionError(f"exit codes {[task.poll() for task in self.tasks]}")
            if time.monotonic() - self.began > self.case.limit_s:
                raise TimeoutError(f"waited {self.case.limit_s:.0f} s for {what}")
            time.sleep(POLL_S)

    def close(self) -> None:
        """Ends what is left."""
        for task in self.tasks:
            task.kill()
        for task in self.tasks:
            task.wait(60)
        self.hosts.close()


def measure(case: LinkCase, number: int = 0) -> Measured:
    """Makes the cluster, lets it train, and compares."""
    measured = Measured(case)
    with tempfile.TemporaryDirectory(prefix="links-") as folder:
        cluster = Cluster(case, number, Path(folder))
        workers = range(1, 1 + case.workers)
        try:
            cluster.start()
            cluster.wait("all workers", lambda: all("ready at" in cluster.text(i) for i in workers))
            _measure(cluster, workers, measured)
        except (TimeoutError, AssertionError) as error:
            tails = [f"--- {i}\n" + "\n".join(cluster.text(i).splitlines()[-12:]) for i in (0, *workers)]
            measured.problem = "\n".join([str(error), *tails])
        finally:
            cluster.close()
    return measured


def _measure(cluster: Cluster, workers: range, measured: Measured) -> None:
    case = cluster.case
    began = time.monotonic()
    before = {i: cluster.hosts.link_bytes(i) for i in workers}
    made, ended = dict.fromkeys(workers, 0), dict.fromkeys(workers, began)

    def over() -> bool:
        for i in workers:
            steps = len(re.findall(r"^local ", cluster.text(i), re.MULTILINE))
            if steps > made[i]:
                made[i], ended[i] = steps, time.monotonic()
        return all(task.poll() is not None for task in cluster.tasks)

    cluster.wait("the end", over)
    needed = 1e6 * case.mbytes
    worst = [
        (there - before[i][side]) / (made[i] * needed)
        for i in workers
        for side, there in enumerate(cluster.hosts.link_bytes(i))
    ]
    measured.bytes_of_needed = max(worst)
    measured.steps_of_floor = min(made[i] / (ended[i] - began) for i in workers) / case.floor
    said = "\n".join(cluster.text(i) for i in (0, *workers))
    assert all(task.poll() == 0 for task in cluster.tasks), f"exit codes {[task.poll() for task in cluster.tasks]}"
    for lost in ("counts as dead", "has not answered", "trying to go on"):
        assert lost not in said, f"a slow link was taken for a loss: {lost!r}"
    assert re.search(r"waiting for .*: \d+ s, .* MB", said), "no waiting line told of the bytes that have come"
    most = MOST_BYTES if case.divide == 1 else MOST_BYTES_IN_SMALL
    assert measured.bytes_of_needed <= most, f"{measured.bytes_of_needed:.2f} of the bytes that are needed"
    assert measured.steps_of_floor >= LEAST_STEPS, f"{measured.steps_of_floor:.2f} of the steps that the link passes"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.links", description="Measure slow links.")
    parser.add_argument("--rules", default="async,sync,bounded:2")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--mbytes", type=float, default=4.2)
    parser.add_argument("--mbit", type=float, default=2.0)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--divide", type=float, default=1.0, help="deadlines are so much shorter [%(default)s]")
    parser.add_argument("--secret", action="store_true")
    args = parser.parse_args()
    if reason := missing():
        print(reason)
        return 1
    failed = 0
    for number, rule in enumerate(args.rules.split(",")):
        case = LinkCase(
            rule=rule,
            workers=args.workers,
            mbytes=args.mbytes,
            mbit=args.mbit,
            steps=args.steps,
            divide=args.divide,
            secret=args.secret,
        )
        found = measure(case, number)
        failed += bool(found.problem)
        print(
            f"{rule:12} {'secret' if args.secret else 'plain':6} bytes {found.bytes_of_needed:5.2f} of needed, "
            f"steps {found.steps_of_floor:5.2f} of the link's   {found.problem or 'ok'}",
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
