"""Checkpoints and restores, by hand: what ps tasks say and do while the disk does what it likes."""

import shutil
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import torchquorum as tq
import torchquorum.wire.messages as m
from tests.protocol.by_hand import Ps, layout_of, make_plan, name, only
from tests.protocol.saving import Make, save, start, told, until
from torchquorum.formats.checkpoint import list_checkpoints, load_manifest, verify
from torchquorum.formats.ledger import Event, read_records
from torchquorum.placement.layout import Variable
from torchquorum.server.followers import SILENCE_S
from torchquorum.server.reply import LEADER, Reply
from torchquorum.server.stand_in import STAND_IN_S

# -- one ps ---------------------------------------------------------------------------------------------------------------


def test_what_was_saved_is_restored_with_the_positions_of_the_workers(make: Make, tmp_path: Path) -> None:
    ps = make()
    start(ps, tmp_path, steps=2)
    assert save(ps, 1, tmp_path) == m.SaveState(1, "running", 2, "", "")
    assert ps.push(0, 3, 2) == []  # it waits for the other one, and is asked for its position while it does
    assert only(ps.send(name(0), m.Probe(0, 1, 4)), m.Held).save == 2
    for worker in (0, 1):
        ps.send(name(worker), m.Position(worker, 1, 2, {"epoch": worker}))
    ps.send(name(1), m.Position(1, 99, 2, {"epoch": "of a stranger"}))
    done = told(ps, 1, tmp_path)
    assert (done.state, done.step, Path(done.path)) == ("done", 2, tmp_path / "model.ckpt-2")
    assert f"/job:ps/task:0: saved {tmp_path}/model.ckpt-2" in ps.said
    assert verify(Path(done.path)) is None
    workers = load_manifest(Path(done.path)).workers
    assert {w: (body["epoch"], body["version"]) for w, body in workers.items()} == {"0": (0, 2), "1": (1, 2)}

    again = make()
    assert only(again.send(b"chief", m.Create(ps.plan, done.path, generation=7)), m.Created) == m.Created(2, False)
    assert torch.equal(again.values(), torch.full_like(again.values(), 2.0))
    position = only(again.join(1, 5), m.Variables).position
    assert position is not None and position["epoch"] == 1
    for asked in (m.Probe(1, 5, 1), m.Join(1, 5, 1, None, None)):  # whoever did not hear it, or asked before it came
        assert only(again.send(name(1), asked), m.Variables).position == position


def test_a_ps_whose_neighbour_lost_its_variables_gives_its_own_up_and_restores(make: Make, tmp_path: Path) -> None:
    ps = make()
    start(ps, tmp_path, steps=1)
    done = told(ps, 1, tmp_path)
    for worker in (0, 1):
        ps.push(worker, 2, 1)
    save(ps, 2, tmp_path)  # will never be: it goes with the variables
    create = m.Create(ps.plan, done.path, generation=7, replace=True)
    assert only(ps.send(b"chief", create), m.Created) == m.Created(1, False)
    assert only(ps.send(b"chief", create), m.Created) == m.Created(
        1, False
    )  # the same once more, if the answer was lost
    assert only(ps.send(b"chief", m.Create(ps.plan, done.path, generation=8)), m.Created) == m.Created(1, True)
    assert torch.equal(ps.values(), torch.full_like(ps.values(), 1.0))
    assert only(ps.push(0, 3, 2), m.Fault).kind == "LostPlaceError"  # everybody joins again
    until(ps, lambda: not list(tmp_path.glob(".*partial*")) and not ps.service.life.saver.busy)
    assert [info.step for info in list_checkpoints(tmp_path)] == [1]
    began = [r for r in read_records(tmp_path) if isinstance(r, Event) and r.event == "began"]
    assert [r.version for r in began] == [0, 1]


