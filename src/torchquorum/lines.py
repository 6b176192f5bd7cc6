"""Prints whole lines.

Used by everything that prints a line. What always holds: a line and its newline are one write, so lines of several threads, or
of tasks that share a terminal, do not mix. `print` writes the newline separately where the output is unbuffered, as in tasks of
the launcher and in most containers.
"""

import sys
from typing import TextIO


def write_line(line: str, file: TextIO | None = None) -> None:
    """Writes a line at once.

    Args:
        line: The text, without the final newline.
        file: Where to write; default: the current standard output.
    """
    stream = sys.stdout if file is None else file
    if stream is not None:  # None in a process without a console; print() ignores that too
        stream.write(f"{line}\n")
        stream.flush()
