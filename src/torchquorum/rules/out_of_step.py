"""Which workers are out of step: at another place in their program than the others, so that they may wait in another track's round.

Owned by the quorum; of use only with several tracks. A worker that joins a run under way, comes back, was refused or was asked for
more than its one gradient may be out of step, and is in step again when, in every track that makes workers wait, a round of all live
workers has closed with it. What always holds: whoever is out of step may be let go; a number of times without an update in between, and
no more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from torchquorum.rules.track import Track

MOST_LET_GO = 256


class Walker(Protocol):
    """A worker, as far as this goes.

    Attributes:
        out_of_step: Whether it may be at another place than the others.
        seen_in: The tracks in which a round of all live workers has closed with it since then.
    """

    out_of_step: bool
    seen_in: set[int]


class OutOfStep:
    """Says who is out of step.

    Attributes:
        begun: Gradients were given: who joins now may be out of step.
    """

    def __init__(self, tracks: Sequence[Track], *, begun: bool) -> None:
        self.begun = begun
        self._tracks, self._several = tracks, len(tracks) > 1
        self._binding = {t.index for t in tracks if t.rule.once_per_round or t.rule.max_lead is not None}
        self._let_go = 0  # since the last update

    def joined(self, worker: Walker) -> None:
        """A new process has joined."""
        if self.begun:
            self.lost(worker)

    def lost(self, worker: Walker) -> None:
        """A worker is out of step from now on."""
        if self._several:
            worker.out_of_step = True
            worker.seen_in.clear()

    def applied(self, track: Track, givers: Collection[Walker], live: int) -> None:
        """A round of a track has closed with gradients of these workers, of so many that live.

        Only a round of all of them says where they are: in others, as where each gradient is an update of its own, a worker may be ahead.
        """
        self._let_go = 0
        for worker in givers if len(givers) >= live else ():
            if worker.out_of_step:
                worker.seen_in.add(track.index)
                worker.out_of_step = not self._binding <= worker.seen_in

    def who_goes(self, waiting: Mapping[int, Sequence[tuple[int, Walker]]]) -> list[int]:
        """Returns which of the workers that wait, by track, go on, when all do: those out of step, but not in the fullest round.

        None if nobody is out of step, or it has been tried too often: then they are not on the same way at all.
        """
        fullest = max(waiting, key=lambda k: (len(self._tracks[k].round) / self._tracks[k].needed, -k))
        lost = [(k, i, w) for k, those in waiting.items() for i, w in those if w.out_of_step]
        chosen = [entry for entry in lost if entry[0] != fullest] or lost
        self._let_go += 1
        if self._let_go > MOST_LET_GO:
            return []
        for _, _, worker in chosen:
            self.lost(worker)
        return sorted(i for _, i, _ in chosen)