def test_a_creation_that_cannot_be_leaves_the_variables_as_they_are(make: Make, tmp_path: Path) -> None:
    ps, other = make(), make()
    start(ps, tmp_path / "run", steps=1)
    start(other, tmp_path / "other", steps=1, variables=[Variable(name="v", shape=(3,), dtype="float32")])
    elsewhere = told(other, 1, tmp_path / "other")
    wider = make()
    start(
        wider, tmp_path / "wider", variables=[Variable(name="w", shape=(4, 6), dtype="float32"), *ps.plan.variables[1:]]
    )
    same_names = told(wider, 1, tmp_path / "wider")
    torn = tmp_path / "model.ckpt-9"
    torn.mkdir()
    (torn / "manifest.json").write_text("{")
    frames = bytes(layout_of(ps.plan).trained[0].size_bytes), bytes(layout_of(ps.plan).constants[0].size_bytes)
    again: dict[str, Any] = {"generation": 7, "replace": True}
    for create, given in (
        (m.Create(ps.plan, elsewhere.path, **again), ()),  # of another model
        (m.Create(ps.plan, same_names.path, **again), ()),
        (m.Create(ps.plan, str(torn), **again), ()),
        (m.Create(ps.plan, str(tmp_path / "model.ckpt-4"), **again), ()),  # not there
        (m.Create(ps.plan, None, **again), frames[:1]),
        (m.Create(ps.plan, None, **again), (frames[0][:-1], frames[1])),
        (m.Create(msgspec.structs.replace(ps.plan, durable="write", logdir=None), None, **again), frames),
    ):
        fault = only(ps.send(b"chief", create, *given), m.Fault)
        if create.restore == same_names.path:
            assert "w is float32 [4, 6] there and float32 [4, 5] here; give another logdir" in fault.text
        assert torch.equal(ps.values(), torch.full_like(ps.values(), 1.0))
    ps.push(0, 2, 1)  # nobody had to join again
    replies = ps.push(1, 2, 1)
    assert {r.message.version for r in replies if isinstance(r.message, m.Variables)} == {2}
    assert only(ps.send(b"chief", m.Create(ps.plan, None, **again), *frames), m.Created) == m.Created(0, False)


def test_a_folder_that_cannot_be_written_is_said_and_training_goes_on(make: Make, tmp_path: Path) -> None:
    ps = make()
    start(ps, tmp_path)
    (tmp_path / "file").write_text("")
    failed = save(ps, 1, tmp_path / "file" / "folder")
    assert failed.state == "failed" and "failed" in failed.text
    assert any("/job:ps/task:0: no checkpoint at step 1: " in line and "training goes on" in line for line in ps.said)
    assert told(ps, 2, tmp_path).state == "done"


def test_parts_that_vanish_before_they_are_published_are_said_and_training_goes_on(make: Make, tmp_path: Path) -> None:
    ps = make()
    start(ps, tmp_path)
    save(ps, 1, tmp_path)
    saving = ps.run.checkpoints.saving
    assert saving is not None
    until(ps, lambda: saving.parts)
    assert not saving.publishing
    shutil.rmtree(saving.partial)  # type: ignore[arg-type]
    failed = told(ps, 1, tmp_path)
    assert failed.state == "failed" and "model.ckpt-1" in failed.text
    assert any("no checkpoint at step 1: " in line and line.endswith("training goes on") for line in ps.said)
    for worker in (0, 1):
        ps.push(worker, 2, 1)
    assert ps.shard.version == 2
    assert told(ps, 2, tmp_path).state == "done"


def test_a_second_checkpoint_waits_for_its_turn_and_is_then_of_the_version_that_there_is(
    make: Make, tmp_path: Path
) -> None:
    ps = make()
    start(ps, tmp_path)
    save(ps, 1, tmp_path)
    assert save(ps, 2, tmp_path) == m.SaveState(2, "running", -1, "", "")
    for worker in (0, 1):
        ps.push(worker, 2, 1)
    done = told(ps, 2, tmp_path)
    assert (done.state, done.step) == ("done", 2)
    assert [info.step for info in list_checkpoints(tmp_path)] == [1, 2]


