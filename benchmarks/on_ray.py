"""What Ray costs: start-up and speed of a run on Ray against a local one, and a machine that is lost and one that comes.

    python benchmarks/on_ray.py [--rounds 3] [--steps 3000] [--only runs,loss] [--budget 280]

Needs `torchquorum[ray]` and wants the machine for itself; ends within its budget of seconds, and says what it left out for it.
The three kinds of run take turns. Start-up is from the command to the first gradient in the ledger; speed is that of the
second half of the same run, and its ratio is taken within a turn. "Ray, started here" is `--on ray`, which starts a Ray of its own;
"Ray, running" is one that is there already. The machines of the last part are raylets of this one (`ray.cluster_utils`, in
tests/process/ray_machines.py): one with a ps and a worker is killed in mid-training, later one is added for the worker that
waits. Costs are in seconds and in steps that had to be made again.
"""

import argparse
import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.process.ray_machines import Machines  # noqa: E402

TORCHQUORUM = [sys.executable, "-m", "torchquorum.cli.main"]
EXAMPLE = str(ROOT / "examples" / "mnist" / "train_quorum.py")
COUNTER = str(ROOT / "tests" / "process" / "program.py")


class SpentError(Exception):
    """The time is over."""


class Budget:
    """How long this may take in all."""

    def __init__(self, limit_s: float) -> None:
        self._ends_at = time.monotonic() + limit_s

    def left_s(self) -> float:
        """Returns the seconds that are left.

        Raises:
            SpentError: None are.
        """
        left_s = self._ends_at - time.monotonic()
        if left_s <= 0:
            raise SpentError
        return left_s


def run_example(options: list[str], steps: int, budget: Budget) -> dict[str, float]:
    """Runs the example; returns the seconds until its first gradient, and gradients per second in its second half."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        command = [*TORCHQUORUM, "run", "--quiet", "--threads", "1", *options, EXAMPLE]
        process = subprocess.Popen(
            [*command, "--steps", str(steps), "--logdir", f"{folder}/run"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            said, _ = process.communicate(timeout=budget.left_s())
        except subprocess.TimeoutExpired:
            process.terminate()  # as good as Ctrl-C: it takes its tasks along
            process.communicate(timeout=120)
            raise SpentError from None
        if process.returncode:
            sys.exit(f"{' '.join(command)}\nended with {process.returncode}:\n{said[-2000:]}")
        lines = (Path(folder) / "run" / "ledger.jsonl").read_text().splitlines()
    times = sorted(entry["arrived_at"] for line in lines if "arrived_at" in (entry := json.loads(line)))
    half = times[len(times) // 2 :]  # when all workers are there
    return {"start_s": times[0] - began, "per_s": (len(half) - 1) / (half[-1] - half[0])}


def show(name: str, values: list[float], digits: int) -> None:
    """Prints the middle of some values, and the range."""
    middle = f"{statistics.median(values):9.{digits}f}"
    print(f"  {name:20} {middle}   ({min(values):.{digits}f} to {max(values):.{digits}f})", flush=True)


def compare(rounds: int, steps: int, budget: Budget) -> None:
    """Start-up and speed, of runs that take turns."""
    machines = Machines()
    try:
        machines.add(8)
        places = {
            "local": [],
            "Ray, started here": ["--on", "ray"],
            "Ray, running": ["--on", "ray", "--address", machines.address],
        }
        turns: list[dict[str, dict[str, float]]] = []
        try:
            for _ in range(rounds):
                turns.append({name: run_example(options, steps, budget) for name, options in places.items()})
        except SpentError:
            print(f"the time is over: {len(turns)} of {rounds} turns were made")
        if not turns:
            return
        print(f"seconds from the command to the first gradient, 1 ps and 2 workers, {len(turns)} turns")
        for name in places:
            show(name, [turn[name]["start_s"] for turn in turns], 2)
        print(f"gradients per second of the MNIST example over {steps} steps, one thread each")
        for name in places:
            show(name, [turn[name]["per_s"] for turn in turns], 0)
        print("the same as a share of the local run of the same turn")
        for name in list(places)[1:]:
            show(name, [turn[name]["per_s"] / turn["local"]["per_s"] for turn in turns], 2)
    finally:
        machines.close()


@contextmanager
def counting(machines: Machines, folder: str, save_steps: int, budget: Budget) -> Iterator[Iterator[tuple[float, str]]]:
    """A run of 2 ps and 2 workers that counts; gives its lines with their times, and ends it when the time is over."""
    options = ["--on", "ray", "--address", machines.address, "--ps", "2", "--workers", "2"]
    program = [COUNTER, "--steps", "1000000", "--pause", "0.02", "--rule", "async", "--logdir", folder]
    process = subprocess.Popen(
        [*TORCHQUORUM, "run", *options, *program, "--save-steps", str(save_steps)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    watchdog = threading.Timer(budget.left_s(), process.terminate)
    watchdog.start()
    try:
        yield ((time.monotonic(), line.rstrip()) for line in process.stdout)
    finally:
        watchdog.cancel()
        process.terminate()
        with contextlib.suppress(ValueError):
            process.communicate(timeout=120)


def step_in(line: str) -> int | None:
    """Returns the global step that a worker's line tells of."""
    found = re.search(r"\] local \d+ global (\d+)", line)
    return int(found[1]) if found else None


