"""In-graph replication: a client exports its model, compute tasks run it. The block is the list of `tq.graph`."""

from typing import TYPE_CHECKING

from torchquorum.lazy import load_when_used

if TYPE_CHECKING:
    from torchquorum.graph.assignments import BatchResult as BatchResult
    from torchquorum.graph.export import Graph as Graph
    from torchquorum.graph.graph_client import GraphClient as GraphClient
    from torchquorum.graph.graph_client import connect as connect
    from torchquorum.graph.graph_server import Server as Server
    from torchquorum.graph.graph_session import GraphSession as GraphSession
else:
    __getattr__, __dir__ = load_when_used(__name__)
