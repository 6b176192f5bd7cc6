"""Who sends too much within a second is named once."""

from torchquorum.server.rate_limit import MOST_PER_SECOND, RateLimit


def test_a_peer_that_sends_too_much_is_named_once_and_others_are_not() -> None:
    limit = RateLimit()
    for _ in range(3 * MOST_PER_SECOND):
        limit.count(b"flood")
    for _ in range(MOST_PER_SECOND - 1):
        limit.count(b"polite")
    assert limit.exceeded == [b"flood"]


def test_a_second_later_the_counts_begin_again() -> None:
    limit = RateLimit()
    for _ in range(3):
        for _ in range(MOST_PER_SECOND - 1):
            limit.count(b"steady")
        limit.reset()
    assert limit.exceeded == []
