"""How near to the machine's own speed 100 MB move: shared memory against memcpy, TCP against a raw socket.

    python benchmarks/bandwidth.py [--rounds 9] [--numel 25000000] [--output DIR]

One ps and one worker, rule Async, SGD. In every round, one after the other: the copy of 100 MB inside the worker, or 100 MB
to another process and back through a plain socket; then a pull; then a step with ready-made gradients, which is a push, the
update and a pull. What a push takes is the step less the pull: it has the update in it, whose arithmetic is shown beside it.
"""

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pushers
import results
import torch
from results import Floor, Result

import torchquorum as tq

NUMEL = 25_000_000
WARM_UP = 2
FLOORS = {"shm": (0.5, " of memcpy"), "tcp": (0.6, " of a raw socket")}


def echo(size_bytes: int) -> None:
    """Is the other end of a raw socket: takes so many bytes and sends as many back, until the other side hangs up."""
    memory = memoryview(bytearray(size_bytes))
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
        with connection:
            while _receive(connection, memory):
                connection.sendall(memory)


def _receive(connection: socket.socket, memory: memoryview) -> bool:
    at = 0
    while at < len(memory):
        got = connection.recv_into(memory[at:], len(memory) - at)
        if not got:
            return False
        at += got
    return True


def _seconds(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _work(numel: int, rounds: int, port: int | None) -> dict[str, list[float]]:
    """Is the worker; returns the seconds of each round."""
    task = tq.join()
    torch.set_num_threads(1)
    model = pushers.make_model(numel)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-6)
    optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=1e-3), rule=tq.Async())
    values, other, sent = torch.ones(numel), torch.zeros(numel), torch.ones(numel)
    raw = socket.create_connection(("127.0.0.1", port)) if port is not None else None
    memory = memoryview(sent.view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]

    def there_and_back() -> None:
        assert raw is not None
        raw.sendall(memory)
        _receive(raw, memory)

    took: dict[str, list[float]] = {name: [] for name in ("machine", "pull", "step", "update")}
    with tq.Session(task, model, optimizer) as session:
        for number in range(WARM_UP + rounds):
            seen = {
                "machine": _seconds(lambda: other.copy_(values)) if raw is None else _seconds(there_and_back) / 2,
                "pull": _seconds(session.pull),
                "step": _seconds(optimizer.step),
                "update": _seconds(lambda: torch.add(values, sent, alpha=-1e-3, out=other)),
            }
            if number >= WARM_UP:
                for name, seconds in seen.items():
                    took[name].append(seconds)
    if raw is not None:
        raw.close()
    return took


def run(transport: str, numel: int, rounds: int) -> dict[str, Any]:
    """Measures one transport."""
    peer, port = None, None
    if transport == "tcp":
        command = [sys.executable, __file__, "--echo", str(4 * numel)]
        peer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert peer.stdout is not None
        port = int(peer.stdout.readline())
    try:
        (took,) = tq.launch(_work, numel, rounds, port, workers=1, transport=transport, quiet=True)
    finally:
        if peer is not None:
            peer.kill()
            peer.communicate()
    machine, pull, step = (results.middle(took[name], 6) for name in ("machine", "pull", "step"))
    push, gb = max(step - pull, 1e-6), 4 * numel / 1e9
    return {
        "transport": transport,
        "bytes": 4 * numel,
        "machine_gb_per_s": round(gb / machine, 2),
        "pull_gb_per_s": round(gb / pull, 2),
        "push_gb_per_s": round(gb / push, 2),
        "pull_of_machine": round(machine / pull, 3),
        "push_of_machine": round(machine / push, 3),
        "ms": {name: round(1000 * results.middle(v, 6), 2) for name, v in took.items()},
    }


def measure(numel: int, rounds: int) -> Result:
    """Measures both transports."""
    rows, floors = [], []
    for transport, (bound, unit) in FLOORS.items():
        row = run(transport, numel, rounds)
        rows.append(row)
        for way in ("push", "pull"):
            floors.append(Floor(f"{way}, {transport}", row[f"{way}_of_machine"], bound, unit))
    return Result("bandwidth", f"{pushers.size(4 * numel)}, 1 ps, 1 worker, rule Async", rows, floors)


def show(result: Result) -> None:
    """Prints the table."""
    head = ["", "machine GB/s", "pull GB/s", "push GB/s", "pull", "push", "step ms", "of it pull", "update"]
    rows = [
        [
            f"{row['transport']} against {'memcpy' if row['transport'] == 'shm' else 'a raw socket'}",
            *(f"{row[k]:.2f}" for k in ("machine_gb_per_s", "pull_gb_per_s", "push_gb_per_s")),
            *(f"{row[k]:.2f}" for k in ("pull_of_machine", "push_of_machine")),
            *(f"{row['ms'][k]:.1f}" for k in ("step", "pull", "update")),
        ]
        for row in result.rows
    ]
    print(results.table(head, rows))
    results.say(result)


def main() -> None:
    """Measures, prints a table and writes JSON."""
    if sys.argv[1:2] == ["--echo"]:
        echo(int(sys.argv[2]))
        return
    parser = results.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--numel", type=int, default=NUMEL)
    args = parser.parse_args()
    results.report(lambda: measure(args.numel, args.rounds), show, args.output)


if __name__ == "__main__":
    main()
