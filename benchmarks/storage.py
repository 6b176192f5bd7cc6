"""What a checkpoint costs on a local disk and on a server that speaks S3 on loopback: written, published, verified, read.

    python benchmarks/storage.py [--megabytes 100] [--repeats 5]

Needs the developers' packages. The server is moto's, in a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from torchquorum.formats.checkpoint import CheckpointReader, Manifest, Stored, verify
from torchquorum.formats.checkpoint_write import begin, part_name, prune, publish, tensor_key, write_part
from torchquorum.formats.storage import Location, locate


def serve(pipe: Any) -> None:
    """Runs the server until its parent closes the pipe."""
    import logging

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    pipe.send(server.get_host_and_port())
    with contextlib.suppress(EOFError):
        pipe.recv()
    server.stop()


def measure(folder: Location, megabytes: int, repeats: int) -> dict[str, float]:
    """Returns seconds for each part of a checkpoint's life, medians."""
    tensor = torch.randn(megabytes * 250_000)
    key, name = tensor_key("variable", "w"), part_name(0, 1)
    piece = Stored(
        kind="variable",
        variable="w",
        file=name,
        key=key,
        start=0,
        stop=tensor.numel(),
        shape=(tensor.numel(),),
        dtype="float32",
    )
    took: dict[str, list[float]] = {"write": [], "publish": [], "verify": [], "read": []}
    for step in range(1, repeats + 1):
        marks = [time.perf_counter()]
        partial = begin(folder, step)
        info = write_part(partial, 0, 1, {key: tensor})
        marks.append(time.perf_counter())
        path = publish(partial, Manifest(step=step, num_ps=1, pieces=[piece], files={name: info}))
        prune(folder, 1)
        marks.append(time.perf_counter())
        assert verify(path) is None
        marks.append(time.perf_counter())
        with CheckpointReader(path) as reader:
            assert torch.equal(reader.read("variable", "w"), tensor)
        marks.append(time.perf_counter())
        for what, first, last in zip(took, marks[:-1], marks[1:], strict=True):
            took[what].append(last - first)
    return {what: statistics.median(times) for what, times in took.items()}


def main() -> None:
    """Measures both and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    here, there = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(there,))
    server.start()
    try:
        host, port = here.recv()
        os.environ |= {  # noqa: TID251
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        import fsspec

        fsspec.filesystem("s3").mkdir("bucket")
        with tempfile.TemporaryDirectory() as folder:
            local = measure(Path(folder), args.megabytes, args.repeats)
        remote = measure(locate("s3://bucket/run"), args.megabytes, args.repeats)
    finally:
        here.send(None)
        server.join(10)
    print(f"{args.megabytes} MB     local disk   S3 on loopback")
    for what in local:
        print(f"{what:10} {local[what]:8.2f} s {remote[what]:12.2f} s")


if __name__ == "__main__":
    main()
