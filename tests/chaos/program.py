"""The program of the fault matrix: counts instead of learning, and stops at gates so that a fault falls where it shall.

Every parameter's gradient is -1 and the rate 1, so each value equals the version: an update that was lost, doubled or mixed
with another shows at once. A gate is a file that the runner makes; what the program prints is what the runner waits for.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchquorum as tq
from tests.process.run_flags import make_parser, make_session
from torchquorum.rules import parse_rule
from torchquorum.server import ending, followers, saver, serve

GATE_S = 120.0
POLL_S = 0.005
GATED_FROM = 7  # there is a checkpoint before the one during which something happens


def parse() -> argparse.ArgumentParser:
    parser = make_parser()
    parser.add_argument("--gates", type=Path, required=True)
    parser.add_argument("--gate-at", type=int, required=True)
    parser.add_argument("--size", type=int, default=1000)
    parser.add_argument("--user-deadlines", action="store_true", help="liveness and silence as of a user who sets none")
    parser.set_defaults(pause=0.005, liveness=1.0, silence=1.0, start=40.0, round=40.0)
    return parser


def gate(folder: Path, name: str) -> None:
    """Waits until the runner opens a gate."""
    deadline = time.monotonic() + GATE_S
    while not (folder / name).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"gate {name} was never opened")
        time.sleep(POLL_S)


def gate_checkpoints(folder: Path, last_step: int) -> None:
    """A ps task stops, with its part of a checkpoint written and before it says so, until the gate is open."""
    write = saver.write_part

    def gated(partial: Path, shard: int, *rest: Any) -> Any:
        info = write(partial, shard, *rest)
        step = int(partial.name.split(".")[2].removeprefix("ckpt-"))
        if step < GATED_FROM:
            return info
        if step == last_step:  # a periodic one may be of the last step, too
            gate(folder, "last checkpoint")
        print(f"checkpoint begun: {partial.name}", flush=True)
        gate(folder, "checkpoint")
        return info

    saver.write_part = gated  # pyright: ignore[reportAttributeAccessIssue]


class Counter(nn.Module):
    """Two vectors, so that each of two ps tasks holds one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(size))
        self.other = nn.Parameter(torch.zeros(size // 2))
        for parameter in self.parameters():
            parameter.grad = -torch.ones_like(parameter)

    def value(self) -> tuple[int, int]:
        """The least and the greatest element."""
        return int(min(p.min() for p in self.parameters())), int(max(p.max() for p in self.parameters()))


def main() -> None:
    # A ps task's own deadlines, shortened like those of the session below.
    known, _ = parse().parse_known_args()
    if not known.user_deadlines:
        serve.LEADER_SILENCE_S, ending.LATE_S, ending.IDLE_S = 10.0, 1.0, 12.0  # a ps may take 5 s to be back
        serve.WAIT_FOR_CHIEF_S, serve.SAY_EVERY_S = 20.0, 1.0
        followers.SILENCE_S = 5.0
    gate_checkpoints(known.gates, known.steps)
    task = tq.join()
    args = parse().parse_args()
    if args.user_deadlines:
        args.liveness, args.silence = 5.0, 10.0
    model = Counter(args.size)
    optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=1.0), rule=parse_rule(args.rule))
    with make_session(args, task, model, optimizer) as session:
        print(f"ready at {session.global_step} over {'+'.join(session.transports)}", flush=True)
        gate(args.gates, "begin")
        while not session.should_stop():
            if session.local_step == args.gate_at:
                gate(args.gates, "middle")
            if session.local_step == args.gate_at + 2:
                gate(args.gates, "late")
            optimizer.step(loss=1.0)
            step = optimizer.last
            print(f"local {step.local_step} global {step.version} accepted {step.accepted} {step.reason}", flush=True)
            assert model.value() == (step.version, step.version), (model.value(), step)
            time.sleep(args.pause)
        print(f"over at {session.global_step}", flush=True)
        gate(args.gates, "end")
    print(f"done at {session.global_step} after {session.local_step} local steps: {model.value()}", flush=True)


if __name__ == "__main__":
    main()
