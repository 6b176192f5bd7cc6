"""A worker's part in a run, once it has joined: it takes versions, of one optimizer's parameters or of all at one place of the log.

Owned by the worker's thread, through its link, and made anew for every join. What belongs to one optimizer is in
`torchquorum.worker.track_member`. What always holds: one request is open at a time; after `take` the parameters that it was about hold
whole versions, and after `pull` all are of one place of the log.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torchquorum.wire.messages as m
from torchquorum.wire.codec import Frame
from torchquorum.wire.settings import Settings
from torchquorum.worker.flat import FlatParameters
from torchquorum.worker.optimizer_state import OptimizerState
from torchquorum.worker.own_writes import OwnWrites
from torchquorum.worker.positions import Positions
from torchquorum.worker.requests import Requests
from torchquorum.worker.residuals import Residuals
from torchquorum.worker.run_view import RunView
from torchquorum.worker.step import Step
from torchquorum.worker.track_member import LaterLoss, OwnTrack, TrackMember


class RunMember:
    """A worker's part in a run.

    Args:
        plan: The run's plan.
        flats: Of each optimizer, its parameters.
        shared: Of each ps task, whether memory is shared with it.
        requests: How the ps tasks are asked.
        view: Where this worker stands; kept up to date here.
        positions: Notes where it stood at each version.
        residuals: Of each optimizer, what this worker has computed and not yet given, where something can be kept.

    Attributes:
        tracks: Its part in each optimizer.
        writes: What the program has written to its parameters.
        on_stop: Is called when an answer says that the run is over.

    Raises:
        SegmentError: No shared memory can be had.
    """

    def __init__(
        self,
        plan: m.Plan,
        flats: Sequence[FlatParameters],
        shared: Sequence[bool],
        *,
        requests: Requests,
        view: RunView,
        positions: Positions,
        residuals: Sequence[Residuals | None] | None = None,
    ) -> None:
        self.plan = plan
        self._requests, self._channels = requests, requests.channels
        self._view, self._positions = view, positions
        self.on_stop: Callable[[], None] = lambda: None
        end = requests.channels.end
        self._who, self._round_s = (end.index, end.incarnation), end.patience.round_s
        view.have_tracks(len(flats), plan.in_step)
        self.tracks: list[TrackMember] = []
        try:
            for k, (of, flat) in enumerate(zip(plan.tracks(), flats, strict=True)):
                own = OwnTrack(k, of, flat, residuals[k] if residuals is not None else None)
                self.tracks.append(
                    TrackMember(own, shared, member=self, requests=requests, view=view, positions=positions)
                )
        except BaseException:
            self.close()
            raise
        self._all = list(range(len(self.tracks)))
        self.writes = OwnWrites(self.tracks, requests, view, self)

    def join(self, life: bytes = b"", lost: int = -1) -> m.Variables:
        """Joins at all ps tasks and takes the current versions; returns shard 0's answer. `life` and `lost` are for a record."""
        number = self._channels.next_number()
        messages: list[tuple[m.Message, Sequence[Frame]]] = []
        for k in range(len(self._channels.end.ps)):
            first, *more = [track.memory(k) for track in self.tracks]
            plan, mine = (self.plan, life) if k == 0 else (None, b"")
            join = m.Join(*self._who, number, first.gradients, plan, first.fastpath, mine, lost, more)
            join.rows = [track.row_memory(k) for track in self.tracks] if self.plan.every_table else []
            messages.append((join, []))
        self._requests.begin(number, messages, self._all)
        answer = self.take(self._channels.end.patience.start_s)
        for track in self.tracks:
            track.joined()
        return answer

    @property
    def pipeline(self) -> bool:
        """Whether a gradient may be on its way while the next is computed."""
        return any(track.plan.rule.pipeline for track in self.tracks)

    @property
    def flat(self) -> FlatParameters:
        """Returns the parameters of the first optimizer."""
        return self.tracks[0].flat

    def close(self) -> None:
        """Gives the memory up."""
        for track in self.tracks:
            track.close()

    def push(
        self,
        loss: float | LaterLoss | None,
        settings: Settings | None = None,
        *,
        allow_nonfinite: bool = False,
        track: int = 0,
        later: bool = False,
        of: m.Contribution | None = None,
    ) -> Step:
        """Sends the gradients of one optimizer's parameters, see `TrackMember.push`."""
        return self.tracks[track].push(loss, settings, allow_nonfinite=allow_nonfinite, later=later, of=of)

    def receive(self, track: int) -> Step:
        """Takes the answer to what was pushed of an optimizer with `later`."""
        return self.tracks[track].receive()

    # -- variables ----------------------------------------------------------------------------------------------------

    def pull(self, *, averaged: bool = False) -> m.Variables:
        """Takes the current versions, or the moving averages at them; returns shard 0's answer."""
        self.finish_request()
        for track in self.tracks:
            track.watch.before_pull()
        self._send_pull(averaged=averaged)
        return self.take(self._round_s)

    def pull_state(self, track: int = 0) -> OptimizerState:
        """Takes the current versions, and returns an optimizer's state at that place, as all ps tasks have it.

        What the program has written to the parameters stays in them: the next step finds it, as without this.
        """
        self.finish_request()
        written = self.writes.set_aside()
        for each in self.tracks:
            each.watch.before_pull()
        self._send_pull(averaged=False, state=True)
        self.take(self._round_s)
        self.writes.put_back(written)
        states = [each.optimizer_state() for each in self.tracks]
        return states[track]

    def finish_request(self) -> None:
        """Takes the answer to the open request, if there is one: pipelined, a push may be."""
        if self._requests.is_open:
            push, answer = self._requests.open[0][0], self.take(self._round_s)
            if isinstance(push, m.Push):
                self.tracks[push.track].previous = answer

    def _send_pull(self, *, averaged: bool, state: bool = False) -> None:
        number = self._channels.next_number()
        pull = m.Pull(*self._who, number, averaged, state)
        self._requests.begin(number, [(pull, []) for _ in self._channels.end.ps], self._all)

    def take(self, limit_s: float) -> m.Variables:
        """Waits for the answers of every ps task to the open request and loads them. Returns shard 0's, of the first track."""
        requests, view = self._requests, self._view
        first_message = requests.open[0][0]
        averaged = isinstance(first_message, m.Pull) and first_message.averaged
        state = isinstance(first_message, m.Pull) and first_message.state
        # These come with the answer to a join, also where that is of a version that is gone by now.
        restored, kept = None, list[tuple[int, int]]()
        for track in self.tracks:
            track.watch.before_take()
        while True:
            # A request is open: every ps task answers with its part of a version of each track, which is loaded at once.
            answers = requests.answers(limit_s)
            restored, kept = answers[0][0][0].position or restored, answers[0][0][0].kept or kept
            whole = [self._load(list(of_track)) for of_track in zip(*answers, strict=True)]
            requests.settle()
            if all(whole):
                break
            # Frozen for so long that a version was reused: take the current ones.
            self._send_pull(averaged=averaged, state=state)
        # Nothing is open and the parameters hold whole versions.
        first = answers[0][0][0]
        if first.generation != view.generation:
            view.assignments = 0
        view.generation = first.generation
        view.stopped = view.stopped or first.stop
        view.position, view.kept = restored, kept or view.kept
        for message, _ in answers[0]:
            self.tracks[message.track].took(message)
        if first.stop:
            self.on_stop()
        self._positions.note(view.place)
        self._positions.send(view.place if first.stop else first.save)
        return first

    def _load(self, answers: list[tuple[m.Variables, list[Frame]]]) -> bool:
        """Takes one track's answer from every ps task; False if it was overwritten meanwhile, or is not of one version."""
        track = self.tracks[answers[0][0].track]
        if any(answer.optimizer is not None for answer, _ in answers):
            track.state = [(a.optimizer, frames[-1]) for a, frames in answers if a.optimizer is not None]
            answers = [(a, frames[:-1] if a.optimizer is not None else frames) for a, frames in answers]
        loaded = [track.load(k, message, frames) for k, (message, frames) in enumerate(answers)]
        return all(loaded) and len({message.version for message, _ in answers}) == 1
