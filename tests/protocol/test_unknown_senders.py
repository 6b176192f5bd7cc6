"""What somebody hears who reaches a ps without a secret and guesses: nothing in whose name he could speak."""

import struct
from pathlib import Path

import pytest

import torchquorum.wire.messages as m
from tests.protocol.by_hand import Ps, only
from torchquorum.fastpath.host import may_change
from torchquorum.formats.ledger import name_life, read_ledger
from torchquorum.wire import codec

LIVES = (0x2BADC0FFEE15600D, 0x1CEB00DA5EED5EED)
GUESSED = 0x1234567812345678
QUESTIONS: list[m.Message] = [
    m.Hello(m.PROTOCOL, "/job:worker/task:1", GUESSED, "elsewhere", 1),
    m.StatusRequest(),
    m.MeanRequest(),
    *(
        kind
        for worker in (0, 1, 7)
        for kind in (m.Probe(worker, GUESSED, 2), m.Pull(worker, GUESSED, 2), m.Beat(worker, GUESSED))
    ),
    m.FateOf(1, GUESSED, 1),
    m.Push(1, GUESSED, 2, 1, 0, -1, [], None),
    m.Leave(1, GUESSED, None, None, True),
    m.Save(0, GUESSED, 1, "/nowhere", 5),
    m.Settle(),
    m.Stop(0, GUESSED),
    m.TakeBuffers(1, GUESSED, 1, False),
    m.ShardHello(1, GUESSED, 0, 1, "elsewhere", 0, m.PROTOCOL, m.PACKAGE),
    m.Have(1, 1, GUESSED, 2, 1, 0, 0),
]


@pytest.fixture
def guarded(ps: Ps, tmp_path: Path) -> Ps:
    """Two workers whose lives are random numbers, as they are in earnest; one gradient waits, one update was made."""
    ps.create(logdir=str(tmp_path))
    for worker, life in enumerate(LIVES):
        ps.join(worker, life)
    for worker, life in enumerate(LIVES):
        ps.push(worker, 1, 0, incarnation=life)
    ps.push(0, 2, 1, incarnation=LIVES[0])
    return ps


def tells(text: bytes) -> bool:
    """Whether bytes have a worker's life in them, as a message or people would write it."""
    return any(
        written in text
        for life in LIVES
        for written in (struct.pack(">Q", life), struct.pack("<Q", life), b"%x" % life, b"%d" % life)
    )


def test_a_life_is_found_where_it_is_written() -> None:
    assert tells(codec.encode(m.Beat(0, LIVES[0]))) and tells(f"{LIVES[1]:016x}".encode())
    assert not tells(codec.encode(m.Beat(0, GUESSED)))


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: f"{type(q).__name__}-{getattr(q, 'worker', '')}")
def test_no_answer_to_a_stranger_names_a_workers_life_and_no_guess_is_believed(
    guarded: Ps, question: m.Message
) -> None:
    quorum = guarded.run.leader.quorum
    before = repr(quorum)
    for reply in guarded.send(b"stranger", question):
        assert reply.peer == b"stranger"
        assert not tells(codec.encode(reply.message)) and not any(tells(bytes(f)) for f in reply.frames)
    assert repr(quorum) == before and guarded.service.ended is None


def test_neither_the_ledger_nor_what_is_said_names_a_life(guarded: Ps, tmp_path: Path) -> None:
    status = only(guarded.send(b"anybody", m.StatusRequest()), m.Status).body
    guarded.later(0)  # which flushes
    entries = list(read_ledger(tmp_path))
    assert [(e.worker, e.incarnation) for e in entries] == [(w, name_life(LIVES[w])) for w in (0, 1, 0)]
    assert len({name_life(life) for life in (*LIVES, GUESSED)}) == 3
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert files and not any(map(tells, [*files, repr(status).encode(), "\n".join(guarded.said).encode()]))


def test_the_board_is_not_closed_for_what_will_be_refused(guarded: Ps) -> None:
    shard = guarded.shard
    for life, closes in ((GUESSED, False), (LIVES[1], True)):
        of_a_worker = [
            m.Push(1, life, 3, 2, 1, -1, [], None),
            m.Pull(1, life, 3),
            m.Leave(1, life, None, None, True),
            m.Save(1, life, 1, "/nowhere", 5),
            m.Stop(1, life),
        ]
        assert {may_change(message, shard) for message in of_a_worker} == {closes}
    assert [may_change(m.Join(w, GUESSED, 1, None, None), shard) for w in (-1, 0, 1, 2, 10**9)] == [
        False,
        True,
        True,
        False,
        False,
    ]
    assert not may_change(m.StatusRequest(), shard) and may_change(m.MeanRequest(), shard)
    assert may_change(m.Pull(1, GUESSED, 3), None)  # nobody knows anybody yet
