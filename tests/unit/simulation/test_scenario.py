import pytest

from torchquorum.errors import ConfigError
from torchquorum.simulation.scenario import Scenario


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "workers=0: must be 1 or more"),
        ({"times": -1.0}, "above 0"),
        ({"seconds": 0.0}, "seconds=0.0: must be a number above 0"),
        ({"noise": -1.0}, "noise=-1.0: must be 0 or more"),
        ({"start": 1}, "give arrive_s= too"),
        ({"start": 9}, "from 1 to the 2 workers"),
        ({"restart_s": 1.0}, "give fail_s= too"),
        ({"slow": {5: 2.0}}, "worker 5"),
        ({"rule": "sync:3of4"}, "is for 4 workers"),
        ({"rule": "synk"}, "did you mean sync"),
        ({"times": "normal:1"}, "allowed are"),
    ],
)
def test_a_scenario_that_cannot_be_is_an_error(options: dict, message: str) -> None:
    given = {"rule": "sync", "workers": 2, "times": 1.0} | options
    with pytest.raises(ConfigError, match=message):
        Scenario(**given)
