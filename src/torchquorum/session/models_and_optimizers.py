"""What a program gives to `tq.Session`: one model or several, one optimizer or several, with a name for each.

Called by the session once, before anything is connected. What always holds: no parameter belongs to two optimizers; every optimizer has
parameters of the models, and a name of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn

from torchquorum.errors import ConfigError
from torchquorum.placement.layout import Variable
from torchquorum.worker.flat import describe
from torchquorum.worker.optimizer import Optimizer
from torchquorum.worker.row_tables import RowTables
from torchquorum.worker.variable_names import plain_names

MOST_NAMED = 3
Given = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer]


def read_model(model: Any) -> nn.Module:
    """Returns one module with all models in it: a list's by number, a mapping's by name."""
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, Mapping) and model:
        wrong = [name for name, part in model.items() if not isinstance(part, nn.Module)]
        if not wrong:
            try:
                return nn.ModuleDict({str(name): part for name, part in model.items()})
            except KeyError as error:
                raise ConfigError(f"model={{{', '.join(map(repr, model))}}}: {error.args[0]}") from None
        raise ConfigError(f"model[{wrong[0]!r}] is a {type(model[wrong[0]]).__name__}, not a torch.nn.Module")
    if isinstance(model, Iterable) and not isinstance(model, str):
        parts = list(model)
        if parts and all(isinstance(part, nn.Module) for part in parts):
            return nn.ModuleList(parts)
    raise ConfigError(
        f"model={type(model).__name__}: give a torch.nn.Module, or several, such as [generator, discriminator] or "
        "{'G': generator, 'D': discriminator}"
    )


def read_optimizers(given: Any) -> list[Optimizer]:
    """Returns the optimizers of a session; of several, each knows what it is called."""
    named: list[tuple[str, Any]]
    if isinstance(given, Mapping):
        named = [(str(name), optimizer) for name, optimizer in given.items()]
    elif isinstance(given, Iterable) and not isinstance(given, str | torch.optim.Optimizer):
        named = [("", optimizer) for optimizer in given]
    else:
        named = [("", given)]
    if not named:
        raise ConfigError("optimizer=[]: give at least one tq.Optimizer")
    for number, (name, optimizer) in enumerate(named):
        if not isinstance(optimizer, Optimizer):
            place = f"[{name or number!r}]" if len(named) > 1 or isinstance(given, Mapping) else ""
            raise ConfigError(
                f"optimizer{place}={type(optimizer).__name__}: wrap it first: tq.Optimizer(optimizer, rule=tq.Sync())"
            )
    optimizers: list[Optimizer] = [optimizer for _, optimizer in named]
    if len(optimizers) == 1:
        optimizers[0].called = ""
        return _split(optimizers)
    if len({id(optimizer) for optimizer in optimizers}) < len(optimizers):
        raise ConfigError("the same optimizer is given twice: give each once")
    for number, (name, optimizer) in enumerate(named):
        optimizer.called = name or optimizer.options.name or f"opt{number}"
    names = [optimizer.called for optimizer in optimizers]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"two optimizers are called {twice[0]!r}: give each a name of its own")
    return _split(optimizers)


def _split(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """Returns what these are to the run: one whose model is pushed in fragments is an optimizer for each."""
    found: list[Optimizer] = []
    for optimizer in optimizers:
        parts = optimizer.split()
        for part in parts:
            part.called = optimizer.called if part is optimizer else part.options.name
        found += parts
    if len(found) == 1:
        found[0].called = ""
    return found


def describe_each(
    module: nn.Module, optimizers: Sequence[Optimizer], tables: Sequence[RowTables]
) -> list[tuple[list[Variable], list[nn.Parameter]]]:
    """Returns of each optimizer the variables and the parameters that they stand for, without those that are in its `tables`.

    What no optimizer has is with the first's.
    """
    rows = {id(each.parameter) for own in tables for each in own.all}
    _check_memory(module, optimizers, rows)
    if len(optimizers) == 1:
        return [describe(module, optimizers[0].inner, rows, has_tables=bool(tables[0]))]
    owner, found = owners(module, optimizers), []
    for k, (optimizer, own) in enumerate(zip(optimizers, tables, strict=True)):
        variables, parameters = describe(module, optimizer.inner, rows, has_tables=bool(own))
        kept = [(v, p) for v, p in zip(variables, parameters, strict=True) if owner.get(id(p), 0) == k]
        found.append(([v for v, _ in kept], [p for _, p in kept]))
    return found


def owners(module: nn.Module, optimizers: Sequence[Optimizer]) -> dict[int, int]:
    """Returns of each parameter, by its id, which optimizer has it.

    Raises:
        ConfigError: A parameter belongs to two of them, or to none of the models.
    """
    owner: dict[int, int] = {}
    plain = plain_names(module)
    names = {id(parameter): plain(name) for name, parameter in module.named_parameters()}
    for k, optimizer in enumerate(optimizers):
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            other = owner.setdefault(id(parameter), k)
            if other != k:
                shown = names.get(id(parameter), f"of shape {list(parameter.shape)}")
                raise ConfigError(
                    f"parameter {shown} is in {optimizers[other].called} and in {optimizer.called}: each update of one would overwrite "
                    "the other's; a parameter belongs to one optimizer"
                )
        _check_all_there(optimizer, names)
    return owner


def _check_all_there(optimizer: Optimizer, names: Mapping[int, str]) -> None:
    """Raises ConfigError if an optimizer has parameters that no model has."""
    strange = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in names]
    if strange:
        shapes = ", ".join(str(list(p.shape)) for p in strange[:MOST_NAMED])
        raise ConfigError(
            f"{optimizer.called} has {len(strange)} parameters that no model of the session has (of shapes {shapes}): give all models, "
            "tq.Session(task, [generator, discriminator], [opt_g, opt_d]), and make each optimizer from their parameters"
        )


def _check_memory(module: nn.Module, optimizers: Sequence[Optimizer], rows: Set[int]) -> None:
    """Raises ConfigError if a trained parameter has memory in common with another, as after `head.weight.data = embedding.weight.data`."""
    trained = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    plain, found = plain_names(module), list[tuple[Any, int, int, str, torch.Tensor]]()
    for name, p in module.named_parameters():
        if id(p) in rows or isinstance(p, nn.parameter.UninitializedParameter) or not p.numel() or not p.data_ptr():
            continue
        last = sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True)) * p.element_size()
        found.append((p.device, p.data_ptr(), p.data_ptr() + last, plain(name), p))
    found.sort(key=lambda one: (str(one[0]), one[1]))
    for (device, _, end, name, p), (other_device, begin, _, other, q) in itertools.pairwise(found):
        if device == other_device and begin <= end and not trained.isdisjoint((id(p), id(q))) and _overlap(p, q):
            raise ConfigError(
                f"parameters {name} and {other} are two that lie in the same memory: the ps tasks hold each of them by itself, so an "
                f"update of one would no longer reach the other. Make them one parameter, such as head.weight = embedding.weight, or give "
                f"each its own memory, {other}.data = {other}.data.clone()"
            )


def _overlap(p: torch.Tensor, q: torch.Tensor) -> bool:
    """Whether two tensors whose memory is interleaved have an element in common."""
    if p.is_contiguous() and q.is_contiguous():
        return True
    begin, marked = min(p.data_ptr(), q.data_ptr()), set[int]()
    for one in (p, q):
        places = torch.tensor(one.data_ptr() - begin)
        for size, stride in zip(one.shape, one.stride(), strict=True):
            places = places.unsqueeze(-1) + torch.arange(size) * (stride * one.element_size())
        own = set(places.flatten().tolist())
        if not marked.isdisjoint(own):
            return True
        marked = own
    return False
