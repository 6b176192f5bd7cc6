"""`tq.types`: what calls of `tq` return or take beside plain values. The block is the list."""

from typing import TYPE_CHECKING

from torchquorum.lazy import load_when_used

if TYPE_CHECKING:
    from torchquorum.cluster import TaskId as TaskId
    from torchquorum.reader.change import Change as Change
    from torchquorum.reader.change import ChangedRows as ChangedRows
    from torchquorum.reader.follow import Follow as Follow
    from torchquorum.reader.read_copy import ReadVersion as ReadVersion
    from torchquorum.session.share import Share as Share
    from torchquorum.simulation.counts import Simulated as Simulated
    from torchquorum.simulation.network import Network as Network
    from torchquorum.simulation.scenario import Scenario as Scenario
    from torchquorum.simulation.scenario import SlowDown as SlowDown
    from torchquorum.wire.rpc import Patience as Patience
    from torchquorum.worker.capture import CapturedStep as CapturedStep
    from torchquorum.worker.step import Step as Step
else:
    __getattr__, __dir__ = load_when_used(__name__)
