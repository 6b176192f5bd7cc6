"""The fast path's stages in every order: nothing is lost, counted twice or half read, and nobody waits for ever."""

import pytest

from tests.hunt.explore import FAULTS
from tests.hunt.explorer import RULES, explore
from torchquorum.memory.lock import supported

pytestmark = pytest.mark.skipif(not supported(), reason="this system has no locks between processes")
ALL = {fault: budget for fault, budget in FAULTS.items() if fault != "all of these"}
CASES = [
    *(pytest.param(2, 1, rule, fault, id=f"2 workers, {rule}, {fault}") for rule in RULES for fault in ALL),
    pytest.param(2, 2, "sync", "a freeze", id="2 workers, two steps, sync, a freeze"),
    *(
        pytest.param(
            workers, steps, rule, fault, marks=pytest.mark.long, id=f"{workers} workers, {steps} steps, {rule}, {fault}"
        )
        for workers, steps in ((2, 2), (3, 1))
        for rule in RULES
        for fault in ALL
    ),
    *(
        pytest.param(2, 1, rule, "all of these", marks=pytest.mark.long, id=f"2 workers, {rule}, all of these")
        for rule in RULES
    ),
]


@pytest.mark.parametrize(("workers", "steps", "rule", "fault"), CASES)
def test_workers_in_every_order_with_a_fault_at_every_point(workers: int, steps: int, rule: str, fault: str) -> None:
    found = explore(RULES[rule], workers, steps, FAULTS[fault])
    assert found.broken is None, f"{found.broken} after {found.path}"
    assert found.complete and found.states > 60 and found.ends >= 1
