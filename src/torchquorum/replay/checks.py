"""What is looked at before a replay begins: versions, processor, the program's files; and the run's checkpoints, to compare with.

What always holds: whatever would make other bits is named before the first process is started.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import cast

import torch

from torchquorum.formats.checkpoint import CheckpointReader, list_checkpoints, load_manifest
from torchquorum.formats.checkpoint_manifest import Kind, title
from torchquorum.formats.record_file import RunRecordError
from torchquorum.replay.kept_state import KeptState, whole_tables
from torchquorum.replay.script import Script
from torchquorum.session.recording import cpu_model, versions

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_machine(script: Script) -> None:
    """Checks that this machine computes as those did that made the run.

    Raises:
        RunRecordError: It has other versions, or another processor.
    """
    here, cpu = versions(), cpu_model()
    for life in script.lives.values():
        body = life.body
        unequal = [
            f"{name} {body.versions.get(name)}, here {v}" for name, v in here.items() if body.versions.get(name) != v
        ]
        if unequal:
            raise RunRecordError(
                f"{life} ran with {'; '.join(unequal)}: other versions may make other bits. Install those, then replay"
            )
        if body.cpu != cpu:
            raise RunRecordError(
                f"{life} ran on {body.cpu}, and this is {cpu}: another processor may make other bits. Replay on one of that model"
            )


def changed_files(script: Script) -> list[str]:
    """Returns the files of the program that are not as they were."""
    wanted = {path: digest for life in script.lives.values() for path, digest in life.body.files.items()}
    found = []
    for path, digest in sorted(wanted.items()):
        now = ""
        with suppress(OSError):
            now = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        if now != digest:
            found.append(path if now else f"{path} (which is gone)")
    return found


def comparable(folder: Path) -> dict[tuple[int, int], Path]:
    """Returns the run's checkpoints that are there, by generation and place in its log."""
    found = {}
    for info in list_checkpoints(folder):
        if info.problem is None:
            path = Path(str(info.path))
            manifest = load_manifest(path)
            found[manifest.generation, manifest.place] = path
    return found


def compare(kept: KeptState, path: Path) -> list[str]:
    """Returns what of a checkpoint the replay has otherwise: names of tensors; empty if every bit is the same."""
    unequal = []
    ours = kept.whole()
    with CheckpointReader(path) as reader:
        names = {(p.kind, p.variable, p.state) for p in reader.manifest.pieces}
        for kind, variable, state in sorted(names | set(ours)):
            if (kind, variable, state) not in ours or (kind, variable, state) not in names:
                unequal.append(f"{title(kind, variable, state)} (only in one of them)")
            elif not _same_bits(
                ours[kind, variable, state].reshape(-1), reader.read(cast(Kind, kind), variable, state)
            ):
                unequal.append(title(kind, variable, state))
        here = whole_tables(kept, kept.manifest, kept.plan)
        there = whole_tables(reader, reader.manifest, kept.plan)
    for table, columns in here.items():
        unequal += [
            f"{name} of table {table}"
            for name, values in columns.items()
            if not _same_bits(values, there[table].get(name, torch.empty(0)))
        ]
    return unequal


def _same_bits(here: torch.Tensor, there: torch.Tensor) -> bool:
    bits = _BITS[here.element_size()] if not here.is_complex() else torch.uint8
    return here.dtype == there.dtype and torch.equal(here.contiguous().view(bits), there.contiguous().view(bits))
