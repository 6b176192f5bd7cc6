"""The figures of followed runs for Prometheus, in its text format and by its conventions for names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torchquorum.dashboard.followed import RunOnPage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Name, type, help, and where a value stands in the status of ps task 0.
_OF_RUN = (
    ("global_step", "gauge", "Updates that were made.", "global_step"),
    ("batches_total", "counter", "Gradients that arrived.", "batches"),
    ("refused_total", "counter", "Gradients that were refused.", "refused"),
    ("loss", "gauge", "Loss of the newest gradient.", "loss"),
    ("accuracy", "gauge", "Accuracy that the chief recorded at the end.", "accuracy"),
    ("staleness_mean", "gauge", "Mean staleness of used gradients, in versions.", "staleness_mean"),
    ("saved_step", "gauge", "Global step of the newest checkpoint.", "saved_step"),
    ("workers", "gauge", "Workers that the cluster has places for.", "workers"),
    ("ps_memory_bytes", "gauge", "Resident memory of ps task 0.", "memory_bytes"),
    ("moved_bytes_total", "counter", "Bytes between ps task 0 and workers.", "moved_bytes"),
)
_OF_WORKER = (
    ("worker_batches_total", "counter", "Gradients of a worker that arrived.", "batches"),
    ("worker_refused_total", "counter", "Gradients of a worker that were refused.", "refused"),
    ("worker_waited_seconds_total", "counter", "Time that a worker waited.", "waited_s"),
    ("worker_staleness_mean", "gauge", "Mean staleness of a worker's used gradients, in versions.", "staleness_mean"),
)


def exposition(runs: Sequence[RunOnPage]) -> str:
    """Returns what Prometheus reads."""
    lines: list[str] = []
    for name, kind, text, samples in _families(runs):
        lines += [f"# HELP torchquorum_{name} {text}", f"# TYPE torchquorum_{name} {kind}"]
        lines += [f"torchquorum_{name}{{{_labels(labels)}}} {float(value):.17g}" for labels, value in samples]
    return "\n".join([*lines, ""])


Sample = tuple[dict[str, str], Any]


def _families(runs: Sequence[RunOnPage]) -> Iterator[tuple[str, str, str, list[Sample]]]:
    up = [({"run": run.name}, run.state == "running") for run in runs]
    yield "up", "gauge", "Whether ps task 0 answers and the run goes on.", up
    known = [run for run in runs if "per_worker" in run.status]
    for name, kind, text, key in _OF_RUN:
        samples = [({"run": run.name}, run.status[key]) for run in known if run.status.get(key) is not None]
        if samples:
            yield name, kind, text, samples
    alive = [({"run": run.name}, len(run.status["live"])) for run in known]
    if alive:
        yield "workers_alive", "gauge", "Workers that are alive.", alive
    for name, kind, text, key in _OF_WORKER:
        samples = [
            ({"run": run.name, "worker": index}, worker[key])
            for run in known
            for index, worker in run.status["per_worker"].items()
        ]
        if samples:
            yield name, kind, text, samples


def _labels(labels: dict[str, str]) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
