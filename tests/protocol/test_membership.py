"""Who is in, who is out, and what a ps task says about it: messages in, replies out, a clock that the test sets."""

import pytest
import torch

import torchquorum as tq
import torchquorum.wire.messages as m
from tests.protocol.by_hand import VARIABLES, Ps, by_peer, layout_of, make_plan, name, only
from torchquorum.memory.slots import Slots
from torchquorum.placement.layout import Variable
from torchquorum.server.ending import IDLE_S, LATE_S
from torchquorum.server.processes import LIVES_WATCHED
from torchquorum.server.reply import Reply

# -- saying hello ---------------------------------------------------------------------------------------------------------


def test_hello_is_answered_with_who_this_is_and_whether_variables_exist(ps: Ps) -> None:
    hello = m.Hello(m.PROTOCOL, "/job:worker/task:1", 5, "elsewhere", 123)
    before = only(ps.send(b"x", hello), m.Welcome)
    ps.create()
    after = only(ps.send(b"x", hello), m.Welcome)
    assert (before.task, before.incarnation, before.created, after.created) == ("/job:ps/task:0", 77, False, True)


def test_another_protocol_version_is_refused_with_both_versions(ps: Ps) -> None:
    fault = only(ps.send(b"x", m.Hello(m.PROTOCOL + 1, "/job:worker/task:1", 5, "", 1)), m.Fault)
    assert fault.kind == "protocol"
    assert f"speaks protocol {m.PROTOCOL + 1}, /job:ps/task:0 speaks {m.PROTOCOL}" in fault.text
    assert "install the same torchquorum" in fault.text


@pytest.mark.parametrize("task", ["/job:worker/task:2", "/job:pss/task:0", "worker", ""])
def test_hello_of_a_task_that_is_not_in_the_cluster_is_refused(ps: Ps, task: str) -> None:
    before = ps.state()
    only(ps.send(b"x", m.Hello(m.PROTOCOL, task, 5, "here", 123)), m.Fault)
    assert ps.state() == before


@pytest.mark.parametrize("pid", [0, -1, 2**31, 2**62])
def test_a_process_number_that_cannot_be_is_not_watched(ps: Ps, pid: int) -> None:
    only(ps.send(b"x", m.Hello(m.PROTOCOL, "/job:worker/task:1", 5, "here", pid)), m.Welcome)
    assert ps.service.pids == {}


# -- creating and joining -------------------------------------------------------------------------------------------------


def test_of_a_worker_that_starts_again_and_again_only_the_last_lives_are_watched(ps: Ps) -> None:
    for life in range(LIVES_WATCHED + 5):
        hello = m.Hello(m.PROTOCOL, "/job:worker/task:1", life, "here", 1000 + life)
        assert only(ps.send(name(1), hello), m.Welcome)
    ps.send(name(0), m.Hello(m.PROTOCOL, "/job:worker/task:0", 7, "here", 999))
    assert list(ps.service.pids) == [(1, life) for life in range(5, LIVES_WATCHED + 5)] + [(0, 7)]


def test_a_join_before_the_variables_exist_waits_and_says_for_whom(ps: Ps) -> None:
    held = only(ps.join(1), m.Held)
    assert (held.what, held.have, held.need, held.missing) == ("the chief to create the variables", 0, 1, [0])
    assert only(ps.send(name(1), m.Probe(1, 1, 1)), m.Held).missing == [0]
    assert isinstance(only(ps.send(name(0), m.Probe(0, 1, 1)), m.Unknown), m.Unknown)
    answers = by_peer(ps.create())
    assert answers[b"chief"] == m.Created(0, False)
    variables = answers[name(1)]
    assert isinstance(variables, m.Variables)
    assert (variables.request, variables.version, variables.stop) == (1, 0, False)


def test_a_join_that_waited_twice_is_answered_once(ps: Ps) -> None:
    ps.join(1)
    ps.join(1)
    assert set(by_peer(ps.create())) == {b"chief", name(1)}


