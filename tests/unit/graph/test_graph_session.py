"""A client and its compute tasks, in one process with real sockets: results, waits, mistakes and strangers."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchquorum as tq
from tests.graph_cluster import PATIENCE, GraphCluster, graph_cluster, session
from torchquorum.errors import ConfigError, DeadlineError, GraphError, TorchQuorumError
from torchquorum.graph import graph_messages as g
from torchquorum.graph.dispatcher import Dispatcher
from torchquorum.graph.runner import Program
from torchquorum.wire import codec
from torchquorum.wire import messages as m
from torchquorum.wire.entry_channel import EntryChannel
from torchquorum.wire.rpc import Patience

BATCH = (torch.randn(4, 5), torch.randint(0, 3, (4,)))


@pytest.fixture
def dispatchers(monkeypatch: pytest.MonkeyPatch) -> list[Dispatcher]:
    """The dispatchers of all sessions that the test begins."""
    made: list[Dispatcher] = []

    class Recorded(Dispatcher):
        def start(self) -> None:
            made.append(self)
            super().start()

    monkeypatch.setattr("torchquorum.graph.graph_session.Dispatcher", Recorded)
    return made


def make(rule: tq.Rule | None = None, **options: Any) -> tuple[nn.Module, tq.graph.Graph, tq.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return (
        model,
        tq.graph.Graph(model, F.cross_entropy, example_inputs=BATCH),
        tq.Optimizer(inner, rule=rule, **options),
    )


def test_results_tell_loss_step_and_placement_and_the_model_is_trained() -> None:
    model, graph, optimizer = make(tq.Async())
    before = model[3].weight.detach().clone()  # type: ignore[index]
    with graph_cluster() as cluster, session(cluster, graph, optimizer) as run:
        pending = [run.submit(*BATCH) for _ in range(5)]
        results = [p.result() for p in pending]
        assert run.workers == [0] and run.global_step == 5
        assert run.pull() == 5
        assert all(p.done() for p in pending)
    assert [r.step for r in results] == [1, 2, 3, 4, 5]
    assert {r.placement for r in results} == {"/job:worker/task:0/device:CPU:0"}
    assert results[0].loss is not None and results[-1].loss is not None and results[-1].loss < results[0].loss
    assert not torch.equal(model[3].weight, before)  # type: ignore[index]
    assert int(dict(model.named_buffers())["1.num_batches_tracked"]) == 5


def test_last_step_is_exact_and_later_batches_are_told_so() -> None:
    _, graph, optimizer = make(tq.Async())
    with (
        graph_cluster(workers=2) as cluster,
        session(cluster, graph, optimizer, last_step=7, wait_for_workers=2) as run,
    ):
        results = list(run.run(BATCH for _ in range(1000)))
        assert run.should_stop() and run.pull() == 7
    assert sum(bool(r.accepted) for r in results) == 7
    assert {r.reason for r in results if not r.accepted} <= {"past last step"}
    assert len(results) < 20  # the data is not read to its end


def test_what_the_last_batches_wait_for_may_never_come_and_that_is_said() -> None:
    _, graph, optimizer = make(tq.Sync())
    with graph_cluster(workers=2) as cluster, session(cluster, graph, optimizer, wait_for_workers=2) as run:
        results = list(run.run([BATCH] * 5))
        assert run.pull() == 2
        late = [r for r in results if r.accepted is None]
        assert len(late) == 1 and late[0].reason.startswith("waits for the quorum (1 of 2") and late[0].loss is not None
        more = list(run.run([BATCH] * 3))  # the first of these fills the round
        assert [r.accepted for r in more] == [True] * 3 and run.pull() == 4
        lonely = run.submit(*BATCH)
        with pytest.raises(ConfigError, match=r"Sync\(\) makes an update of 2 gradients"):
            lonely.result()


def test_bounded_ends_too_although_the_slowest_has_no_more_work() -> None:
    _, graph, optimizer = make(tq.Bounded(1))
    with graph_cluster(workers=2) as cluster, session(cluster, graph, optimizer, wait_for_workers=2) as run:
        results = [run.submit(*BATCH, on=0) for _ in range(2)]
        assert all(r.result().accepted for r in results[:1])
        everything = list(run.run([BATCH] * 9))
        assert len(everything) == 9 and all(r.accepted for r in everything)
        assert run.pull() == 11


def test_results_come_while_data_is_still_being_read(dispatchers: list[Dispatcher]) -> None:
    _, graph, optimizer = make(tq.Async())
    shown: list[int] = []

    def slow() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Data that takes longer to read than to compute: the tasks always have room for more."""
        for number in range(6):
            deadline = time.monotonic() + 60
            while dispatchers[0].run.assignments.unfinished and time.monotonic() < deadline:
                time.sleep(0.01)
            assert len(shown) >= number - 1
            yield BATCH

    with graph_cluster(workers=2) as cluster, session(cluster, graph, optimizer, wait_for_workers=2, ahead=8) as run:
        for result in run.run(slow()):
            shown.append(result.number)
    assert shown == list(range(6))


