"""A request to all ps tasks: asked about until all have answered; and questions beside it, on the same channels."""

from __future__ import annotations

import pytest

import torchquorum.wire.messages as m
from tests.unit.worker.ps_by_hand import PsTasks, variables
from torchquorum.errors import DeadlineError, LostCreationError, LostPlaceError, TaskLostError
from torchquorum.wire.channel import Progress
from torchquorum.worker.link_states import LinkState, LinkStates
from torchquorum.worker.ps_channels import PsChannels
from torchquorum.worker.requests import Requests


def greeted(ps: PsTasks) -> Requests:
    states = LinkStates()
    states.set(LinkState.GREETED)
    return Requests(PsChannels(ps.end), states)


def number_of(message: m.Message) -> int:
    return getattr(message, "request", -1)


def pull(requests: Requests, ps: PsTasks) -> int:
    number = requests.channels.next_number()
    requests.begin(number, [(m.Pull(1, 7, number), []) for _ in ps.channels])
    return number


def test_all_ps_tasks_are_waited_for() -> None:
    ps = PsTasks(2)
    ps.answer = lambda k, message: [variables(message.request, 5 + k)] if isinstance(message, m.Pull) else []
    requests = greeted(ps)
    pull(requests, ps)
    assert requests.is_open and [answer.version for [(answer, _)] in requests.answers(60.0)] == [5, 6]
    requests.settle()
    assert not requests.is_open and requests.open == []


def test_one_that_does_not_answer_is_probed_and_so_is_shard_0() -> None:
    ps = PsTasks(2)
    probes = 0

    def answer(k: int, message: m.Message) -> list[m.Message]:
        nonlocal probes
        if isinstance(message, m.Pull) and k == 0:
            return [variables(message.request)]
        if isinstance(message, m.Probe) and k == 1:
            probes += 1
            return [variables(message.request)] if probes == 2 else [m.Held(message.request, "its disk", 0, 1, [])]
        return []

    ps.answer = answer
    requests = greeted(ps)
    number = pull(requests, ps)
    requests.answers(60.0)
    assert ps.sent(0)[1:] == ps.sent(1)[1:] == [m.Probe(1, 7, number)] * 2
    assert requests.waiting_for == "its disk (0 of 1)"


def test_a_request_that_a_ps_does_not_know_is_sent_again_there() -> None:
    ps = PsTasks(2)
    lost = True

    def answer(k: int, message: m.Message) -> list[m.Message]:
        nonlocal lost
        if k == 1 and lost:
            lost = not isinstance(message, m.Probe)
            return [m.Unknown(message.request)] if isinstance(message, m.Probe) else []
        return [variables(message.request)] if isinstance(message, m.Pull) else []

    ps.answer = answer
    requests = greeted(ps)
    number = pull(requests, ps)
    requests.answers(60.0)
    assert ps.sent(1) == [m.Pull(1, 7, number), m.Probe(1, 7, number), m.Pull(1, 7, number)]
    assert [message for message in ps.sent(0) if isinstance(message, m.Pull)] == [m.Pull(1, 7, number)]


def test_what_was_answered_before_a_restore_does_not_count_beside_what_was_answered_after_it() -> None:
    ps = PsTasks(2)
    generations = {0: iter([1, 2]), 1: iter([2, 2])}
    ps.answer = lambda k, message: (
        [variables(message.request, generation=next(generations[k]))] if isinstance(message, m.Pull) else []
    )
    requests = greeted(ps)
    pull(requests, ps)
    assert [answer.generation for [(answer, _)] in requests.answers(60.0)] == [2, 2]
    assert len(ps.sent(0)) == len(ps.sent(1)) == 2


def test_an_answer_to_an_older_request_is_none() -> None:
    ps = PsTasks()
    ps.answer = lambda _k, message: (
        [variables(message.request - 1, 4), variables(message.request, 5)] if isinstance(message, m.Pull) else []
    )
    requests = greeted(ps)
    requests.channels.count = 9
    pull(requests, ps)
    assert requests.answers(60.0)[0][0][0].version == 5


def test_a_wait_says_for_whom_and_gives_the_position_that_a_checkpoint_wants() -> None:
    ps = PsTasks()
    saves: list[int] = []
    ps.answer = lambda _k, message: [m.Held(number_of(message), "the quorum", 1, 2, [0], save=12)]
    requests = greeted(ps)
    requests.save_wanted = saves.append
    pull(requests, ps)
    with pytest.raises(DeadlineError, match=r"the quorum \(1 of 2; missing /job:worker/task:0 \(localhost:2000\)\)"):
        requests.answers(20.0)
    assert set(saves) == {12}
    assert ps.said[0].startswith("/job:worker/task:1: waiting for the quorum (1 of 2")


def test_the_chief_does_not_wait_for_itself_to_create_the_variables() -> None:
    ps = PsTasks(index=0)
    ps.answer = lambda _k, message: [m.Held(number_of(message), m.CREATION, 0, 1, [0])]
    requests = greeted(ps)
    pull(requests, ps)
    with pytest.raises(LostCreationError, match="holds no variables any more"):
        requests.answers(20.0)