def test_the_answer_to_a_join_brings_variables_and_constants(ps: Ps) -> None:
    ps.create()
    [reply] = ps.join(0)
    assert isinstance(reply.message, m.Variables)
    assert reply.message.lr == [1.0] and reply.message.outcome is None
    assert [len(f) for f in reply.frames] == [128 + 64, 64]


def test_creating_again_leaves_live_variables_alone(running: Ps) -> None:
    running.push(0, 1, 0)
    running.push(1, 1, 0)
    created = only(running.create(), m.Created)
    assert (created.version, created.existing) == (1, True)
    assert torch.equal(running.values(), torch.ones(25))


def test_a_late_worker_starts_at_the_current_version(ps: Ps) -> None:
    ps.create(rule=tq.Async())
    ps.join(0)
    for step in range(3):
        ps.push(0, step + 1, step)
    late = only(ps.join(1), m.Variables, name(1))
    assert late.version == 3
    assert "/job:worker/task:1 joined" in ps.said


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"variables": [Variable(name="w", shape=(4, 6), dtype="float32"), *VARIABLES[1:]]}, ["w [4, 5]", "w [4, 6]"]),
        ({"variables": VARIABLES[:2]}, ["table [3] int64 (constant)"]),
        ({"variables": [VARIABLES[1], VARIABLES[0], VARIABLES[2]]}, ["the order"]),
        ({"optimizer": m.OptimizerSpec("SGD", [{"lr": 0.5}])}, ["another optimizer", "0.5", "1.0"]),
        ({"optimizer": m.OptimizerSpec("Adam", [{"lr": 1.0}])}, ["another optimizer", "Adam", "SGD"]),
        ({"rule": tq.Async()}, ["another rule", "Async()", "Sync()"]),
        (
            {"optimizer": m.OptimizerSpec("SGD", [{"lr": 1.0}] * 2)},
            ["another optimizer", "parameter groups: 2", "is 1"],
        ),
        ({"schedule": m.ScheduleSpec("ExponentialLR", {"gamma": 0.9})}, ["another schedule", "ExponentialLR"]),
        ({"average": m.AverageSpec(0.9, True)}, ["another average", "decay=0.9, num_updates=True", "None"]),
        ({"placement": "greedy"}, ["another placement", "greedy", "round_robin"]),
        ({"slice_bytes": 10}, ["another slice_bytes", "10", "None"]),
        ({"num_workers": 3}, ["another num_workers", "3", "2"]),
    ],
)
def test_a_worker_with_another_program_is_refused_and_the_difference_is_shown(
    ps: Ps, changes: dict, shown: list[str]
) -> None:
    ps.create()
    before = ps.state()
    fault = only(ps.join(1, plan=make_plan(**changes)), m.Fault)
    assert fault.kind == "RefusedError" and fault.request == 1
    assert "/job:worker/task:1" in fault.text and "same program" in fault.text
    for words in shown:
        assert words in fault.text
    assert ps.state() == before


def test_a_schedule_with_other_arguments_is_shown_by_those_that_differ(ps: Ps) -> None:
    ps.create(schedule=m.ScheduleSpec("StepLR", {"step_size": 5, "gamma": 0.5}))
    other = make_plan(schedule=m.ScheduleSpec("StepLR", {"step_size": 5, "last": 1}))
    text = only(ps.join(1, plan=other), m.Fault).text
    assert "schedule StepLR, gamma: nothing, the chief's is 0.5" in text
    assert "schedule StepLR, last: 1, the chief's is nothing" in text and "step_size" not in text


@pytest.mark.parametrize("changes", [{"num_shards": 2}, {"num_shards": 0}, {"num_shards": -1}, {"num_workers": 0}])
def test_a_chief_with_another_cluster_is_refused(ps: Ps, changes: dict) -> None:
    fault = only(ps.send(b"chief", m.Create(make_plan(**changes)), bytes(192), bytes(64)), m.Fault)
    assert "--ps_hosts" in fault.text
    assert ps.service.run is None


@pytest.mark.parametrize("worker", [2, -1, 10**12])
def test_an_index_out_of_range_is_refused(running: Ps, worker: int) -> None:
    before = running.state()
    fault = only(running.join(worker), m.Fault)
    assert f"worker {worker}: the cluster has 2 workers" in fault.text
    assert running.state() == before


