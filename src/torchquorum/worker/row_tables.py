"""The tables of one worker's model: which parameters have rows on the ps tasks, and their rows before and after the session.

Owned by the worker's thread, with the flat parameters, which hold the rest. What always holds: a parameter whose rows are pulled
belongs to sparse embeddings alone, and to an optimizer that updates single rows; the others stay whole.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from torch import nn

from torchquorum.errors import ConfigError
from torchquorum.memory.key_index import Keys
from torchquorum.update.row_kernels import KERNELS
from torchquorum.update.table_keys import shard_of
from torchquorum.wire.codec import Frame
from torchquorum.wire.frames import pack_parts
from torchquorum.wire.plan import InitSpec, TableSpec
from torchquorum.worker.row_parameter import RowParameter
from torchquorum.worker.row_reading import Reading
from torchquorum.worker.row_transfer import HostCopy
from torchquorum.worker.table_module import Table
from torchquorum.worker.variable_names import plain_names

_Answer = TypeVar("_Answer")
SPARSE = (nn.Embedding, nn.EmbeddingBag)
DTYPES = ("float32", "float64")
CHUNK_ROWS = 1 << 16
# torch.optim refuses sparse gradients with any other; with options that these cannot have, the variable stays whole.
OPTIMIZERS = ("SGD", "Adagrad", "SparseAdam")


@dataclass(eq=False)
class RowsOf:
    """A parameter with its table."""

    spec: TableSpec
    parameter: nn.Parameter
    initial: torch.Tensor | None  # until the ps tasks have it
    module: Table | None = None  # whose parameter it is, if it is no embedding's

    def begin(self, pull: Callable[[Keys], torch.Tensor]) -> None:
        """From now on its rows come from the ps tasks."""
        if self.module is not None:
            self.module.pull = pull
            self.module.gathered.clear()
        else:
            RowParameter.begin(self.parameter, self.spec.name, pull)

    def take_gradient(self) -> tuple[Keys, torch.Tensor, HostCopy | None] | None:
        """Returns the gradient that has gathered, keys in order, each once, and its copy if that was begun; None if there is none."""
        if self.module is not None:
            found = (*self.module.merged(), self.module.early) if self.module.gathered else None
            self.module.gathered.clear()
            self.module.early = None
            return found
        gradient = self.parameter.grad
        if gradient is None:
            return None
        merged = gradient.coalesce()
        return merged.indices()[0].cpu().numpy(), merged.values(), None


class RowTables:
    """The tables of one model.

    Attributes:
        pull: Returns rows: of a table, by number, with these keys, each once and in order.
        evicted: Returns the keys that went last, of a table by number.
        prefetch: Asks for rows of a later batch: of a table, by number, with these keys, each once and in order.
        reading: How old rows may be that are read.
        survive: Calls something again when a ps task was lost meanwhile and found again.
    """

    def __init__(self, found: Sequence[RowsOf] = (), reading: Reading | None = None) -> None:
        self.all, self.reading = list(found), reading or Reading()
        self.prefetch: Callable[[int, Keys], object] = _not_joined
        self.pull: Callable[[int, Keys], torch.Tensor] = _not_joined
        self.evicted: Callable[[int], Keys] = lambda number: _not_joined(number, np.empty(0, np.int64)).numpy()
        self.survive: Callable[[Callable[[], Any]], Any] = lambda ask: ask()
        for number, each in enumerate(self.all):
            each.begin(lambda keys, k=number: self._pulled(k, keys))
            if each.module is not None:
                each.module.ask_evicted = lambda k=number: self.survive(lambda: self.evicted(k))

    def __len__(self) -> int:
        return len(self.all)

    @property
    def specs(self) -> list[TableSpec]:
        """Returns the tables as they travel."""
        return [each.spec for each in self.all]

    def _pulled(self, number: int, keys: Keys) -> torch.Tensor:
        return self.survive(lambda: self.pull(number, keys))

    def prefetch_ids(self, each: RowsOf, ids: torch.Tensor) -> None:
        """Asks for the rows of ids that a later batch has."""
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise ConfigError(f"session.prefetch(): ids of {each.spec.name} are int64, and these are {ids.dtype}")
        keys = np.unique(ids.detach().reshape(-1).to(device="cpu", dtype=torch.int64).numpy())
        count = each.spec.rows
        if count and len(keys) and (int(keys[0]) < 0 or int(keys[-1]) >= count):
            raise IndexError(
                f"session.prefetch(): {each.spec.name} has rows 0 to {count - 1}, and ids of others were given"
            )
        number = self.all.index(each)
        self.survive(lambda: self.prefetch(number, keys))

    def frames(self, shard: int, num_shards: int) -> list[Frame]:
        """Returns the rows that a shard begins with, of each table that the module has whole, in one frame; none if there is none."""
        found: list[torch.Tensor] = []
        for each in self.all:
            if each.spec.is_fixed:
                assert each.initial is not None, "the chief's rows are given up once they have arrived"
                keys = np.arange(each.spec.rows, dtype=np.int64)
                mine = torch.from_numpy(np.flatnonzero(shard_of(keys, num_shards) == shard))
                rows = each.initial if num_shards == 1 else each.initial.index_select(0, mine)
                found.append(rows)
        return [pack_parts(found)] if found else []

    def let_go(self) -> None:
        """The ps tasks have the rows: this process needs them no more."""
        for each in self.all:
            each.initial = None

    def give_back(self) -> None:
        """The session is about to end well: parameters that were whole before it are whole again, with the rows as they are now."""
        for number, each in enumerate(self.all):
            if each.spec.is_fixed and isinstance(each.parameter, RowParameter):
                values = torch.empty((each.spec.rows, each.spec.dim), dtype=getattr(torch, each.spec.dtype))
                for start in range(0, each.spec.rows, CHUNK_ROWS):
                    keys = np.arange(start, min(start + CHUNK_ROWS, each.spec.rows), dtype=np.int64)
                    values[start : start + len(keys)] = self._pulled(number, keys)
                each.parameter.end(values.to(each.parameter.device))
        self.pull = self.prefetch = _not_joined


def _not_joined(_number: int, _keys: Keys) -> torch.Tensor:
    raise ConfigError(
        "the rows of a sparse embedding are on the ps tasks, and the session is over: use the model inside the session"
    )


def find_tables(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    say: Callable[[str], None],
    *,
    whole: str = "",
    is_own: Callable[[nn.Parameter], bool] = lambda _: True,
) -> list[RowsOf]:
    """Returns the parameters of a module whose rows are to be pulled and pushed by key.

    Args:
        module: The model.
        optimizer: The optimizer of its parameters.
        say: Prints a line for people, where a variable stays whole although its module is sparse.
        whole: Why all of them stay whole, if they do.
        is_own: Whether a table is this optimizer's, by the parameter that stands for it.

    Raises:
        ConfigError: torch.optim would refuse their sparse gradients, too, or an option cannot be used with rows.
    """
    owners, plain = _sparse_owners(module), plain_names(module)
    name_of = {id(p): plain(name) for name, p in module.named_parameters()}
    optimizer_name, found = type(optimizer).__name__, list[RowsOf]()
    for name, each in module.named_modules():
        if isinstance(each, Table) and is_own(each.anchor):
            if whole:
                raise ConfigError(
                    f"{name or 'tq.Table'}: a table of rows cannot be in a session with {whole}, which needs whole variables"
                )
            spec = msgspec.structs.replace(each.spec, name=plain(name) or "table")
            found.append(RowsOf(msgspec.structs.replace(spec, seed=table_seed(spec)), each.anchor, None, each))
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            modules = owners.get(id(parameter))
            if not modules or not parameter.requires_grad:
                continue
            name = name_of[id(parameter)]
            if optimizer_name not in OPTIMIZERS:
                raise ConfigError(
                    f"{name} belongs to an embedding with sparse=True: {optimizer_name} does not support sparse gradients; use "
                    "torch.optim.SparseAdam, Adagrad or SGD, or sparse=False"
                )
            why = whole and f"{whole} needs whole variables"
            if why := why or _why_whole(parameter, group, optimizer):
                say(f"{name}: sparse=True has no effect, the whole variable travels at every step: {why}")
                continue
            _check_modules(name, modules)
            found.append(_describe(name, parameter, number, optimizer_name))
    return found


def table_seed(spec: TableSpec) -> int:
    """Returns the seed of a table's rows: of its own seed and its name, so that two tables do not begin alike."""
    return spec.seed * 0x9E3779B1 + zlib.crc32(spec.name.encode())


