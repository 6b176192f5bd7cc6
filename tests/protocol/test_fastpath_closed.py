"""The ps closes the page while workers are in the middle of a round: it finishes the round itself, and they can tell."""

from collections.abc import Iterator

import pytest

import torchquorum.wire.messages as m
from tests.protocol.by_hand import Ps, layout_of, name
from torchquorum.fastpath.page import CLOSED, OPEN, FastPage
from torchquorum.fastpath.records import GradientId
from torchquorum.memory.lock import supported
from torchquorum.memory.slots import Slots

pytestmark = pytest.mark.skipif(not supported(), reason="this system has no locks between processes")


@pytest.fixture
def opened() -> Iterator[Ps]:
    """Two workers share memory with a ps, so that its page is open."""
    ps = Ps()
    ps.create()
    region = layout_of(ps.plan).trained[0]
    gradients = [Slots.create(f"gradients-{w}", region, 1) for w in range(2)]
    for worker, memory in enumerate(gradients):
        for section in memory.sections[0]:
            section.fill_(-1.0)
        ps.send(name(worker), m.Join(worker, 1, 1, memory.ref, None, fastpath=True))
    for worker in range(2):  # the first update is the ps's own, which keeps its mean
        ps.push(worker, 1, 0)
    assert page_of(ps).words.state == OPEN
    yield ps
    ps.close()
    for memory in gradients:
        memory.close()


def page_of(ps: Ps) -> FastPage:
    assert ps.shard.page is not None
    return ps.shard.page


def give(ps: Ps, version: int) -> None:
    """Both have given their gradients; neither has written its part."""
    page = page_of(ps)
    with page.locked() as held:
        assert held
        for worker in range(2):
            page.records.give(worker, GradientId(1, version, version + 1, version - 1), 0.5, version)
            page.workers.given[worker] = version
        busy = page.workers.busy_slots()
        page.words.target = next(slot for slot in range(9) if slot != page.slot and slot not in busy)
        for worker in range(2):
            page.workers.uses[worker] = page.words.target
        page.words.full = version


def test_a_board_that_is_closed_for_something_stays_closed_until_that_has_been_done(
    opened: Ps, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(opened, 2)
    states, lost = [], opened.run.leader.lost

    def noted(*given: object) -> None:
        states.append(page_of(opened).words.state)
        lost(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(opened.run.leader, "lost", noted)
    opened.service.process_ended(1, 1, opened.now, opened.wall)
    assert states == [CLOSED], "the rule heard of a death while workers could make updates"
    assert page_of(opened).words.state == CLOSED, "a round of both was possible although one is dead"
    assert set(opened.values().tolist()) == {2.0}
    assert opened.service.status()["global_step"] == 2


def test_who_meets_a_version_of_the_next_opening_without_the_lock_meets_the_next_opening(
    opened: Ps, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = page_of(opened)
    before, met, publish = page.words.opening_id, [], FastPage.publish

    def noted(self: FastPage, version: int, slot: int, state_slot: int = 0) -> None:
        publish(self, version, slot, state_slot)
        met.append(
            (self.version, self.words.opening_id)
        )  # as a worker may at this moment, which waits for that version

    monkeypatch.setattr(FastPage, "publish", noted)
    give(opened, 2)
    opened.send(name(0), m.Pull(0, 1, 3))  # which closes the page; the ps finishes the round, and opens it again
    assert page.words.state == OPEN
    assert met == [(2, before + 1)] and page.words.opening_id == before + 1


@pytest.mark.parametrize("recorded", [1, 2])
def test_a_round_whose_last_worker_died_before_it_was_published_counts_once_and_the_board_is_opened_again(
    opened: Ps, recorded: int
) -> None:
    give(opened, 2)
    page, shard = page_of(opened), opened.shard
    for section in shard.variables.versions.slots.sections[page.words.target]:
        section.fill_(2.0)  # both have written their parts
    with page.locked() as held:
        assert held
        for worker in range(recorded):
            page.records.add_given(worker, page.words.target)
    opened.send(name(0), m.Pull(0, 1, 3))
    assert set(opened.values().tolist()) == {2.0} and shard.version == 2
    assert len(shard.gradients) == 0
    assert page.words.state == OPEN and page.version == 2