def test_a_lost_answer_to_a_join_is_given_again(ps: Ps) -> None:
    ps.create()
    first, again, probed = ps.join(0), ps.join(0), ps.send(name(0), m.Probe(0, 1, 1))
    assert [only(r, m.Variables) for r in (again, probed)] == [only(first, m.Variables)] * 2
    assert list(again[0].frames) == list(first[0].frames)


# -- lives ----------------------------------------------------------------------------------------------------------------


def test_a_push_before_any_variables_is_refused(ps: Ps) -> None:
    assert "has not created them" in only(ps.push(0, 1, 0), m.Fault).text


@pytest.mark.parametrize("message", [m.Save(0, 1, 5, "/nowhere", 5), m.Stop(0, 1)])
def test_a_chief_that_asks_a_restarted_ps_hears_that_the_variables_are_lost(ps: Ps, message: m.Message) -> None:
    assert only(ps.send(name(0), message), m.Fault).kind == "LostPlaceError"


def test_a_push_or_pull_before_the_join_is_refused(ps: Ps) -> None:
    ps.create()
    before = ps.state()
    assert only(ps.push(0, 1, 0), m.Fault).kind == "LostPlaceError"
    assert only(ps.send(name(0), m.Pull(0, 1, 2)), m.Fault).kind == "LostPlaceError"
    assert ps.state() == before


def test_a_push_from_an_old_incarnation_is_refused(running: Ps) -> None:
    running.join(1, incarnation=2)
    assert "/job:worker/task:1 came back" in running.said
    before = running.state()
    fault = only(running.push(1, 1, 0, incarnation=1), m.Fault)
    assert fault.kind == "replaced" and "has let a newer process in" in fault.text
    assert running.state() == before
    assert running.push(1, 1, 0, incarnation=2) == []
    assert len(running.push(0, 1, 0)) == 2


def test_a_late_join_of_an_old_incarnation_does_not_push_the_new_one_out(running: Ps) -> None:
    running.join(1, incarnation=2)
    assert only(running.join(1, incarnation=1), m.Fault).kind == "replaced"
    assert running.push(1, 1, 0, incarnation=2) == []


def test_a_worker_may_join_again_by_another_way_and_its_first_join_is_then_too_late(ps: Ps) -> None:
    ps.create()
    first = Slots.create("gradients", layout_of(ps.plan).trained[0], 1)
    shared = m.Join(0, 1, 1, first.ref, None)
    assert only(ps.send(name(0), shared), m.Variables).slot >= 0
    assert only(ps.join(0, request=2), m.Variables).slot == -1
    assert ps.send(name(0), shared) == []
    assert only(ps.join(0, request=2), m.Variables).slot == -1
    first.close()


def test_shared_memory_that_cannot_be_opened_is_refused_and_frames_are_welcome(ps: Ps) -> None:
    ps.create()
    assert only(ps.send(name(0), m.Join(0, 1, 1, m.MemoryRef(2**40, 0, 4096, 1), None)), m.Fault).kind == "SegmentError"
    assert only(ps.join(0, request=2), m.Variables).slot == -1


def test_a_goodbye_of_an_old_incarnation_changes_nothing(running: Ps) -> None:
    running.join(1, incarnation=2)
    before = running.state()
    only(running.leave(1, incarnation=1, finished=False, loss=9.0), m.Bye)
    assert running.state() == before


def test_a_goodbye_of_a_stranger_changes_nothing(running: Ps) -> None:
    before = running.state()
    only(running.leave(55, loss=9.0), m.Bye)
    assert running.state() == before


# -- waiting --------------------------------------------------------------------------------------------------------------


def test_a_gradient_that_comes_again_under_a_later_request_is_answered_under_that_one(running: Ps) -> None:
    def again(request: int) -> list[Reply]:
        return running.send(name(0), m.Push(0, 1, request, 1, 0, -1, [], 0.5), running.gradient())

    running.push(0, 1, 0)  # its worker loses the connection while it waits for the round, and takes it up again
    assert again(7) == []
    released = [r.message for r in running.push(1, 1, 0) if isinstance(r.message, m.Variables)]
    assert sorted(v.request for v in released) == [2, 7]
    [reply] = again(8)  # lost once more, after the round: it is told what it was told before, and nothing is applied
    assert isinstance(reply.message, m.Variables) and reply.message.request == 8 and reply.message.version == 1
    assert reply.message.outcome is not None and reply.message.outcome.accepted
    assert running.service.life.tally.updates == 1


