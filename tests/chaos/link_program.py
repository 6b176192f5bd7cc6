"""The program of the slow links: counts instead of learning, with the deadlines that a user has who sets none.

Every parameter's gradient is -1 and the rate 1, so each value equals the version. It prints each step.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import torchquorum as tq
from torchquorum.rules import parse_rule
from torchquorum.wire.rpc import Patience


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rule", default="async")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--size", type=int, default=1_050_000)
    parser.add_argument("--divide", type=float, default=1.0, help="deadlines are so much shorter than a user's")
    task = tq.join()
    args = parser.parse_args()
    model = nn.Module()
    model.count = nn.Parameter(torch.zeros(args.size))
    model.count.grad = -torch.ones(args.size)
    patience = Patience()
    patience = Patience(
        start_s=patience.start_s / args.divide,
        round_s=patience.round_s / args.divide,
        silence_s=patience.silence_s / args.divide,
        probe_s=patience.probe_s / args.divide,
        say_s=patience.say_s / args.divide,
    )
    optimizer = tq.Optimizer(torch.optim.SGD([model.count], lr=1.0), rule=parse_rule(args.rule))
    with tq.Session(
        task, model, optimizer, last_step=args.steps, liveness_s=5.0 / args.divide, patience=patience
    ) as session:
        print(f"ready at {session.global_step}", flush=True)
        while not session.should_stop():
            optimizer.step(loss=1.0)
            step = optimizer.last
            assert step is not None
            print(f"local {step.local_step} global {step.version} accepted {step.accepted} {step.reason}", flush=True)
            assert float(model.count.min()) == float(model.count.max()) == step.version
    print(f"done at {session.global_step} after {session.local_step} local steps", flush=True)


if __name__ == "__main__":
    main()
