"""Training beside hostile peers, as a share of its speed beside the same peers at somebody else's port.

    python benchmarks/hostile.py --rounds 3 --seconds 8 [KIND ...]

The peers need processor time of their own, which on a small machine they take from training wherever they knock. So each kind
is run three times in turns: not at all, at a port where somebody accepts and says nothing, and at the port of the ps. The share that
counts is the third over the second. The kinds are those of tests/unknown_senders.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from train_runs import train

ROOT = Path(__file__).parent.parent
UNKNOWN_SENDERS = ROOT / "tests" / "unknown_senders.py"
KINDS = (
    "garbage",
    "half_greeting",
    "half_message",
    "oversized",
    "handshakes",
    "thousand",
    "hello_flood",
    "join_flood",
    "status_flood",
    "slow_reader",
    "nonsense",
)
BYSTANDER = """
import socket
listening = socket.create_server(("127.0.0.1", 0), backlog=512)
print(listening.getsockname()[1], flush=True)
kept = []
while True:
    kept = kept[-500:] + [listening.accept()[0]]
"""


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rule", default="async")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--out")
    args = parser.parse_args()
    bystander = subprocess.Popen([sys.executable, "-c", BYSTANDER], stdout=subprocess.PIPE, text=True)
    assert bystander.stdout is not None
    elsewhere = f"127.0.0.1:{int(bystander.stdout.readline())}"
    found: dict[str, Any] = {}

    def knock(kind: str, address: str) -> list[subprocess.Popen[str]]:
        return [
            subprocess.Popen(
                [sys.executable, str(UNKNOWN_SENDERS), kind, address], stdout=subprocess.DEVNULL, text=True
            )
        ]

    try:
        for kind in args.kinds or KINDS:
            runs = []
            for _ in range(args.rounds):
                speeds = [
                    train("mlp", args.rule, args.seconds, args.transport, {}, beside)["batches_per_s"]
                    for beside in (
                        None,
                        lambda _, kind=kind: knock(kind, elsewhere),
                        lambda ps, kind=kind: knock(kind, ps),
                    )
                ]
                runs.append(speeds)
            alone, away, here = (statistics.median(r[i] for r in runs) for i in range(3))
            ratio = statistics.median(r[2] / r[1] for r in runs)
            found[kind] = {"alone": alone, "elsewhere": away, "at_the_ps": here, "ratio": ratio, "runs": runs}
            print(
                f"{kind:14} alone {alone:7.1f}  peers elsewhere {away:7.1f}  at the ps {here:7.1f} batches/s  "
                f"ratio {ratio:.2f}",
                flush=True,
            )
    finally:
        bystander.kill()
        bystander.wait()
    if args.out:
        Path(args.out).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
