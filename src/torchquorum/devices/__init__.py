"""Devices: their names, which are there, where parts of a model go, and the log of it. The block is the list of `tq.devices`."""

from typing import TYPE_CHECKING

from torchquorum.lazy import load_when_used

if TYPE_CHECKING:
    from torchquorum.devices.model_placement import place as place
    from torchquorum.devices.scope import device as device
else:
    __getattr__, __dir__ = load_when_used(__name__)
