"""Options are checked when their group is built, for `tq.Session` and `tq.graph.GraphSession` alike."""

from typing import Any

import pytest
import torch

import torchquorum as tq
from torchquorum.cluster import ClusterSpec, TaskId
from torchquorum.errors import ConfigError
from torchquorum.session.config import MemberOptions, SaveOptions, Setup, StopOptions
from torchquorum.session.join import Task
from torchquorum.session.session import Session


def task(*, workers: int = 3, min_workers: int | None = None) -> Task:
    hosts = [f"localhost:{2000 + i}" for i in range(workers)]
    cluster = ClusterSpec({"ps": ["localhost:1000"], "worker": hosts}, min_workers=min_workers)
    return Task(cluster=cluster, id=TaskId("worker", 0))


def setup(of: Task, **options: Any) -> Setup:
    model = torch.nn.Linear(2, 2)
    optimizer = options.pop("optimizer", None) or tq.Optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    return Setup(task=of, model=model, optimizer=optimizer, **options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"last_step": 0}, "last_step=0: must be a whole number, 1 or more"),
        ({"num_steps": True}, "num_steps=True: must be a whole number"),
        ({"last_step": 3, "num_steps": 3}, "give one of the two"),
        ({"max_seconds": 0}, "max_seconds=0: must be more than 0"),
    ],
)
def test_stop_options_that_make_no_sense_are_errors(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        StopOptions(**options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"every_s": 5.0, "every_steps": 5}, "save_every_s=5.0 and save_every_steps=5: give one"),
        ({"every_s": -1.0}, "save_every_s=-1.0: must be 0 or more"),
        ({"every_steps": 0}, "save_every_steps=0: must be 1 or more"),
    ],
)
def test_save_options_that_make_no_sense_are_errors(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        SaveOptions(**options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"liveness_s": 0.0}, "liveness_s=0.0: must be more than 0 seconds"),
        ({"buffers": "mine"}, "buffers='mine': must be one of 'chief', 'average', 'local'"),
    ],
)
def test_member_options_that_make_no_sense_are_errors(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        MemberOptions(**options)


def test_by_default_the_first_worker_trains_alone_and_an_elastic_run_waits_for_its_least_number() -> None:
    assert setup(task()).wait_for_workers == 1
    assert setup(task(min_workers=2)).wait_for_workers == 2
    assert setup(task(), member=MemberOptions(wait_for_workers=3)).wait_for_workers == 3


def test_how_many_workers_are_waited_for_is_a_number() -> None:
    with pytest.raises(ConfigError, match="wait_for_workers=True: give the number of workers; all of them are"):
        setup(task(), member=MemberOptions(wait_for_workers=True))


@pytest.mark.parametrize("count", [0, 4])
def test_no_more_workers_are_waited_for_than_the_cluster_has(count: int) -> None:
    with pytest.raises(ConfigError, match=f"wait_for_workers={count}: the cluster has 3 workers"):
        setup(task(), member=MemberOptions(wait_for_workers=count))


def test_a_plain_torch_optimizer_is_refused_with_what_to_write() -> None:
    plain = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1.0)
    with pytest.raises(ConfigError, match=r"optimizer=SGD: wrap it first: tq.Optimizer\(optimizer, rule=tq.Sync\(\)\)"):
        setup(task(), optimizer=plain)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_steps": 0}, "num_steps=0"),
        ({"save_every_steps": 0}, "save_every_steps=0"),
        ({"liveness_s": -1.0}, "liveness_s=-1.0"),
        ({"buffers": "all"}, "buffers='all'"),
        ({"wait_for_workers": 9}, "wait_for_workers=9"),
        ({"durable": True}, "durable=True: the journal needs a folder"),
    ],
)
def test_both_kinds_of_session_make_the_same_checks(
    options: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHQUORUM_LOGDIR", raising=False)
    model = torch.nn.Linear(2, 2)
    optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    graph = tq.graph.Graph(model, torch.nn.functional.mse_loss, example_inputs=(torch.ones(4, 2), torch.ones(4, 2)))
    with pytest.raises(ConfigError, match=expected):
        Session(task(), model, optimizer, **options)
    with pytest.raises(ConfigError, match=expected):
        tq.graph.GraphSession(task().cluster, graph, optimizer, **options)
