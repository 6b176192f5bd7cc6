"""An update that fails ends the run for everybody: each is told why, nothing is saved any more, and all may leave."""

from collections.abc import Callable
from pathlib import Path

import pytest

import torchquorum as tq
import torchquorum.wire.messages as m
from tests.protocol.by_hand import Ps, name, only
from tests.protocol.saving import Make, save, start, told, until
from torchquorum.formats.checkpoint import list_checkpoints
from torchquorum.formats.journal import JournalError
from torchquorum.server.reply import LEADER, Reply
from torchquorum.update.updater import Updater

Break = Callable[..., None]


@pytest.fixture
def broken_from(monkeypatch: pytest.MonkeyPatch) -> Break:
    """Makes every update fail from now on."""

    def begin(error: Exception) -> None:
        def fail(*_: object) -> None:
            raise error

        monkeypatch.setattr(Updater, "apply", fail)

    return begin


def test_a_failing_update_is_told_to_everybody_and_the_job_ends_when_all_have_left(
    make: Make, tmp_path: Path, broken_from: Break
) -> None:
    ps = make()
    start(ps, tmp_path)
    assert told(ps, 1, tmp_path).state == "done"
    broken_from(ValueError("no such rate"))
    assert ps.push(0, 2, 1) == []
    fault = only(ps.push(1, 2, 1), m.Fault, name(1))
    assert fault.kind == "UpdateError" and fault.request == 3
    assert "/job:ps/task:0: the update to version 2 failed (ValueError: no such rate)" in fault.text
    assert "would fail again at step 2" in fault.text and f"good checkpoint is {tmp_path}/model.ckpt-1" in fault.text
    assert only(ps.send(name(0), m.Probe(0, 1, 3)), m.Fault).text == fault.text, "who waits for the round hears it too"
    assert only(ps.send(name(0), m.Save(0, 1, 2, str(tmp_path), 5)), m.Fault).text == fault.text
    assert only(ps.join(1, incarnation=2, request=9), m.Fault).text == fault.text
    assert only(ps.send(b"beat/0", m.Beat(0, 1)), m.Alive).stop
    ps.leave(0, finished=False)
    ps.leave(1, finished=False)
    ended = ps.service.ended
    assert ended is not None and not ended.ok and fault.text in ended.why
    assert [info.step for info in list_checkpoints(tmp_path)] == [1]
    assert any("Traceback" in line and "no such rate" in line for line in ps.said)


@pytest.mark.parametrize(
    ("error", "advice"),
    [(MemoryError, "more memory"), (JournalError, "Mend that, then start the job")],
)
def test_the_advice_fits_what_failed(ps: Ps, broken_from: Break, error: type[Exception], advice: str) -> None:
    ps.create(rule=tq.Async())
    ps.join(0)
    broken_from(error("no room"))
    fault = only(ps.push(0, 1, 0), m.Fault)
    assert advice in fault.text and "fail again" not in fault.text
    assert "checkpoint" not in fault.text, "a run without a folder has none"


def test_an_update_that_fails_on_another_shard_ends_the_run_on_all(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = make(ps=2), make(index=1, ps=2)
    for task in (first, second):
        task.create(rule=tq.Async())

    def talk(replies: list[Reply], sender: Ps) -> list[Reply]:
        """Carries what the two ps tasks say to each other."""
        others: list[Reply] = []
        for reply in replies:
            if reply.peer == LEADER:
                others += talk(first.send(b"ps/1", reply.message), first)
            elif reply.peer == b"ps/1":
                others += talk(second.send(LEADER, reply.message), second)
            else:
                others.append(reply)
        return others

    def beat() -> list[Reply]:
        heartbeat = second.service.heartbeat()
        return talk([heartbeat], second) if heartbeat is not None else []

    beat()
    for task in (first, second):
        talk(task.join(0), task)
    beat()
    apply = Updater.apply

    def fail(updater: Updater, *given: object) -> object:
        if updater is second.shard.variables.update:
            raise ValueError("only here")
        return apply(updater, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Updater, "apply", fail)
    talk(second.push(0, 1, 0), second)
    talk(first.push(0, 1, 0), first)
    beat()
    fault = only(first.send(name(0), m.Probe(0, 1, 2)), m.Fault)
    assert "/job:ps/task:1: the update to version 1 failed (ValueError: only here)" in fault.text
    talk(second.leave(0, finished=False), second)
    talk(first.leave(0, finished=False), first)
    talk(first.later(0.3), first)
    talk(first.later(11), first)  # the second worker never came
    beat()
    assert first.service.ended is not None and second.service.ended is not None
    assert not first.service.ended.ok and "only here" in second.service.ended.why


def test_a_checkpoint_that_was_being_made_when_an_update_failed_is_finished(
    make: Make, tmp_path: Path, broken_from: Break
) -> None:
    ps = make()
    start(ps, tmp_path)
    assert save(ps, 1, tmp_path).state == "running"
    broken_from(ValueError("no"))
    for worker in (0, 1):
        ps.push(worker, 2, 1)
    for worker in (0, 1):
        ps.leave(worker, finished=False)
    until(ps, lambda: ps.service.ended is not None, alive=())
    assert [info.step for info in list_checkpoints(tmp_path)] == [1]
