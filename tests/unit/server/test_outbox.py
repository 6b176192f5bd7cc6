"""Replies leave in order: at once, or when the disk has what they say; only the ps thread sends to shard 0."""

import threading
from pathlib import Path
from types import NoneType

import pytest

import torchquorum as tq
from tests.protocol.by_hand import Ps
from torchquorum.server.outbox import Outbox
from torchquorum.server.reply import LEADER, Reply
from torchquorum.wire import codec
from torchquorum.wire.inprocess import InProcessChannel, InProcessListener, InProcessNetwork
from torchquorum.wire.messages import Alive, Held, Message, Probe, Variables

WORKER = b"worker/0"


class Wires:
    """An outbox between a ps, one worker and shard 0."""

    def __init__(self, ps: Ps) -> None:
        network = InProcessNetwork()
        self.at_leader: InProcessListener = network.listen("leader")
        listener = network.listen("ps")
        self.worker: InProcessChannel = network.connect("ps", WORKER)
        self.worker.send([b"hello"])
        assert listener.receive(1.0) is not None
        self.outbox = Outbox(ps.service, listener, network.connect("leader", b"ps/1"))

    def arrived(self) -> Message | None:
        frames = self.worker.receive(0.0)
        return None if frames is None else codec.decode(frames[0])


@pytest.fixture
def ps() -> Ps:
    return Ps()


def test_replies_leave_at_once_and_in_order(ps: Ps) -> None:
    wires = Wires(ps)
    wires.outbox.send([Reply(WORKER, Alive(1, False)), Reply(WORKER, Alive(2, False))])
    assert [wires.arrived(), wires.arrived(), wires.arrived()] == [Alive(1, False), Alive(2, False), None]
    assert not wires.outbox.waiting
    ps.close()


def test_where_the_journal_is_not_on_the_disk_replies_wait_for_the_commit_and_keep_their_order(
    ps: Ps, tmp_path: Path
) -> None:
    wires = Wires(ps)
    ps.create(logdir=str(tmp_path), durable="fsync")
    assert ps.shard.journal is not None
    ps.run.checkpoints.first_is_due = False
    for worker in (0, 1):
        ps.join(worker)
    ps.push(0, 1, 0)
    ps.push(1, 1, 0)  # the update is in the journal, which nobody has committed
    assert ps.service.uncommitted
    wires.outbox.send([Reply(WORKER, Alive(1, False))])
    assert wires.arrived() is None and wires.outbox.waiting
    ps.service.commit()
    wires.outbox.send([Reply(WORKER, Alive(2, False))])  # not before the one that waits
    assert wires.arrived() is None
    wires.outbox.commit()
    assert [wires.arrived(), wires.arrived()] == [Alive(1, False), Alive(2, False)]
    ps.close()


def test_an_answer_that_waits_for_the_disk_is_not_made_again_for_whoever_asks_meanwhile(ps: Ps, tmp_path: Path) -> None:
    wires = Wires(ps)
    ps.create(logdir=str(tmp_path), durable="fsync", rule=tq.Async())
    ps.run.checkpoints.first_is_due = False
    ps.join(0)
    wires.outbox.send(ps.push(0, 1, 0))
    for _ in range(3):  # as after a freeze of this task: the probes came while nobody committed
        wires.outbox.send(ps.send(WORKER, Probe(0, 1, 2)))
    wires.outbox.commit()
    arrived = [wires.arrived() for _ in range(5)]
    assert [type(message) for message in arrived] == [Variables, Held, Held, Held, NoneType]
    again = ps.send(WORKER, Probe(0, 1, 2))  # it has left, and was lost
    assert [type(reply.message) for reply in again] == [Variables]
    ps.close()


def test_what_another_thread_has_for_shard_0_is_sent_by_the_ps_thread(ps: Ps) -> None:
    wires = Wires(ps)
    thread = threading.Thread(target=wires.outbox.send, args=([Reply(LEADER, Alive(3, False))],))
    thread.start()
    thread.join()
    assert wires.outbox.waiting and wires.at_leader.receive(0.0) is None
    wires.outbox.send_to_leader()
    received = wires.at_leader.receive(0.0)
    assert received is not None and codec.decode(received[1][0]) == Alive(3, False)
    ps.close()
