"""The log of decisions: each shard gets what it has not followed, and what all have followed is dropped."""

from torchquorum.server.decision_log import DecisionLog
from torchquorum.wire.messages import Drop

ENTRIES = [Drop([(0, 1, step)]) for step in range(1, 5)]


def filled(num_shards: int) -> DecisionLog:
    log = DecisionLog(num_shards)
    for entry in ENTRIES:
        log.append(entry)
    return log


def test_a_shard_that_was_never_heard_of_gets_all() -> None:
    assert filled(2).unseen_by(1) == (0, ENTRIES)


def test_an_entry_is_kept_until_every_shard_has_followed_it() -> None:
    log = filled(2)
    log.followed(0, 4)
    assert log.unseen_by(0) == (4, []) and log.unseen_by(1) == (0, ENTRIES)
    log.followed(1, 3)
    assert (log.start, log.entries) == (3, ENTRIES[3:]) and log.unseen_by(1) == (3, ENTRIES[3:])
    log.followed(1, 4)
    assert (log.start, log.entries) == (4, [])


def test_a_late_report_takes_nothing_back() -> None:
    log = filled(1)
    log.followed(0, 3)
    log.followed(0, 1)
    assert log.unseen_by(0) == (3, ENTRIES[3:])
