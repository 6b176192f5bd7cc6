"""Data that is shared out by batch, and workers that come and go, message by message with a ps that has no sockets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

import torchquorum as tq
import torchquorum.wire.messages as m
from tests.protocol.by_hand import Ps, by_peer, name, only
from torchquorum.server.shared_data import MOST_SHARES

SPEC = m.ShareSpec("data", rows=80, batch_size=10, batches=8, epochs=1, seed=0)


@pytest.fixture
def ps() -> Iterator[Ps]:
    found = Ps(workers=3)
    yield found
    found.close()


def begin(ps: Ps, joined: int = 2, **changes: Any) -> None:
    ps.create(**{"rule": tq.Async(), "min_workers": 2, **changes})
    for worker in range(joined):
        ps.join(worker)


def take(ps: Ps, worker: int, *steps: int, request: int, incarnation: int = 1, **more: Any) -> m.LeasedBatches:
    message = m.TakeBatches(worker, incarnation, request, more.pop("share", SPEC), list(steps), **more)
    answers = by_peer(ps.send(f"share/{worker}".encode(), message))
    answer = answers[f"share/{worker}".encode()]
    assert isinstance(answer, m.LeasedBatches), answer
    return answer


def data(ps: Ps) -> dict[str, Any]:
    return ps.service.status()["data"]["data"]


def test_a_batch_is_done_when_its_gradient_was_applied(ps: Ps) -> None:
    begin(ps)
    assert take(ps, 0, 1, 2, request=1).numbers == [0, 1]
    assert take(ps, 0, 1, 2, request=1).numbers == [0, 1]  # the answer was lost
    assert take(ps, 1, 1, request=1).numbers == [2]
    ps.push(0, 1, 0)
    assert (data(ps)["used"], data(ps)["leased"]) == (1, 2)


def test_a_worker_that_died_and_comes_back_finds_its_batches_gone(ps: Ps) -> None:
    begin(ps)
    assert take(ps, 0, 1, request=1).numbers == [0]
    assert take(ps, 1, 1, request=1).numbers == [1]
    ps.now += 4.0
    ps.send(name(0), m.Beat(0, 1))
    ps.later(2.0)
    assert any("/job:worker/task:1 counts as dead" in line for line in ps.said)
    assert any("1 of at least 2 workers is alive; the run goes on" in line for line in ps.said)
    assert take(ps, 0, 2, request=2).numbers == [1]
    late = only(ps.push(1, 1, 0), m.Variables)  # computed from batch 1 all the same
    assert late.outcome is not None and (late.outcome.accepted, late.outcome.reason) == (False, "expired")
    assert take(ps, 1, 2, request=2).void
    again = only(ps.push(1, 2, 0), m.Variables)  # it has not heard yet: nothing that it computes counts
    assert again.outcome is not None and again.outcome.reason == "expired"
    assert take(ps, 1, 3, request=3, void=2).numbers == [2]
    assert only(ps.push(1, 3, 0), m.Variables).outcome.accepted  # type: ignore[union-attr]


def test_one_who_gets_no_batch_is_not_waited_for(ps: Ps) -> None:
    begin(ps, rule=tq.Sync(aggregate=2))
    spec = m.ShareSpec("data", 30, 10, 3, 1, 0)
    for step in (1, 2):
        assert take(ps, 0, step, request=step, share=spec).numbers
    assert take(ps, 1, 1, request=1, share=spec).numbers == [2]
    ps.push(0, 1, 0)
    ps.push(1, 1, 0)  # a round of two; then worker 0 has the only batch that is left
    ps.push(0, 2, 1)
    assert ps.service.status()["live"] == [0, 1]
    answer = take(ps, 1, 2, request=2, share=spec, idle=True)
    assert answer.over  # accepted, so nothing will come any more
    ps.leave(1)
    assert not ps.run.leader.quorum.held  # worker 0 is asked for more


def test_one_who_waits_for_a_batch_lets_the_others_fill_the_round(ps: Ps) -> None:
    begin(ps, rule=tq.Sync(aggregate=2))
    spec = m.ShareSpec("data", 20, 10, 2, 1, 0)
    assert take(ps, 0, 1, request=1, share=spec).numbers == [0]
    assert take(ps, 0, 2, request=2, share=spec).numbers == [1]
    assert ps.push(0, 1, 0) == []  # worker 1 is alive, so it waits for its gradient
    answers = by_peer(ps.send(b"share/1", m.TakeBatches(1, 1, 1, spec, [1], idle=True)))
    assert answers[b"share/1"] == m.LeasedBatches(1, [], False, False)
    assert isinstance(answers[name(0)], m.Variables)  # worker 1 has nothing to give: worker 0 gives twice
    status = ps.service.status()["per_worker"]["1"]
    assert status["state"] == "waiting" and "others have those that are left" in status["waits_for"]["what"]
    assert only(ps.push(0, 2, 0), m.Variables).version == 1


def test_workers_that_mean_other_data_are_told_so(ps: Ps) -> None:
    begin(ps)
    take(ps, 0, 1, request=1)
    other = m.ShareSpec("data", rows=80, batch_size=20, batches=4, epochs=1, seed=0)
    fault = only(ps.send(b"share/1", m.TakeBatches(1, 1, 1, other, [1])), m.Fault)
    assert fault.kind == "ConfigError" and "batch_size=20, which was 10" in fault.text


@pytest.mark.parametrize(
    "message",
    [
        m.TakeBatches(0, 1, 1, m.ShareSpec("data", 80, 10, 0, 1, 0), [1]),
        m.TakeBatches(0, 1, 1, m.ShareSpec("data", 80, 10, 8, 0, 0), [1]),
        m.TakeBatches(0, 1, 1, SPEC, [1] * 5000),
        m.TakeBatches(0, 1, 1, SPEC, [-1]),
        m.TakeBatches(7, 1, 1, SPEC, [1]),
        m.TakeBatches(0, 99, 1, SPEC, [1]),
        m.UseBatches(0, 99, 1, "data", [(0, 1)]),
        m.Scale(1),
        m.Scale(4),
        m.Scale(-1),
    ],
    ids=range(10),
)
def test_what_makes_no_sense_gets_a_fault_and_changes_nothing(ps: Ps, message: m.Message) -> None:
    begin(ps)
    before = ps.state()
    assert isinstance(only(ps.send(b"stranger", message), m.Fault), m.Fault)
    assert ps.state() == before


def test_those_that_are_too_many_are_asked_to_leave_and_never_the_chief(ps: Ps) -> None:
    begin(ps, joined=3)
    scaled = only(ps.send(b"scale", m.Scale(2)), m.Scaled)
    assert (scaled.live, scaled.leaving) == ([0, 1, 2], [2])
    asked = [only(ps.send(name(w), m.Beat(w, 1)), m.Alive).leave for w in range(3)]
    assert asked == [False, False, True]
    ps.leave(2)
    ps.join(1, incarnation=2)  # one that comes back is not too many
    assert not only(ps.send(name(1), m.Beat(1, 2)), m.Alive).leave
    ps.join(2, incarnation=2)  # one that was on its way is
    assert only(ps.send(name(2), m.Beat(2, 2)), m.Alive).leave
    assert ps.service.status()["wanted"] == 2


def test_a_cluster_of_fixed_size_cannot_be_scaled(ps: Ps) -> None:
    begin(ps, min_workers=0)
    fault = only(ps.send(b"scale", m.Scale(2)), m.Fault)
    assert "this run has 3 workers, neither more nor fewer" in fault.text
    assert "wanted" not in ps.service.status()


def test_a_worker_above_the_least_that_never_came_is_not_waited_for(ps: Ps) -> None:
    begin(ps)
    ps.leave(1)
    ps.leave(0)
    assert ps.service.ended is not None and ps.service.ended.ok


def test_a_restored_pool_goes_on_where_the_variables_are(ps: Ps) -> None:
    begin(ps, rule=tq.Sync(aggregate=2), joined=2)
    assert take(ps, 0, 1, 2, request=1).numbers == [0, 1]
    assert take(ps, 1, 1, request=1).numbers == [2]
    ps.push(0, 1, 0)
    ps.push(1, 1, 0)
    ps.push(0, 2, 1)  # batch 1 is accepted, and in no update yet
    state = ps.run.leader.data.state()
    assert (state["data"]["low"], state["data"]["done"]) == (1, [2])
    again = Ps(workers=3)
    try:
        begin(again, rule=tq.Sync(aggregate=2), joined=1)
        again.run.leader.data.restore(state, [{"data": [3]}])
        assert take(again, 0, 1, 2, 3, request=1).numbers == [1, 4]
        assert any("the data goes on in epoch 1: 3 batches" in line for line in again.said)
    finally:
        again.close()


def fault(ps: Ps, message: m.Message) -> m.Fault:
    return only(ps.send(b"share/0", message), m.Fault)


def test_who_asks_for_data_too_early_too_late_or_too_much_is_told_why(ps: Ps) -> None:
    early = fault(ps, m.TakeBatches(0, 1, 1, SPEC, [1]))
    assert "shares out no data: only ps task 0 does" in early.text
    assert "only /job:ps/task:0 knows the run" in fault(ps, m.Scale(2)).text
    begin(ps)
    for message in (m.TakeBatches(0, 9, 1, SPEC, [1]), m.UseBatches(2, 1, 1, "data", [(0, 1)])):
        assert fault(ps, message).kind in ("LostPlaceError", "replaced")  # of no worker that is in
    assert "1025 steps: at most 1024" in fault(ps, m.TakeBatches(0, 1, 1, SPEC, list(range(1025)))).text
    assert "1025 batches: at most 1024" in fault(ps, m.UseBatches(0, 1, 2, "data", [(n, n) for n in range(1025)])).text
    for wrong in ({"batches": 0}, {"batches": 1 << 50}, {"epochs": 0}):
        text = fault(ps, m.TakeBatches(0, 1, 1, msgspec.structs.replace(SPEC, **wrong), [1])).text
        assert "must be 1 or more" in text
    assert not only(ps.send(b"share/0", m.UseBatches(0, 1, 3, "unheard-of", [(0, 1)])), m.BatchesUsed).ok
    for number in range(MOST_SHARES):
        assert take(ps, 0, 1, request=4 + number, share=msgspec.structs.replace(SPEC, name=f"n{number}")).numbers == [0]
    one_more = fault(ps, m.TakeBatches(0, 1, 99, SPEC, [1]))
    assert f"share 'data': a run has at most {MOST_SHARES}; use one again" in one_more.text
