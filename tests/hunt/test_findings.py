"""What the hunt has found in the product, each as the shortest schedule that showed it."""

from tests.hunt.run import play
from tests.hunt.schedule import Config, Fault, Schedule
from tests.hunt.shrink import tell


def test_a_worker_that_comes_back_late_goes_back_with_the_run_though_others_have_made_as_many_versions_again() -> None:
    config = Config(seed=5, ps=2, workers=3, rule="sync", steps=60, folder=True, save_every=20)
    loss = Fault(at=1.4, kind="kill", task="ps/1", back_s=0.5)
    late = Fault(at=1.45, kind="pause", task="worker/2", for_s=16.0)
    result = play(Schedule(config=config, faults=(loss, late)))
    assert result.broken is None, tell(result)
    assert any("steps that this task had seen are lost, others have gone on since" in line for _, line in result.lines)


def test_a_durable_run_goes_on_after_a_ps_has_died_while_a_checkpoint_began_on_the_others() -> None:
    config = Config(seed=286, ps=2, rule="async", transport="shm", folder=True, durable="write", save_every=20)
    result = play(
        Schedule(config=config, faults=(Fault(at=2.305, kind="kill_at", task="ps/1", amount=22, back_s=0.1),))
    )
    assert result.broken is None, tell(result)


def test_a_ps_that_comes_out_of_a_freeze_queues_an_answer_once() -> None:
    config = Config(seed=191, rule="buffered", steps=20, folder=True, durable="fsync", save_every=60)
    result = play(Schedule(config=config, faults=(Fault(at=1.658, kind="pause", task="ps/0", for_s=9.2),)))
    assert result.broken is None, tell(result)


def test_a_step_of_a_second_optimizer_in_which_a_ps_was_lost_says_the_version_of_that_one() -> None:
    config = Config(seed=13, ps=2, rule="sync", second="bounded", steps=20)
    result = play(Schedule(config=config, faults=(Fault(at=0.659, kind="kill", task="ps/1", back_s=0.1),)))
    assert result.broken is None, tell(result)
    assert any("steps that this task had seen are lost, others have gone on since" in line for _, line in result.lines)


def test_a_batch_whose_rows_are_not_on_all_ps_tasks() -> None:
    result = play(Schedule(config=Config(seed=3, ps=3, rule="sync", rows=True, steps=20), faults=()))
    assert result.broken is None, tell(result)
    assert result.checks["rows are of one version"] >= 20


def test_a_batch_whose_rows_are_not_on_all_ps_tasks_of_its_host() -> None:
    config = Config(seed=3, ps=3, rule="sync", rows=True, steps=20, transport="shm")
    result = play(Schedule(config=config, faults=()))
    assert result.broken is None, tell(result)
