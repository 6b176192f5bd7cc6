"""How many workers, as users write it: a number, or the least and the most."""

import pytest

from torchquorum.cluster import ClusterSpec, WorkerRange, launcher_task, parse_flags, resolve
from torchquorum.cluster.spec import TaskId
from torchquorum.errors import ClusterError, ConfigError
from torchquorum.launcher.launched import LaunchOptions

JOBS = {"ps": ["a:1"], "worker": ["a:2", "a:3", "a:4", "a:5"]}


@pytest.mark.parametrize(
    ("given", "least", "most"),
    [(4, 4, 4), ("4", 4, 4), ("2:8", 2, 8), (" 2 : 8 ", 2, 8), ("'2:8'", 2, 8), ((2, 8), 2, 8), ([1, 3], 1, 3)],
)
def test_a_number_and_a_range_are_read(given: object, least: int, most: int) -> None:
    found = WorkerRange.read(given)
    assert (found.least, found.most, found.elastic) == (least, most, least < most)
    assert WorkerRange.read(found) is found
    assert WorkerRange.read(str(found)) == found


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("8:2", "write 2:8"),
        ("0:4", "MIN must be 1 or more"),
        ("-1:4", "MIN must be 1 or more"),
        ("0", "must be 1 or more"),
        ("2:", "give both numbers"),
        (":4", "give both numbers"),
        ("2:4:6", "such as 2:8"),
        ("2-8", "write 2:8"),
        ("2..8", "write 2:8"),
        ("two", "must be a number"),
        ("", "must be a number"),
        ("2:1000000", "at most 10000"),
        ((2, 8, 9), "the pair"),
        ((2, "8"), "the pair"),
        (True, "the pair"),
        (2.5, "the pair"),
        (None, "the pair"),
    ],
)
def test_what_is_no_range_is_refused_with_what_to_write(given: object, message: str) -> None:
    with pytest.raises(ConfigError, match=r"--workers .*") as raised:
        WorkerRange.read(given)
    assert message in str(raised.value)


def test_a_cluster_says_who_must_be_there_and_so_does_the_launcher() -> None:
    fixed, elastic = ClusterSpec(JOBS), ClusterSpec(JOBS, min_workers=2)
    assert (fixed.min_workers, fixed.elastic) == (4, False)
    assert (elastic.min_workers, elastic.elastic, elastic.num_tasks("worker")) == (2, True, 4)
    assert fixed != elastic and ClusterSpec(JOBS, min_workers=4) == fixed
    assert '"min_workers":2' in launcher_task(elastic, TaskId("worker", 3))
    with pytest.raises(ClusterError, match="from 1 to 4"):
        ClusterSpec(JOBS, min_workers=5)


def test_a_task_started_by_hand_is_told_by_a_flag() -> None:
    flags, rest = parse_flags(["--min_workers=2", "--num_workers=3", "--max_workers=9"])
    assert flags.min_workers == 2 and rest == ["--num_workers=3", "--max_workers=9"]
    hosts = ["--ps_hosts=a:1", "--worker_hosts=a:2,a:3,a:4", "--job_name=worker", "--task_index=2"]
    found = resolve([*hosts, "--min-workers", "2"])
    assert found is not None and found.cluster.min_workers == 2 and found.cluster.elastic
    with pytest.raises(ClusterError, match="from 1 to 3"):
        resolve([*hosts, "--min-workers", "4"])


def test_a_launcher_reads_what_it_is_to_start() -> None:
    assert (
        LaunchOptions(command=[], workers="2:8").range
        == LaunchOptions(command=[], workers=(2, 8)).range
        == WorkerRange(2, 8)
    )
    with pytest.raises(ConfigError, match="write 2:8"):
        LaunchOptions(command=[], workers="8:2")
