"""`tq.Towers`: one worker computes on several devices, a tower each, and pushes the mean of their gradients.

Used by the training loop, on its thread, in place of forward and `loss.backward()`. Towers on the model's own device run
the model itself; every other device has one copy of it (`torchquorum.towers.replica`). What always holds: gradients are
added in the order of the towers and divided once, so a step does not depend on which device was faster; the buffers that
the model keeps are those of tower 0; a tower that fails leaves the model's gradients as they were.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn

from torchquorum.devices.inventory import available, parse, resolve
from torchquorum.errors import ConfigError
from torchquorum.towers.replica import Replica
from torchquorum.towers.tower_mean import Gradients, TowerSum, bring

LossFn = Callable[..., torch.Tensor]
Regularizer = Callable[[nn.Module], torch.Tensor]
CPU = torch.device("cpu")
CONCURRENT = ("cuda",)  # kinds of devices that work side by side


def torch_device(name: str | torch.device, tower: int, home: torch.device) -> torch.device:
    """Returns the device that a name such as `/gpu:1`, `cuda:1` or `/cpu:0` means here; one left open is the model's own."""
    if isinstance(name, torch.device) and name.type == "cpu":
        return name if name.index else CPU
    found = resolve(parse(name), f"tower {tower}")
    if found is not None and found.type == "meta":
        raise ConfigError(f"tower {tower}: the device meta has no data; name one that computes")
    return home if found is None else found


@dataclass(slots=True)
class _Work:
    """A tower's share of one step, and what came of it."""

    tower: int
    device: torch.device
    batch: Any
    size: int | None
    loss: torch.Tensor | None = None
    gradients: Gradients | None = None
    error: BaseException | None = None


