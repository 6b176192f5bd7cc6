"""`tq.tensorflow`: names of TensorFlow 1 for programs that come from there. The block is the list.

Each has a plainer form here: keywords of `tq.Session` and `tq.join` for the settings, `tq.data.Prefetcher` for input threads,
`torch.tensor` for a constant, `weight_decay` for the regularizer.
"""

from typing import TYPE_CHECKING

from torchquorum.lazy import load_when_used

if TYPE_CHECKING:
    from torchquorum.data.coordinator import Coordinator as Coordinator
    from torchquorum.devices.cannot_run import allow_soft_placement as allow_soft_placement
    from torchquorum.devices.options import ConfigProto as ConfigProto
    from torchquorum.devices.options import GPUOptions as GPUOptions
    from torchquorum.devices.placement_log import constant as constant
    from torchquorum.devices.placement_log import log_device_placement as log_device_placement
    from torchquorum.worker.regularizer import l2_regularizer as l2_regularizer
else:
    __getattr__, __dir__ = load_when_used(__name__)