def lose_and_regain(save_steps: int, budget: Budget) -> None:
    """A machine with a ps and a worker is killed, and another is added."""
    machines = Machines()
    try:
        machines.add(3)
        lost = machines.add(3)
        with tempfile.TemporaryDirectory() as folder, counting(machines, folder, save_steps, budget) as lines:
            highest, removed_at, moved_at, added_at, waiting, resumed = 0, 0.0, 0.0, 0.0, False, False
            for now, line in lines:
                step = step_in(line)
                if not removed_at:
                    highest = max(highest, step or 0)
                    if highest > 3 * save_steps:
                        machines.remove(lost)
                        removed_at = time.monotonic()
                elif not moved_at:
                    highest = max(highest, step or 0)
                    waiting |= "waits for room" in line
                    if "was lost with its place" in line:
                        print(f"  the launcher hears of the loss after {now - removed_at:5.1f} s")
                    if "every task starts again" in line:
                        print(f"  every ps has a place again after     {now - removed_at:5.1f} s")
                        moved_at = now
                elif not added_at:
                    waiting |= "waits for room" in line
                    if step is not None and not resumed:
                        resumed = True
                        print(f"  training goes on after               {now - removed_at:5.1f} s")
                        print(
                            f"  at step {step - 1}, and had been at {highest}: {highest - step + 1} steps are made again"
                        )
                    if resumed and waiting:  # 3 CPUs are left for 4 tasks, so somebody does
                        machines.add(3)
                        added_at = time.monotonic()
                elif "] started at" in line and now > added_at:
                    print(f"  a machine is added: the worker that waited is at work after {now - added_at:.1f} s")
                    return
            print("  the time is over, or the run ended: the rest was not measured")
    finally:
        machines.close()


def main() -> None:
    """Reads the options and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3000, help="of a run whose speed is measured")
    parser.add_argument("--save-steps", type=int, default=50, help="between checkpoints, where a machine is lost")
    parser.add_argument("--only", default="runs,loss", help="runs: start-up and speed; loss: a machine is lost")
    parser.add_argument("--budget", type=float, default=280.0, help="seconds that all may take")
    args = parser.parse_args()
    only = set(args.only.split(","))
    if not only <= {"runs", "loss"}:
        parser.error(f"--only {args.only}: must be of runs, loss")
    budget = Budget(args.budget)
    if "runs" in only:
        compare(args.rounds, args.steps, Budget(args.budget * 0.6) if "loss" in only else budget)
    if "loss" in only:
        print(f"a machine with a ps and a worker is killed; checkpoints every {args.save_steps} steps", flush=True)
        lose_and_regain(args.save_steps, budget)


if __name__ == "__main__":
    main()
