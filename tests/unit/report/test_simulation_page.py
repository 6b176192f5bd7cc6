"""The page of a simulation: what it says follows from the figures, and page and PNG have the same charts."""

import json

from torchquorum.report.scene import Text
from torchquorum.report.simulation_page import (
    SimulatedSweep,
    as_json,
    describe_sweep,
    simulation_charts,
    simulation_page,
    simulation_picture,
)
from torchquorum.rules import Sync
from torchquorum.simulation.recorded_run import RecordedRun
from torchquorum.simulation.scenario import Scenario
from torchquorum.simulation.step_times import Recorded
from torchquorum.simulation.sweep import sweep


def simulated(*rules: str, recorded: RecordedRun | None = None) -> SimulatedSweep:
    scenario = Scenario(rule="sync", workers=4, times="lognormal:0.1:0.1", slow={1: 3.0}, updates=150)
    return SimulatedSweep(runs=sweep(scenario, rules), below="four workers", recorded=recorded)


def titles(found: SimulatedSweep) -> list[str]:
    return [scene.alt.partition(":")[0] for scene in simulation_charts(found)]


def test_one_rule_says_what_it_does() -> None:
    found = simulated("sync")
    (line,) = describe_sweep(found)
    assert (
        line.startswith("sync: 3.") and "updates/s of 4 gradients; workers wait " in line and "for the quorum" in line
    )
    assert "Time to the same loss" not in titles(found)


def test_several_numbers_have_a_best_one() -> None:
    found = simulated("sync:2", "sync:3", "sync", "async", "sync:auto")
    lines = describe_sweep(found)
    assert "The best number to wait for is 3 of 4, 1 backup workers: the most gradients used per second." in lines
    assert any("what staleness costs is not part of it" in line for line in lines)
    assert {"Time to the same loss", "When the k-th gradient arrives, sync", "Gradients waited for"} <= set(
        titles(found)
    )


def test_against_the_run_that_the_times_come_from() -> None:
    recorded = RecordedRun(rule=Sync(), workers=4, times=Recorded({0: [1.0]}), seconds=10.0, updates=30)
    assert describe_sweep(simulated("sync", recorded=recorded))[0].startswith("The run made 3 updates/s with Sync(); ")
    (line, *_) = describe_sweep(simulated("async", recorded=recorded))
    assert line == "The run that the times come from made 3 updates/s with Sync()."


def test_page_picture_and_data_have_every_rule() -> None:
    found = simulated("sync", "bounded:1")
    page, scene = simulation_page(found), simulation_picture(found)
    assert page.count("<svg") == len(simulation_charts(found)) and "http" not in page.replace("http://www.w3.org", "")
    texts = {item.text for item in scene.items if isinstance(item, Text)}
    assert {"Updates per second", "How workers spend their time"} <= texts
    data = json.loads(json.dumps(as_json(found)))
    assert [r["name"] for r in data["rules"]] == ["sync", "bounded:1"]
    assert data["rules"][1]["waiting"]["the slowest worker"] > 0