def test_a_silent_ps_is_lost_and_the_request_stays_known() -> None:
    ps = PsTasks()
    requests = greeted(ps)
    number = pull(requests, ps)
    with pytest.raises(TaskLostError, match="has not answered for"):
        requests.answers(60.0)
    assert requests.open[0][0] == m.Pull(1, 7, number) and requests.is_open


@pytest.mark.parametrize("mine", [True, False])
def test_a_fault_ends_the_wait_that_it_belongs_to(mine: bool) -> None:
    ps = PsTasks()
    ps.answer = lambda _k, message: (
        [
            m.Fault("LostPlaceError", "gone", message.request if mine else message.request + 1),
            variables(message.request),
        ]
        if isinstance(message, m.Pull)
        else []
    )
    requests = greeted(ps)
    pull(requests, ps)
    if mine:
        with pytest.raises(LostPlaceError):
            requests.answers(60.0)
    else:
        assert requests.answers(60.0)[0][0][0].version == 1


def test_variables_that_arrive_while_something_else_is_asked_are_kept_for_the_request() -> None:
    ps = PsTasks()
    ps.answer = lambda _k, message: [m.Settled(True)] if isinstance(message, m.Settle) else []
    requests = greeted(ps)
    number = pull(requests, ps)
    ps.send(0, variables(number, 8))
    assert requests.channels.ask(0, m.Settle(), kind=m.Settled, what="x", limit_s=5.0).done
    assert requests.answers(60.0)[0][0][0].version == 8
    assert ps.sent() == [m.Pull(1, 7, number), m.Settle()]  # nothing had to be asked again


def test_only_the_wait_for_a_request_may_receive_into_the_parameters() -> None:
    ps = PsTasks()
    seen: list[int | None] = []
    requests = greeted(ps)
    requests.channels.while_waiting = lambda: seen.append(requests.awaited())
    number = pull(requests, ps)
    assert requests.awaited() is None
    ps.send(0, variables(number))
    requests.answers(60.0)
    assert seen == [number] and requests.awaited() is None


def test_a_question_is_answered_while_a_request_is_waited_for() -> None:
    ps = PsTasks()
    requests = greeted(ps)
    question = requests.channels.question(m.UseBatches(1, 7, 0, "data", []))
    number = pull(requests, ps)
    ps.send(0, m.BatchesUsed(question.number, True))
    ps.send(0, variables(number))
    requests.answers(60.0)
    assert question.number < number
    assert requests.channels.finish(question, "x") == (m.BatchesUsed(question.number, True), [])


def test_a_question_that_another_thread_left_is_sent_with_the_next_request() -> None:
    ps = PsTasks()
    requests = greeted(ps)
    left = requests.channels.leave_question(0, m.StatusRequest())
    number = pull(requests, ps)
    assert m.StatusRequest(left.number) in ps.sent() and left.number != number


def test_while_the_answer_comes_from_one_ps_only_the_others_are_probed() -> None:
    ps = PsTasks(2)
    count = 0

    def answer(k: int, message: m.Message) -> list[m.Message]:
        return [m.Held(number_of(message), "the quorum", 1, 2, [0])] if k == 0 else []

    def come() -> None:
        nonlocal count
        count += 1
        ps.channels[1].moved = Progress(received=count, coming=60_000_000, came=count * 1_000_000)
        if count == 60:
            ps.channels[1].moved = Progress(received=count)
            ps.send(0, variables(requests.number))
            ps.send(1, variables(requests.number))

    ps.answer = answer
    requests = greeted(ps)
    number = pull(requests, ps)
    requests.channels.while_waiting = come
    requests.answers(20.0)
    assert ps.sent(1) == [m.Pull(1, 7, number)]
    assert ps.sent(0)[1:] == [m.Probe(1, 7, number)] * (len(ps.sent(0)) - 1) and len(ps.sent(0)) > 5
    assert ps.said[0].endswith("): 5 s, 10.0 of 60.0 MB have come")


@pytest.mark.parametrize("moves", [True, False])
def test_a_request_that_leaves_slowly_is_waited_for_as_long_as_bytes_leave(moves: bool) -> None:
    ps = PsTasks(2)
    left = 60

    def flush(timeout_s: float) -> bool:
        nonlocal left
        ps.clock.advance(max(timeout_s, 1.0))
        if moves:
            left -= 1
            ps.channels[0].moved = Progress(delivered=60 - left, leaving=left * 1_000_000)
        return left <= 0

    requests = greeted(ps)
    ps.channels[0].moved = Progress(leaving=60_000_000)
    ps.channels[0].flush = flush  # pyright: ignore[reportAttributeAccessIssue]
    if moves:
        pull(requests, ps)
        assert "waiting for its message to leave: 5 s, 5.0 of 59.0 MB have left" in ps.said[0]
        assert len(ps.sent(0)) == len(ps.sent(1)) == 1
    else:
        with pytest.raises(TaskLostError, match="has not answered for 1[01] s"):
            pull(requests, ps)