def test_a_batch_can_ask_for_its_task() -> None:
    _, graph, optimizer = make(tq.Async())
    with graph_cluster(workers=2) as cluster, session(cluster, graph, optimizer, wait_for_workers=2) as run:
        places = [run.submit(*BATCH, on=n % 2).result().placement for n in range(4)]
        with pytest.raises(ConfigError, match="on=2"):
            run.submit(*BATCH, on=2)
    assert places == [f"/job:worker/task:{n % 2}/device:CPU:0" for n in range(4)]


def test_a_task_that_joins_late_gets_work() -> None:
    _, graph, optimizer = make(tq.Async())
    with graph_cluster(workers=2, start=1) as cluster, session(cluster, graph, optimizer) as run:
        places = set()
        for result in run.run(BATCH for _ in range(100_000)):
            places.add(result.placement)
            if len(places) == 2:
                break
            if result.number == 5:
                cluster.start(1)
        assert len(places) == 2


def ends_by_itself(cluster: GraphCluster, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Waits until the compute task that was started last has returned, although nothing has asked it to."""
    thread = cluster.threads[-1]
    thread.join(60.0)
    assert not thread.is_alive()
    out = capsys.readouterr().err
    assert "has ended without this task; there is nothing left to compute" in out and said in out, out
    assert "gave up" not in out, out  # the client did not wait for it


def test_a_task_that_comes_while_the_run_ends_is_not_taken_in_and_ends_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Ending(Dispatcher):
        def finish(self, *, ok: bool) -> None:
            super().finish(ok=ok)
            cluster.start(1)
            ends_by_itself(cluster, "", capsys)

    monkeypatch.setattr("torchquorum.graph.graph_session.Dispatcher", Ending)
    monkeypatch.setattr("torchquorum.server.ending.LATE_S", 0.2)
    _, graph, optimizer = make(tq.Async())
    with graph_cluster(workers=2, start=1) as cluster, session(cluster, graph, optimizer) as run:
        assert run.submit(*BATCH).result().accepted
    assert len(cluster.threads) == 3


@pytest.mark.parametrize("slow", [True, False], ids=["slow", "refuses"])
def test_a_task_that_cannot_join_before_the_run_is_over_is_not_waited_for_and_ends_too(
    slow: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torchquorum.graph.graph_session.FINISH_S", 30.0)
    monkeypatch.setattr("torchquorum.server.ending.LATE_S", 0.2)
    loading, gone = threading.Event(), threading.Event()

    class LateProgram(Program):
        def __init__(self, *given: Any) -> None:
            if threading.current_thread().name.endswith("worker 1"):
                loading.set()
                if not slow:
                    raise GraphError("no such operation here")
                assert gone.wait(60.0)
            super().__init__(*given)

    monkeypatch.setattr("torchquorum.graph.compute.Program", LateProgram)
    _, graph, optimizer = make(tq.Async())
    with graph_cluster(workers=2, start=1) as cluster:
        ps = cluster.threads[0]
        follower = threading.Thread(target=lambda: (ps.join(60.0), gone.set()))
        with session(cluster, graph, optimizer) as run:
            assert run.submit(*BATCH).result().accepted
            cluster.start(1)
            assert loading.wait(60.0)
            follower.start()
        ends_by_itself(cluster, "" if slow else "cannot join the run of client", capsys)
        follower.join(60.0)


def test_a_task_that_cannot_join_a_run_that_fails_is_there_for_the_next_client() -> None:
    _, graph, optimizer = make(tq.Async())
    with graph_cluster() as cluster:
        channel = EntryChannel(cluster.spec.address(cluster.spec.workers[0]))
        try:
            channel.send([codec.encode(g.Attach(m.PROTOCOL, "client", m.PACKAGE))])
            assert channel.receive(30.0) is not None
            channel.send([codec.encode(g.Finish("its run", False, False))])
            assert isinstance(g.split(channel.receive(30.0) or [])[0], g.State)
        finally:
            channel.close()
        stranger = EntryChannel(cluster.spec.address(cluster.spec.workers[0]))
        try:
            stranger.send([codec.encode(g.Finish("its run", True, True))])  # from one that never introduced itself
            assert isinstance(g.split(stranger.receive(30.0) or [])[0], g.State)
        finally:
            stranger.close()
        with session(cluster, graph, optimizer) as run:
            assert run.submit(*BATCH).result().accepted


def test_a_batch_that_does_not_fit_is_refused_before_it_is_sent_and_a_bad_one_fails_alone() -> None:
    _, graph, optimizer = make(tq.Async())
    with graph_cluster() as cluster, session(cluster, graph, optimizer) as run:
        with pytest.raises(GraphError, match="the graph takes float32"):
            run.submit(torch.randn(4, 6), BATCH[1])
        bad = run.submit(BATCH[0], torch.full((4,), 99))  # no such class
        with pytest.raises(GraphError, match=r"batch 0 could not be computed: /job:worker/task:0: .*cross_entropy"):
            bad.result()
        assert run.submit(*BATCH).result().accepted


def test_averages_and_checkpoints_are_there_for_the_client(tmp_path: Path) -> None:
    average = tq.ExponentialMovingAverage(0.5)
    model, graph, optimizer = make(tq.Async(), average=average)
    with graph_cluster() as cluster, session(cluster, graph, optimizer, logdir=tmp_path) as run:
        list(run.run([BATCH] * 4))
        assert Path(run.save()).name == "model.ckpt-4"
        run.pull()
        variables = model[0].weight.detach().clone()  # type: ignore[index]
        with run.averaged() as version:
            assert version == 4 and not torch.equal(model[0].weight, variables)  # type: ignore[index]
        assert torch.equal(model[0].weight, variables)  # type: ignore[index]
    model, graph, optimizer = make(tq.Async(), average=average)
    with graph_cluster() as cluster, session(cluster, graph, optimizer, logdir=tmp_path, num_steps=2) as run:
        assert [r.step for r in run.run([BATCH] * 9) if r.accepted] == [5, 6]
    assert int(dict(model.named_buffers())["1.num_batches_tracked"]) == 6  # buffers are saved and restored, too
    between, _, optimizer = make(tq.Async(), average=average)  # and on between-graph, where in-graph ended
    with tq.Session(tq.join([]), between, optimizer, logdir=tmp_path) as alone:
        assert alone.global_step == 6
        assert torch.equal(between[0].weight, model[0].weight)  # type: ignore[index]


class Counting(nn.Module):
    """Batch norm on the input itself, a buffer that is not used, and one that belongs to no checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.unused = nn.Buffer(torch.arange(3))
        self.passing = nn.Buffer(torch.full((5,), 2.0), persistent=False)
        self.out = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x) * self.passing)


