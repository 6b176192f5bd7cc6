"""A shard's answers to workers, with one optimizer's variables: the last one of each is kept, to be given again when asked.

Owned by the shard, which follows the log and says when a request is answered. What always holds: an answer that is given again
is of the same version, or, where its worker counted as dead meanwhile, of the current one; while a large one is on its way it
is not sent again.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchquorum.fastpath.page import FastPage
from torchquorum.server.reply import Delivery, Reply
from torchquorum.server.shard_variables import ShardVariables
from torchquorum.server.snapshot import state_frame
from torchquorum.server.worker_table import JoinedWorker, TrackWorkers
from torchquorum.wire.codec import Frame
from torchquorum.wire.frames import tensor_frame
from torchquorum.wire.messages import Held, Outcome, Release, StateRef, Variables


@dataclass(slots=True)
class LastAnswer:
    """The last answer to a worker."""

    incarnation: int
    request: int
    version: int
    stop: bool
    outcome: Outcome | None
    state: tuple[StateRef, Frame] | None = None
    delivery: Delivery | None = None


class Answers:
    """The answers of one shard.

    Args:
        index: Which shard; shard 0 says more.
        generation: Which creation of the variables this is.
        variables: What is answered with.
        workers: Those who have joined.
        page: The fast path's page, where the plan allows it.
    """

    def __init__(
        self, index: int, generation: int, variables: ShardVariables, workers: TrackWorkers, page: FastPage | None
    ) -> None:
        self._index, self._generation = index, generation
        self._variables, self._workers, self._page = variables, workers, page
        self._last: dict[int, LastAnswer] = {}

    def release(self, entry: Release, outcome: Outcome | None, version: int, *, silent: bool) -> list[Reply]:
        """The log says that a request is answered now; `silent` if its worker has seen that on the fast path."""
        variables, worker = self._variables, entry.worker
        answer = LastAnswer(entry.incarnation, entry.request, version, entry.stop, outcome)
        self._last[worker] = answer
        if entry.state:
            answer.state = state_frame(variables.update)
        if silent:
            variables.versions.forget(worker)
            return []
        if entry.averaged and variables.averages is not None:
            variables.versions.lease_copy(worker, variables.averages.shadows)
        else:
            variables.versions.lease(worker)
        return self.again(worker, entry.incarnation, entry.request)

    def renumber(self, worker: int, incarnation: int, request: int, outcome: Outcome | None = None) -> list[Reply]:
        """Answers another request of a worker with the version that it was given last."""
        before = self._last[worker]
        self._last[worker] = LastAnswer(incarnation, request, before.version, before.stop, outcome)
        return self.again(worker, incarnation, request)

    def again(self, worker: int, incarnation: int, request: int) -> list[Reply]:
        """Returns the answer to a request again, if it has been decided and the worker is known here.

        While it is on its way it is not sent again: over a slow link it would never come.
        """
        answer, joined, versions = self._last.get(worker), self._workers.get(worker), self._variables.versions
        if answer is None or joined is None or (answer.incarnation, answer.request) != (incarnation, request):
            return []
        if joined.incarnation != incarnation:
            return []
        if answer.delivery is not None and answer.delivery.is_under_way_to(joined.peer):
            return [Reply(joined.peer, Held(request, "the rest of the variables", 0, 1, []))]
        slot = versions.leased(worker)
        if slot is None or not versions.slots.holds(slot, answer.version):
            # The worker counted as dead and its version is gone: it gets the current one.
            slot, answer.version = versions.lease(worker), versions.version
        return [self._variables_in(slot, answer, joined)]

    def _variables_in(self, slot: int, answer: LastAnswer, joined: JoinedWorker) -> Reply:
        """Returns the reply with what a slot holds: by its number where memory is shared, as bytes elsewhere."""
        variables, versions, page = self._variables, self._variables.versions, self._page
        joining, shared = answer.request == joined.join_request, bool(joined.memory)
        frames: list[Frame] = []
        uncopied = None
        if not shared:
            frame = tensor_frame(versions.slots.bytes[slot])
            uncopied = slot if versions.may_send_uncopied(slot) else None
            frames.append(frame if uncopied is not None else bytes(frame))
        if joining:
            frames.append(variables.constants)
        track = self._workers.track
        fastpath = page if track in joined.fastpath and joining else None
        message = Variables(
            request=answer.request,
            version=answer.version,
            stop=answer.stop,
            slot=slot if shared else -1,
            ring=versions.slots.ref if shared and joining else None,
            fastpath=fastpath.ref if fastpath is not None else None,
            states=variables.update.state.refs if fastpath is not None else [],
            outcome=answer.outcome,
            lr=variables.update.rates.now,
            generation=self._generation,
            used=variables.update.rates.used,
            track=track,
        )
        if answer.state is not None:
            message.optimizer = answer.state[0]
            frames.append(answer.state[1])
        if self._index == 0 and (joining or joined.revisions[track] != variables.revision):
            message.settings, message.revision = variables.update.settings, variables.revision
        answer.delivery = Delivery(joined.peer) if not shared else None
        return Reply(joined.peer, message, frames, uncopied, answer.delivery, track)
