"""How ps task 0 leaves: not before every other ps task has heard of the end and has answered, or is gone.

Made by `serve` on ps task 0, once. What always holds: whoever is gone, as its host says, or has not answered for `FAREWELL_S`, is waited
for no more; the second is told to people. A signal to this task shortens it to `HURRIED_S`.
"""

from __future__ import annotations

from collections.abc import Callable

from torchquorum.cluster import ClusterSpec, TaskId

FAREWELL_S = 30.0
HURRIED_S = 3.0
LOOK_EVERY_S = 1.0
TURN_S = 0.05


class Farewell:
    """The other ps tasks at the end of a job.

    Args:
        cluster: Who exists.
        refuses: Whether nobody listens at an address, as its host says.
        announce: Prints a line for people.
        answer: Answers messages for so many seconds, and returns the time.
        hurried: Whether this task was asked to end.
    """

    def __init__(
        self,
        cluster: ClusterSpec,
        refuses: Callable[[str], bool],
        announce: Callable[[str], None],
        answer: Callable[[float], float],
        hurried: Callable[[], bool],
    ) -> None:
        self._cluster, self._refuses, self._announce, self._answer = cluster, refuses, announce, answer
        self._hurried = hurried
        self._given_up: set[int] = set()

    def wait(self, owing: Callable[[], set[int]]) -> None:
        """Answers messages until none of the others owes an answer any more, or only those do that are gone."""
        began = looked = self._answer(0.0)
        while missing := owing() - self._given_up:
            now = self._answer(TURN_S)
            if now - looked >= LOOK_EVERY_S:
                looked = now
                self._given_up |= {shard for shard in missing if self._refuses(self._address(shard))}
            longest_s = HURRIED_S if self._hurried() else FAREWELL_S
            if now - began > longest_s and (late := missing - self._given_up):
                names = ", ".join(f"{TaskId('ps', shard)} ({self._address(shard)})" for shard in sorted(late))
                self._announce(
                    f"{names}: has not answered for {now - began:.0f} s that the run is over; this task ends without it"
                )
                self._given_up |= late

    def _address(self, shard: int) -> str:
        return self._cluster.address(TaskId("ps", shard))