@pytest.mark.parametrize("mode", ["chief", "average", "local"])
def test_the_client_gets_the_runs_buffers(mode: str) -> None:
    model = Counting()
    graph = tq.graph.Graph(model, F.cross_entropy, example_inputs=BATCH)
    optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), rule=tq.Async())
    first, second = BATCH[0], BATCH[0] + 3.0
    options: dict[str, Any] = {"wait_for_workers": 2, "buffers": mode}
    with graph_cluster(workers=2) as cluster, session(cluster, graph, optimizer, **options) as run:
        run.submit(first, BATCH[1], on=0).result()
        run.submit(second, BATCH[1], on=1).result()
        run.pull()
        shift = 1.5 if mode == "average" else 0.0
        assert torch.allclose(model.norm.running_mean, 0.1 * (first.mean(0) + shift), atol=1e-5)  # type: ignore[arg-type]


def test_with_nobody_there_the_client_says_so_and_gives_up() -> None:
    _, graph, optimizer = make()
    impatient = Patience(start_s=1.0, round_s=1.0, say_s=0.3)
    with graph_cluster(workers=1, start=0) as cluster:
        with (
            pytest.raises(
                DeadlineError, match=r"/job:worker/task:0 \(localhost:\d+\) has not answered yet\. Start one"
            ),
            tq.graph.GraphSession(cluster.spec, graph, optimizer, patience=impatient),
        ):
            pass
        cluster.start(0)
        with session(cluster, graph, optimizer) as run:  # the variables are there; now somebody is, too
            assert run.submit(*BATCH).result().accepted


