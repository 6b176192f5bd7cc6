"""What a reader is given: an address of a ps task, or a run's folder."""

from __future__ import annotations

import os
import re
from pathlib import Path

from torchquorum.cluster.spec import parse_address

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.%]+\]|[^/\\\s\[\]:]+):[0-9]{1,5}")


def is_address(source: str | os.PathLike[str]) -> bool:
    """Whether this is host:port, or a list of those; a folder of that name goes first, as does a path."""
    text = os.fspath(source)
    return isinstance(source, str) and all(map(_ADDRESS.fullmatch, text.split(","))) and not Path(text).is_dir()


def one_address(source: str) -> str:
    """Returns the first address of a list, as in --ps_hosts; the others are asked for."""
    return str(parse_address(source.split(",")[0], label="tq.Reader(address)"))
