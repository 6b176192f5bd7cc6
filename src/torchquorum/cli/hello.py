"""`torchquorum hello`: the two smallest clusters, as a demo of a second or two."""

from __future__ import annotations

import socket
import sys
from typing import Any

import click

from torchquorum.cli.command import Command
from torchquorum.clock import SYSTEM, Clock

PORTS = (2222, 2223)
DEADLINE_S = 60.0


@click.command(cls=Command)
def hello() -> int:
    """Run the smallest clusters: a single server in this process, then two tasks, of which the first waits for the second.

    \b
    Examples:
      torchquorum hello
    """
    import torch

    torch.set_num_threads(1)  # before the tasks are forked: a fork inherits torch, but not its threads
    _warm_up(torch)  # the first export loads half of torch; the tasks inherit that too
    ports = _choose_ports()
    tasks = _Tasks({"local": [f"localhost:{port}" for port in ports]})
    try:
        click.echo("A single server:")
        _local_server()
        click.echo("\nTwo tasks, the second of which starts later:")
        return tasks.show()
    finally:
        tasks.end()


def join_letters(first: Any, second: Any) -> Any:
    """The graph that runs here."""
    import torch

    return torch.cat([first, second])


def _warm_up(torch: Any) -> None:
    from torchquorum.graph.export import export_program

    class Greeting(torch.nn.Module):
        def forward(self, first: Any, second: Any) -> Any:
            return join_letters(first, second)

    export_program(Greeting(), (letters("Hello, "), letters("you")), batch=False)


def letters(text: str) -> Any:
    """Returns a text as a tensor of bytes."""
    import torch

    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def _local_server() -> None:
    import torchquorum as tq

    with tq.graph.Server.create_local_server() as server:
        click.echo(f"  server.target is {server.target}")
        with tq.graph.connect(server.target) as client:
            greeting = client.run(join_letters, letters("Hello, distributed "), letters("torchquorum!"))
        click.echo(f"  {bytes(greeting.tolist()).decode()}")


def _choose_ports() -> list[int]:
    """Returns the ports of the tutorials if they are free, otherwise two others."""
    chosen: list[int] = []
    held = []
    try:
        for port in PORTS:
            s = socket.socket()
            held.append(s)
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                s.bind(("127.0.0.1", 0))
                click.echo(f"port {port} is in use; using {s.getsockname()[1]} instead")
            chosen.append(s.getsockname()[1])
    finally:
        for s in held:
            s.close()
    return chosen


class _Tasks:
    """Two processes, forked before anything else runs in this one; each begins when its event is set."""

    def __init__(self, cluster: dict[str, list[str]], clock: Clock = SYSTEM) -> None:
        import multiprocessing

        self._clock = clock
        context = multiprocessing.get_context("fork")
        self._begin = [context.Event() for _ in range(2)]
        self._first_waits = context.Event()
        done = context.Barrier(2)
        self._processes = [
            context.Process(target=_run_task, args=(cluster, index, self._begin[index], waits, done), daemon=True)
            for index, waits in enumerate([self._first_waits, None])
        ]
        for process in self._processes:
            process.start()

    def show(self) -> int:
        """Starts the first; when it reports that it waits, the second; waits for both."""
        deadline = self._clock.now() + DEADLINE_S
        self._begin[0].set()
        while not self._first_waits.wait(0.05) and self._processes[0].exitcode is None and self._clock.now() < deadline:
            pass
        self._begin[1].set()
        for process in self._processes:
            process.join(max(0.0, deadline - self._clock.now()))
        late = [str(i) for i, process in enumerate(self._processes) if process.exitcode is None]
        if late:
            click.echo(f"torchquorum: error: task {', '.join(late)} did not end within {DEADLINE_S:.0f} s", err=True)
        return 0 if all(process.exitcode == 0 for process in self._processes) else 1

    def end(self) -> None:
        """Ends both processes."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join(5.0)


class _ObservedStderr:
    """Standard error that sets an event at its first line, which says that the task waits."""

    def __init__(self, written: Any) -> None:
        self._written, self._stream = written, sys.stderr

    def write(self, text: str) -> int:
        """Writes, and sets the event."""
        self._written.set()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _run_task(cluster: dict[str, list[str]], index: int, begin: Any, waits: Any, done: Any) -> None:
    """Runs one of the two tasks: a server, and a client of the whole cluster, as in the tutorials."""
    from torchquorum.launcher.process import die_with_parent

    die_with_parent()
    if not begin.wait(DEADLINE_S):
        return
    if waits is not None:
        sys.stderr = _ObservedStderr(waits)
    import torchquorum as tq
    from torchquorum.errors import TorchQuorumError

    try:
        with tq.graph.Server(cluster, job_name="local", task_index=index) as server:
            click.echo(f"  {server.task} serves on {server.target}")
            with tq.graph.connect(server.target, wait_s=DEADLINE_S / 2) as client:
                _greet(client, index)
            done.wait(DEADLINE_S / 2)  # the other task may still need this one
    except TorchQuorumError as error:
        click.echo(f"torchquorum: error: {error}", err=True)
        sys.exit(1)


def _greet(client: Any, index: int) -> None:
    """The first task runs its graph on itself and then on the second; the second runs its own on the first."""
    for place in [0, 1] if index == 0 else [None]:
        greeting = client.run(join_letters, letters("Hello from server "), letters(f"{(place or 0) + 1}!"), on=place)
        words = bytes(greeting.tolist()).decode()
        click.echo(f"  /job:local/task:{index} got: {words} (computed by {client.tasks[place or 0]})")
