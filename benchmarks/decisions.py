"""What it costs a ps to decide: quorum, log and books for one gradient, with 2 to 1,000 workers, without any bytes.

    python benchmarks/decisions.py [--rounds 5] [--output DIR]

The leader of ps task 0 is told of gradients, as its service tells it, and follows the rule; nothing is sent or added up.
CPU time of one thread, so a busy machine hardly changes it.
"""

import time
from collections.abc import Sequence
from typing import Any

import results
from results import Result

from torchquorum.placement.layout import Variable
from torchquorum.rules import Async, Rule, Sync
from torchquorum.rules.quorum import Key
from torchquorum.server.leader import Arrival, Leader
from torchquorum.server.tally import Tally
from torchquorum.wire.messages import OptimizerSpec, Plan

WORKERS = (2, 32, 1_000)
GRADIENTS = 4_000


def decide(rule: Rule, workers: int, gradients: int) -> float:
    """Returns the microseconds of CPU time that one gradient costs."""
    plan = Plan(
        variables=[Variable(name="w", shape=(10,), dtype="float32", group=0)],
        optimizer=OptimizerSpec("SGD", [{"lr": 0.1}]),
        rule=rule,
        num_workers=workers,
        num_shards=1,
    )
    leader = Leader(plan, Tally(0.0), None)
    for worker in range(workers):
        leader.join(worker, 1 + worker, 1, 0.0, 0.0, "tcp")
    rounds = max(1, gradients // workers)
    began = time.process_time()
    for step in range(1, rounds + 1):
        for worker in range(workers):
            computed_at = leader.quorum.version
            key = Key(worker, 1 + worker, step)
            leader.arrived(0, key, step + 1, 0.0, 0.0, push=Arrival(computed_at, 0.5))
        leader.log.followed(0, leader.log.start + len(leader.log.entries))
    took = time.process_time() - began
    assert leader.quorum.version == (rounds if leader.quorum.needed > 1 else rounds * workers)
    return 1e6 * took / (rounds * workers)


def measure(rounds: int, workers: Sequence[int] = WORKERS, gradients: int = GRADIENTS) -> Result:
    """Measures both rules with every number of workers; the best of the rounds, for noise only adds."""
    rows: list[dict[str, Any]] = []
    for number in workers:
        row: dict[str, Any] = {"workers": number}
        for name, rule in (("async", Async()), ("sync", Sync())):
            row[f"{name}_us"] = round(min(decide(rule, number, gradients) for _ in range(rounds)), 1)
        rows.append(row)
    return Result("decisions", "CPU microseconds of ps task 0 for one gradient, without its bytes", rows)


def show(result: Result) -> None:
    """Prints the table."""
    rows = [[str(r["workers"]), f"{r['async_us']:.1f}", f"{r['sync_us']:.1f}"] for r in result.rows]
    print(results.table(["workers", "async, us", "sync, us"], rows))
    results.say(result)


def main() -> None:
    """Measures, prints a table and writes JSON."""
    parser = results.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    results.report(lambda: measure(args.rounds), show, args.output)


if __name__ == "__main__":
    main()
