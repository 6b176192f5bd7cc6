"""Lines for people: each is written whole.

Everything that prints a line uses it. What always holds: a line and its end are one write, so that lines of threads, or of
tasks that share a terminal, come one after the other. `print` writes the end by itself where the output is not buffered,
as it is not in tasks of the launcher and in most containers.
"""

import sys
from typing import TextIO


def write_line(line: str, file: TextIO | None = None) -> None:
    """Writes a line at once.

    Args:
        line: Without its end; it may hold others.
        file: Standard output as it is now, unless told otherwise.
    """
    stream = sys.stdout if file is None else file
    if stream is not None:  # a process without a console has none, and print() minds as little
        stream.write(f"{line}\n")
        stream.flush()
