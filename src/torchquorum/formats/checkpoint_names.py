"""Names of unfinished checkpoints and their files; they contain the writer's host and process.

Used by `checkpoint_write` and `checkpoint_remote`. What always holds: two writers never use the same name; for a writer on this
host it is known whether it still runs.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from pathlib import Path
from typing import TypeVar, cast

import msgspec

from torchquorum.clock import SYSTEM, Clock
from torchquorum.formats.checkpoint_manifest import PREFIX, STEP, Manifest, pack, seal
from torchquorum.formats.scratch import is_alive
from torchquorum.formats.storage import Location

_L = TypeVar("_L", bound=Location)

STALE_S = 3600.0
_WRITER = r"([0-9a-f]{12})-([1-9][0-9]{0,9})-([0-9a-f]{8})"
HIDDEN = re.compile(rf"\.{re.escape(PREFIX)}{STEP}\.(partial|removed)-({_WRITER})")
OWNED = re.compile(rf".*\.({_WRITER})\.safetensors")


def hidden(folder: _L, step: int, what: str) -> _L:
    """Returns a new hidden name of this process for a checkpoint that is being written or removed."""
    name = f".{PREFIX}{step}.{what}-{this_host()}-{os.getpid()}-{secrets.token_hex(4)}"
    return cast(_L, folder / name)


def free_name(path: _L) -> _L:
    """Returns a name beside a damaged checkpoint under which it can be kept: model.ckpt-5.damaged, or with a number."""
    aside, number = path.with_name(f"{path.name}.damaged"), 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.damaged-{number}")
    return cast(_L, aside)


def owned(name: str, writer: str) -> str:
    """Returns the name of a file with its writer in it: part-00000-of-00001.WRITER.safetensors."""
    return f"{name.removesuffix('.safetensors')}.{writer}.safetensors"


def with_owner(manifest: Manifest, owner: str) -> Manifest:
    """Returns a manifest whose files have their writer in their names."""
    renamed = {name: owned(name, owner) for name in manifest.files}
    return msgspec.structs.replace(
        manifest,
        files={renamed[name]: info for name, info in manifest.files.items()},
        pieces=[msgspec.structs.replace(piece, file=renamed[piece.file]) for piece in manifest.pieces],
        buffers=[msgspec.structs.replace(piece, file=renamed[piece.file]) for piece in manifest.buffers],
        tables=[
            msgspec.structs.replace(table, files=[renamed[name] for name in table.files]) for table in manifest.tables
        ],
    )


def encode_manifest(manifest: Manifest) -> bytes:
    """Returns a manifest as it is stored."""
    packed = msgspec.structs.replace(
        manifest,
        plan=pack(manifest.plan),
        scalars=pack(manifest.scalars),
        workers=pack(manifest.workers),
        checksum="",
    )
    return seal(msgspec.json.format(msgspec.json.encode(packed), indent=1) + b"\n")


def this_host() -> str:
    """Returns an id of the scope of this process's pid: this boot of this machine, and its pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return hashlib.sha256(f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}".encode()).hexdigest()[:12]


def is_abandoned(host: str, process: int, changed_at: float, clock: Clock = SYSTEM) -> bool:
    """Whether a writer is known to be dead, or has changed nothing for an hour."""
    return (host == this_host() and not is_alive(process)) or clock.wall() - changed_at > STALE_S