def _why_whole(parameter: nn.Parameter, group: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> str:
    """Returns why the rows of a sparse embedding cannot be updated alone; nothing if they can."""
    name, dtype = type(optimizer).__name__, str(parameter.dtype).removeprefix("torch.")
    for option, (allowed, why) in KERNELS[name].refused.items():
        if group.get(option, allowed) != allowed:
            return f"with {name}({option}={group[option]}) {why}"
    if dtype not in DTYPES or parameter.dim() != 2:
        return f"rows are {' or '.join(DTYPES)}, and it is {dtype}"
    if float(optimizer.state.get(parameter, {}).get("step", 0)) > 0:
        return "its optimizer has a state from before the session"
    return ""


def _describe(name: str, parameter: nn.Parameter, group: int, optimizer: str) -> RowsOf:
    rows, dim = parameter.shape
    spec = TableSpec(
        name=name,
        dim=dim,
        dtype=str(parameter.dtype).removeprefix("torch."),
        rows=rows,
        is_fixed=not parameter.is_meta,
        group=group,
        optimizer=optimizer,
        init=InitSpec("normal", {"mean": 0.0, "std": 1.0}),
    )
    spec.seed = table_seed(spec)
    return RowsOf(spec, parameter, parameter.detach().to("cpu") if not parameter.is_meta else None)


def _check_modules(name: str, modules: Iterable[Any]) -> None:
    for module in modules:
        if module.max_norm is not None:
            raise ConfigError(
                f"{name}: max_norm={module.max_norm} would write to rows in the forward pass; leave it out"
            )
        if module.scale_grad_by_freq:
            raise ConfigError(
                f"{name}: scale_grad_by_freq=True is not supported with sparse gradients, by torch either"
            )


def _sparse_owners(module: nn.Module) -> dict[int, list[nn.Module]]:
    """Returns, of each parameter that belongs to sparse embeddings alone, those modules."""
    owners: dict[int, list[nn.Module]] = {}
    others: set[int] = set()
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is None:
                continue
            if isinstance(each, SPARSE) and each.sparse and name == "weight":
                owners.setdefault(id(parameter), []).append(each)
            else:
                others.add(id(parameter))
    return {key: modules for key, modules in owners.items() if key not in others}
