"""Checkpoints that failed: said once a minute, and the last one of a run is tried again for a while.

Owned by the run's checkpoints, which try again when it is time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

RETRY_S = 2.0
SAY_AGAIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Retry:
    """The last checkpoint of a run, which has failed and is tried again."""

    number: int
    folder: str
    keep: int
    why: str
    at: float


class SaveFailures:
    """The failures in a row.

    Args:
        say: Prints a line for people.
        save_s: For how long the last checkpoint is tried again.

    Attributes:
        retry: What is tried again, if something is.
    """

    def __init__(self, say: Callable[[str], None], save_s: float) -> None:
        self._say, self._save_s = say, save_s
        self.retry: Retry | None = None
        self._since: float | None = None
        self._said_at: float | None = None
        self._count = 0

    def succeeded(self) -> None:
        """A checkpoint was made."""
        self._since, self._said_at, self._count = None, None, 0

    def is_tried_again(self, now: float | None, *, last: bool) -> bool:
        """A checkpoint has failed: returns whether it will be tried again; only the last of a run, and only with `now`."""
        if not last:
            return False
        if self._since is None:
            self._since = now
        return now is not None and self._since is not None and now - self._since < self._save_s

    def complain(self, what: str, now: float | None, *, last: bool, again: bool) -> None:
        """Says that a checkpoint failed: once, and then every minute."""
        self._count += 1
        if again or not last:
            if now is not None and self._said_at is not None and now - self._said_at < SAY_AGAIN_S:
                return
            self._said_at = now
        often = f" (for the {self._count}th time)" if self._count > 3 else ""
        then = f"trying again for {self._save_s:.0f} s" if again else "training goes on" if not last else "giving up"
        self._say(f"{what}{often}; {then}")

    def take(self, now: float | None = None) -> Retry | None:
        """Returns, and forgets, what is tried again; with `now`, only if it is time."""
        retry = self.retry
        if retry is None or (now is not None and now < retry.at):
            return None
        self.retry = None
        return retry
