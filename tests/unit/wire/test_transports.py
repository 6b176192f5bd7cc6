"""The list of transports: what a ps offers and a worker takes; a new one is a file and a line."""

import threading
from pathlib import Path

import pytest
import torch

import torchquorum as tq
from tests.ports import free_ports
from tests.unit.wire.pipes import PIPES, USED
from torchquorum.cluster import ClusterSpec, TaskId
from torchquorum.cluster.secret import Access, Secret
from torchquorum.server.serve import PsTask, ServeOptions
from torchquorum.session.join import Task
from torchquorum.wire import transports
from torchquorum.wire.transport import Listening
from torchquorum.wire.transports import TRANSPORTS, connector, find

SECRET = Access(secret=Secret("the-secret-of-this-cluster-0123456789abcdef"))
STEPS = 5


def test_a_kind_is_found_by_its_name_and_names_are_not_given_twice() -> None:
    assert [find(transport.kind) for transport in TRANSPORTS] == TRANSPORTS
    assert find("avian") is None


@pytest.mark.parametrize(("access", "kinds"), [(Access(), ["unix"]), (SECRET, ["unix"])])
def test_a_ps_offers_what_its_access_allows_best_first(access: Access, kinds: list[str]) -> None:
    listener = transports.listen(Listening(address="127.0.0.1:0", access=access))
    assert [way.kind for way in listener.ways] == kinds
    listener.close()


def test_a_transport_that_cannot_listen_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_listening: Listening) -> None:
        raise OSError("no")

    broken = transports.Transport(kind="broken", same_host=False, listen=fail, connect=PIPES.connect)
    monkeypatch.setattr(transports, "TRANSPORTS", [*TRANSPORTS, broken])
    before = sorted(Path("/proc/self/fd").iterdir())
    with pytest.raises(OSError, match="no"):
        transports.listen(Listening(address="127.0.0.1:0", access=SECRET))
    assert len(sorted(Path("/proc/self/fd").iterdir())) == len(before)


def train(cluster: ClusterSpec) -> list[torch.Tensor]:
    """Returns the parameters after a few steps with a real ps on real sockets."""
    server = PsTask(cluster, 0, ServeOptions(say=lambda _: None))

    def serve() -> None:
        try:
            server.serve()
        finally:
            server.close()

    thread = threading.Thread(target=serve, name="torchquorum-test-ps")
    thread.start()
    task = Task(
        cluster=cluster, id=TaskId("worker", 0), transport="tcp", connect=connector(cluster, Access()), separate=True
    )
    torch.manual_seed(1)
    model = torch.nn.Linear(300, 100)  # large enough for frames of their own
    optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), rule=tq.Async())
    with tq.Session(task, model, optimizer, last_step=STEPS) as session:
        while not session.should_stop():
            optimizer.zero_grad()
            model(torch.ones(2, 300)).square().mean().backward()
            optimizer.step()
        session.pull()
    thread.join(30)
    assert not thread.is_alive()
    return [p.detach().clone() for p in model.parameters()]


def test_a_new_transport_is_one_file_and_one_line_and_a_worker_pushes_and_pulls_over_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = train(_cluster())
    assert not USED
    monkeypatch.setattr(transports, "TRANSPORTS", [PIPES, *TRANSPORTS])  # the line
    found = train(_cluster())
    assert USED["received"] > STEPS and USED["sent"] > STEPS
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def _cluster() -> ClusterSpec:
    ports = free_ports(2)
    return ClusterSpec({"ps": [f"127.0.0.1:{ports[0]}"], "worker": [f"127.0.0.1:{ports[1]}"]})
