"""How ps task 0 leaves, on a clock by hand."""

from torchquorum.cluster import ClusterSpec
from torchquorum.server.farewell import FAREWELL_S, HURRIED_S, Farewell

CLUSTER = ClusterSpec({"ps": ["localhost:1000", "localhost:1001", "localhost:1002"], "worker": ["localhost:2000"]})


class Job:
    """The end of a job with three ps tasks, of which 1 and 2 owe an answer."""

    def __init__(self) -> None:
        self.now, self.hurried, self.said = 0.0, False, list[str]()
        self.owing, self.gone = {1, 2}, set[str]()
        self.answered_at: dict[int, float] = {}
        self.farewell = Farewell(CLUSTER, self.gone.__contains__, self.said.append, self._answer, lambda: self.hurried)

    def _answer(self, timeout_s: float) -> float:
        self.now += timeout_s
        self.owing -= {shard for shard, at in self.answered_at.items() if at <= self.now}
        return self.now

    def lasts_s(self) -> float:
        began = self.now
        self.farewell.wait(lambda: set(self.owing))
        return self.now - began


def test_it_lasts_until_the_last_has_answered() -> None:
    job = Job()
    job.answered_at = {1: 2.0, 2: 5.0}
    assert 5.0 <= job.lasts_s() < 5.2
    assert not job.said


def test_who_is_silent_is_named_and_not_waited_for_again() -> None:
    job = Job()
    job.answered_at = {1: 2.0}
    assert FAREWELL_S <= job.lasts_s() < FAREWELL_S + 0.2
    assert len(job.said) == 1 and job.said[0].startswith("/job:ps/task:2 (localhost:1002): has not answered for 30 s")
    assert job.lasts_s() == 0.0


def test_who_is_gone_is_not_waited_for() -> None:
    job = Job()
    job.gone |= {"localhost:1001", "localhost:1002"}
    assert job.lasts_s() < 1.2
    assert not job.said


def test_a_signal_shortens_it() -> None:
    job = Job()
    job.hurried = True
    assert HURRIED_S <= job.lasts_s() < HURRIED_S + 0.2
