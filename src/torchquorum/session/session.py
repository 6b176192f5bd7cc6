"""`tq.Session`: the run around a training loop. The minimal one: it begins, says when to stop, and ends.

The chief creates the variables, the others wait for that; then every worker joins, trains and leaves. What always holds:
after the block the model's parameters are ordinary tensors of this process, at the last version it took.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from torchquorum import env
from torchquorum.errors import ConfigError, TorchQuorumError
from torchquorum.session.hooks import Hook, Ran, end_all
from torchquorum.session.join import Task, say
from torchquorum.transport.messages import Plan
from torchquorum.worker.beat import Beat
from torchquorum.worker.client import Client, Patience, Step, make_layout
from torchquorum.worker.flat import FlatParameters, describe
from torchquorum.worker.optimizer import Optimizer


class Session:
    """A training run, as a context manager.

    Args:
        task: What `tq.join()` returned.
        model: The module to train.
        optimizer: A `tq.Optimizer` over its parameters.
        logdir: The run's folder, for the ledger and the report; the ps tasks write there.
        last_step: The global step at which the run is over, exactly; None trains until the loop ends.
        liveness_s: A worker that is silent for longer counts as dead, and the others go on.
        patience: How long to wait for what.
        hooks: What to do around the loop, in this order; see `torchquorum.session.hooks`.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        logdir: str | Path | None = None,
        last_step: int | None = None,
        liveness_s: float = 5.0,
        patience: Patience | None = None,
        hooks: Sequence[Hook] = (),
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"optimizer={type(optimizer).__name__}: wrap it first: tq.Optimizer(optimizer, rule=tq.Sync())"
            )
        if last_step is not None and (isinstance(last_step, bool) or not isinstance(last_step, int) or last_step < 1):
            raise ConfigError(
                f"last_step={last_step!r}: must be a whole number, 1 or more; leave it out to train until the loop ends"
            )
        if liveness_s <= 0:
            raise ConfigError(f"liveness_s={liveness_s}: must be more than 0 seconds")
        self.task, self.model, self.optimizer = task, model, optimizer
        folder = logdir if logdir is not None else env.logdir()
        self.logdir = str(Path(folder).absolute()) if folder is not None else None
        self._last_step, self._liveness_s = last_step, liveness_s
        self._patience = patience or Patience()
        self._client: Client | None = None
        self._beat: Beat | None = None
        self._results: dict[str, float] = {}
        self.flat: FlatParameters | None = None
        self.hooks = list(hooks)
        self._stop_asked = False

    def __enter__(self) -> Session:
        if self._client is not None:
            raise ConfigError("this session has begun already; make a new tq.Session for another run")
        for hook in self.hooks:
            hook.begin(self)
        if self.task.alone is not None:
            self.task.alone.start()
        incarnation = secrets.randbits(62)
        client = Client(
            self.task.cluster,
            self.task.index,
            incarnation,
            self.task.connect,
            transport=self.task.transport,
            patience=self._patience,
            say=say,
        )
        try:
            self._begin(client, incarnation)
        except BaseException:
            self._end(client)
            raise
        self._client = client
        self.optimizer.attach(client, self)
        try:
            for hook in self.hooks:
                hook.after_create_session(self)
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def before_run(self) -> None:
        """Tells the hooks that a step is about to be pushed; the optimizer calls this."""
        for hook in self.hooks:
            hook.before_run(self)

    def after_run(self, step: Step, loss: float | None, seconds: float) -> None:
        """Tells the hooks what a step did; the optimizer calls this."""
        if self.hooks:
            ran = Ran(step, loss, seconds)
            for hook in self.hooks:
                hook.after_run(self, ran)

    def _begin(self, client: Client, incarnation: int) -> None:
        plan, parameters = self._plan()
        flat = FlatParameters(make_layout(plan), parameters)
        client.hello()
        if self.task.is_chief and client.create(plan, flat):
            say(f"{self.task}: the ps tasks hold live variables already; going on with them")
        beats = self.task.connect(
            self.task.cluster.address(self.task.cluster.tasks("ps")[0]),
            f"beat/{self.task.index}/{incarnation:016x}".encode(),
        )
        self._beat = Beat(beats, self.task.index, incarnation, min(1.0, self._liveness_s / 4))
        client.join(plan, flat)
        self.flat = flat

    def _plan(self) -> tuple[Plan, list[nn.Parameter]]:
        variables, parameters = describe(self.model, self.optimizer.inner)
        plan = Plan(
            variables=variables,
            optimizer=self.optimizer.spec(),
            rule=self.optimizer.rule,
            schedule=self.optimizer.schedule,
            average=self.optimizer.average,
            num_shards=self.task.num_ps,
            num_workers=self.task.num_workers,
            placement=self.optimizer.placement,
            slice_bytes=self.optimizer.slice_bytes,
            last_step=self._last_step,
            liveness_s=self._liveness_s,
            logdir=self.logdir,
        )
        return plan, parameters

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        client = self._client
        assert client is not None
        finished = kind is None
        try:
            if finished and client.pipeline:
                client.pull()
            if finished:
                end_all(self.hooks, self)
            client.leave(finished=finished, **self._results)
        except BaseException as failure:
            if finished:
                client.leave(finished=False)
                raise
            if not isinstance(failure, TorchQuorumError):
                raise
        finally:
            self.optimizer.attach(None)
            self._end(client)

    def _end(self, client: Client) -> None:
        if self._beat is not None:
            self._beat.stop()
            self._beat = None
        client.close()
        if self.task.alone is not None:
            self.task.alone.finish()

    # -- inside the block ---------------------------------------------------------------------------------------------

    def should_stop(self) -> bool:
        """Whether the run is over: the last step has been reached, or somebody asked to stop."""
        return self._stop_asked or self._running().stopped

    def request_stop(self) -> None:
        """Makes this worker's loop end: `should_stop` is true from now on."""
        self._stop_asked = True

    @property
    def global_step(self) -> int:
        """Returns the cluster's version, as of this worker's last push or pull."""
        return self._known().version

    @property
    def local_step(self) -> int:
        """Returns how many gradients this worker has computed."""
        return self._known().local_step

    @property
    def transports(self) -> list[str]:
        """Returns how this worker talks to each ps task: shm or tcp."""
        return self._known().transports

    def pull(self) -> int:
        """Takes the cluster's current version into the model's parameters; returns it."""
        return self._running().pull()

    @contextmanager
    def averaged(self) -> Iterator[int]:
        """Inside this block the model's parameters are the moving averages; afterwards they are the variables again."""
        yield self._running().pull(averaged=True)
        self._running().pull()

    def record(self, **results: Any) -> None:
        """Notes this worker's final `loss` and `accuracy` for the report."""
        unknown = set(results) - {"loss", "accuracy"}
        if unknown:
            raise ConfigError(f"session.record({', '.join(sorted(unknown))}=...): allowed are loss and accuracy")
        self._results.update({k: float(v) for k, v in results.items()})

    def _known(self) -> Client:
        if self._client is None:
            raise ConfigError("the session has not begun: use it as `with tq.Session(...) as session:`")
        return self._client

    def _running(self) -> Client:
        client = self._known()
        if self._beat is None:
            raise ConfigError("the session is over; ask inside its `with` block")
        return client
