"""In-graph beside between-graph: batches per second, the client's own cost, and where the client becomes the bottleneck.

    python benchmarks/in_graph.py [--seconds 4] [--rounds 3] [--tasks 1,2,4] [--svg docs/images/in_graph.svg]

For each number of tasks both clusters are up at the same time, and only one of them works at a time, in turns, so that
whatever else the machine does meets both. Rule Async. Ratios of medians mean something, single figures do not.
"""

import argparse
import itertools
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

MODELS = {  # name: (sizes of the layers, rows of a batch)
    "mlp 784-500-10, 100 rows": ([784, 500, 10], 100),
    "linear 784-10, 1000 rows": ([784, 10], 1000),
}


def batch_bytes(kind: str) -> int:
    """Returns the bytes of one batch: float32 inputs, int64 labels."""
    sizes, rows = MODELS[kind]
    return rows * (sizes[0] * 4 + 8)


# -- one role of a cluster, told by lines on standard input how long to work -------------------------------------------------


def orders() -> Iterator[float]:
    """Yields how many seconds to work, until the input ends."""
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        yield float(line)


def play(role: str, kind: str, flags: list[str]) -> None:
    """Is a between-graph worker, or the client of in-graph tasks; prints what it did in each turn."""
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy

    import torchquorum as tq
    from torchquorum.cluster.flags import parse_flags

    torch.set_num_threads(1)
    sizes, rows = MODELS[kind]
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    pool = [(torch.randn(rows, sizes[0]), torch.randint(0, sizes[-1], (rows,))) for _ in range(8)]
    optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.01), rule=tq.Async())

    def report(count: int, wall: float, cpu: float) -> None:
        used = {"batches": count, "seconds": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        print(json.dumps(used), flush=True)

    if role == "worker":
        with tq.Session(tq.join(flags), model, optimizer):
            for seconds in orders():
                count, wall, cpu = 0, time.perf_counter(), time.process_time()
                while time.perf_counter() - wall < seconds:
                    x, y = pool[count % len(pool)]
                    optimizer.zero_grad()
                    cross_entropy(model(x), y).backward()
                    optimizer.step()
                    count += 1
                report(count, wall, cpu)
        return
    found, _ = parse_flags(flags)
    cluster = tq.ClusterSpec({"ps": found.ps_hosts or (), "worker": found.worker_hosts or ()})
    graph = tq.Graph(model, cross_entropy, example_inputs=pool[0])
    with tq.GraphSession(cluster, graph, optimizer, wait_for_workers=cluster.num_tasks("worker")) as session:
        for seconds in orders():
            wall, cpu = time.perf_counter(), time.process_time()

            def stream(until: float = wall + seconds) -> Iterator[tuple[torch.Tensor, ...]]:
                number = 0
                while time.perf_counter() < until:
                    yield pool[number % len(pool)]
                    number += 1

            report(sum(1 for _ in session.run(stream())), wall, cpu)


# -- the two clusters --------------------------------------------------------------------------------------------------------


class Cluster:
    """The processes of one way to train, started together."""

    def __init__(self, way: str, kind: str, tasks: int) -> None:
        held = [socket.socket() for _ in range(1 + tasks)]
        for s in held:
            s.bind(("127.0.0.1", 0))
        names = [f"localhost:{s.getsockname()[1]}" for s in held]
        for s in held:
            s.close()
        hosts = [f"--ps_hosts={names[0]}", f"--worker_hosts={','.join(names[1:])}"]
        me, join = [sys.executable, __file__], [sys.executable, "-m", "torchquorum.cli.main", "join"]
        who = [["--job_name=worker", f"--task_id={i}", *hosts] for i in range(tasks)]
        self.silent = [self._start([*join, "--job_name=ps", "--task_id=0", *hosts])]
        if way == "in-graph":
            self.silent += [self._start([*join, *flags]) for flags in who]
            self.told = [self._start([*me, "--play", "client", kind, *hosts])]
        else:
            self.told = [self._start([*me, "--play", "worker", kind, *flags]) for flags in who]
        for process in self.told:
            self._line(process)

    @staticmethod
    def _start(command: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    @staticmethod
    def _line(process: subprocess.Popen[str]) -> dict[str, float]:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(map(str, process.args))} ended early")  # type: ignore[arg-type]
        return json.loads(line)

    def work(self, seconds: float) -> dict[str, float]:
        """Works for some seconds; returns batches per second, and the CPU seconds per batch of those who were told."""
        for process in self.told:
            assert process.stdin is not None
            process.stdin.write(f"{seconds}\n")
            process.stdin.flush()
        done = [self._line(process) for process in self.told]
        batches = sum(d["batches"] for d in done)
        return {
            "rate": batches / max(d["seconds"] for d in done),
            "cpu_ms": 1000 * sum(d["cpu_s"] for d in done) / batches,
        }

    def end(self) -> None:
        """Ends the processes: politely, then not."""
        for process in self.told:
            assert process.stdin is not None
            process.stdin.close()
        for process in [*self.told, *self.silent]:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def measure(kind: str, tasks: int, seconds: float, rounds: int) -> dict[str, float]:
    """Returns medians for one number of tasks."""
    clusters = {way: Cluster(way, kind, tasks) for way in ("in-graph", "between-graph")}
    seen: dict[str, list[dict[str, float]]] = {way: [] for way in clusters}
    try:
        for cluster in clusters.values():
            cluster.work(1.0)  # warm
        for _ in range(rounds):
            for way, cluster in clusters.items():
                seen[way].append(cluster.work(seconds))
    finally:
        for cluster in clusters.values():
            cluster.end()
    rate = {way: statistics.median(s["rate"] for s in samples) for way, samples in seen.items()}
    return {
        "model": kind,  # type: ignore[dict-item]
        "tasks": tasks,
        "batch_bytes": batch_bytes(kind),
        "in_graph_per_s": round(rate["in-graph"], 1),
        "between_graph_per_s": round(rate["between-graph"], 1),
        "ratio": round(
            statistics.median(
                a["rate"] / b["rate"] for a, b in zip(seen["in-graph"], seen["between-graph"], strict=True)
            ),
            2,
        ),
        "client_cpu_ms_per_batch": round(statistics.median(s["cpu_ms"] for s in seen["in-graph"]), 2),
        "client_limit_per_s": round(1000 / statistics.median(s["cpu_ms"] for s in seen["in-graph"])),
    }


def draw(rows: list[dict[str, float]], path: Path) -> None:
    """Draws in-graph as a share of between-graph, a line per model."""
    width, height, left, bottom = 640, 300, 60, 250
    colours = ("#1f6feb", "#d1600a", "#1a7f37")
    counts = sorted({int(r["tasks"]) for r in rows})
    top = max(1.2, max(r["ratio"] for r in rows) * 1.1)

    def point(row: dict[str, float]) -> tuple[float, float]:
        x = left + 60 + counts.index(int(row["tasks"])) * (width - left - 160) / max(1, len(counts) - 1)
        return x, bottom - row["ratio"] / top * 200

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{left}" y="24" font-size="15" fill="#1f2328">In-graph, as a share of between-graph on the same machine</text>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = bottom - share / top * 200
        parts.append(f'<line x1="{left}" y1="{y:.0f}" x2="{width - 40}" y2="{y:.0f}" stroke="#d0d7de"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.0f}" text-anchor="end" fill="#59636e">{share:g}</text>')
    for n, kind in enumerate(dict.fromkeys(str(r["model"]) for r in rows)):
        points = [point(r) for r in rows if r["model"] == kind]
        line = " ".join(f"{x:.0f},{y:.0f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colours[n]}" stroke-width="2.5"/>')
        parts += [f'<circle cx="{x:.0f}" cy="{y:.0f}" r="4" fill="{colours[n]}"/>' for x, y in points]
        kilobytes = next(int(r["batch_bytes"]) for r in rows if r["model"] == kind) // 1000
        label = f"{kind}, {kilobytes} kB"
        parts.append(f'<text x="{left + 20 + n * 280}" y="{height - 8}" fill="{colours[n]}">{label}</text>')
    for row in rows[: len(counts)]:
        x, _ = point(row)
        parts.append(
            f'<text x="{x:.0f}" y="{bottom + 20}" text-anchor="middle" fill="#1f2328">{row["tasks"]} tasks</text>'
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def main() -> None:
    """Measures, prints a table and JSON, and draws."""
    if sys.argv[1:2] == ["--play"]:
        play(sys.argv[2], sys.argv[3], sys.argv[4:])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tasks", default="1,2,4")
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for kind in MODELS:
        for tasks in map(int, args.tasks.split(",")):
            row = measure(kind, tasks, args.seconds, args.rounds)
            rows.append(row)
            print(
                f"{kind:26} {tasks} tasks  {row['batch_bytes'] / 1000:7.0f} kB  in-graph {row['in_graph_per_s']:7.1f}/s  "
                f"between {row['between_graph_per_s']:7.1f}/s  ratio {row['ratio']:.2f}  "
                f"client {row['client_cpu_ms_per_batch']:.2f} ms CPU per batch",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    if args.svg:
        draw(rows, args.svg)


if __name__ == "__main__":
    main()
