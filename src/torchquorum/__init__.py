"""torchquorum: a parameter server for PyTorch.

`import torchquorum as tq` has the names of a training loop; what fewer programs need is in `tq.data`, `tq.graph`, `tq.hooks`,
`tq.devices`, `tq.rows`, `tq.tensorflow`, `tq.types` and `tq.errors`. The block below is the list (see `torchquorum.lazy`): a name is loaded
when it is first used, so that `torchquorum --help` does not pay for importing torch.
"""

from typing import TYPE_CHECKING

from torchquorum.lazy import load_when_used
from torchquorum.version import __version__ as __version__

if TYPE_CHECKING:
    from torchquorum import data as data
    from torchquorum import devices as devices
    from torchquorum import errors as errors
    from torchquorum import graph as graph
    from torchquorum import hooks as hooks
    from torchquorum import rows as rows
    from torchquorum import tensorflow as tensorflow
    from torchquorum import types as types
    from torchquorum.cluster import ClusterSpec as ClusterSpec
    from torchquorum.data.batches import Batches as Batches
    from torchquorum.errors import LaunchError as LaunchError
    from torchquorum.errors import NanLossError as NanLossError
    from torchquorum.errors import TorchQuorumError as TorchQuorumError
    from torchquorum.launcher.launch import launch as launch
    from torchquorum.launcher.ray_cluster import Ray as Ray
    from torchquorum.reader.reader import Reader as Reader
    from torchquorum.rules import Async as Async
    from torchquorum.rules import Bounded as Bounded
    from torchquorum.rules import Buffered as Buffered
    from torchquorum.rules import Local as Local
    from torchquorum.rules import Rule as Rule
    from torchquorum.rules import Sync as Sync
    from torchquorum.session.hooks.evaluation import EvaluateHook as EvaluateHook
    from torchquorum.session.hooks.hook import Hook as Hook
    from torchquorum.session.hooks.standard import LogHook as LogHook
    from torchquorum.session.hooks.standard import StopAtStepHook as StopAtStepHook
    from torchquorum.session.hooks.summaries import SummaryHook as SummaryHook
    from torchquorum.session.join import Task as Task
    from torchquorum.session.join import join as join
    from torchquorum.session.session import Session as Session
    from torchquorum.simulation.simulate import simulate as simulate
    from torchquorum.towers.towers import Towers as Towers
    from torchquorum.update.constraints import Clamp as Clamp
    from torchquorum.update.constraints import MaxNorm as MaxNorm
    from torchquorum.update.constraints import UnitNorm as UnitNorm
    from torchquorum.update.optimizers import register_optimizer as register_optimizer
    from torchquorum.worker.capture import capture as capture
    from torchquorum.worker.optimizer import Optimizer as Optimizer
    from torchquorum.worker.schedule_spec import ExponentialDecay as ExponentialDecay
    from torchquorum.worker.schedule_spec import ExponentialMovingAverage as ExponentialMovingAverage
    from torchquorum.worker.schedule_spec import schedule as schedule
    from torchquorum.worker.table_module import Table as Table
else:
    __getattr__, __dir__ = load_when_used(__name__)