def test_while_the_chief_is_dead_the_ps_saves_in_its_place_now_and_then(make: Make, tmp_path: Path) -> None:
    ps = make()
    start(ps, tmp_path)
    ps.service.process_ended(0, 1, ps.now, ps.wall)
    until(ps, lambda: "/job:ps/task:0: saved" in " ".join(ps.said), alive=(1,), pace_s=1.0)
    ps.push(1, 2, 1)
    ps.push(1, 3, 1)  # alone, it fills the quorum
    assert ps.shard.version == 2
    half = ps.now + STAND_IN_S / 2
    until(ps, lambda: ps.now > half, alive=(1,), pace_s=1.0)
    assert [info.step for info in list_checkpoints(tmp_path)] == [1]
    until(ps, lambda: len(list_checkpoints(tmp_path)) == 2, alive=(1,), pace_s=1.0)
    assert any("counts as dead (its process ended); the run goes on without it (ps task 0 saves" in s for s in ps.said)


def test_a_chief_that_leaves_by_an_exception_is_a_dead_chief(make: Make, tmp_path: Path) -> None:
    ps = make()
    start(ps, tmp_path, last_step=3)
    ps.leave(0, finished=False, why="ValueError: boom")
    until(ps, lambda: len(list_checkpoints(tmp_path)) == 1, alive=(1,), pace_s=1.0)
    assert any(
        "(its program failed: ValueError: boom); the run goes on without it (ps task 0 saves" in s for s in ps.said
    )
    assert only(ps.send(b"beat/1", m.Beat(1, 1)), m.Alive).lead == 1, "the first one alive does the chief's work"
    ps.push(1, 2, 1)
    ps.push(1, 3, 1)  # alone, it fills the quorum
    until(ps, lambda: len(list_checkpoints(tmp_path)) == 2, alive=(1,), pace_s=1.0)
    ps.push(1, 4, 2)
    ps.push(1, 5, 2)
    ps.leave(1)
    until(ps, lambda: ps.service.ended is not None, alive=())
    assert [info.step for info in list_checkpoints(tmp_path)] == [1, 2, 3]
    assert ps.service.ended is not None and not ps.service.ended.ok


def test_a_chief_that_was_done_before_the_others_has_the_ps_save_by_the_clock_and_at_the_end(
    make: Make, tmp_path: Path
) -> None:
    ps = make()
    start(ps, tmp_path)
    assert told(ps, 1, tmp_path).state == "done"
    ps.leave(0)
    assert any("/job:worker/task:0 is done; the others go on (ps task 0 saves in its place)" in s for s in ps.said)
    ps.push(1, 2, 1)
    ps.push(1, 3, 1)
    half = ps.now + STAND_IN_S / 2
    until(ps, lambda: ps.now > half, alive=(1,), pace_s=1.0)
    assert [info.step for info in list_checkpoints(tmp_path)] == [1], "the chief had saved when it left"
    until(ps, lambda: len(list_checkpoints(tmp_path)) == 2, alive=(1,), pace_s=1.0)
    ps.push(1, 4, 2)
    ps.push(1, 5, 2)
    ps.leave(1)
    until(ps, lambda: ps.service.ended is not None, alive=())
    assert [info.step for info in list_checkpoints(tmp_path)] == [1, 2, 3]
    assert ps.service.ended == m.End(True, "the run is over")


def test_the_job_ends_only_when_a_checkpoint_in_the_making_is_made_whoever_asked_for_it(
    make: Make, tmp_path: Path
) -> None:
    ps = make()
    start(ps, tmp_path, steps=2, last_step=2)
    save(ps, 1, tmp_path)
    assert ps.saving.version == 2
    ps.leave(1)
    ps.leave(0, finished=False)  # it did not wait for what it asked for
    until(ps, lambda: ps.service.ended is not None, alive=())
    assert [info.step for info in list_checkpoints(tmp_path)] == [2]
    assert [path.name for path in tmp_path.glob(".*partial*")] == []


def test_a_ps_that_ends_leaves_nothing_of_a_checkpoint_that_it_cannot_complete(make: Make, tmp_path: Path) -> None:
    ps, other = make(ps=2), make(index=1, ps=2)
    for task in (ps, other):
        task.create(logdir=str(tmp_path))
    ps.run.checkpoints.save(1, str(tmp_path), 5, ps.now)
    until(ps, lambda: 0 in ps.saving.parts, alive=())  # the other ps never writes its part
    assert list(tmp_path.glob(".*partial*"))
    ps.service.close()
    assert [path.name for path in tmp_path.glob(".*partial*")] == []


