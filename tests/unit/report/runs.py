"""Runs' folders written by hand, with whatever in them a test wants to see in pictures."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from torchquorum.formats.ledger import Entry, Event
from torchquorum.formats.ledger_write import LedgerWriter
from torchquorum.formats.measures import Measure, append_measures

START = 1_700_000_000.0


def write_sync(
    folder: Path,
    *,
    rounds: int = 40,
    times: tuple[float, ...] = (0.01, 0.03, 0.01),
    begin: float = START,
    version: int = 0,
    ended: bool = True,
    events: bool = True,
) -> float:
    """A sync run in which worker i takes times[i] seconds per batch; returns when it ended."""
    writer = LedgerWriter(folder)
    now = begin
    if events:
        config = {"rule": "Sync()", "num_shards": 1, "num_workers": len(times), "last_step": version + rounds}
        writer.write(Event("began", begin, version, values=config))
        for worker in range(len(times)):
            writer.write(Event("joined", begin, version, worker))
    steps = [0] * len(times)
    for step in range(version, version + rounds):
        for took, worker in sorted((t, w) for w, t in enumerate(times)):
            steps[worker] += 1
            took_s = took if events else None
            writer.write(
                Entry(worker, "0a", steps[worker], step, step, 0, True, "fresh", now + took, 2.0 / (1 + step), took_s)
            )
        now += max(times)
    if events:
        writer.write(Event("saved", now, version + rounds, text=f"model.ckpt-{version + rounds}"))
        writer.write(Event("left", now, version + rounds, 0, values={"accuracy": 0.95, "loss": 0.1}))
        if ended:
            writer.write(Event("ended", now, version + rounds))
    writer.close()
    measures = [
        Measure("accuracy", min(0.99, 0.1 + 0.02 * i), version + i, begin + i * max(times)) for i in range(rounds)
    ]
    append_measures(folder, measures)
    return now


def write_async(folder: Path, *, gradients: int = 90, times: tuple[float, ...] = (0.01, 0.03, 0.01)) -> None:
    """An async run: every gradient is an update, computed at the version its worker saw last."""
    writer = LedgerWriter(folder)
    writer.write(Event("began", START, 0, values={"rule": "Async()", "num_shards": 1, "num_workers": len(times)}))
    ready = [(t, w) for w, t in enumerate(times)]
    saw, steps = [0] * len(times), [0] * len(times)
    at = 0.0
    for version in range(gradients):
        at, worker = min(ready)
        ready.remove((at, worker))
        ready.append((at + times[worker], worker))
        steps[worker] += 1
        stale = version - saw[worker]
        reason = "fresh" if stale == 0 else "within bound"
        writer.write(
            Entry(
                worker, "0a", steps[worker], saw[worker], version, stale, True, reason, START + at, 1.0, times[worker]
            )
        )
        saw[worker] = version + 1
    writer.write(Event("left", START + at, gradients, 0, values={"accuracy": 0.90}))
    writer.write(Event("ended", START + at, gradients))
    writer.close()


def write_gan(folder: Path, *, iterations: int = 30, critics: int = 3) -> None:
    """A run of two optimizers: in each iteration the discriminator makes several updates, then the generator one; two workers."""
    writer = LedgerWriter(folder)
    more = {"name": "D", "rule": "Async()", "optimizer": {"name": "SGD", "groups": [{"lr": 0.1}]}, "variables": 4}
    config = {
        "rule": "Sync()",
        "num_shards": 1,
        "num_workers": 2,
        "optimizer": {"name": "Adam", "groups": [{"lr": 0.01}]},
    }
    config |= {"variables": 2, "values": 9, "more": [{**more, "values": 7}], "versions": {"G": 0, "D": 0}}
    writer.write(Event("began", START, 0, values=config))
    at, steps, discriminated = START, 0, 0
    for generated in range(iterations):
        for step in range(critics + 1):
            for worker in (0, 1):
                at += 0.01
                if step < critics:
                    entry = Entry(
                        worker, "0a", steps + 1, discriminated, discriminated, 0, True, "fresh", at, 1.5, 0.01
                    )
                    entry = msgspec.structs.replace(entry, optimizer="D", track=1, norm=2.0)
                    discriminated += 1
                else:
                    entry = Entry(worker, "0a", steps + 1, generated, generated, 0, True, "fresh", at, 0.5, 0.01)
                    entry = msgspec.structs.replace(entry, optimizer="G", norm=1.0)
                writer.write(entry)
            steps += 1
    writer.write(Event("ended", at, iterations))
    writer.close()
    (folder / "report.json").write_text(json.dumps({"optimizers": {"D": {"version": discriminated}}}))
