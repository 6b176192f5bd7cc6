"""A user's program, started as real processes by tests: counts instead of learning, so that every result is exact.

The one parameter's gradient is -1 and the learning rate 1, so the parameter always equals the version.
"""

import time
from pathlib import Path

import torch
from run_flags import make_parser, make_session
from torch import nn

import torchquorum as tq
from torchquorum.rules import parse_rule

task = tq.join()
parser = make_parser()
parser.add_argument("--size", type=int, default=1000)
parser.add_argument("--fail-at", type=int, default=-1)
parser.add_argument("--summaries", action="store_true")
parser.add_argument("--until", type=Path, help="end when this file is there")
parser.add_argument("--hold", type=Path, help="do not go beyond half of the steps before this file is there")
parser.add_argument("--hurry", type=Path, help="do not pause any more when this file is there")
parser.add_argument("--chief-late", type=float, default=0.0)
args = parser.parse_args()


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(args.size))
        self.other = nn.Parameter(torch.zeros(17))


model = Counter()
optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=1.0), rule=parse_rule(args.rule))
for parameter in model.parameters():
    parameter.grad = -torch.ones_like(parameter)
if task.is_chief and args.chief_late:
    print(f"coming {args.chief_late:g} s late", flush=True)
    time.sleep(args.chief_late)
hooks = [tq.SummaryHook(every_steps=2)] if args.summaries else []
with make_session(args, task, model, optimizer, hooks=hooks) as session:
    print(f"started at {session.global_step} over {'+'.join(session.transports)}", flush=True)
    while not session.should_stop():
        optimizer.step(loss=1.0)
        step = optimizer.last
        print(f"local {step.local_step} global {step.version} accepted {step.accepted} {step.reason}", flush=True)
        assert int(model.count.min()) == int(model.count.max()) == int(model.other[0]) == step.version
        if step.local_step == args.fail_at:
            raise RuntimeError("told to fail")
        if args.until is not None and args.until.exists():
            session.request_stop()
        if args.hold is not None:
            deadline = time.monotonic() + 300
            while step.version >= args.steps // 2 and not args.hold.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
        if args.pause and not (args.hurry is not None and args.hurry.exists()):
            time.sleep(args.pause)
print(f"done at {session.global_step} after {session.local_step} local steps: {model.count[0].item():g}", flush=True)
