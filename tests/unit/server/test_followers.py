"""The other ps tasks as shard 0 sees them."""

import pytest

import torchquorum.wire.messages as m
from tests.unit.server.parts import identity
from torchquorum.server.decision_log import DecisionLog, LogEntry
from torchquorum.server.followers import ASK_S, SILENCE_S, Followers
from torchquorum.server.reply import Reply

ENTRIES: list[LogEntry] = [m.Drop([(0, 1, step)]) for step in range(1, 4)]
PEER = b"ps/1"


def hello(shard: int = 1, followed: int = 0, generation: int = 5, protocol: int = m.PROTOCOL) -> m.ShardHello:
    return m.ShardHello(shard, 9, followed, 1, "there", generation, protocol, m.PACKAGE)


def log() -> DecisionLog:
    made = DecisionLog(2)
    for entry in ENTRIES:
        made.append(entry)
    return made


def test_a_shard_is_sent_each_entry_once_and_the_rest_again_when_it_reports_fewer() -> None:
    followers, entries = Followers(identity()), log()
    assert followers.news(entries, 5, 2) == []  # not heard of yet
    assert followers.hear(PEER, hello(), 5, 3, 0.0) is None
    assert followers.news(entries, 5, 2) == [Reply(PEER, m.Log(5, 0, ENTRIES))]
    assert followers.news(entries, 5, 2) == []
    followers.sent[1] = 1  # it reported one entry
    assert followers.news(entries, 5, 3) == [Reply(PEER, m.Log(5, 1, ENTRIES[1:]))]


def test_after_a_restore_the_log_begins_anew() -> None:
    followers, entries = Followers(identity()), log()
    followers.hear(PEER, hello(), 5, 3, 0.0)
    followers.news(entries, 5, 3)
    followers.begin_again()
    assert followers.news(entries, 6, 3) == [Reply(PEER, m.Log(6, 0, ENTRIES))]


def test_a_shard_of_another_generation_or_protocol_is_answered_and_not_taken_in() -> None:
    followers = Followers(identity())
    assert followers.hear(PEER, hello(generation=4), 5, 3, 0.0) == m.Alive(0, False)
    refused = followers.hear(PEER, hello(protocol=m.PROTOCOL + 1), 5, 3, 0.0)
    assert isinstance(refused, m.Fault) and refused.kind == "protocol"
    assert followers.news(log(), 5, 3) == []


@pytest.mark.parametrize(
    ("index", "message", "says"),
    [
        (1, hello(), "only shard 0 hears of other shards"),
        (0, hello(shard=2), "shard 2: the cluster has 2 ps tasks"),
        (0, hello(shard=0), "shard 0: the cluster has 2 ps tasks"),
        (0, hello(followed=4), "shard 1 has followed 4 entries, more than the log has"),
    ],
)
def test_a_message_that_makes_no_sense_is_refused(index: int, message: m.ShardHello, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Followers(identity(index)).hear(PEER, message, 5, 3, 0.0)


def test_a_shard_that_owes_its_part_and_is_silent_is_named() -> None:
    followers = Followers(identity())
    followers.hear(PEER, hello(), 5, 3, 10.0)
    assert followers.missed({0}, 0.0, 10.0 + ASK_S) is None
    waits = followers.missed({0}, 0.0, 10.0 + SILENCE_S)
    assert waits is not None and not waits.is_late
    missed = followers.missed({0}, 0.0, 11.0 + SILENCE_S)
    assert missed is not None and missed.is_late and not missed.is_gone
    assert missed.why == "/job:ps/task:1 (localhost:1001) has not been heard of for 601 s"
    assert followers.missed({0, 1}, 0.0, 11.0 + SILENCE_S) is None  # it has given its part
    begun_later = followers.missed({0}, 11.0, 11.0 + SILENCE_S)
    assert begun_later is not None and not begun_later.is_late


def test_one_that_is_gone_is_not_waited_for() -> None:
    followers, asked = Followers(identity()), list[str]()
    followers.refuses = lambda address: bool(asked.append(address)) or len(asked) > 1
    followers.hear(PEER, hello(), 5, 3, 10.0)
    for at in (20.5, 21.0, 30.0):  # its host is asked now and then: it may only be paused
        missed = followers.missed({0}, 0.0, at)
        assert missed is not None and not missed.is_late and asked == ["localhost:1001"]
    for at in (31.0, 32.0, 50.0):
        missed = followers.missed({0}, 0.0, at)
        assert missed is not None and missed.is_late and missed.is_gone and len(asked) == 2
    followers.hear(PEER, hello(), 5, 3, 51.0)
    assert followers.missed({0}, 0.0, 52.0) is None


def test_one_that_was_started_again_has_not_what_it_held() -> None:
    followers = Followers(identity())
    followers.hear(PEER, hello(), 5, 3, 10.0)
    followers.hear(PEER, hello(generation=0), 5, 3, 15.0)
    missed = followers.missed({0}, 0.0, 11.0 + ASK_S)
    assert missed is not None and missed.is_late and missed.is_gone
