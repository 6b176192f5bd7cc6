"""A short hunt, always the same; and that a seed is a run: the same events at the same times, whenever it is played."""

import time

import pytest

from tests.hunt.__main__ import hunt, report
from tests.hunt.run import play
from tests.hunt.schedule import Config, Fault, Schedule, draw
from tests.hunt.shrink import shrink, tell

SEEDS = 12


def test_a_short_hunt_breaks_nothing() -> None:
    found = hunt(1, seconds=60.0, runs=SEEDS, steps=40, clock=time.process_time)
    assert found.found is None, tell(shrink(found.found))
    assert found.runs == SEEDS and "pairs of fault and state were met" in report(found)
    assert found.checks["versions are whole"] > 300 and found.checks["no update is lost or applied twice"] > 300


@pytest.mark.parametrize("seed", [3, 25])
def test_a_seed_is_always_the_same_run(seed: int) -> None:
    first, second = (play(draw(seed, steps=30)) for _ in range(2))
    assert first.lines == second.lines and first.events == second.events and first.checks == second.checks


def test_a_durable_run_whose_journal_led_to_its_last_step_ends_with_a_checkpoint_of_it() -> None:
    config = Config(seed=55, rule="bounded", folder=True, durable="fsync")
    faults = (
        Fault(at=1.3489, kind="pause", task="ps/0", for_s=0.4524),
        Fault(at=1.3558, kind="kill_at", task="worker/0", amount=19, back_s=12.0),
        Fault(at=1.3596, kind="power", task="disk", amount=972700991.0, back_s=3.0),
        Fault(at=1.3767, kind="kill", task="worker/0", back_s=0.5),
    )
    result = play(Schedule(config=config, faults=faults))
    assert result.broken is None, tell(result)
    assert any("updates 75 to 100 are back from the journal" in line for _, line in result.lines)
    assert any("saved RUN/model.ckpt-100" in line for _, line in result.lines)


def test_faults_befall_tasks_that_are_there() -> None:
    for seed in range(1, 3000):
        schedule = draw(seed)
        named = {name for fault in schedule.faults for name in (fault.task, fault.other, fault.when.partition(":")[0])}
        assert named - {"", "disk"} <= set(schedule.config.tasks), schedule


def test_a_fault_happens_in_the_state_that_it_asks_for() -> None:
    config = Config(seed=7, folder=True, steps=40, save_every=20)
    fault = Fault(at=0.0, kind="kill", task="worker/0", back_s=0.5, when="ps/0: publishing")
    result = play(Schedule(config=config, faults=(fault,)))
    assert result.broken is None, tell(result)
    assert any("FAULT: while ps/0: publishing, worker/0 is killed" in line for _, line in result.lines)


def test_two_optimizers_with_assignments_and_barriers() -> None:
    config = Config(seed=8, steps=40, workers=3, ps=2, rule="sync", second="async", assigns=True, barriers=True)
    result = play(Schedule(config=config, faults=(Fault(at=0.6, kind="kill", task="worker/1", back_s=0.5),)))
    assert result.broken is None, tell(result)
    assert result.checks["what is assigned counts once"] and result.steps == 40