def test_a_probe_while_held_names_the_missing_workers(running: Ps) -> None:
    running.push(0, 1, 0)
    held = only(running.send(name(0), m.Probe(0, 1, 2)), m.Held)
    assert (held.what, held.have, held.need, held.missing) == ("the quorum", 1, 2, [1])


def test_a_probe_about_a_request_that_never_came_says_so(running: Ps) -> None:
    assert only(running.send(name(0), m.Probe(0, 1, 2)), m.Unknown).request == 2
    assert only(running.send(b"x", m.Probe(7, 9, 2)), m.Unknown).request == 2


def test_a_bounded_worker_that_is_ahead_is_told_for_whom_it_waits(ps: Ps) -> None:
    ps.create(rule=tq.Bounded(1))
    ps.join(0)
    ps.join(1)
    only(ps.push(0, 1, 0), m.Variables)
    assert ps.push(0, 2, 1) == []
    held = only(ps.send(name(0), m.Probe(0, 1, 3)), m.Held)
    assert (held.what, held.missing) == ("the slowest worker", [1])
    assert set(by_peer(ps.push(1, 1, 0))) == {name(0), name(1)}


def test_silence_for_longer_than_liveness_frees_the_round(running: Ps) -> None:
    running.push(0, 1, 0)
    running.now += 3
    running.send(b"beat", m.Beat(0, 1))
    assert running.later(2.0) == []
    released = only(running.later(0.5), m.Variables, name(0))
    assert (released.version, released.outcome) == (0, m.Outcome(True, "fresh", 0))
    assert any("/job:worker/task:1 counts as dead (not heard of for 5.5 s)" in line for line in running.said)
    assert only(running.push(0, 2, 0), m.Variables).version == 1  # a lone worker fills the quorum


def test_beats_and_probes_keep_a_worker_alive(running: Ps) -> None:
    for _ in range(6):
        running.now += 2
        assert only(running.send(b"beat", m.Beat(0, 1)), m.Alive) == m.Alive(0, False)
        running.send(name(1), m.Probe(1, 1, 2))
        running.later(0)
    assert running.service.status()["live"] == [0, 1]


def test_the_end_of_a_process_is_known_at_once(running: Ps) -> None:
    running.push(0, 1, 0)
    released = running.service.process_ended(1, 1, running.now, running.wall)
    assert only(released, m.Variables, name(0)).version == 0
    assert any("its process ended" in line for line in running.said)


def test_a_worker_taken_for_dead_that_speaks_again_is_told_its_gradient_expired(running: Ps) -> None:
    running.now += 4
    running.send(b"beat", m.Beat(0, 1))
    running.later(2)
    assert running.service.status()["live"] == [0]
    answers = running.push(1, 1, 0)
    assert only(answers, m.Variables, name(1)).outcome == m.Outcome(False, "expired", 0)
    assert running.service.status()["live"] == [0, 1]


# -- the end --------------------------------------------------------------------------------------------------------------


def test_the_job_ends_when_everybody_has_left(running: Ps) -> None:
    only(running.leave(1), m.Bye, name(1))
    assert running.service.ended is None
    only(running.leave(0), m.Bye)
    assert running.service.ended == m.End(True, "the run is over")


def test_leaving_twice_is_answered_twice(running: Ps) -> None:
    only(running.leave(1), m.Bye)
    before = running.state()
    only(running.leave(1), m.Bye)
    assert running.state() == before


def test_a_worker_that_failed_makes_the_job_end_badly(running: Ps) -> None:
    running.leave(1, finished=False, why="ValueError: no")
    running.leave(0)
    running.later(LATE_S)
    assert running.service.ended is None, "it may come back"
    running.later(0.5)
    why = "/job:worker/task:1 failed and did not come back (its program failed: ValueError: no)"
    assert running.service.ended == m.End(False, why)
    assert any("/job:worker/task:1 counts as dead (its program failed: ValueError: no)" in s for s in running.said)


