"""What Ray costs: start-up and speed of a run on Ray against a local one, and a machine that is lost and one that comes.

    python benchmarks/on_ray.py [--rounds 3] [--steps 3000] [--only start,speed,loss]

Needs `torchquorum[ray]` and wants the machine for itself. Start-up is from the command to the first gradient in the ledger.
"Ray, started here" is `--on ray`, which starts a Ray of its own; "Ray, running" is one that is there already. The machines of the
last part are raylets of this one (`ray.cluster_utils`, in tests/process/ray_machines.py): one with a ps and a worker is killed in
mid-training, later one is added for the worker that waits. Costs are in seconds and in steps that had to be made again.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.process.ray_machines import Machines  # noqa: E402

TORCHQUORUM = [sys.executable, "-m", "torchquorum.cli.main"]
EXAMPLE = str(ROOT / "examples" / "mnist" / "train_quorum.py")
COUNTER = str(ROOT / "tests" / "process" / "program.py")


def ledger_of(options: list[str], steps: int) -> tuple[float, list[dict[str, float]]]:
    """Runs the example; returns when it was started and the ledger's gradients."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        command = [
            *TORCHQUORUM,
            "run",
            "--quiet",
            *options,
            EXAMPLE,
            "--steps",
            str(steps),
            "--logdir",
            f"{folder}/run",
        ]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            sys.exit(f"{' '.join(command)}\nended with {ran.returncode}:\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}")
        lines = (Path(folder) / "run" / "ledger.jsonl").read_text().splitlines()
    return began, [entry for line in lines if "arrived_at" in (entry := json.loads(line))]


def start_s(options: list[str]) -> float:
    """Returns the seconds from the command to the first gradient."""
    began, gradients = ledger_of(options, 5)
    return min(entry["arrived_at"] for entry in gradients) - began


def steps_per_s(options: list[str], steps: int) -> float:
    """Returns the gradients per second in the second half of a run, when all workers are there."""
    _, gradients = ledger_of(options, steps)
    times = sorted(entry["arrived_at"] for entry in gradients)
    half = times[len(times) // 2 :]
    return (len(half) - 1) / (half[-1] - half[0])


def in_turns(rounds: int, actions: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Measures everything in turns; prints and returns the middle."""
    seen: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            seen[name].append(action())
    for name, values in seen.items():
        print(f"  {name:20} {statistics.median(values):8.2f}   ({min(values):.2f} to {max(values):.2f})", flush=True)
    return {name: statistics.median(values) for name, values in seen.items()}


def compare(rounds: int, steps: int, only: set[str]) -> None:
    """Start-up and speed."""
    machines = Machines()
    try:
        machines.add(8)
        places = {
            "local": [],
            "Ray, started here": ["--on", "ray"],
            "Ray, running": ["--on", "ray", "--address", machines.address],
        }
        if "start" in only:
            print("seconds from the command to the first gradient, 1 ps and 2 workers")
            in_turns(rounds, {name: lambda o=options: start_s(o) for name, options in places.items()})
        if "speed" in only:
            print(f"gradients per second of the MNIST example over {steps} steps, 1 ps and 2 workers, one thread each")
            # On a cluster connections are encrypted, as by a secret between hosts; on one host that is not the memory's way.
            found = in_turns(
                rounds,
                {
                    name: lambda o=options: steps_per_s([*o, "--threads", "1"], steps)
                    for name, options in places.items()
                },
            )
            for name in places:
                print(f"  {name:20} {found[name] / found['local']:8.2f} of local")
    finally:
        machines.close()


@contextmanager
def counting(machines: Machines, folder: str, save_steps: int) -> Iterator[Iterator[tuple[float, str]]]:
    """A run of 2 ps and 2 workers that counts; gives its lines with their times."""
    options = ["--on", "ray", "--address", machines.address, "--ps", "2", "--workers", "2"]
    program = [COUNTER, "--steps", "1000000", "--pause", "0.02", "--rule", "async", "--logdir", folder]
    process = subprocess.Popen(
        [*TORCHQUORUM, "run", *options, *program, "--save-steps", str(save_steps)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield ((time.monotonic(), line.rstrip()) for line in process.stdout)
    finally:
        process.terminate()
        process.wait(120)
        process.stdout.close()


def step_in(line: str) -> int | None:
    """Returns the global step that a worker's line tells of."""
    found = re.search(r"\] local \d+ global (\d+)", line)
    return int(found[1]) if found else None


def lose_and_regain(save_steps: int) -> None:
    """A machine with a ps and a worker is killed, and another is added."""
    machines = Machines()
    try:
        machines.add(3)
        lost = machines.add(3)
        with tempfile.TemporaryDirectory() as folder, counting(machines, folder, save_steps) as lines:
            highest, removed_at, moved_at, added_at, waiting = 0, 0.0, 0.0, 0.0, False
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
                    if step is not None and "[worker" in line:
                        back = step - 1
                        print(f"  training goes on after               {now - removed_at:5.1f} s")
                        print(f"  at step {back}, and had been at {highest}: {highest - back} steps are made again")
                        machines.add(3)
                        added_at = time.monotonic()
                        if not waiting:
                            print("  (every worker had found room already: the machine that comes is not needed)")
                            return
                elif "] started at" in line and now > added_at:
                    print(f"  a machine is added: the worker that waited is at work after {now - added_at:.1f} s")
                    return
    finally:
        machines.close()


def main() -> None:
    """Reads the options and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3000, help="of a run whose speed is measured")
    parser.add_argument("--save-steps", type=int, default=50, help="between checkpoints, where a machine is lost")
    parser.add_argument("--only", default="start,speed,loss")
    args = parser.parse_args()
    only = set(args.only.split(","))
    if only & {"start", "speed"}:
        compare(args.rounds, args.steps, only)
    if "loss" in only:
        print(f"a machine with a ps and a worker is killed; checkpoints every {args.save_steps} steps")
        lose_and_regain(args.save_steps)


if __name__ == "__main__":
    main()
