"""The fast path's stages in every order: nothing is lost, counted twice or half read, and nobody waits for ever."""

import pytest

from tests.hunt.explorer import RULES, Budget, explore
from torchquorum.memory.lock import supported

pytestmark = pytest.mark.skipif(not supported(), reason="this system has no locks between processes")
FAULTS = {
    "nothing": Budget(),
    "a death": Budget(deaths=1),
    "a freeze": Budget(freezes=1),
    "a closing": Budget(closings=1),
    "a wait that is too long": Budget(timeouts=1),
}


# What `make test` has the time for is the smallest; the rest takes minutes.
CASES = [pytest.param(fault, marks=[] if fault == "nothing" else pytest.mark.long) for fault in FAULTS]


@pytest.mark.parametrize("fault", CASES)
@pytest.mark.parametrize("rule", RULES)
def test_two_workers_in_every_order_with_a_fault_at_every_point(rule: str, fault: str) -> None:
    found = explore(RULES[rule], 2, 1, FAULTS[fault])
    assert found.broken is None, f"{found.broken} after {found.path}"
    assert found.complete and found.states > 40 and found.ends >= 1
