"""A program's own parser beside the flags of the cluster."""

import argparse

import pytest

from torchquorum import env
from torchquorum.cluster.program import fill_in, read_program_flags
from torchquorum.cluster.sources import launcher_task, resolve
from torchquorum.cluster.spec import ClusterSpec, TaskId
from torchquorum.errors import FlagError

HOSTS = ["--ps_hosts=a:1", "--worker_hosts=b:1,b:2"]


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch):
    for name in (env.TASK, env.TF_CONFIG, env.TRANSPORT):
        monkeypatch.delenv(name, raising=False)


def make_parser(**defaults) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    for name in ("job_name", "ps_hosts", "worker_hosts"):
        parser.add_argument(f"--{name}", default=defaults.get(name))
    parser.add_argument("--task_id", type=int, default=defaults.get("task_id"))
    parser.add_argument("--steps", type=int, default=10)
    return parser


def full_parser() -> argparse.ArgumentParser:
    return make_parser(job_name="worker", task_id=0, ps_hosts=" p:1, p:2", worker_hosts=" w:1,w:2")


def read(parser: argparse.ArgumentParser, argv: list[str]):
    values, defaults = read_program_flags(parser, argv)
    found = resolve(argv, defaults=defaults)
    fill_in(values, found)
    return values, found


def test_without_flags_the_defaults_of_the_program_name_the_task() -> None:
    values, found = read(full_parser(), [])
    assert found is not None and (found.task, found.source) == (TaskId("worker", 0), "defaults")
    assert found.cluster == ClusterSpec({"ps": ["p:1", "p:2"], "worker": ["w:1", "w:2"]})
    assert (values.job_name, values.task_id, values.ps_hosts, values.steps) == ("worker", 0, "p:1,p:2", 10)


def test_a_flag_wins_over_the_default_beside_it() -> None:
    values, found = read(full_parser(), ["--task_id=1", "--ps_host='q:7'", "--steps", "3"])
    assert found is not None and (found.task, found.source) == (TaskId("worker", 1), "flags and defaults")
    assert (values.task_id, values.task_index, values.ps_hosts, values.steps) == (1, 1, "q:7", 3)


def test_all_four_flags_leave_no_room_for_defaults() -> None:
    values, found = read(full_parser(), ["--job_name=ps", "--task_index=0", *HOSTS])
    assert found is not None and (found.task, found.source) == (TaskId("ps", 0), "flags")
    assert (values.job_name, values.worker_hosts) == ("ps", "b:1,b:2")


def test_the_launcher_wins_over_defaults_and_the_values_tell_the_truth(monkeypatch) -> None:
    cluster = ClusterSpec({"ps": ["x:1"], "worker": ["y:1", "y:2", "y:3"]})
    monkeypatch.setenv(env.TASK, launcher_task(cluster, TaskId("worker", 2)))
    values, found = read(full_parser(), ["--steps=4"])
    assert found is not None and found.source == "launcher"
    assert (values.task_id, values.ps_hosts, values.worker_hosts, values.steps) == (2, "x:1", "y:1,y:2,y:3", 4)


def test_half_a_task_beside_the_launcher_is_not_completed_by_defaults(monkeypatch) -> None:
    cluster = ClusterSpec({"ps": ["x:1"], "worker": ["y:1"]})
    monkeypatch.setenv(env.TASK, launcher_task(cluster, TaskId("worker", 0)))
    with pytest.raises(FlagError, match="without --task_index"):
        read(full_parser(), ["--job_name=ps"])


def test_defaults_in_part_name_no_task_by_themselves() -> None:
    with pytest.raises(FlagError, match="without --job_name --task_index"):
        read(make_parser(ps_hosts="a:1", worker_hosts="b:1"), [])
    _, found = read(make_parser(ps_hosts="a:1", worker_hosts="b:1"), ["--job_name='ps'", "--task_index=**0**"])
    assert found is not None and found.task == TaskId("ps", 0)


def test_a_parser_without_defaults_and_no_flags_is_no_cluster() -> None:
    values, found = read(make_parser(), ["--steps=5"])
    assert found is None
    assert (values.job_name, values.task_id, values.steps) == ("worker", 0, 5)


def test_cluster_flags_may_be_required() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job_name", required=True)
    parser.add_argument("--task_index", type=int, required=True)
    values, found = read(parser, ["--job_name=worker", "--task_index=1", *HOSTS])
    assert found is not None and (values.job_name, values.task_index) == ("worker", 1)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--stpes=5"], r"--stpes: no such flag; this program has .*; did you mean --steps\?"),
        (["--taske_id=5"], r"--taske_id: no such flag.* did you mean --task_id\?"),
        (["--zzz"], "--zzz: no such flag; this program has .*--help"),
        (["5000"], "5000: the program takes no argument without a flag"),
    ],
)
def test_a_flag_that_nobody_knows_is_an_error_with_a_suggestion(argv: list[str], message: str) -> None:
    with pytest.raises(FlagError, match=message):
        read(full_parser(), argv)


def test_help_shows_the_flags_of_the_cluster_and_ends_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read(full_parser(), ["--help", "--job_name=ps"])
    assert caught.value.code == 0
    assert "--worker_hosts" in capsys.readouterr().out


def test_a_wrong_value_ends_the_program_as_argparse_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read(full_parser(), ["--steps=many"])
    assert caught.value.code == 2
    assert "--steps: invalid int value: 'many'" in capsys.readouterr().err


def test_a_default_that_is_not_allowed_is_an_error() -> None:
    with pytest.raises(FlagError, match="--task_id=-1"):
        read(make_parser(job_name="worker", task_id=-1, ps_hosts="a:1", worker_hosts="b:1"), [])
