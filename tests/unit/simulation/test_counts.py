"""What is counted adds up."""

import pytest

from torchquorum.simulation.network import Network
from torchquorum.simulation.simulate import simulate


@pytest.mark.parametrize("rule", ["sync", "sync:3", "async", "async:pipeline", "bounded:2", "buffered:3"])
def test_the_time_of_a_worker_is_spent_once(rule: str) -> None:
    net = Network(size_bytes=1e6, bandwidth=1e8, latency_s=0.01)
    found = simulate(rule, 5, "pareto:0.1:2.5", network=net, fail_s=20.0, restart_s=1.0, updates=500)
    total = found.computing + sum(found.waiting.values()) + (0.0 if "pipeline" in rule else found.sending)
    assert total == pytest.approx(1.0, abs=0.05)  # what was on its way when a worker failed is counted as sending
    assert found.used + sum(found.refused.values()) <= found.gradients <= found.used + sum(found.refused.values()) + 5
