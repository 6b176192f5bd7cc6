"""The flags that the programs of the tests share, and the session that they describe.

A program gives its own defaults with `parser.set_defaults`, and whatever else its session needs. Imported by the name that a
program's own folder gives it, for programs are started as a user's are.
"""

import argparse
from typing import Any

from torch import nn

import torchquorum as tq
from torchquorum.session.join import Task
from torchquorum.wire.rpc import Patience


def make_parser() -> argparse.ArgumentParser:
    """Returns a parser of the shared flags, to which a program may add."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rule", default="sync")
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--liveness", type=float, default=5.0)
    parser.add_argument("--silence", type=float, default=10.0)
    parser.add_argument("--start", type=float, default=60.0)
    parser.add_argument("--round", type=float, default=60.0)
    parser.add_argument("--logdir")
    parser.add_argument("--save-steps", type=int)
    parser.add_argument("--durable", default="")
    parser.add_argument("--afresh", action="store_true")
    parser.add_argument("--accept-loss", action="store_true")
    return parser


def make_session(
    args: argparse.Namespace, task: Task, model: nn.Module, optimizer: tq.Optimizer, **more: Any
) -> tq.Session:
    """Returns the session that the flags describe; `more` are further options of it."""
    return tq.Session(
        task,
        model,
        optimizer,
        last_step=args.steps,
        logdir=args.logdir,
        liveness_s=args.liveness,
        save_every_steps=args.save_steps,
        start_afresh=args.afresh,
        accept_loss=args.accept_loss,
        durable=args.durable or None,
        patience=Patience(start_s=args.start, round_s=args.round, silence_s=args.silence, probe_s=0.2, say_s=2.0),
        **more,
    )
