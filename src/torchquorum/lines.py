"""Prints whole lines, and makes one of an error.

Used by everything that prints a line. What always holds: a line and its newline are one write, so lines of several threads, or
of tasks that share a terminal, do not mix. `print` writes the newline separately where the output is unbuffered, as in tasks of
the launcher and in most containers.
"""

import sys
from collections.abc import Sequence
from typing import TextIO

MOST_OF_AN_ERROR = 300


def write_line(line: str, file: TextIO | None = None) -> None:
    """Writes a line at once.

    Args:
        line: The text, without the final newline.
        file: Where to write; default: the current standard output.
    """
    stream = sys.stdout if file is None else file
    if stream is not None:  # None in a process without a console; print() ignores that too
        try:
            stream.write(f"{line}\n")
        except UnicodeEncodeError:  # an odd file name, or a terminal that knows few characters
            stream.write(f"{line}\n".encode(stream.encoding, "backslashreplace").decode(stream.encoding))
        stream.flush()


def first_of(names: Sequence[str], most: int = 3) -> str:
    """Returns the first of some names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def counted(count: int, what: str) -> str:
    """Returns a number of things, in the right form."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def text_of(error: BaseException) -> str:
    """Returns what an error of a user's program says, so that it can be sent and printed, whatever the error is.

    Characters that cannot be, such as those of a file's name that is no UTF-8, are written with a backslash.
    """
    try:
        text = str(error)
    except Exception as failure:
        text = f"{type(failure).__name__} where its text is made"
    return "".join(c if c.isprintable() or c.isspace() else c.encode("unicode_escape").decode() for c in text)


def line_of(error: BaseException) -> str:
    """Returns an error in one line, for the others of the run."""
    lines = text_of(error).split("\n")
    inner = next((i for i, line in enumerate(lines) if line.startswith("Original Traceback")), None)
    if inner is not None:  # of a child of torch's DataLoader: where it was raised is in the task's own output
        lines = [*lines[:inner], *[line for line in lines if line.strip()][-1:]]
    text = " ".join(" ".join(lines).split())
    return f"{type(error).__name__}: {text}"[:MOST_OF_AN_ERROR] if text else type(error).__name__
