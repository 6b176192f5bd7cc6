"""Buffers and deaths: real processes, real sockets, kill -9."""

import re
from pathlib import Path

from safetensors.torch import load_file

from tests.process.tasks import Started, by_hand
from torchquorum.cli.checkpoints import export
from torchquorum.formats.checkpoint import list_checkpoints

PROGRAM = Path(__file__).parent / "buffers_program.py"


def ends_well(*tasks: Started) -> None:
    for task in tasks:
        assert task.wait() == 0, task.tail()


def test_a_ps_killed_and_restarted_gives_the_buffers_back_as_they_were_at_the_checkpoint(tmp_path: Path) -> None:
    logdir, enough = tmp_path / "run", tmp_path / "enough"
    with by_hand(workers=1, program=PROGRAM) as cluster:
        options = (f"--logdir={logdir}", "--steps=1000000", f"--until={enough}", "--save-steps=10", "--pause=0.01")
        ps, chief = cluster.start("ps", 0), cluster.start("worker", 0, *options)
        ps.until("saved")
        chief.until("local 40 ")
        ps.kill()
        ps.wait()
        again = cluster.start("ps", 0)
        chief.until("going on at global step")
        enough.touch()
        ends_well(again, chief)
        done = re.fullmatch(r"done at (\d+) having seen (\d+)", chief.lines[-1])
        assert done is not None and done[1] == done[2], chief.tail()  # the program compares after every step
    target = tmp_path / "counter.safetensors"
    assert not export.main([str(logdir), str(target)], standalone_mode=False)
    exported = load_file(target)
    assert set(exported) == {"weight", "tied", "seen"} and exported["seen"][-1].item() == int(done[1])


def test_a_chief_killed_and_restarted_begins_with_the_buffers_of_a_live_worker(tmp_path: Path) -> None:
    with by_hand(program=PROGRAM) as cluster:
        options = (f"--logdir={tmp_path}", "--steps=100000", "--pause=0.01", "--rule=async")
        ps = cluster.start("ps", 0)
        chief, other = (cluster.start("worker", i, *options) for i in (0, 1))
        chief.until("local ")
        other.until("local 30 ")
        chief.kill()
        chief.wait()
        ps.until("/job:worker/task:0 counts as dead")
        ps.until("saved")  # by the ps itself, with what the other one has
        again = cluster.start("worker", 0, *options)
        begun = float(again.until("started at").split()[-1])
        assert begun >= 30
        saved = list_checkpoints(tmp_path)[-1]
        assert saved.problem is None
        again.until("local 20 ")
        again.process.terminate()
        assert again.wait() == 130, again.tail()  # a signal ended its run, and all is saved
        ends_well(other, ps)
        seen = {
            t: float(next(x for x in t.lines if x.startswith("the run has seen")).split()[-1]) for t in (again, other)
        }
        assert len(set(seen.values())) == 1, seen  # both evaluate the same
        assert "the next start goes on from there" in again.tail()