def test_the_last_checkpoint_is_tried_again_and_a_run_that_is_saved_in_the_end_has_ended_well(
    make: Make, tmp_path: Path
) -> None:
    ps = make()
    start(ps, tmp_path, steps=2, last_step=2, save_s=30.0)
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    folder = in_the_way / "folder"
    trying = save(ps, 1, folder)
    assert trying.state == "running" and "file" in trying.text, "the chief hears why it takes so long"
    until(ps, lambda: ps.now > 110, pace_s=1.0)
    assert ps.service.ended is None and save(ps, 1, folder).state == "running"
    assert len([line for line in ps.said if "no checkpoint at step 2" in line]) == 1, "said once, then every minute"
    in_the_way.unlink()
    assert told(ps, 1, folder).state == "done"
    ps.leave(0)
    ps.leave(1)
    until(ps, lambda: ps.service.ended is not None, alive=())
    assert ps.service.ended == m.End(True, "the run is over")


@pytest.mark.parametrize(("must_save", "ok"), [(True, False), (False, True)])
def test_a_run_whose_last_step_cannot_be_saved_has_failed_unless_that_is_allowed(
    make: Make, tmp_path: Path, must_save: bool, ok: bool
) -> None:
    ps, folder = make(), tmp_path / "run"
    start(ps, folder, last_step=2, must_save=must_save, save_s=10.0)
    assert told(ps, 1, folder).state == "done"
    for worker in (0, 1):
        ps.push(worker, 2, 1)
    folder.rename(tmp_path / "away")
    folder.write_text("no folder any more")
    until(ps, lambda: save(ps, 2, folder).state != "running", pace_s=1.0)
    failed = save(ps, 2, folder)
    assert failed.state == "failed" and f"The last good checkpoint is {folder}/model.ckpt-1." in failed.text
    assert ps.service.status()["not_saved"].startswith("the last step of the run, 2, is not saved: ")
    ps.leave(0, finished=False)
    ps.leave(1)
    until(ps, lambda: ps.service.ended is not None, alive=())
    ended = ps.service.ended
    assert ended is not None and ("is not saved" in ended.why) != ok


def test_at_the_end_the_ps_saves_in_place_of_a_chief_that_is_gone_while_the_others_wait_for_it(
    make: Make, tmp_path: Path
) -> None:
    ps = make()
    start(ps, tmp_path, last_step=2)
    ps.leave(0, finished=False)
    until(ps, lambda: ps.service.status()["saved_step"] == 1, alive=(1,), pace_s=1.0)
    ps.push(1, 2, 1)
    ps.push(1, 3, 1)
    assert ps.service.status()["saved_step"] == 1 and ps.service.status()["global_step"] == 2
    until(ps, lambda: ps.service.status()["saved_step"] == 2, alive=(1,), pace_s=1.0)


def test_whoever_stops_a_run_again_ends_the_tries_to_save_it(make: Make, tmp_path: Path) -> None:
    ps = make()
    start(ps, tmp_path, steps=2, last_step=2, save_s=1000.0)
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    assert save(ps, 1, in_the_way / "folder").state == "running"
    ps.service.stop(ps.now, ps.wall)
    assert save(ps, 1, in_the_way / "folder").state == "failed"


def test_the_averages_are_saved_and_restored_and_asked_for_only_where_they_are_kept(make: Make, tmp_path: Path) -> None:
    ps = make()
    start(ps, tmp_path, average=m.AverageSpec(0.5, False))
    done = told(ps, 1, tmp_path)
    again = make()
    again.plan = ps.plan
    again.send(b"chief", m.Create(ps.plan, done.path, generation=7))
    again.join(0)
    [reply] = again.send(name(0), m.Pull(0, 1, 2, True))
    assert torch.frombuffer(bytearray(reply.frames[0]), dtype=torch.float32)[:20].eq(0.5).all()
    without = make()
    start(without, tmp_path / "other")
    fault = only(without.send(name(0), m.Pull(0, 1, 3, True)), m.Fault)
    assert fault.kind == "ConfigError" and "average=tq.ExponentialMovingAverage" in fault.text


