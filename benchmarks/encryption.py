"""What encryption costs: MNIST over TCP with a secret, as a share of the same without, runs of both kinds in turns.

    python benchmarks/encryption.py --rounds 5 --seconds 8

Prints a table and, with --out, writes every run as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from train_runs import train

from torchquorum.cluster.secret import make_secret


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--transport", default="tcp")
    parser.add_argument("--out")
    args = parser.parse_args()
    secret = {"TORCHQUORUM_SECRET": make_secret()}
    found: dict[str, Any] = {}
    for rule in ("async", "sync"):
        pairs = [
            [
                train(args.model, rule, args.seconds, args.transport, environment)["batches_per_s"]
                for environment in ({}, secret)
            ]
            for _ in range(args.rounds)
        ]
        plain, locked = (statistics.median(p[i] for p in pairs) for i in (0, 1))
        ratio = statistics.median(p[1] / p[0] for p in pairs)
        found[rule] = {"plain": plain, "encrypted": locked, "ratio": ratio, "runs": pairs}
        print(f"{rule:6}  plain {plain:7.1f}  encrypted {locked:7.1f} batches/s  ratio {ratio:.2f}", flush=True)
    if args.out:
        Path(args.out).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
