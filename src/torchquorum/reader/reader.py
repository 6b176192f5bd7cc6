"""`tq.Reader`: whoever wants what a run has learnt so far, and is no part of it: servers, evaluators, actors.

Used from any number of threads, each call of which holds the reader's lock while it asks. What always holds: a reader is no worker and is
not counted as one; nothing of a run waits for it; what it hands out is of one version; a version goes back only with a new generation.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import nn

from torchquorum.clock import SYSTEM, Clock
from torchquorum.cluster.secret import read_access
from torchquorum.compress.compressor import read_compressor
from torchquorum.errors import ConfigError
from torchquorum.lines import write_line
from torchquorum.reader.core import ReaderCore
from torchquorum.reader.folder_source import FolderSource
from torchquorum.reader.follow import Follow
from torchquorum.reader.ps_connections import Who
from torchquorum.reader.read_copy import AVERAGE, BUFFER, VARIABLE, ReadCopy, ReadVersion
from torchquorum.reader.run_source import RunSource
from torchquorum.reader.source import Source, WantedParts
from torchquorum.reader.source_name import is_address, one_address
from torchquorum.reader.write_model import write_model
from torchquorum.wire.rpc import Patience
from torchquorum.worker.row_parameter import RowParameter
from torchquorum.worker.table_module import Table
from torchquorum.worker.variable_names import plain_names


class Reader:
    """Reads a run while it trains.

    Args:
        source: host:port of ps task 0, or the run's folder, whose published checkpoints are then read.
        secret_file: The file with the cluster's secret, or with its read-only form; by default as the environment says.
        compress: Versions after the first are compressed differences: `int8`, `int4`, `bfloat16`, `topk:K/N`.
        shared_memory: Whether versions are read from shared memory, where all ps tasks are on this host.
        tables: Names of tables whose rows are kept here, with every version that is taken; then `rows` asks at most once a second.
            True for all.
        name: What it is called in the run's status; by default host and process.
        patience: How long it waits for a run that is not there, and how often it says so.
        say: Prints a line for people.
        clock: Tells the time.

    Raises:
        ConfigError: An argument is not allowed, or has no effect.
        SecretError: The secret cannot be read.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        *,
        secret_file: str | None = None,
        compress: str | None = None,
        shared_memory: bool = True,
        tables: bool | Iterable[str] = (),
        name: str | None = None,
        patience: Patience | None = None,
        say: Callable[[str], None] = write_line,
        clock: Clock = SYSTEM,
    ) -> None:
        self.name = name or f"{socket.gethostname()}/{os.getpid()}"
        if compress is not None:
            read_compressor(compress)
        if is_address(source):
            who = Who(secrets.randbits(62), self.name, shares_memory=shared_memory)
            access = read_access(secret_file)
            found: Source = RunSource(one_address(str(source)), access, who, compress or "", clock)
        else:
            for option, given in (("secret_file", secret_file), ("compress", compress)):
                if given is not None:
                    raise ConfigError(
                        f"tq.Reader({option}=) has no effect on a run's folder; leave it out, or give host:port"
                    )
            found = FolderSource(source, clock)
        self._core = core = ReaderCore(found, self.name, patience or Patience(), say, clock)
        core.all_tables = tables is True
        core.kept = frozenset(() if isinstance(tables, bool) else [tables] if isinstance(tables, str) else tables)

    # -- what it has --------------------------------------------------------------------------------------------------

    @property
    def version(self) -> ReadVersion | None:
        """The version that is here; None before the first."""
        with self._core.lock:
            return None if self._core.replica.is_empty else self._core.here(note=False)

    @property
    def way(self) -> str:
        """How versions come: `shared memory`, `messages` or `checkpoints`."""
        return self._core.source.way

    @property
    def over(self) -> bool:
        """Whether the run has said that it makes no more versions."""
        return self._core.source.over

    @property
    def received_bytes(self) -> int:
        """How many bytes have come by message; none do from shared memory."""
        return self._core.source.received_bytes

    def freshness(self) -> dict[str, float]:
        """Returns how old what it has is now, in seconds, and the median and 99th percentile over its last minutes."""
        with self._core.lock:
            ages = self._core.source.freshness.ages()
        return {"age_s": ages.now, "age_p50_s": ages.p50, "age_p99_s": ages.p99} if ages is not None else {}

    # -- reading ------------------------------------------------------------------------------------------------------

    def pull(self, model: nn.Module | None = None, *, averages: bool = False) -> ReadVersion:
        """Takes the newest version: variables and buffers, all of one version, into a model. Waits for the first one.

        Sparse embeddings get all their rows; a `tq.Table` of the model asks this reader for its rows from now on. While no ps task
        answers, the model gets the version that is here, and the reader says so.

        Args:
            model: The model, built as the run's program builds it; None to take the version only, see `state_dict`.
            averages: Whether the moving averages take the place of the variables.

        Raises:
            TaskLostError: No version has come, for as long as `patience` allows.
            ConfigError: The run has another model, or keeps no averages.
        """
        core = self._core
        with core.lock:
            tables = self._attach(model) if model is not None else frozenset[str]()
            core.refresh(WantedParts(averages=averages, tables=tables), wait=core.lacks(averages, tables | core.kept))
            replica = self._core.replica
            if averages and not replica.of_kind(AVERAGE):
                raise ConfigError(
                    "no moving averages are kept; give tq.Optimizer an average=tq.ExponentialMovingAverage(0.99)"
                )
            if model is not None:
                values = {**replica.of_kind(VARIABLE), **(replica.of_kind(AVERAGE) if averages else {})}
                write_model(model, {**values, **_weights(replica, tables)}, replica.of_kind(BUFFER))
            return self._core.here()

    def state_dict(self, *, averages: bool = False) -> dict[str, torch.Tensor]:
        """Takes the newest version, and returns copies of its variables and buffers by name."""
        with self._core.lock:
            self.pull(averages=averages)
            replica = self._core.replica
            found = {**replica.of_kind(VARIABLE), **(replica.of_kind(AVERAGE) if averages else {})}
            found |= {name: found[first] for name, first in replica.tied.items() if first in found}
            return {name: value.clone() for name, value in {**found, **replica.of_kind(BUFFER)}.items()}

    def rows(self, table: str | Mapping[str, Any], keys: Any = None) -> Any:
        """Returns rows of a table as they are now, all of one version: of the shape of `keys`, with one more dimension.

        Args:
            table: The name of the table, as the model has it: that of the embedding's weight, or of the `tq.Table`. Or the keys of
                several by name: then all are of one version, and rows are returned by name.
            keys: Whole numbers, of any shape, in any order.

        Raises:
            ConfigError: There is no such table, or it has no such keys.
            TaskLostError: No ps task answers, for as long as `patience` allows.
        """
        return self.rows_and_version(table, keys)[0]

    def rows_and_version(self, table: str | Mapping[str, Any], keys: Any = None) -> tuple[Any, ReadVersion]:
        """Returns rows as `rows` does, and the version that they are of."""
        asked = {table: keys} if isinstance(table, str) else dict(table)
        given = {name: torch.as_tensor(value) for name, value in asked.items()}
        for name, value in given.items():
            if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
                raise ConfigError(f"rows of {name}: keys are whole numbers, and these are {value.dtype}")
        unique = {
            name: np.unique(value.detach().reshape(-1).to(device="cpu", dtype=torch.int64).numpy(), return_inverse=True)
            for name, value in given.items()
        }
        found, version = self._core.rows({name: keys_ for name, (keys_, _) in unique.items()})
        shaped = {
            name: found[name][torch.from_numpy(unique[name][1].reshape(-1))].view(*value.shape, found[name].shape[1])
            for name, value in given.items()
        }
        return (shaped[table] if isinstance(table, str) else shaped), version

    def follow(
        self,
        *,
        since: ReadVersion | int | None = None,
        every_s: float = 0.1,
        averages: bool = False,
        tables: bool | Iterable[str] = True,
    ) -> Follow:
        """Returns what changes, version by version, for `for` and `async for`: the first is everything there is.

        It ends when the run makes no more versions. It yields the newest version, so versions may be left out.

        Args:
            since: A version that is known already: the first change is what differs from it. A number alone is taken as one of the
                generation that there is now.
            every_s: At least so many seconds are between two versions.
            averages: Whether moving averages are wanted, too.
            tables: Of which tables rows are wanted; all of them by default.
        """
        if not every_s >= 0:
            raise ConfigError(f"follow(every_s={every_s}): must be 0 seconds or more")
        chosen = tables if isinstance(tables, bool) else frozenset([tables] if isinstance(tables, str) else tables)
        return Follow(self._core, since=since, every_s=every_s, averages=averages, tables=chosen)

    def changes(self, since: ReadVersion | int | None = None, **options: Any) -> Follow:
        """Returns what has changed since a version, and then what changes; as `follow`."""
        return self.follow(since=since, **options)

    async def pull_async(self, model: nn.Module | None = None, *, averages: bool = False) -> ReadVersion:
        """Takes the newest version, as `pull`, while the event loop goes on."""
        return await asyncio.to_thread(lambda: self.pull(model, averages=averages))

    async def rows_async(self, table: str | Mapping[str, Any], keys: Any = None) -> Any:
        """Returns rows, as `rows`, while the event loop goes on."""
        return await asyncio.to_thread(lambda: self.rows(table, keys))

    # -- inside -------------------------------------------------------------------------------------------------------

    def _attach(self, model: nn.Module) -> frozenset[str]:
        """Has the tables of a model ask this reader for rows; returns those whose weights are wanted whole."""
        plain, core = plain_names(model), self._core
        for name, module in model.named_modules():
            if isinstance(module, Table):
                table = plain(name) or "table"
                module.pull = lambda keys, table=table: core.rows({table: keys})[0][table]
        if core.replica.is_empty:
            core.refresh(WantedParts(), wait=True)
        wanted: set[str] = set()
        for own, parameter in model.named_parameters():
            name = plain(own)
            if name in core.replica.specs and not isinstance(parameter, RowParameter):
                if parameter.is_meta:
                    RowParameter.begin(parameter, name, lambda keys, name=name: core.rows({name: keys})[0][name])
                else:
                    wanted.add(name)
        return frozenset(wanted)

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes it: the run is told that it reads no more. What is followed ends."""
        self._core.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Reader:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)


def _weights(replica: ReadCopy, tables: frozenset[str]) -> dict[str, torch.Tensor]:
    """Returns whole tables as weights."""
    found: dict[str, torch.Tensor] = {}
    for name in tables:
        part = replica.tables[name]
        found[name] = part.gather(np.arange(part.spec.rows, dtype=np.int64))
    return found
