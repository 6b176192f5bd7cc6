"""The messages that a ps task answers: for each who may send it, which kind of run it needs, and who answers it.

Read by the service, which checks and calls. What always holds: a message is handled only after the checks of its row; one that
has no row is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torchquorum.wire.messages as m
from torchquorum.errors import ConfigError, LostPlaceError
from torchquorum.rules.quorum import Key
from torchquorum.server.following import Following
from torchquorum.server.leading import Leading
from torchquorum.server.leading_requests import NO_BUFFERS
from torchquorum.server.reply import Incoming, Reply
from torchquorum.server.run import Run

NO_VARIABLES = "holds no variables yet: the chief, /job:worker/task:0, has not created them"
NO_DATA = "shares out no data: only ps task 0 does, once the chief has created the variables"
NO_EPOCHS = "counts no epochs: only ps task 0 does, once the chief has created the variables"
NO_SCALE = "only /job:ps/task:0 knows the run, once the chief has created the variables: ask that one"
NO_PARTS = "only shard 0 takes parts of checkpoints, from the other shards"

Handler = Callable[[Any, Incoming[Any]], list[Reply]]


@dataclass(frozen=True, slots=True)
class Route:
    """How a message is handled.

    Attributes:
        handler: Answers it, given the run.
        needs: The kind of run that it needs.
        otherwise: Answers it where there is no such run; without it, the sender is told that there are no variables.
        joined: Only an incarnation of a worker that has joined may send it; others are told that they have not.
        request: It is a joined worker's request, which is dropped if it is older than the worker's newest.
        quiet: A sender that has not joined is not answered.
        counted: Anybody may send it, so the rate limit counts it.
        from_shard_0: Only shard 0 may send it, to the other shards.
        only_shard_0: What another shard answers.
    """

    handler: Handler
    needs: type[Run] = Run
    otherwise: Callable[[Incoming[Any]], list[Reply]] | None = None
    _: KW_ONLY
    joined: bool = False
    request: bool = False
    quiet: bool = False
    counted: bool = False
    from_shard_0: bool = False
    only_shard_0: str = ""


def _refuse(error: type[Exception], text: str) -> Callable[[Incoming[Any]], list[Reply]]:
    def refuse(got: Incoming[Any]) -> list[Reply]:
        raise error(text)

    return refuse


def _ignore(got: Incoming[Any]) -> list[Reply]:
    return []


def _not_decided(got: Incoming[m.FateOf]) -> list[Reply]:
    asked = got.message
    return [got.reply(m.Fate(asked.worker, asked.incarnation, asked.local_step, "never"))]


# -- what is one line of a part of the run ----------------------------------------------------------------------------


def _save(run: Leading, got: Incoming[m.Save]) -> list[Reply]:
    run.leader.conclude(got.wall)
    save = got.message
    return [got.reply(run.checkpoints.save(save.number, save.folder, save.keep, got.now, at_once=save.at_once))]


def _position(run: Leading, got: Incoming[m.Position]) -> list[Reply]:
    position = got.message
    run.checkpoints.positions.note(position.worker, position.version, position.body, final=position.final)
    return []


def _part(run: Leading, got: Incoming[m.Part]) -> list[Reply]:
    if not 0 < got.message.shard < run.plan.num_shards:
        raise ValueError(NO_PARTS)
    run.checkpoints.part(got.message)
    return [got.reply(m.PartTaken(got.message.number))]


def _part_taken(run: Following, got: Incoming[m.PartTaken]) -> list[Reply]:
    run.unconfirmed = None
    return []


def _stop(run: Leading, got: Incoming[m.Stop]) -> list[Reply]:
    return [got.reply(m.Alive(run.leader.quorum.version, True)), *run.stop(got.wall)]


def _mean(run: Run, got: Incoming[m.MeanRequest]) -> list[Reply]:
    first, *others = run.shard.tracks
    mean = first.variables.mean
    return [Reply(got.peer, *mean.answer(got.message.request, [track.variables.mean for track in others]))]


def _evicted(run: Run, got: Incoming[m.TakeEvicted]) -> list[Reply]:
    keys = run.requests.track(got.message.track).tables.evicted(got.message.table)
    return [Reply(got.peer, m.Evicted(got.message.request), [keys])]


def _data(handler: Handler) -> Handler:
    """A worker that has left gets no data, and comes to no barrier."""

    def handle(run: Leading, got: Incoming[m.TakeBatches | m.UseBatches | m.AtBarrier]) -> list[Reply]:
        message = got.message
        if run.leader.quorum.workers[message.worker].left:
            return [got.reply(run.requests.not_joined(message.worker, message.incarnation, message.request))]
        return handler(run, got)

    return handle


# -- the table --------------------------------------------------------------------------------------------------------

_no_data = _refuse(LostPlaceError, NO_DATA)
_no_buffers = _refuse(LostPlaceError, NO_BUFFERS)

ROUTES: dict[type[m.Message], Route] = {
    # training
    m.Push: Route(lambda run, got: run.requests.push(got), joined=True, request=True),
    m.TakeEvicted: Route(_evicted, joined=True),
    m.PullRows: Route(lambda run, got: run.requests.pull_rows(got), joined=True),
    m.Pull: Route(lambda run, got: run.requests.pull(got), joined=True, request=True),
    m.Values: Route(lambda run, got: run.requests.keep_values(got), joined=True),
    m.Assign: Route(lambda run, got: run.requests.assign(got), joined=True, request=True),
    m.MeanRequest: Route(_mean, counted=True),
    # those who only read
    m.Read: Route(lambda run, got: run.reads.ask(got)),
    m.ReadRows: Route(lambda run, got: run.reads.ask(got)),
    m.ReaderBeat: Route(
        lambda run, got: run.reads.beat(got),
        Leading,
        lambda got: [got.reply(m.ReaderAlive(0, False))],
    ),
    # membership
    m.Beat: Route(lambda run, got: run.requests.beat(got), Leading, lambda got: [got.reply(m.Alive(0, False))]),
    m.Leave: Route(lambda run, got: run.leave(got), otherwise=lambda got: [got.reply(m.Bye())]),
    m.Scale: Route(
        lambda run, got: [got.reply(run.leader.membership.scale(got.message.workers))],
        Leading,
        _refuse(ConfigError, NO_SCALE),
        counted=True,
    ),
    m.Stop: Route(_stop, Leading, joined=True, only_shard_0="only shard 0 can stop the run"),
    m.FateOf: Route(
        lambda run, got: [
            got.reply(run.leader.fate(Key(got.message.worker, got.message.incarnation, got.message.local_step)))
        ],
        Leading,
        _not_decided,
    ),
    # checkpoints
    m.Save: Route(_save, Leading, joined=True, only_shard_0="only shard 0 makes checkpoints"),
    m.Settle: Route(
        lambda run, got: [got.reply(m.Settled(run.checkpoints.settle()))],
        Leading,
        lambda got: [got.reply(m.Settled(True))],
        counted=True,
    ),
    m.Position: Route(_position, Leading, _ignore, joined=True, quiet=True),
    m.Part: Route(_part, Leading, _refuse(ValueError, NO_PARTS)),
    m.PartTaken: Route(_part_taken, Following, _ignore, from_shard_0=True),
    # the model's buffers and shared data
    m.Buffers: Route(
        lambda run, got: [*run.requests.receive_buffers(got), *run.reads.advance(got.now)],
        Leading,
        _no_buffers,
        joined=True,
    ),
    m.TakeBuffers: Route(lambda run, got: run.requests.take_buffers(got), Leading, _no_buffers, joined=True),
    m.TakeBatches: Route(_data(Leading.take_batches), Leading, _no_data, joined=True),
    m.UseBatches: Route(
        _data(lambda run, got: [got.reply(run.leader.data.use(got.message))]), Leading, _no_data, joined=True
    ),
    m.AtBarrier: Route(_data(Leading.at_barrier), Leading, _refuse(LostPlaceError, NO_EPOCHS), joined=True),
    # the other shards
    m.Log: Route(Following.log, Following, from_shard_0=True),
    m.Alive: Route(lambda run, got: [], otherwise=_ignore, from_shard_0=True),
}
