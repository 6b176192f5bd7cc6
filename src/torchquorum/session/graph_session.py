"""`tq.GraphSession`: in-graph training. One client holds program and data; compute tasks pull, compute and push.

The client is not a worker: it creates the variables, hands out the graph, and submits batches from the thread of the user's
loop; `torchquorum.session.dispatcher` does the talking on a thread of its own. What always holds: every batch that was
submitted gets exactly one result; every wait has a deadline; after the block the client's model holds the variables.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from torchquorum.cluster import ClusterSpec, TaskId
from torchquorum.cluster.secret import read_access
from torchquorum.cluster.signals import Signals
from torchquorum.errors import ConfigError, DeadlineError, GraphError, TorchQuorumError
from torchquorum.session.assignments import Assignments, BatchResult, GivenBatch
from torchquorum.session.dispatcher import Dispatcher, Question
from torchquorum.session.join import Task, say
from torchquorum.session.session import Session
from torchquorum.transport import graph_messages as g
from torchquorum.transport.tensors import pack, unpack
from torchquorum.transport.zmq_channel import connector
from torchquorum.worker.client import Patience
from torchquorum.worker.graph_export import Graph
from torchquorum.worker.graph_runner import check_batch
from torchquorum.worker.optimizer import Optimizer

FINISH_S = 150.0
POLL_S = 0.5
START_ONE = " Start one: torchquorum join --job_name=worker --task_id=0, with the same --ps_hosts and --worker_hosts as this client."
Addresses = ClusterSpec | Mapping[str, Any] | Task


class PendingBatch:
    """A batch that was submitted; `result()` waits for what became of it."""

    def __init__(self, session: GraphSession, batch: GivenBatch) -> None:
        self._session, self._batch = session, batch
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
        return self._session._result(self._batch)


class GraphSession:
    """A run in which compute tasks that only joined train the client's graph.

    Args:
        cluster: Who exists: a `tq.ClusterSpec`, or {"ps": [...], "worker": [...]} with the addresses of the compute tasks.
        graph: What to train.
        optimizer: A `tq.Optimizer` over the parameters of the graph's model.
        logdir, last_step, num_steps, liveness_s, save_every_s, save_every_steps, keep, restore, start_afresh, buffers, durable: As in
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
            raise ConfigError(f"graph={type(graph).__name__}: give tq.Graph(model, loss_fn, example_inputs=(x, y))")
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
            access=self._access,
        )
        # The client creates the variables as a chief would; it never joins as a worker.
        self._creator = Session(
            chief,
            graph.model,
            optimizer,
            logdir=logdir,
            last_step=last_step,
            num_steps=num_steps,
            liveness_s=liveness_s,
            save_every_s=save_every_s,
            save_every_steps=save_every_steps,
            keep=keep,
            restore=restore,
            start_afresh=start_afresh,
            buffers=buffers,
            durable=durable,
            wait_for_workers=wait_for_workers,
            patience=self._patience,
        )
        self._options = g.RunOptions(
            save_every_s=save_every_s,
            save_every_steps=save_every_steps,
            keep=keep,
            start_s=self._patience.start_s,
            round_s=self._patience.round_s,
            log_device_placement=bool(log_device_placement),
        )
        self._liveness_s, self._wait_for_workers = liveness_s, wait_for_workers
        self._depth = 1 + ahead
        self._seed = torch.initial_seed() if seed is None else seed
        self._signals = Signals(lambda line: say(f"client: {line}"), "ending the run")
        self._dispatcher: Dispatcher | None = None
        self._submitted = 0
        self._asked = 0
        self._over = False

    # -- begin and end ------------------------------------------------------------------------------------------------

    def __enter__(self) -> GraphSession:
        if self._dispatcher is not None or self._over:
            raise ConfigError("this session has begun already; make a new tq.GraphSession for another run")
        plan = self._creator.create_only()
        self.last_step = plan.last_step
        name = f"client {socket.gethostname()}/{os.getpid()}"
        train = g.Train(secrets.token_hex(8), name, self.graph.spec, plan, self._options)
        _, frames = pack(self.graph.values, copy=True)
        in_turn = plan.rule.once_per_round and plan.rule.needed(plan.num_workers) >= plan.num_workers
        books = Assignments(depth=self._depth, in_turn=in_turn)
        self._dispatcher = Dispatcher(
            self.cluster,
            train,
            frames,
            books,
            liveness_s=self._liveness_s,
            say=lambda line: say(f"client: {line}"),
            access=self._access,
        )
        self._signals.install()
        self._dispatcher.start()
        try:
            self._wait(
                lambda d: len(d.ready) >= self._wait_for_workers,
                f"{self._wait_for_workers} compute tasks to be ready",
                self._patience.start_s,
            )
        except BaseException:
            self._end(ok=False)
            raise
        return self

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
        """Tells the tasks that it is over, waits until they have left, and gives everything up."""
        dispatcher = self._running()
        try:
            dispatcher.finish(ok=ok)
            self._wait(
                lambda d: d.all_left,
                "the compute tasks to leave the run",
                FINISH_S if ok else self._liveness_s,
                finishing=True,
            )
        except DeadlineError as late:
            say(f"client: {late}")
        finally:
            self._over, self._dispatcher = True, None
            self._signals.remove()
            dispatcher.close()

    # -- batches ------------------------------------------------------------------------------------------------------

    def submit(self, *inputs: torch.Tensor, on: int | None = None) -> PendingBatch:
        """Hands a batch over; waits only while all compute tasks have enough to do.

        Args:
            *inputs: The batch, as the graph takes it.
            on: Which compute task shall have it, while it lives; by default whichever has least to do.
        """
        batch = self._make(inputs, on)
        self._wait(lambda d: d.books.room > 0 or d.stop, "a compute task with room", self._patience.round_s)
        self._give(batch)
        return PendingBatch(self, batch)

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
                more = more and not self.should_stop()
                self._expect(more)
                if more and not self._full():
                    given = next(source, None)
                    more = given is not None
                    if given is not None:
                        batch = self._make(given, None)
                        mine[batch.number] = batch
                        self._give(batch)
                elif mine:
                    self._wait(self._progress(mine, more), "a batch to be computed", self._patience.round_s)
                # Results are shown before more data is read: that may take its time, and the tasks may be faster.
                for batch in self._over_among(mine, settle=not more):
                    del mine[batch.number]
                    yield self._show(batch)
        finally:
            self._expect(False)

    def _expect(self, more: bool) -> None:
        """Says whether further batches come by themselves; nobody needs to know once the session is over."""
        if (dispatcher := self._dispatcher) is not None:
            with dispatcher.changed:
                dispatcher.books.expecting = more

    def _progress(self, mine: dict[int, GivenBatch], more: bool) -> Callable[[Dispatcher], bool]:
        """Returns what `run` waits for: a result, room for another batch, a signal, or that nothing more will come."""

        def found(dispatcher: Dispatcher) -> bool:
            if any(batch.over for batch in mine.values()):
                return True
            if more:
                return dispatcher.books.room > 0 or self._signals.asked
            return dispatcher.books.stuck() is not None

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

    def _give(self, batch: GivenBatch) -> None:
        dispatcher = self._running()
        with dispatcher.changed:
            dispatcher.books.waiting.append(batch)
        dispatcher.wake()

    def _full(self) -> bool:
        dispatcher = self._running()
        with dispatcher.changed:
            return dispatcher.books.room <= 0

    def _over_among(self, mine: dict[int, GivenBatch], *, settle: bool) -> list[GivenBatch]:
        """Takes the batches that are done; with `settle`, also those that wait for gradients that nobody computes."""
        dispatcher = self._running()
        with dispatcher.changed:
            for helper, batch, what in (dispatcher.books.stuck() or []) if settle else []:
                if not batch.over:
                    batch.result = BatchResult(
                        number=batch.number,
                        loss=helper.loss,
                        step=helper.version,
                        local_step=helper.local_step + 1,
                        placement=helper.place,
                        accepted=True if what.startswith("the slowest") else None,
                        reason=f"waits for {what}",
                        attempts=batch.attempts,
                    )
            return [batch for batch in mine.values() if batch.over]

    def _show(self, batch: GivenBatch) -> BatchResult:
        if batch.result is None:
            raise GraphError(f"batch {batch.number} could not be computed: {batch.error}")
        return batch.result

    def _result(self, batch: GivenBatch) -> BatchResult:
        self._wait(
            lambda d: batch.over or d.books.stuck() is not None,
            f"batch {batch.number} to be computed",
            self._patience.round_s,
        )
        if not batch.over:
            rule = self.optimizer.rule
            raise ConfigError(
                f"batch {batch.number} waits for its round, and nobody computes what is missing: {rule} makes an update of "
                f"{rule.needed(self.cluster.num_tasks('worker'))} gradients. Submit that many before you ask for a result."
            )
        return self._show(batch)

    # -- what the client sees -----------------------------------------------------------------------------------------

    def should_stop(self) -> bool:
        """Whether the run is over: the last step has been reached, or Ctrl-C has asked for the end."""
        dispatcher = self._running()
        with dispatcher.changed:
            return dispatcher.stop or self._signals.asked

    @property
    def global_step(self) -> int:
        """Returns the newest version that a compute task has told of."""
        return self._running().version

    @property
    def workers(self) -> list[int]:
        """Returns the compute tasks that are ready, by index."""
        dispatcher = self._running()
        with dispatcher.changed:
            return dispatcher.ready

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
        if self._creator.logdir is None:
            raise ConfigError("session.save(): the session has no logdir to save into")
        answer = self._ask(g.SaveNow(self._run_id(), self._number()), "a checkpoint").answer
        return answer.path

    def _load(self, what: str) -> int:
        question = self._ask(g.Fetch(self._run_id(), self._number(), what), f"the {what}")
        answer: g.Fetched = question.answer
        model = self.graph.model
        named = dict(model.named_buffers() if what == "buffers" else model.named_parameters())
        with torch.no_grad():
            for name, tensor in zip(answer.names, unpack(answer.tensors, question.frames), strict=True):
                if name in named:
                    named[name].copy_(tensor)
        return answer.version

    def _ask(self, message: Any, what: str) -> Question:
        dispatcher, question = self._running(), Question(message)
        with dispatcher.changed:
            dispatcher.questions.append(question)
        dispatcher.wake()
        try:
            self._wait(lambda d: question.answer is not None, f"{what} from a compute task", self._patience.round_s)
        finally:
            with dispatcher.changed:
                dispatcher.questions.remove(question)
        if question.answer.error:
            raise TorchQuorumError(f"{what}: {question.answer.error}")
        return question

    # -- waiting ------------------------------------------------------------------------------------------------------

    def _wait(
        self, done: Callable[[Dispatcher], bool], what: str, patience_s: float, *, finishing: bool = False
    ) -> None:
        """Waits until something is so; says now and then for what, and gives up when the time is over."""
        dispatcher = self._running()
        started = told = time.monotonic()
        with dispatcher.changed:
            while not done(dispatcher):
                dispatcher.changed.wait(POLL_S)
                now = time.monotonic()
                if dispatcher.failure is not None:
                    raise dispatcher.failure
                if not finishing:
                    self._check_hope(dispatcher)
                if now - started > patience_s:
                    advice = "" if dispatcher.ready else START_ONE
                    raise DeadlineError(
                        f"waited {now - started:.0f} s for {what} and gave up. {_who(dispatcher)}{advice}"
                    )
                if now - told >= self._patience.say_s:
                    told = now
                    say(f"client: waiting for {what}: {now - started:.0f} s. {_who(dispatcher)}")

    def _check_hope(self, dispatcher: Dispatcher) -> None:
        """Gives up when no task can do the work, or when the user wants out while nobody is there."""
        if self._signals.asked and not dispatcher.ready:
            raise KeyboardInterrupt
        why = dispatcher.hopeless(time.monotonic())
        if why:
            raise TorchQuorumError(f"no compute task can join: {why}")

    def _running(self) -> Dispatcher:
        if self._dispatcher is None:
            state = "is over" if self._over else "has not begun"
            raise ConfigError(f"the session {state}; use it inside `with tq.GraphSession(...) as session:`")
        return self._dispatcher

    def _run_id(self) -> str:
        return self._running()._run

    def _number(self) -> int:
        self._asked += 1
        return self._asked


def batch_seed(seed: int, number: int) -> int:
    """Returns the seed under which a batch is computed: torch.manual_seed of it gives the same dropout anywhere."""
    return (seed * 1_000_003 + number) % (1 << 62)


def _who(dispatcher: Dispatcher) -> str:
    """Says how every compute task is doing."""
    books = dispatcher.books
    said = []
    for contact in dispatcher.contacts:
        helper = books.helpers.get(contact.task.index)
        batches = ", ".join(f"{b.number}{helper.held_text(b.number)}" for b in helper.queue) if helper else ""
        said.append(f"{contact}, has batch {batches}" if batches else str(contact))
    waiting = [str(b.number) for b in books.waiting] + [f"{d.batch.number} (in doubt)" for d in books.doubts]
    return "; ".join(said) + (f"; not given to anybody: batch {', '.join(waiting)}" if waiting else "") + "."
