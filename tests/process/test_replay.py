"""Recorded runs are made again, bit for bit: every rule, several ps tasks, deaths and restarts."""

import random
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.process.replays import EPOCHS_PROGRAM, PROGRAM, ROWS_PROGRAM, record, replay, spawn
from tests.process.tasks import Started, by_hand
from torchquorum.formats.record_file import MAGIC, RecordFile, RunRecordError, read_record
from torchquorum.replay.replay import ReplayOptions, make_again

pytestmark = pytest.mark.replays


@pytest.mark.parametrize("rule", ["async", "sync", "async:pipeline"])
def test_a_recorded_run_is_made_again_bit_for_bit(rule: str, tmp_path: Path) -> None:
    record(tmp_path, f"--rule={rule}", "--load=6" if rule == "async" else "--load=-1")
    assert replay(tmp_path)


@pytest.mark.parametrize("rule", ["async", "sync"])
def test_several_optimizers_and_rows_that_are_asked_for_ahead_are_made_again(rule: str, tmp_path: Path) -> None:
    record(tmp_path, f"--rule={rule}", "--ahead", ps=2, program=ROWS_PROGRAM)
    assert replay(tmp_path)


@pytest.mark.parametrize("rule", ["async", "sync"])
def test_epochs_and_barriers_are_made_again(rule: str, tmp_path: Path) -> None:
    record(tmp_path, f"--rule={rule}", program=EPOCHS_PROGRAM)
    said = replay(tmp_path)
    assert sum(line.endswith("] done") for line in said) == 2, said


def test_rows_may_be_as_old_as_they_were(tmp_path: Path) -> None:
    record(tmp_path, "--max-staleness=2", "--ahead", ps=2, program=ROWS_PROGRAM)
    assert replay(tmp_path)


@pytest.mark.parametrize(
    ("rule", "ps", "who", "flags", "program"),
    [
        ("bounded:2", 1, "worker", ["--shared"], PROGRAM),
        ("async", 2, "any", ["--durable=write"], PROGRAM),
        ("async", 2, "any", ["--durable=write", "--ahead"], ROWS_PROGRAM),
        ("local:3:async", 1, "worker", ["--compress=int8", "--save-steps=5"], PROGRAM),
        ("local:3:async", 1, "any", ["--save-steps=5"], PROGRAM),
    ],
)
def test_a_run_whose_tasks_are_killed_whenever_is_made_again_bit_for_bit(
    rule: str, ps: int, who: str, flags: list[str], program: Path, tmp_path: Path
) -> None:
    seed = time.time_ns()
    draw, folder = random.Random(seed), tmp_path / "run"
    flags = [f"--rule={rule}", "--steps=60", f"--logdir={folder}", "--record", "--pause=0.02", *flags]
    with by_hand(ps=ps, workers=2, program=program) as cluster:

        def start(job: str, index: int) -> Started:
            return cluster.start(job, index, *(flags if job == "worker" else ()))

        tasks = {(job, i): start(job, i) for job, count in (("ps", ps), ("worker", 2)) for i in range(count)}
        tasks["worker", 0].until("begins at")
        for _ in range(2):
            time.sleep(draw.uniform(0.0, 0.4))
            victim = draw.choice([task for task in tasks if who in ("any", task[0])])
            if tasks[victim].process.poll() is None:
                tasks[victim].kill()
                tasks[victim].wait()
                tasks[victim] = start(*victim)
        codes = {victim: task.wait() for victim, task in tasks.items()}
        assert set(codes.values()) == {0}, f"seed {seed}: {codes}\n" + "\n".join(t.tail() for t in tasks.values())
    try:
        replay(folder)
    except BaseException:
        print(f"seed {seed}")
        raise


def test_an_update_is_written_with_the_gradients_that_made_it(tmp_path: Path) -> None:
    record(tmp_path, "--rule=sync", "--steps=12", "--optimizer=SGD")
    said: list[str] = []
    options = ReplayOptions(folder=tmp_path, dump=8)
    assert make_again(options, said.append, lambda _life, _line: None, spawn=spawn) == 0, said  # type: ignore[arg-type]
    found = load_file(tmp_path / "dump-8.safetensors")
    own = [found[name] for name in sorted(found) if name.startswith("gradient/") and name.endswith("/4.weight")]
    assert len(own) == 2 and sum("norm of its gradient" in line for line in said) == 2
    expected = found["before/4.weight"] - 0.01 * (own[0] + own[1]) / 2
    torch.testing.assert_close(found["after/4.weight"], expected, rtol=1e-5, atol=1e-7)
    with pytest.raises(RunRecordError, match="step 99: the record goes from step 0 to step 12"):
        make_again(ReplayOptions(folder=tmp_path, to=99), said.append, lambda _life, _line: None)


def test_an_update_of_rows_is_written_with_the_gradients_that_made_it(tmp_path: Path) -> None:
    record(tmp_path, "--rule=sync", "--steps=8", program=ROWS_PROGRAM)
    said: list[str] = []
    options = ReplayOptions(folder=tmp_path, dump=5)
    assert make_again(options, said.append, lambda _life, _line: None, spawn=spawn) == 0, said  # type: ignore[arg-type]
    found = load_file(tmp_path / "dump-5.safetensors")
    assert sum(line.startswith("rows, version 5: /job:worker/task:") for line in said) == 2, said
    assert sum(line.startswith("dense, version ") for line in said) == 2, said
    touched = torch.cat(
        [keys for name, keys in found.items() if name.endswith("/fixed.weight/keys") and "gradient" in name]
    )
    changed = (found["before/fixed.weight/rows"] != found["after/fixed.weight/rows"]).any(1)
    assert set(found["after/fixed.weight/keys"][changed].tolist()) == set(touched.tolist())


def test_what_is_no_record_or_was_made_elsewhere_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(RunRecordError, match="only a run that was recorded can be replayed"):
        replay(tmp_path)
    (tmp_path / "run.record").write_bytes(b"something else entirely")
    with pytest.raises(RunRecordError, match="is no record of a run"):
        replay(tmp_path)
    (tmp_path / "run.record").write_bytes(MAGIC)
    with pytest.raises(RunRecordError, match="is empty"):
        replay(tmp_path)


def test_a_torn_end_is_cut_off_and_damage_is_named(tmp_path: Path) -> None:
    file = RecordFile(tmp_path)
    file.append(b"one")
    file.append(b"two")
    file.close()
    path = tmp_path / "run.record"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert list(read_record(tmp_path)) == [b"one"]
    again = RecordFile(tmp_path)
    assert again.torn_bytes > 0
    again.append(b"three")
    again.close()
    assert list(read_record(tmp_path)) == [b"one", b"three"]
    path.write_bytes(whole.replace(b"one", b"OnE"))
    with pytest.raises(RunRecordError, match="is damaged at byte"):
        list(read_record(tmp_path))
