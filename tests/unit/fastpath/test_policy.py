"""Which runs have a fast path, and of which kind."""

from typing import Any

import pytest

import torchquorum as tq
from torchquorum.fastpath import policy
from torchquorum.fastpath.policy import may_have_fastpath, mode_of
from torchquorum.memory.lock import supported
from torchquorum.placement.layout import CONSTANT, Variable
from torchquorum.wire.messages import AverageSpec, OptimizerSpec, Plan

pytestmark = pytest.mark.skipif(not supported(), reason="this system has no locks between processes")


def plan(rule: Any, workers: int = 3, **options: Any) -> Plan:
    given = {
        "variables": [Variable(name="a", shape=(3,), dtype="float32")],
        "optimizer": OptimizerSpec("SGD", [{"lr": 0.1}]),
        "num_shards": 1,
    }
    return Plan(rule=rule, num_workers=workers, **{**given, **options})


@pytest.mark.parametrize(
    ("rule", "workers", "mode"),
    [
        (tq.Async(), 3, "turns"),
        (tq.Sync(), 3, "rounds"),
        (tq.Sync(), 1, "turns"),
        (tq.Sync(2), 3, None),
        (tq.Sync("auto"), 3, None),
        (tq.Sync("auto", floor=3), 3, "rounds"),  # all are waited for
        (tq.Bounded(2), 3, None),
        (tq.Buffered(2), 3, None),
        (tq.Async(pipeline=True), 3, None),
    ],
)
def test_the_rule_says_whether_workers_take_turns_or_make_rounds(rule: Any, workers: int, mode: str | None) -> None:
    assert mode_of(plan(rule, workers)) == mode
    assert may_have_fastpath(plan(rule, workers)) is (mode is not None)


@pytest.mark.parametrize(
    "options",
    [
        {"durable": "write", "name": "generator"},  # one of several optimizers
        {"num_shards": 2},
        {"average": AverageSpec(0.9, False)},
        {"optimizer": OptimizerSpec("SGD", [{"lr": 0.1, "foreach": True}])},
        {"optimizer": OptimizerSpec("Adadelta", [{"lr": 0.1}])},
    ],
)
def test_what_only_the_ps_can_do_leaves_no_fast_path(options: dict[str, Any]) -> None:
    assert not may_have_fastpath(plan(tq.Async(), **options))


def test_in_narrow_dtypes_there_are_turns_but_no_rounds_as_slices_round_differently() -> None:
    narrow = [Variable(name="a", shape=(3,), dtype="float32"), Variable(name="b", shape=(3,), dtype="bfloat16")]
    assert not may_have_fastpath(plan(tq.Sync(), variables=narrow))
    assert may_have_fastpath(plan(tq.Async(), variables=narrow))
    narrow[1] = Variable(name="b", shape=(3,), dtype="bfloat16", group=CONSTANT)
    assert may_have_fastpath(plan(tq.Sync(), variables=narrow)), "nobody updates a constant"


def test_without_locks_between_processes_there_is_no_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "supported", lambda: False)
    assert not may_have_fastpath(plan(tq.Async()))
