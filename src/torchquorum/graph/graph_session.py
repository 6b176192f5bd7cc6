"""`tq.graph.GraphSession`: in-graph training. One client holds program and data; compute tasks pull, compute and push.

The client is not a worker: it creates the variables and submits batches from the thread of the user's loop;
`torchquorum.graph.dispatcher` exchanges messages with the tasks on a thread of its own; `torchquorum.graph.graph_run` is what the two
threads share. What always holds: every batch that was submitted gets exactly one result; every wait has a deadline; after the
block the client's model holds the variables.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from torchquorum.cluster import ClusterSpec, TaskId
from torchquorum.cluster.secret import read_access
from torchquorum.cluster.signals import Signals
from torchquorum.errors import ConfigError, DeadlineError, GraphError
from torchquorum.graph import graph_messages as g
from torchquorum.graph.assignments import Assignments, BatchResult, GivenBatch
from torchquorum.graph.dispatcher import Dispatcher, connect_leader, connect_tasks
from torchquorum.graph.export import Graph
from torchquorum.graph.graph_run import GraphRun
from torchquorum.graph.runner import check_batch
from torchquorum.graph.tensors import pack, unpack
from torchquorum.session.attach import create_variables
from torchquorum.session.config import MemberOptions, SaveOptions, Setup, StopOptions
from torchquorum.session.durable import read_durable, read_restore
from torchquorum.session.folder import check_folder
from torchquorum.session.join import Task, say
from torchquorum.wire.messages import Plan
from torchquorum.wire.rpc import Patience
from torchquorum.wire.transports import connector
from torchquorum.worker.optimizer import Optimizer

FINISH_S = 150.0
Addresses = ClusterSpec | Mapping[str, Any] | Task


class PendingBatch:
    """A batch that was submitted; `result()` waits for what became of it."""

    def __init__(self, batch: GivenBatch, wait: Callable[[GivenBatch], BatchResult]) -> None:
        self._batch, self._wait = batch, wait
        self.number = batch.number

    def done(self) -> bool:
        """Whether the result is there."""
        return self._batch.over

    def result(self) -> BatchResult:
        """Waits for the result and returns it.

        Raises:
            GraphError: The batch could not be computed.
            ConfigError: It waits for a round that cannot fill while this thread waits: submit more batches first.
            DeadlineError: It was not there in time.
        """
        return self._wait(self._batch)


class GraphSession:
    """A run in which compute tasks that only joined train the client's graph.

    Args:
        cluster: Who exists: a `tq.ClusterSpec`, or {"ps": [...], "worker": [...]} with the addresses of the compute tasks.
        graph: What to train.
        optimizer: A `tq.Optimizer` over the parameters of the graph's model.
        logdir, last_step, num_steps, liveness_s, save_every_s, save_every_steps, keep, restore, start_afresh, accept_loss: As in
            `tq.Session`.
        buffers, durable: As in
            `tq.Session`; compute task 0 is the chief.
        wait_for_workers: Begin when so many compute tasks are ready; the others may come later.
        ahead: How many batches a task has besides the one that it computes, so that it need not wait for the next.
        seed: Dropout and the like in batch n follow from this and n, wherever it is computed. By default torch's seed.
        log_device_placement: Every compute task prints, once, where variables live and its operations run.
        patience: How long to wait for what.
        secret_file: The file with the cluster's secret; by default that of the task, or what the environment says.
    """

    def __init__(
        self,
        cluster: Addresses,
        graph: Graph,
        optimizer: Optimizer,
        *,
        logdir: str | Path | None = None,
        last_step: int | None = None,
        num_steps: int | None = None,
        liveness_s: float = 5.0,
        save_every_s: float | None = None,
        save_every_steps: int | None = None,
        keep: int = 5,
        restore: bool = True,
        start_afresh: bool = False,
        accept_loss: bool = False,
        buffers: str = "chief",
        durable: bool | str | None = None,
        wait_for_workers: int = 1,
        ahead: int = 1,
        seed: int | None = None,
        log_device_placement: bool = False,
        patience: Patience | None = None,
        secret_file: str | None = None,
    ) -> None:
        if not isinstance(graph, Graph):
            raise ConfigError(
                f"graph={type(graph).__name__}: give tq.graph.Graph(model, loss_fn, example_inputs=(x, y))"
            )
        if isinstance(ahead, bool) or not isinstance(ahead, int) or not 0 <= ahead <= 64:
            raise ConfigError(f"ahead={ahead!r}: must be a whole number from 0 to 64")
        spec = cluster.cluster if isinstance(cluster, Task) else cluster
        self.cluster = spec if isinstance(spec, ClusterSpec) else ClusterSpec(spec)
        self.graph, self.optimizer = graph, optimizer
        self._patience = patience or Patience()
        known = cluster.access if isinstance(cluster, Task) and secret_file is None else None
        self._access = read_access(secret_file) if known is None else known
        chief = Task(
            cluster=self.cluster,
            id=TaskId("worker", 0),
            source="client",
            connect=connector(self.cluster, self._access),
            separate=True,
            access=self._access,
        )
        folder = check_folder(chief, logdir)
        # The client creates the variables as a chief would; it never joins as a worker.
        self._setup = Setup(
            task=chief,
            model=graph.model,
            optimizer=optimizer,
            logdir=folder,
            patience=self._patience,
            stop=StopOptions(last_step=last_step, num_steps=num_steps),
            save=SaveOptions(every_s=save_every_s, every_steps=save_every_steps, keep=keep),
            restore=read_restore(
                read_durable(durable, folder), restore=restore, start_afresh=start_afresh, accept_loss=accept_loss
            ),
            member=MemberOptions(liveness_s=liveness_s, wait_for_workers=wait_for_workers, buffers=buffers),
        )
        self._options = g.RunOptions(
            save_every_s=save_every_s,
            save_every_steps=save_every_steps,
            keep=keep,
            start_s=self._patience.start_s,
            round_s=self._patience.round_s,
            log_device_placement=bool(log_device_placement),
        )
        self._depth = 1 + ahead
        self._seed = torch.initial_seed() if seed is None else seed
        self._signals = Signals(lambda line: say(f"client: {line}"), "ending the run")
        self._dispatcher: Dispatcher | None = None
        self._submitted = 0
        self._over = False

    # -- begin and end ------------------------------------------------------------------------------------------------

    def __enter__(self) -> GraphSession:
        if self._dispatcher is not None or self._over:
            raise ConfigError("this session has begun already; make a new tq.graph.GraphSession for another run")
        # The variables exist after this line, whether or not a compute task is there.
        plan = create_variables(self._setup)
        self.last_step = plan.last_step
        dispatcher = self._dispatcher = self._make_dispatcher(plan)
        self._signals.install()
        dispatcher.start()
        try:
            self._wait(
                lambda: len(dispatcher.run.ready) >= self._setup.wait_for_workers,
                f"{self._setup.wait_for_workers} compute tasks to be ready",
                self._patience.start_s,
            )
        except BaseException:
            self._end(ok=False)
            raise
        return self

    def _make_dispatcher(self, plan: Plan) -> Dispatcher:
        def tell(line: str) -> None:
            say(f"client: {line}")

        in_turn = plan.rule.once_per_round and plan.rule.least(plan.num_workers) >= plan.num_workers
        connect = connector(self.cluster, self._access)
        run = GraphRun(
            secrets.token_hex(8),
            connect_tasks(self.cluster, connect),
            Assignments(depth=self._depth, in_turn=in_turn),
            say_s=self._patience.say_s,
            say=tell,
        )
        name = f"client {socket.gethostname()}/{os.getpid()}"
        train = g.Train(run.id, name, self.graph.spec, plan, self._options)
        _, frames = pack(self.graph.values, copy=True)
        leader = connect_leader(self.cluster, connect)
        return Dispatcher(run, train, frames, leader, liveness_s=self._setup.member.liveness_s, say=tell)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ok = kind is None
        try:
            if ok:
                self.pull()
        except BaseException:
            ok = False
            raise
        finally:
            self._end(ok=ok)

    def _end(self, *, ok: bool) -> None:
        """Tells the tasks that the run is over, waits until they have left, and closes everything."""
        dispatcher = self._running()
        run, limit_s = dispatcher.run, FINISH_S if ok else self._setup.member.liveness_s
        try:
            dispatcher.finish(ok=ok)
            run.wait(lambda: run.all_left, "the compute tasks to leave the run", limit_s, lambda: None)
        except DeadlineError as late:
            say(f"client: {late}")
        finally:
            self._over, self._dispatcher = True, None
            self._signals.remove()
            dispatcher.close()

    # -- batches ------------------------------------------------------------------------------------------------------

    def submit(self, *inputs: torch.Tensor, on: int | None = None) -> PendingBatch:
        """Submits a batch; waits only while all compute tasks have enough to do.

        Args:
            *inputs: The batch, as the graph takes it.
            on: Which compute task gets it, while it lives; by default the one with least to do.
        """
        run, batch = self._running().run, self._make(inputs, on)
        self._wait(lambda: run.assignments.room > 0 or run.stop, "a compute task with room", self._patience.round_s)
        run.add(batch)
        return PendingBatch(batch, self._wait_for_result)

    def run(self, batches: Iterable[Sequence[torch.Tensor]]) -> Iterator[BatchResult]:
        """Trains on batches and yields what became of each, in the order in which they are done.

        Ends when the batches do or when the run is over (`should_stop`). Under a rule that waits for several gradients, what
        the last ones wait for may never come: then their result says so, with accepted=None.

        Args:
            batches: The data; read only as fast as it can be computed.
        """
        mine: dict[int, GivenBatch] = {}
        source = iter(batches)
        more = True
        try:
            while more or mine:
                run = self._running().run
                more = more and not self.should_stop()
                run.expect(more)
                with run.changed:
                    full = run.assignments.room <= 0
                if more and not full:
                    given = next(source, None)
                    more = given is not None
                    if given is not None:
                        batch = self._make(given, None)
                        mine[batch.number] = batch
                        run.add(batch)
                elif mine:
                    self._wait(self._progress(run, mine, more), "a batch to be computed", self._patience.round_s)
                # Results are yielded before more data is read: reading may be slow, and the tasks may be faster.
                for batch in self._running().run.over_among(mine.values(), settle=not more):
                    del mine[batch.number]
                    yield _result_of(batch)
        finally:
            if self._dispatcher is not None:  # the session may be over when the generator is closed
                self._dispatcher.run.expect(False)

    def _progress(self, run: GraphRun, mine: dict[int, GivenBatch], more: bool) -> Callable[[], bool]:
        """Returns what `run` waits for: a result, room for another batch, a signal, or that nothing more will come."""

        def found() -> bool:
            if any(batch.over for batch in mine.values()):
                return True
            if more:
                return run.assignments.room > 0 or self._signals.asked
            return run.assignments.stuck() is not None

        return found

    def _make(self, inputs: Sequence[torch.Tensor], on: int | None) -> GivenBatch:
        self._running()
        if isinstance(inputs, torch.Tensor):
            inputs = (inputs,)
        if on is not None and on not in range(self.cluster.num_tasks("worker")):
            raise ConfigError(f"on={on!r}: the cluster has {self.cluster.num_tasks('worker')} compute tasks, from 0")
        tensors = [x if isinstance(x, torch.Tensor) else torch.as_tensor(x) for x in inputs]
        specs, frames = pack(tensors, copy=True)
        check_batch(self.graph.inputs, specs)
        number = self._submitted
        self._submitted += 1
        return GivenBatch(number, batch_seed(self._seed, number), specs, frames, on)

    def _wait_for_result(self, batch: GivenBatch) -> BatchResult:
        assignments = self._running().run.assignments
        self._wait(
            lambda: batch.over or assignments.stuck() is not None,
            f"batch {batch.number} to be computed",
            self._patience.round_s,
        )
        if not batch.over:
            rule = self.optimizer.rule
            raise ConfigError(
                f"batch {batch.number} waits for its round, and no task computes what is missing: {rule} makes an update of "
                f"{rule.needed(self.cluster.num_tasks('worker'))} gradients. Submit that many before you ask for a result."
            )
        return _result_of(batch)

    # -- what the client sees -----------------------------------------------------------------------------------------

    def should_stop(self) -> bool:
        """Whether the run is over: the last step has been reached, or Ctrl-C has asked for the end."""
        run = self._running().run
        with run.changed:
            return run.stop or self._signals.asked

    @property
    def global_step(self) -> int:
        """Returns the newest version that a compute task has reported."""
        return self._running().run.version

    @property
    def workers(self) -> list[int]:
        """Returns the compute tasks that are ready, by index."""
        run = self._running().run
        with run.changed:
            return run.ready

    def pull(self, *, buffers: bool = True) -> int:
        """Takes the variables into the client's model, and the run's buffers, see `buffers=`.

        Returns:
            The version of the variables.
        """
        version = self._load("variables")
        if buffers and any(s.kind == "buffer" for s in self.graph.spec.inputs):
            self._load("buffers")
        return version

    @contextmanager
    def averaged(self) -> Iterator[int]:
        """Inside this block the client's model holds the moving averages; afterwards the variables again."""
        try:
            yield self._load("averages")
        finally:
            self._load("variables")

    def save(self) -> str:
        """Makes a checkpoint of the current version, waits for it, and returns its path."""
        if self._setup.logdir is None:
            raise ConfigError("session.save(): the session has no logdir to save into")
        return self._running().run.ask("checkpoint", self._patience.round_s, self._check_hope).answer.path

    def _load(self, what: str) -> int:
        question = self._running().run.ask(what, self._patience.round_s, self._check_hope)
        answer: g.Fetched = question.answer
        model = self.graph.model
        named = dict(model.named_buffers() if what == "buffers" else model.named_parameters())
        with torch.no_grad():
            for name, tensor in zip(answer.names, unpack(answer.tensors, question.frames), strict=True):
                if name in named:
                    named[name].copy_(tensor)
        return answer.version

    # -- waiting ------------------------------------------------------------------------------------------------------

    def _wait(self, done: Callable[[], bool], what: str, limit_s: float) -> None:
        self._running().run.wait(done, what, limit_s, self._check_hope)

    def _check_hope(self) -> None:
        """Ends a wait when no task can do the work, or when the user wants to stop while no task is there."""
        run = self._running().run
        if self._signals.asked and not run.ready:
            raise KeyboardInterrupt
        run.check_hope()

    def _running(self) -> Dispatcher:
        if self._dispatcher is None:
            state = "is over" if self._over else "has not begun"
            raise ConfigError(f"the session {state}; use it inside `with tq.graph.GraphSession(...) as session:`")
        return self._dispatcher


def batch_seed(seed: int, number: int) -> int:
    """Returns the seed under which a batch is computed: torch.manual_seed of it gives the same dropout anywhere."""
    return (seed * 1_000_003 + number) % (1 << 62)


def _result_of(batch: GivenBatch) -> BatchResult:
    if batch.result is None:
        raise GraphError(f"batch {batch.number} could not be computed: {batch.error}")
    return batch.result
