"""Checkpoints for tests to save, damage and lose, in this process or in one that is killed."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, TypeVar

import torch

from torchquorum.formats.checkpoint import (
    Manifest,
    Stored,
    newest_good,
)
from torchquorum.formats.checkpoint_write import (
    begin,
    part_name,
    publish,
    tensor_key,
    write_part,
)
from torchquorum.formats.storage import Location

Folder = TypeVar("Folder", bound=Location)
Tensors = dict[tuple[Any, str, str], torch.Tensor]


def example(seed: int = 0, scale: int = 1) -> Tensors:
    """Variables of every dtype, an optimizer's state and averages."""
    generator = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for name in ("float64", "float32", "bfloat16", "float16"):
        value = torch.randn(7, 11 * scale, generator=generator, dtype=torch.float64).to(getattr(torch, name))
        tensors["variable", f"layer.{name}", ""] = value
        tensors["optimizer", f"layer.{name}", "exp_avg"] = value * 2
        tensors["optimizer", f"layer.{name}", "step"] = torch.tensor(3.0 + seed)
        tensors["average", f"layer.{name}", ""] = value + 1
    tensors["variable", "count", ""] = torch.tensor(2**53 + 1 + seed)
    tensors["variable", "empty", ""] = torch.empty(0, 3)
    return tensors


def dtype_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def cut(tensors: Tensors, num_ps: int) -> list[list[tuple[Stored, torch.Tensor]]]:
    """Cuts every tensor into a slice per ps, as far as it goes."""
    parts: list[list[tuple[Stored, torch.Tensor]]] = [[] for _ in range(num_ps)]
    for (kind, variable, state), tensor in tensors.items():
        flat, cuts = tensor.reshape(-1), [tensor.numel() * k // num_ps for k in range(num_ps + 1)]
        ranges = [(k, cuts[k], cuts[k + 1]) for k in range(num_ps) if cuts[k] < cuts[k + 1]] or [(0, 0, 0)]
        for k, start, stop in ranges:
            stored = Stored(
                kind=kind,
                variable=variable,
                state=state,
                file=part_name(k, num_ps),
                key=tensor_key(kind, variable, state, start),
                start=start,
                stop=stop,
                shape=tuple(tensor.shape),
                dtype=dtype_of(tensor),
            )
            parts[k].append((stored, flat[start:stop] if tensor.dim() else tensor))
    return parts


def save(folder: Folder, step: int, tensors: Tensors | None = None, num_ps: int = 3, **more: Any) -> Folder:
    partial = begin(folder, step)
    parts = cut(example(step) if tensors is None else tensors, num_ps)
    files = {
        part_name(k, num_ps): write_part(partial, k, num_ps, {stored.key: value for stored, value in part})
        for k, part in enumerate(parts)
    }
    pieces = [stored for part in parts for stored, _ in part]
    return publish(partial, Manifest(step=step, num_ps=num_ps, pieces=pieces, files=files, **more))


def found_step(folder: Path) -> int | None:
    found, _ = newest_good(folder)
    return found[1].step if found else None


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


PROGRAM = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = {paths!r}
import torch
from tests.unit.formats.checkpoints import example, save
"""


def child(body: str, *arguments: object) -> list[str]:
    head = PROGRAM.format(paths=sys.path)
    return [sys.executable, "-c", head + textwrap.dedent(body), *map(str, arguments)]


def run_child(body: str, *arguments: object, **options: Any) -> str:
    done = subprocess.run(child(body, *arguments), capture_output=True, text=True, timeout=100, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def left_by_the_dead(living: Path) -> Path:
    """Makes the scratch folder that a killed process would have left beside a living one's, with a file in it."""
    dead = subprocess.Popen(["true"])
    dead.wait(60)
    left = living.with_name(living.name.replace(f"-{os.getpid()}-", f"-{dead.pid}-"))
    left.mkdir()
    (left / "part").touch()
    return left
