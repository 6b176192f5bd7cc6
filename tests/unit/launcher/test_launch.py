"""Arguments of `tq.launch` that it refuses; tests/process/test_launch.py runs it."""

import pytest

import torchquorum as tq
from torchquorum.errors import ConfigError


def test_launch_takes_only_places_that_there_are():
    with pytest.raises(ConfigError, match=r"tq.launch\(on='mars'\): must be 'local', 'ray' or tq.Ray"):
        tq.launch(print, on="mars")
