"""A small real training, started as real processes by tests: every batch is a function of its number, so that a run whose
updates were each made exactly once ends with the same bits as any other such run."""

import time

import torch
from run_flags import make_parser, make_session
from torch import nn

import torchquorum as tq
from torchquorum.rules import parse_rule


def main() -> None:
    task = tq.join()
    parser = make_parser()
    parser.add_argument("--optimizer", default="Adam")
    parser.add_argument("--width", type=int, default=30)
    parser.add_argument("--fail-at", type=int, default=-1)
    parser.set_defaults(steps=200, save_steps=25, pause=0.003, silence=20.0, liveness=20.0)
    args = parser.parse_args()
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(20, args.width), nn.Tanh(), nn.Linear(args.width, 3))
    inner = getattr(torch.optim, args.optimizer)(model.parameters(), lr=0.01)
    optimizer = tq.Optimizer(inner, rule=parse_rule(args.rule), average=tq.ExponentialMovingAverage(0.9))
    with make_session(args, task, model, optimizer, wait_for_workers=task.num_workers) as session:
        print(f"started at {session.global_step} over {'+'.join(session.transports)}", flush=True)
        batch = 0
        while not session.should_stop():
            x = torch.randn(8, 20, generator=torch.Generator().manual_seed(1000 * task.index + batch))
            optimizer.zero_grad()
            loss = (model(x) ** 2).mean()
            loss.backward()
            optimizer.step(loss=loss)
            step = optimizer.last
            # What a worker is told when `step` returns is what must never be lost.
            print(f"told {step.version} accepted {step.accepted} {step.reason}", flush=True)
            batch += 1
            if batch == args.fail_at and task.index == 1:
                raise MemoryError("no memory is left")
            time.sleep(args.pause)
    print(f"done at {session.global_step}", flush=True)


if __name__ == "__main__":
    main()
