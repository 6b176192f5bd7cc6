"""Ctrl-C in the command line, from its first moment on: no traceback. Imports nothing that takes time."""

import os
import signal
from types import FrameType

INTERRUPTED = 130


def was_interrupted(error: BaseException | None) -> bool:
    """Whether an error is Ctrl-C, or came from it: a module that is being imported may make another error of it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def end_at_once() -> None:
    """Until the command begins there is nothing to clean up, and an exception inside an import may be lost or changed."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def _end(_number: int, _frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def raise_interrupts() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt, as in other programs: a command has begun."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