def test_a_failure_that_was_made_good_is_forgiven(running: Ps) -> None:
    running.leave(1, finished=False)
    running.join(1, incarnation=2)
    running.leave(0)
    assert running.service.ended is None
    running.leave(1, incarnation=2)
    assert running.service.ended == m.End(True, "the run is over")


def test_a_worker_that_failed_twice_is_not_forgiven(ps: Ps) -> None:
    ps.create(rule=tq.Async(), last_step=1)
    ps.join(0)
    ps.join(1)
    ps.leave(1, finished=False)
    ps.join(1, incarnation=2)
    ps.leave(1, incarnation=2, finished=False, why="again")
    ps.push(0, 1, 0)
    ps.leave(0)
    ended = ps.service.ended
    assert ended is not None and not ended.ok and "again" in ended.why, "the run was over: nobody waits for it"


def test_a_beat_that_comes_after_the_goodbye_of_a_worker_that_failed_does_not_make_it_alive(running: Ps) -> None:
    running.leave(1, finished=False)
    running.send(b"beat/1", m.Beat(1, 1))
    running.later(0.3)
    assert running.service.status()["live"] == [0]
    assert running.service.status()["per_worker"]["1"]["state"] == "dead"


def test_when_all_have_failed_the_job_ends_after_a_moment(running: Ps) -> None:
    running.leave(1, finished=False)
    running.leave(0, finished=False)
    running.later(LATE_S)
    assert running.service.ended is None
    running.later(0.5)
    assert running.service.ended is not None and not running.service.ended.ok


def test_workers_that_never_came_get_a_moment(ps: Ps) -> None:
    ps.create()
    ps.join(0)
    ps.leave(0)
    ps.later(LATE_S)
    assert ps.service.ended is None
    ps.later(0.5)
    assert ps.service.ended == m.End(True, "the run is over")


def test_a_worker_that_comes_in_that_moment_is_served(ps: Ps) -> None:
    ps.create(last_step=1)
    ps.join(0)
    ps.push(0, 1, 0)
    ps.push(0, 2, 0)
    ps.leave(0)
    ps.later(LATE_S - 1)
    late = only(ps.join(1), m.Variables)
    assert (late.version, late.stop) == (1, True)
    ps.later(2)
    assert ps.service.ended is None
    ps.leave(1)
    assert ps.service.ended == m.End(True, "the run is over")


def test_a_dead_worker_does_not_keep_a_finished_run_from_ending(ps: Ps) -> None:
    ps.create(rule=tq.Async(), last_step=1)
    ps.join(0)
    ps.join(1)
    ps.push(0, 1, 0)
    ps.leave(0)
    assert ps.service.ended is None
    ps.later(5.5)
    assert ps.service.ended == m.End(True, "the run is over")


def test_nobody_alive_for_long_ends_the_job_badly_and_names_who_is_missing(running: Ps) -> None:
    running.later(6)
    running.later(IDLE_S)
    assert running.service.ended is None
    running.later(1)
    assert running.service.ended is not None and not running.service.ended.ok
    assert "/job:worker/task:0, /job:worker/task:1" in running.service.ended.why


def test_gradients_of_a_round_that_never_closed_are_spoken_of(ps: Ps) -> None:
    ps.create(rule=tq.Buffered(3))
    ps.join(0)
    ps.join(1)
    ps.push(0, 1, 0)
    ps.leave(0)
    ps.leave(1)
    assert any("1 accepted gradients were not used" in line for line in ps.said)


def test_a_last_step_that_differs_from_the_chiefs_is_said(ps: Ps) -> None:
    ps.create(last_step=5)
    for worker, last_step in ((0, 5), (1, 7)):
        ps.join(worker, plan=make_plan(last_step=last_step))
    said = [line for line in ps.said if "last_step" in line]
    assert said == ["/job:worker/task:1 has last_step=7, which does not count: the run ends at the chief's 5"]