def test_a_client_that_was_lost_can_be_replaced_by_one_with_the_same_graph(
    monkeypatch: pytest.MonkeyPatch, dispatchers: list[Dispatcher]
) -> None:
    monkeypatch.setattr("torchquorum.graph.inbox.TAKE_OVER_S", 1.0)
    _, graph, optimizer = make(tq.Async())
    with graph_cluster() as cluster:
        steps: list[int] = []
        first = session(cluster, graph, optimizer, liveness_s=1.5)
        # On a thread of its own, where a session leaves the signals alone.
        thread = threading.Thread(target=lambda: steps.extend(r.step for r in first.__enter__().run([BATCH] * 3)))
        thread.start()
        thread.join(60.0)
        assert steps == [1, 2, 3]
        dispatchers[0].close()  # as if its process had been killed
        _, graph, optimizer = make(tq.Async())
        with session(cluster, graph, optimizer, liveness_s=1.5) as second:
            assert [r.step for r in second.run([BATCH] * 3)] == [4, 5, 6]


def test_an_interrupt_ends_the_run_well(tmp_path: Path) -> None:
    _, graph, optimizer = make(tq.Async())
    with graph_cluster() as cluster, session(cluster, graph, optimizer, logdir=tmp_path) as run:
        seen = 0
        for _ in run.run(BATCH for _ in range(100_000)):
            seen += 1
            if seen == 10:
                os.kill(os.getpid(), signal.SIGINT)
        assert run.should_stop() and 10 <= seen < 100
    assert list(tmp_path.glob("model.ckpt-*"))


def test_an_error_in_the_clients_loop_ends_every_task_and_is_what_the_user_sees() -> None:
    _, graph, optimizer = make(tq.Sync())
    cluster = GraphCluster(workers=2)
    run = session(cluster, graph, optimizer, wait_for_workers=2)
    with pytest.raises(ZeroDivisionError), run:
        raise ZeroDivisionError(run.submit(*BATCH).number)
    cluster.wait()
    assert "the client ended before its run was over" in str(cluster.failures["worker 0"])
    with pytest.raises(ConfigError, match="the session is over"):
        run.submit(*BATCH)


def test_a_second_client_is_told_that_the_task_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchquorum.graph.graph_run.BUSY_S", 1.0)
    _, graph, optimizer = make(tq.Async())
    with graph_cluster() as cluster, session(cluster, graph, optimizer) as run:
        assert run.submit(*BATCH).result().accepted
        _, second, other = make(tq.Async())
        with (
            pytest.raises(TorchQuorumError, match=r"is busy with the run of client"),
            session(cluster, second, other, liveness_s=1.5),
        ):
            pass
        assert run.submit(*BATCH).result().accepted


def test_unknown_senders_get_an_answer_and_change_nothing() -> None:
    _, graph, optimizer = make(tq.Async())
    with graph_cluster() as cluster, session(cluster, graph, optimizer) as run:
        address = cluster.spec.address(cluster.spec.workers[0])
        channel = EntryChannel(address)
        try:
            for frames in ([b"\x80\x04K\x01."], [b""], [codec.encode(m.StatusRequest())], [codec.encode(m.Bye())] * 3):
                channel.send(frames)
                received = channel.receive(30.0)
                assert received is not None
                answer, _ = g.split(received)
                assert isinstance(answer, m.Fault) and answer.kind == "wire"
            channel.send([codec.encode(g.Finish("not our run", True, True))])
            received = channel.receive(30.0)
            assert received is not None and isinstance(g.split(received)[0], g.State)
            channel.send([codec.encode(g.Execute(7, g.GraphSpec("bad", [], [], [{"ref": 3}]), []))])
            received = channel.receive(30.0)
            answer, _ = g.split(received or [])
            assert isinstance(answer, g.Outputs) and "not a number" in answer.error
        finally:
            channel.close()
        assert run.submit(*BATCH).result().accepted


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ahead": -1}, "ahead=-1"),
        ({"last_step": 0}, "last_step=0"),
        ({"wait_for_workers": 3}, "the cluster has 1 workers"),
        ({"last_step": 1, "num_steps": 1}, "give one of the two"),
    ],
)
def test_values_that_make_no_sense_are_refused_at_once(options: dict[str, Any], says: str) -> None:
    _, graph, optimizer = make()
    with pytest.raises(ConfigError, match=says):
        tq.graph.GraphSession({"ps": ["a:1"], "worker": ["b:2"]}, graph, optimizer, patience=PATIENCE, **options)
