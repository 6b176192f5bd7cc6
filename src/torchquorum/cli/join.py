"""`torchquorum join`: joins a cluster as a task without a program."""

from __future__ import annotations

import click

from torchquorum.cli.command import Command, option


@click.command(
    cls=Command,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": True},
)
@option("--device", default="cpu", metavar="NAME", help="device of a compute task: cpu, cuda, cuda:1")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def join(flags: tuple[str, ...], device: str) -> int:
    """Join a cluster as a ps, or as a worker that runs the graphs of a client (in-graph training).

    It needs none of the client's code and serves until the run is over. FLAGS name the task, as for every program, or the
    environment does: TF_CONFIG, CLUSTER_SPEC, torchrun's variables, SLURM_*.

    \b
    Examples:
      torchquorum join --job_name=ps --task_id=0 --ps_hosts=a:2 --worker_hosts=b:2
      torchquorum join --job_name=worker --task_id=0 --ps_hosts=a:2 --worker_hosts=b:2
    """
    from torchquorum.cluster.flags import EXAMPLE
    from torchquorum.cluster.sources import resolve
    from torchquorum.cluster.spec import EVALUATOR
    from torchquorum.errors import FlagError
    from torchquorum.session.join import say
    from torchquorum.session.rendezvous import exchange_addresses

    found = resolve(list(flags), exchange=lambda rendezvous: exchange_addresses(rendezvous, say=say))
    if found is None:
        raise FlagError(f"no task is named; give flags, such as {EXAMPLE}, or set TF_CONFIG")
    if found.task.job == EVALUATOR:
        raise FlagError(
            f"{found.task}: an evaluator needs the program whose model it evaluates; start that program instead of torchquorum join"
        )
    if found.remaining:
        raise FlagError(f"{found.remaining[0]}: torchquorum join takes only the flags that name the task: {EXAMPLE}")
    say(f"{found.task}: {found.why}")
    from torchquorum.graph.graph_server import serve_task

    return serve_task(found, device)