@pytest.mark.parametrize(
    ("optimizer", "arguments"),
    [
        ("Adafactor", {}),  # keeps what has another shape than its variable
        ("Adam", {"amsgrad": True}),
        ("NAdam", {}),
        ("Rprop", {}),
        ("SGD", {"momentum": 0.9}),
    ],
)
def test_an_optimizer_goes_on_from_a_checkpoint_as_if_nothing_had_happened(
    make: Make, tmp_path: Path, optimizer: str, arguments: dict[str, Any]
) -> None:
    ps, again = make(), make()
    start(ps, tmp_path, steps=2, optimizer=m.OptimizerSpec(optimizer, [{"lr": 0.1, **arguments}]))
    done = told(ps, 1, tmp_path)
    again.plan = ps.plan
    assert only(again.send(b"chief", m.Create(ps.plan, done.path, generation=7)), m.Created).version == 2
    for worker in (0, 1):
        again.join(worker)
    for step in (1, 2):
        for worker in (0, 1):
            ps.push(worker, step + 2, step + 1, value=0.3 * step)
            again.push(worker, step, step + 1, value=0.3 * step)
        assert torch.equal(ps.values(), again.values())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimizer": m.OptimizerSpec("Adam", [{"lr": 1.0}])}, "was made with SGD, this run uses Adam"),
        ({"variables": make_plan().variables[:2]}, r"holds another model: only there ['table'], only here []"),
    ],
)
def test_a_checkpoint_of_another_program_is_refused_and_the_right_one_welcome(
    make: Make, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    ps = make()
    start(ps, tmp_path)
    path = told(ps, 1, tmp_path).path
    again = make()
    fault = only(again.send(b"chief", m.Create(make_plan(**changes), path, generation=7)), m.Fault)
    assert said in fault.text and again.service.run is None
    assert only(again.send(b"chief", m.Create(make_plan(), path, generation=7)), m.Created).version == 1


# -- several ps -----------------------------------------------------------------------------------------------------------


def pair(make: Make, tmp_path: Path) -> tuple[Ps, Ps]:
    """Two ps tasks that know of each other; nothing travels between them by itself."""
    first, second = make(0, ps=2), make(1, ps=2)
    for ps in (second, first):
        ps.create(logdir=str(tmp_path), slice_bytes=8)
    hello(first, second)
    for worker in (0, 1):
        for ps in (first, second):
            ps.join(worker)
    hello(first, second)
    return first, second


def hello(first: Ps, second: Ps) -> list[Reply]:
    """Shard 1's heartbeat, and what shard 0 answers it with."""
    beat = second.service.heartbeat()
    assert beat is not None
    replies: list[Reply] = []
    for reply in first.send(b"shard/1", beat.message):
        if reply.peer == b"shard/1":
            replies += second.send(LEADER, reply.message)
    return replies


def test_each_shard_writes_its_part_and_tells_shard_0_until_it_has_heard(make: Make, tmp_path: Path) -> None:
    first, second = pair(make, tmp_path)
    assert any(isinstance(r.message, m.SaveState) for r in first.send(name(0), m.Save(0, 1, 1, str(tmp_path), 5)))
    hello(first, second)
    replies = until(second, lambda: second.unconfirmed is not None)
    part = second.later(0.1)[0]
    assert part.peer == LEADER and isinstance(part.message, m.Part) and part.message.shard == 1
    assert second.later(0.1)[0].message == part.message, replies  # until it is heard
    first.now = second.now
    [taken] = [r for r in first.send(b"shard/1", part.message) if isinstance(r.message, m.PartTaken)]
    assert second.send(LEADER, taken.message) == [] and second.later(0.1) == []
    until(first, lambda: list_checkpoints(tmp_path), pace_s=1.0)
    [info] = list_checkpoints(tmp_path)
    assert info.problem is None and load_manifest(info.path).num_ps == 2


def test_a_part_that_could_not_be_written_fails_the_checkpoint_for_all(make: Make, tmp_path: Path) -> None:
    first, second = pair(make, tmp_path)
    first.send(name(0), m.Save(0, 1, 1, str(tmp_path), 5))
    saving = first.run.checkpoints.saving
    assert saving is not None
    until(first, lambda: saving.parts)
    shutil.rmtree(saving.partial)  # type: ignore[arg-type]
    hello(first, second)
    until(second, lambda: second.unconfirmed is not None)
    untold = second.unconfirmed
    assert untold is not None and "part-00001-of-00002" in untold.error
    first.send(b"shard/1", untold)
    assert told(first, 1, tmp_path).state == "failed"
    assert any("no checkpoint at step 0" in line and "training goes on" in line for line in first.said)


def test_a_shard_that_is_gone_is_not_waited_for_longer_than_half_a_minute(make: Make, tmp_path: Path) -> None:
    first, _ = pair(make, tmp_path)
    first.send(name(0), m.Save(0, 1, 1, str(tmp_path), 5))
    until(first, lambda: first.saving.parts)
    begun = first.now
    until(first, lambda: save_state(first, 1, tmp_path).state != "running", pace_s=1.0)
    assert first.now - begun >= SILENCE_S
    state = save_state(first, 1, tmp_path)
    assert state.state == "failed"
    assert "/job:ps/task:1 (localhost:1001) has not been heard of for" in state.text and "start it again" in state.text


def settled(ps: Ps) -> bool:
    return only(ps.send(b"chief", m.Settle()), m.Settled).done


@pytest.mark.parametrize(
    ("rule", "with_positions", "kept"),
    [(tq.Sync(), True, [1]), (tq.Sync(), False, []), (tq.Async(), True, [2]), (tq.Async(), False, [2])],
)
def test_the_chief_that_chooses_a_checkpoint_waits_for_one_that_is_as_good_as_made(
    make: Make, tmp_path: Path, rule: tq.Rule, with_positions: bool, kept: list[int]
) -> None:
    ps = make()
    assert settled(ps)  # there is nothing yet
    ps.create(logdir=str(tmp_path), rule=rule)
    for worker in (0, 1):
        ps.join(worker)
        ps.push(worker, 1, 0)
    assert settled(ps)
    save(ps, 1, tmp_path)
    until(ps, lambda: ps.saving.parts, alive=())
    for worker in (0, 1) if with_positions else ():
        ps.send(name(worker), m.Position(worker, 1, ps.saving.version, {}))
    assert settled(ps) is not bool(kept) and list_checkpoints(tmp_path) == []
    before = ps.now
    until(ps, lambda: settled(ps), alive=())
    assert [info.step for info in list_checkpoints(tmp_path)] == kept
    assert ps.now == before  # no position was waited for


def test_a_checkpoint_without_all_its_parts_is_given_up_when_the_chief_chooses(make: Make, tmp_path: Path) -> None:
    first, _ = pair(make, tmp_path)
    first.send(name(0), m.Save(0, 1, 1, str(tmp_path), 5))
    first.send(name(0), m.Save(0, 1, 2, str(tmp_path), 5))  # waits for its turn
    until(first, lambda: first.saving.parts)
    assert settled(first)
    assert save_state(first, 1, tmp_path).state == "failed"
    first.later(10.0)
    first.service.life.saver.close()
    assert list(tmp_path.glob("*model.ckpt*")) == []


def save_state(ps: Ps, number: int, folder: Path) -> m.SaveState:
    replies = ps.send(name(0), m.Save(0, 1, number, str(folder), 5))
    return next(r.message for r in replies if isinstance(r.message, m.SaveState))


def test_what_only_shard_0_may_be_asked_is_refused_elsewhere_and_strangers_are_refused_there(
    make: Make, tmp_path: Path
) -> None:
    first, second = pair(make, tmp_path)
    part = m.Part(1, 1, 0, "", [], {}, "")
    for message, said in (
        (m.Save(0, 1, 1, str(tmp_path), 5), "only shard 0 makes checkpoints"),
        (m.Stop(0, 1), "only shard 0 can stop the run"),
        (part, "only shard 0 takes parts of checkpoints"),
    ):
        before = second.state()
        assert said in only(second.send(b"x", message), m.Fault).text
        assert second.state() == before
    for message in (m.Save(0, 99, 1, str(tmp_path), 5), m.Stop(0, 99), m.Save(5, 1, 1, str(tmp_path), 5), m.Stop(5, 1)):
        assert only(first.send(b"x", message), m.Fault).kind == "LostPlaceError"
    for shard in (0, 2, -1):
        assert "only shard 0 takes parts" in only(first.send(b"x", m.Part(shard, 1, 0, "", [], {}, "")), m.Fault).text
    assert only(first.send(b"x", part), m.PartTaken) == m.PartTaken(1)  # of a checkpoint that nobody makes any more
    assert list_checkpoints(tmp_path) == []
    assert second.send(LEADER, m.Log(99, 0, [m.End(True, "of another generation")])) == []
    assert second.service.ended is None
    assert second.send(LEADER, m.Fault("protocol", "another release")) == []
    assert second.service.shard_0.refuses == "another release"
    stop = first.send(name(0), m.Stop(0, 1))
    assert any(isinstance(r.message, m.Alive) and r.message.stop for r in stop)


def test_a_ps_without_variables_answers_what_can_be_answered(make: Make) -> None:
    ps = make()
    assert only(ps.send(b"x", m.Beat(0, 1)), m.Alive) == m.Alive(0, False)
    assert only(ps.send(b"x", m.FateOf(0, 1, 1)), m.Fate).state == "never"
    assert ps.send(b"x", m.Position(0, 1, 0, {})) == []
    assert only(ps.send(b"x", m.MeanRequest()), m.Fault).kind == "LostPlaceError"
    assert only(ps.send(b"x", m.Leave(0, 1, None, None, True)), m.Bye)
    assert ps.service.process_ended(0, 1, ps.now, ps.wall) == [] and ps.service.stop(ps.now, ps.wall) == []
    assert ps.later(1.0) == []


def test_a_frozen_saver_does_not_keep_the_ps_from_answering(make: Make, tmp_path: Path) -> None:
    ps = make()
    start(ps, tmp_path)
    thawed = threading.Event()
    ps.service.life.saver.submit(lambda: thawed.wait() and None, answered=False)
    save(ps, 1, tmp_path)
    for worker in (0, 1):
        ps.push(worker, 2, 1)
    assert ps.shard.version == 2
    assert save(ps, 1, tmp_path).state == "running"
    thawed.set()
    assert told(ps, 1, tmp_path).step == 1  # of the version at which it was asked for


def test_a_rule_without_rounds_takes_the_latest_position_that_each_worker_gave(make: Make, tmp_path: Path) -> None:
    ps = make()
    ps.create(logdir=str(tmp_path), rule=tq.Async())
    for worker in (0, 1):
        ps.join(worker)
    ps.push(0, 1, 0)
    ps.push(1, 1, 0)
    ps.send(name(0), m.Position(0, 1, 1, {"epoch": 3}))
    save(ps, 1, tmp_path)
    for version in range(1, 8):
        ps.send(name(1), m.Position(1, 1, version, {"epoch": version}))
    done = told(ps, 1, tmp_path)
    assert {w: b["epoch"] for w, b in load_manifest(Path(done.path)).workers.items()} == {"0": 3, "1": 7}


def test_a_chief_that_goes_on_with_live_variables_makes_none_where_they_are_gone(make: Make, tmp_path: Path) -> None:
    ps, restarted = make(), make()
    start(ps, tmp_path, steps=1)
    frames = bytes(layout_of(ps.plan).trained[0].size_bytes), bytes(layout_of(ps.plan).constants[0].size_bytes)
    going_on = m.Create(ps.plan, only_existing=True)
    assert only(ps.send(b"chief", going_on, *frames), m.Created) == m.Created(1, True)
    assert only(restarted.send(b"chief", going_on, *frames), m.Fault).kind == "LostCreationError"
    assert restarted.service.run is None
