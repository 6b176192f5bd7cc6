"""The ps closes the board while workers are in the middle of a round: it finishes the round itself, and they can tell."""

from collections.abc import Iterator

import pytest

import torchquorum.transport.messages as m
from tests.protocol.by_hand import Ps, layout_of, name
from torchquorum.transport.board import _FIRST, _TAIL, CLOSED, OPEN, Board, Given  # pyright: ignore[reportPrivateUsage]
from torchquorum.transport.shared_lock import supported
from torchquorum.transport.slots import Slots

pytestmark = pytest.mark.skipif(not supported(), reason="this system has no locks between processes")


@pytest.fixture
def opened() -> Iterator[Ps]:
    """Two workers share memory with a ps, so that its board is open."""
    ps = Ps()
    ps.create()
    region = layout_of(ps.plan).trained[0]
    gradients = [Slots.create(f"gradients-{w}", region, 1) for w in range(2)]
    for worker, memory in enumerate(gradients):
        for section in memory.sections[0]:
            section.fill_(-1.0)
        ps.send(name(worker), m.Join(worker, 1, 1, memory.ref, None, board=True))
    for worker in range(2):  # the first update is the ps's own, which keeps its mean
        ps.push(worker, 1, 0)
    assert board_of(ps).state == OPEN
    yield ps
    ps.close()
    for memory in gradients:
        memory.close()


def board_of(ps: Ps) -> Board:
    assert ps.service.shard is not None and ps.service.shard.board is not None
    return ps.service.shard.board


def give(ps: Ps, version: int) -> None:
    """Both have given their gradients; neither has written its part."""
    board = board_of(ps)
    with board.locked() as held:
        assert held
        for worker in range(2):
            board.give(worker, Given(1, version, version + 1, version - 1), 0.5, version)
        board.target = next(slot for slot in range(9) if slot != board.slot and slot not in board.busy())
        for worker in range(2):
            board.use(worker, board.target)
        board.full = version


def test_a_board_that_is_closed_for_something_stays_closed_until_that_has_been_done(
    opened: Ps, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(opened, 2)
    states, lost = [], opened.service.leader.lost  # type: ignore[union-attr]

    def noted(*given: object) -> None:
        states.append(board_of(opened).state)
        lost(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(opened.service.leader, "lost", noted)
    opened.service.process_ended(1, 1, opened.now, opened.wall)
    assert states == [CLOSED], "the rule heard of a death while workers could make updates"
    assert board_of(opened).state == CLOSED, "a round of both was possible although one is dead"
    assert set(opened.values().tolist()) == {2.0}
    assert opened.service.status()["global_step"] == 2


def test_who_meets_a_version_of_the_next_era_without_the_lock_meets_the_next_era(
    opened: Ps, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = board_of(opened)
    before, met, publish = board.era, [], Board.publish

    def noted(self: Board, version: int, slot: int) -> None:
        publish(self, version, slot)
        met.append((self.version, self.era))  # as a worker may at this moment, which waits for that version

    monkeypatch.setattr(Board, "publish", noted)
    give(opened, 2)
    opened.send(name(0), m.Pull(0, 1, 3))  # which closes the board; the ps finishes the round, and opens it again
    assert board.state == OPEN
    assert met == [(2, before + 1)] and board.era == before + 1


@pytest.mark.parametrize("recorded", [1, 2])
def test_a_round_whose_last_worker_died_before_it_was_published_counts_once_and_the_board_is_opened_again(
    opened: Ps, recorded: int
) -> None:
    give(opened, 2)
    board, shard = board_of(opened), opened.service.shard
    assert shard is not None
    for section in shard.versions.slots.sections[board.target]:
        section.fill_(2.0)  # both have written their parts
    with board.locked() as held:
        assert held
        before = board.recorded
        board.record_round(2, board.target)
        board._q[_FIRST + _TAIL] = before + recorded  # pyright: ignore[reportPrivateUsage]
    opened.send(name(0), m.Pull(0, 1, 3))
    assert set(opened.values().tolist()) == {2.0} and shard.version == 2
    assert not shard.undecided_gradients
    assert board.state == OPEN and board.version == 2
