"""In-graph beside between-graph: batches per second, the client's own cost, and where the client becomes the bottleneck.

    python benchmarks/in_graph.py [--seconds 4] [--rounds 3] [--tasks 1,2,4] [--svg docs/images/in_graph.svg]

For each number of tasks both clusters are up at the same time, and only one of them works at a time, in turns, so that
whatever else the machine does meets both. Rule Async. Rates depend on what else runs and on the cores; CPU time per batch,
of all processes of a cluster and of the client alone, hardly does.
"""

import argparse
import itertools
import json
import os
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
    graph = tq.graph.Graph(model, cross_entropy, example_inputs=pool[0])
    with tq.graph.GraphSession(cluster, graph, optimizer, wait_for_workers=cluster.num_tasks("worker")) as session:
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
        """Works for some seconds; returns batches per second, and CPU milliseconds per batch: all, and those who were told."""
        before = sum(map(cpu_seconds, [*self.told, *self.silent]))
        for process in self.told:
            assert process.stdin is not None
            process.stdin.write(f"{seconds}\n")
            process.stdin.flush()
        done = [self._line(process) for process in self.told]
        used = sum(map(cpu_seconds, [*self.told, *self.silent])) - before
        batches = sum(d["batches"] for d in done)
        return {
            "rate": batches / max(d["seconds"] for d in done),
            "all_ms": 1000 * used / batches,
            "told_ms": 1000 * sum(d["cpu_s"] for d in done) / batches,
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


def cpu_seconds(process: subprocess.Popen[str]) -> float:
    """Returns the CPU time that a process has used, all its threads together."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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

    def middle(way: str, figure: str) -> float:
        return statistics.median(sample[figure] for sample in seen[way])

    client, everybody = middle("in-graph", "told_ms"), middle("in-graph", "all_ms")
    pairs = zip(seen["in-graph"], seen["between-graph"], strict=True)
    return {
        "model": kind,  # type: ignore[dict-item]
        "tasks": tasks,
        "batch_bytes": batch_bytes(kind),
        "in_graph_per_s": round(middle("in-graph", "rate"), 1),
        "between_graph_per_s": round(middle("between-graph", "rate"), 1),
        "ratio": round(statistics.median(a["rate"] / b["rate"] for a, b in pairs), 2),
        "in_graph_cpu_ms": round(everybody, 2),
        "between_graph_cpu_ms": round(middle("between-graph", "all_ms"), 2),
        "client_cpu_ms": round(client, 2),
        "client_feeds_tasks": round((everybody - client) / client, 1),
    }


def draw(rows: list[dict[str, float]], path: Path) -> None:
    """Draws the CPU time of a batch: between-graph, and in-graph with the client's part of it."""
    bar, gap, left, top, scale = 22, 34, 250, 60, 300 / max(r["in_graph_cpu_ms"] for r in rows)
    height = top + len(rows) * (2 * bar + gap) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 680 {height}" font-family="sans-serif" font-size="13">',
        f'<rect width="680" height="{height}" fill="#ffffff"/>',
        '<text x="16" y="26" font-size="15" fill="#1f2328">CPU milliseconds per batch, all processes together</text>',
        '<rect x="16" y="38" width="12" height="12" fill="#8c959f"/><text x="34" y="48">between-graph</text>',
        '<rect x="150" y="38" width="12" height="12" fill="#1f6feb"/><text x="168" y="48">in-graph: tasks and ps</text>',
        '<rect x="330" y="38" width="12" height="12" fill="#d1600a"/><text x="348" y="48">in-graph: the client</text>',
    ]
    for n, row in enumerate(rows):
        y = top + 12 + n * (2 * bar + gap)
        between, everybody, client = (
            row[k] * scale for k in ("between_graph_cpu_ms", "in_graph_cpu_ms", "client_cpu_ms")
        )
        many = "task" if row["tasks"] == 1 else "tasks"
        parts += [
            f'<text x="16" y="{y + 16}" fill="#1f2328">{row["model"]}</text>',
            f'<text x="16" y="{y + 36}" fill="#59636e">{row["batch_bytes"] / 1000:.0f} kB, {row["tasks"]} {many}</text>',
            f'<rect x="{left}" y="{y}" width="{between:.0f}" height="{bar - 2}" fill="#8c959f"/>',
            f'<text x="{left + between + 6:.0f}" y="{y + 15}">{row["between_graph_cpu_ms"]:.1f}</text>',
            f'<rect x="{left}" y="{y + bar}" width="{everybody - client:.0f}" height="{bar - 2}" fill="#1f6feb"/>',
            f'<rect x="{left + everybody - client:.0f}" y="{y + bar}" width="{client:.0f}" height="{bar - 2}" fill="#d1600a"/>',
            f'<text x="{left + everybody + 6:.0f}" y="{y + bar + 15}">{row["in_graph_cpu_ms"]:.1f}</text>',
        ]
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
                f"between {row['between_graph_per_s']:7.1f}/s  ratio {row['ratio']:.2f}  CPU ms per batch: in-graph "
                f"{row['in_graph_cpu_ms']:.2f}, of it client {row['client_cpu_ms']:.2f}, between {row['between_graph_cpu_ms']:.2f}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    if args.svg:
        draw(rows, args.svg)


if __name__ == "__main__":
    main()