class Towers:
    """A tower per device: each computes the gradients of a batch of its own; their mean becomes the model's.

    ```python
    towers = tq.Towers(model, devices=["/gpu:0", "/gpu:1"])
    ...
        optimizer.zero_grad()
        loss = towers.backward(lambda model, x, y: cross_entropy(model(x), y), batches)
        optimizer.step(loss=loss)
    ```

    Args:
        model: The model that is trained; its parameters get the mean gradients. It stays where it is.
        devices: A device per tower, in order; a device may be named several times. By default every GPU, or, where there is
            none, the model's own device.
        num_towers: How many towers; with more towers than devices they go round.
        weighted: Weigh each tower by its number of examples, so that uneven batches count as one joined batch. Otherwise each
            tower counts the same, as in TensorFlow's programs.

    Attributes:
        devices: The device of each tower.
        losses: The loss of each tower in the last step, without the regularizer; None for one that had no batch.
        examples: How many examples the last step took; None where that cannot be told from the batches.
    """

    def __init__(
        self,
        model: nn.Module,
        devices: str | torch.device | Sequence[str | torch.device] | None = None,
        *,
        num_towers: int | None = None,
        weighted: bool = False,
    ) -> None:
        self.model, self._weighted = model, weighted
        self._home = _home(model)
        places = self._places(devices)
        count = len(places) if num_towers is None else num_towers
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(f"num_towers={num_towers!r}: must be a whole number, 1 or more")
        if devices is not None and count < len(places):
            raise ConfigError(
                f"num_towers={num_towers} and {len(places)} devices: name as many devices as towers, or fewer"
            )
        self.devices = [places[i % len(places)] for i in range(count)]
        self._replicas = {d: Replica(model, d) for d in dict.fromkeys(self.devices) if d != self._home}
        self.losses: list[torch.Tensor | None] = []
        self.examples: int | None = None

    def _places(self, devices: str | torch.device | Sequence[str | torch.device] | None) -> list[torch.device]:
        if devices is None:
            return available()[1:] or [self._home]
        named = [devices] if isinstance(devices, str | torch.device) else list(devices)
        if not named:
            raise ConfigError("devices=[]: name a device per tower, such as ['/gpu:0', '/gpu:1'], or leave it out")
        return [torch_device(name, tower, self._home) for tower, name in enumerate(named)]

    def __len__(self) -> int:
        return len(self.devices)

    def split(self, *joined: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        """Cuts a joined batch into one for each tower, as evenly as it goes; the first ones get what is left over."""
        cut = [tensor.tensor_split(len(self)) for tensor in joined]
        return list(zip(*cut, strict=True))

    def backward(
        self, loss_fn: LossFn, batches: Iterable[Any], *, regularizer: Regularizer | None = None
    ) -> torch.Tensor:
        """Computes every tower's gradients and adds their mean to the model's, as `loss.backward()` adds to them.

        Args:
            loss_fn: `loss_fn(model, x, y)` for batches `(x, y)`: gets the tower's model and batch, returns the loss as one
                number, which should be a mean over the batch. A batch that is no tuple or list comes as one argument.
            batches: One per tower, on any device. An iterator, such as `tq.Batches`, is asked for one per tower. A tower whose
                batch is None or has no rows sits the step out, and the mean is taken over the others.
            regularizer: Such as `tq.tensorflow.l2_regularizer(1e-4)`: what it returns for the model is added once. (Added in `loss_fn`
                it counts once as well, because every tower's loss is divided by their number; it is only computed more often.)

        Returns:
            The mean of the towers' losses, with the regularizer, for `optimizer.step(loss=loss)`.
        """
        work = self._take(loss_fn, batches)
        weights = self._weights(work)
        for replica in self._replicas.values():
            replica.refresh()
        parameters = list(self.model.parameters())
        before = [parameter.grad for parameter in parameters]
        try:
            mean = self._compute(loss_fn, work, weights)
        except BaseException:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
            raise
        for parameter, old, new in zip(parameters, before, mean, strict=True):
            parameter.grad = new if old is None else old if new is None else old + new
        losses = [w.loss for w in work if w.loss is not None]
        self.losses = [next((w.loss for w in work if w.tower == i), None) for i in range(len(self))]
        sizes = [w.size for w in work]
        self.examples = sum(s for s in sizes if s is not None) if None not in sizes else None
        loss = _mean_loss(losses, weights)
        return loss if regularizer is None else loss + self._regularize(regularizer)

    # -- what is to be done -------------------------------------------------------------------------------------------

    def _take(self, loss_fn: LossFn, batches: Iterable[Any]) -> list[_Work]:
        if isinstance(loss_fn, nn.Module) or not callable(loss_fn):
            raise ConfigError(
                f"loss_fn={type(loss_fn).__name__}: give a function of the tower's model and its batch, such as "
                "lambda model, x, y: torch.nn.functional.cross_entropy(model(x), y)"
            )
        if isinstance(batches, Iterator):
            given = list(islice(batches, len(self)))
            if not given:
                raise StopIteration("the batches have come to their end")
            given += [None] * (len(self) - len(given))
        elif isinstance(batches, torch.Tensor | Mapping | str):
            raise ConfigError(
                f"batches={type(batches).__name__}: give a list with one batch per tower, {len(self)} in all"
            )
        else:
            given = list(islice(batches, len(self) + 1))
        if len(given) != len(self):
            more = f"more than {len(self)}" if len(given) > len(self) else len(given)
            raise ConfigError(
                f"{more} batches for {len(self)} towers: give one per tower, None where there is none; of a DataLoader "
                "or the like, iter(loader), which is asked for one per tower"
            )
        work = [_Work(i, self.devices[i], batch, _rows(batch)) for i, batch in enumerate(given) if batch is not None]
        work = [w for w in work if w.size != 0]
        if not work:
            raise ConfigError("every tower's batch is empty: there is nothing to compute; leave such a step out")
        return work

    def _weights(self, work: list[_Work]) -> list[float] | None:
        """Returns what each tower counts for, None if all count the same."""
        if not self._weighted:
            return None
        sizes = [w.size for w in work if w.size is not None]
        if len(sizes) != len(work):
            raise ConfigError("weighted=True: the batches hold no tensor whose rows could be counted; leave it out")
        return [size / sum(sizes) for size in sizes] if len(set(sizes)) > 1 else None

    # -- the towers at work -------------------------------------------------------------------------------------------

    def _compute(self, loss_fn: LossFn, work: list[_Work], weights: list[float] | None) -> list[torch.Tensor | None]:
        """Runs all towers; returns the mean gradient of every parameter."""
        by_device: dict[torch.device, list[_Work]] = {}
        for each in work:
            by_device.setdefault(each.device, []).append(each)
        total = TowerSum(weights)
        if len(by_device) == 1:  # they run in order: what one has found is added before the next one begins
            [only] = by_device.values()
            self._run_device(loss_fn, only, work[0].tower, done=lambda w: total.add(bring(_taken(w), self._home)))
            _raise_first(work)
            self._keep_buffers(work[0])
            return total.mean()
        self._run_devices(loss_fn, by_device, work[0].tower)
        _raise_first(work)
        self._keep_buffers(work[0])
        for each in work:
            total.add(bring(_taken(each), self._home))
        return total.mean()

    def _keep_buffers(self, keeper: _Work) -> None:
        """Gives the model the first tower's buffers: when all have ended, since a tower of the model puts its own back."""
        replica = self._replicas.get(keeper.device)
        if replica is not None:
            replica.give_buffers(self._home)

    def _run_devices(self, loss_fn: LossFn, by_device: dict[torch.device, list[_Work]], keeper: int) -> None:
        """Runs GPUs side by side, each from a thread of its own; the CPU's towers one after another on this thread.

        One operation on the CPU already uses all its cores, so two towers at once would only fight for them; and in order
        they draw the same random numbers every time.
        """
        mine = [d for d in by_device if d.type not in CONCURRENT] or [next(iter(by_device))]
        settings = _Settings(by_device)

        def run(work: list[_Work]) -> None:
            try:
                with settings.in_force(work[0].device):
                    self._run_device(loss_fn, work, keeper)
            except BaseException as error:
                work[0].error = work[0].error or error

        threads = [
            threading.Thread(target=run, args=(work,), name=f"torchquorum-tower-{work[0].tower}")
            for device, work in by_device.items()
            if device not in mine
        ]
        for thread in threads:
            thread.start()
        try:
            for device in mine:
                self._run_device(loss_fn, by_device[device], keeper)
        finally:
            for thread in threads:
                thread.join()

    def _run_device(
        self, loss_fn: LossFn, work: list[_Work], keeper: int, done: Callable[[_Work], None] | None = None
    ) -> None:
        """Runs the towers of one device in order. May run on a thread of its own."""
        replica = self._replicas.get(work[0].device)
        module = self.model if replica is None else replica.module
        parameters = list(module.parameters())
        for each in work:
            try:
                for parameter in parameters:
                    parameter.grad = None
                with torch.enable_grad(), _own_buffers(module, keep=each.tower == keeper):
                    loss = _call(loss_fn, module, _moved(each.batch, each.device))
                    _check_loss(loss)
                    loss.backward()
                each.loss = loss.detach().to(self._home)
                each.gradients = [parameter.grad for parameter in parameters]
                if done is not None:
                    done(each)
                    each.gradients = None
            except BaseException as error:
                error.add_note(f"in tower {each.tower} on {each.device}")
                each.error = error
                return
            finally:
                for parameter in parameters:
                    parameter.grad = None

    def _regularize(self, regularizer: Regularizer) -> torch.Tensor:
        with torch.enable_grad():
            term = regularizer(self.model)
            _check_loss(term)
            if term.requires_grad:
                term.backward()
        return term.detach().to(self._home)


class _Settings:
    """What torch keeps per thread, taken on the loop's thread and put in force on a tower's."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        kinds = ("cpu", "cuda")
        self._casts = [(k, torch.get_autocast_dtype(k), torch.is_autocast_enabled(k)) for k in kinds]
        self._cache = torch.is_autocast_cache_enabled()
        self._streams = {d: torch.cuda.current_stream(d) for d in devices if d.type == "cuda"}

    @contextmanager
    def in_force(self, device: torch.device) -> Iterator[None]:
        """Inside this block they hold on this thread, for a device."""
        with ExitStack() as stack:
            for kind, dtype, enabled in self._casts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self._cache))
            if device in self._streams:
                stack.enter_context(torch.cuda.device(device))
                stack.enter_context(torch.cuda.stream(self._streams[device]))
            yield


@contextmanager
def _own_buffers(module: nn.Module, *, keep: bool) -> Iterator[None]:
    """Unless they are to be kept, puts the module's buffers back as they were, whatever a tower makes of them."""
    if keep:
        yield
        return
    saved = [(m, name, b, b.clone()) for m in module.modules() for name, b in m._buffers.items() if b is not None]
    try:
        yield
    finally:
        with torch.no_grad():
            for owner, name, buffer, value in saved:
                buffer.copy_(value)
                owner._buffers[name] = buffer


def _home(model: nn.Module) -> torch.device:
    devices = dict.fromkeys(parameter.device for parameter in model.parameters())
    if len(devices) > 1:
        raise ConfigError(
            f"the model's parameters lie on {', '.join(map(str, devices))}; a tower needs a model on one device"
        )
    return next(iter(devices), CPU)


def _rows(batch: Any) -> int | None:
    """Returns how many examples a batch has: the length of the first tensor in it."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else None
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else ()
    return next((rows for part in parts if (rows := _rows(part)) is not None), None)


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: _moved(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_moved(value, device) for value in batch))
    return type(batch)(_moved(value, device) for value in batch) if isinstance(batch, tuple | list) else batch


def _call(loss_fn: LossFn, module: nn.Module, batch: Any) -> torch.Tensor:
    return loss_fn(module, *batch) if isinstance(batch, tuple | list) else loss_fn(module, batch)


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ConfigError(f"the loss is {what}; it must be a tensor with one number, such as the mean over the batch")


def _mean_loss(losses: list[torch.Tensor], weights: list[float] | None) -> torch.Tensor:
    stacked = torch.stack([loss.reshape(()) for loss in losses])
    return stacked.mean() if weights is None else (stacked * stacked.new_tensor(weights)).sum()


def _taken(work: _Work) -> Gradients:
    assert work.gradients is not None
    return work.gradients


def _raise_first(work: list[_Work]) -> None:
    """Raises the first failure, in the order of the towers."""
    for each in work:
        if each.error is not None:
            raise each.error
