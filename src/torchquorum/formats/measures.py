"""What a run measured, such as the accuracy on a validation set: one JSON line per number, in the run's folder.

Written by the chief (`session.measure`), read by `torchquorum report` and `torchquorum compare`. What always holds: lines are
appended complete; a run that starts again appends to the same file.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from torchquorum.formats.ledger_segments import put_lines
from torchquorum.formats.storage import Location, RemotePath

NAME = "measures.jsonl"


class Measure(msgspec.Struct, frozen=True):
    """One number.

    Attributes:
        name: What was measured, such as accuracy.
        value: The number; None if it was not finite.
        global_step: The version it belongs to.
        at: When, in seconds since the epoch.
    """

    name: str
    value: float | None
    global_step: int
    at: float


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Measure)


def append_measures(folder: Location, measures: list[Measure]) -> None:
    """Appends numbers to the file in a run's folder.

    Raises:
        OSError: It cannot be written.
    """
    lines = b"".join(_encoder.encode(m) + b"\n" for m in measures)
    if isinstance(folder, RemotePath):
        put_lines(folder, NAME, lines)
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / NAME).open("ab") as file:
        file.write(lines)


def read_measures(folder: Path) -> list[Measure]:
    """Returns the numbers in a run's folder, in order; leaves out lines that cannot be read."""
    try:
        lines = (folder / NAME).read_bytes().split(b"\n")
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            found.append(_decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
    return found
