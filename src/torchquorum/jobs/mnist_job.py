"""The built-in job: MNIST with any of the built-in models, as one task of a cluster runs it.

`torchquorum train` starts this module once per task; the options come as one JSON argument. Training uses the public API only,
as any user's program does.
"""

from __future__ import annotations

import difflib
import sys
from dataclasses import asdict, dataclass, fields
from typing import Any

import msgspec

from torchquorum.devices.names import DeviceName
from torchquorum.devices.options import check_fraction
from torchquorum.errors import ConfigError
from torchquorum.jobs.slow import Slowness, parse_slow
from torchquorum.rules import parse_rule

MODEL_NAMES = ("softmax", "mlp", "cnn")  # the models in jobs.models, without importing torch


@dataclass(kw_only=True)
class MnistOptions:
    """What to train and how.

    Attributes:
        model: softmax, mlp or cnn.
        rule: As `parse_rule` reads it.
        steps: The global step at which the run ends; None trains until the epochs or the seconds are over.
        epochs: Number of epochs of all workers together; None for no limit.
        batch_size: Images per batch and worker.
        optimizer: A class of torch.optim.
        lr: Its learning rate.
        momentum: For SGD and RMSprop.
        decay_rate: Exponential decay of the learning rate; 1 for none.
        decay_steps: Global steps per decay by that rate.
        staircase: Whether it decays in steps.
        l2: Weight decay as in the seeds: l2 * sum(w^2) / 2 in the loss.
        average: Decay of moving averages kept on the ps; 0 for none.
        compress: How gradients leave the workers in fewer bytes, such as int8; None as they are.
        seed: Seed of the weights and of the order of the images.
        data: A folder with idx files; None for the packaged ones.
        placement: round_robin or greedy.
        slice_bytes: Larger variables are split over the ps tasks.
        logdir: The run's folder.
        durable: How updates are journalled: write or fsync; None for no journal.
        start_afresh: Whether a run that cannot be restored begins again at step 0.
        accept_loss: Whether a durable run goes on without updates that are lost.
        record: Whether the run is recorded.
        device: The device of the workers, such as cuda:0 or /gpu:0; None for the CPU.
        log_device_placement: Print the device of every variable and of every operation of the first step.
        allow_soft_placement: Use the CPU for a device that is missing or cannot run an operation.
        gpu_memory_fraction: The share of each GPU's memory for each worker.
        seconds: The run ends after this time; None for no limit.
        slow: Slowed workers, as `parse_slow` reads them: worker1:3x,worker2:2x; empty for none.
    """

    model: str = "mlp"
    rule: str = "sync"
    steps: int | None = 3000
    epochs: int | None = None
    batch_size: int = 100
    optimizer: str = "SGD"
    lr: float = 0.5
    momentum: float = 0.0
    decay_rate: float = 1.0
    decay_steps: float = 600.0
    staircase: bool = False
    l2: float = 0.0
    average: float = 0.0
    compress: str | None = None
    seed: int = 0
    data: str | None = None
    placement: str = "round_robin"
    slice_bytes: int | None = None
    logdir: str | None = None
    durable: str | None = None
    start_afresh: bool = False
    accept_loss: bool = False
    record: bool = False
    device: str | None = None
    log_device_placement: bool = False
    allow_soft_placement: bool = False
    gpu_memory_fraction: float | None = None
    seconds: float | None = None
    slow: str = ""

    def __post_init__(self) -> None:
        parse_rule(self.rule)
        if self.model not in MODEL_NAMES:
            near = difflib.get_close_matches(self.model.lower(), MODEL_NAMES, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"--model {self.model}: must be one of {', '.join(MODEL_NAMES)}{hint}")
        for name in ("steps", "epochs", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {value}: must be 1 or more")
        if self.steps is None and self.seconds is None and self.epochs is None:
            raise ConfigError("the run has no end: give --steps, --epochs or --seconds")
        for name in ("lr", "decay_rate", "decay_steps"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be more than 0")
        if not 0 <= self.average <= 1:
            raise ConfigError(f"--average {self.average}: must be between 0 and 1, such as 0.99")
        if self.l2 < 0:
            raise ConfigError(f"--l2 {self.l2}: must be 0 or more")
        if self.device is not None:
            self._check_device(DeviceName.parse(self.device))
        if self.gpu_memory_fraction is not None:
            check_fraction(self.gpu_memory_fraction, label="--gpu-memory-fraction ")
        if self.seconds is not None and not self.seconds > 0:
            raise ConfigError(f"--seconds {self.seconds:g}: must be more than 0; leave it out for no limit")
        parse_slow(self.slow)

    def _check_device(self, name: DeviceName) -> None:
        if name.type == "META":
            raise ConfigError("--device meta: tensors there have no data, so nothing can be trained; use cpu or cuda:0")
        if name.job is not None or name.task is not None:
            own = DeviceName(type=name.type or "CPU", index=name.index)
            raise ConfigError(
                f"--device {self.device}: applies to every worker, so it must not name a task; write {own}"
            )

    def to_json(self) -> str:
        """Returns the options as the one argument of a task."""
        return msgspec.json.encode(asdict(self)).decode()

    @classmethod
    def from_json(cls, text: str) -> MnistOptions:
        """Reads the options back."""
        given: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
        return cls(**{f.name: given[f.name] for f in fields(cls) if f.name in given})


def train(options: MnistOptions, argv: list[str] | None = None, report: str | None = None) -> None:
    """Runs one task of the job."""
    import torch
    from torch.nn.functional import cross_entropy

    import torchquorum as tq
    from torchquorum.jobs.measuring import Measuring, Slowed
    from torchquorum.jobs.models import evaluate, make_model

    task = tq.join(argv, report=report)
    torch.manual_seed(options.seed + 1000 * task.index)
    data = tq.data.load_mnist(options.data)
    # If workers may join and leave, or epochs are counted, ps task 0 assigns batches; otherwise each worker has a fixed share.
    shared = options.epochs is not None or task.cluster.elastic
    batches = None
    if not shared:
        batches = tq.Batches(
            data.train, options.batch_size, worker=task.index, workers=task.num_workers, seed=options.seed
        )
    model = make_model(options.model)
    decay = None
    if options.decay_rate != 1.0:
        decay = tq.ExponentialDecay(
            decay_steps=options.decay_steps, decay_rate=options.decay_rate, staircase=options.staircase
        )
    optimizer = tq.Optimizer(
        _inner(options, model.parameters()),
        rule=parse_rule(options.rule),
        schedule=decay,
        placement=options.placement,
        slice_bytes=options.slice_bytes,
        average=tq.ExponentialMovingAverage(options.average) if options.average else None,
        compress=options.compress,
    )
    slowness = Slowness(options.slow, task.index, task.num_workers)
    regularize = tq.tensorflow.l2_regularizer(options.l2)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = cross_entropy(model(x), y)
        return loss + regularize(model) if options.l2 else loss

    step = tq.capture(loss_of, optimizer)
    with tq.Session(
        task,
        model,
        optimizer,
        logdir=options.logdir,
        last_step=options.steps,
        max_seconds=options.seconds,
        data=batches,
        durable=options.durable,
        record=options.record or None,
        start_afresh=options.start_afresh,
        accept_loss=options.accept_loss,
        # On a local cluster all workers start together, so the run is reproducible; by hand some may start minutes later.
        wait_for_workers=task.min_workers if task.source == "launcher" else None,
        placement=options.device,
        log_device_placement=options.log_device_placement,
        allow_soft_placement=options.allow_soft_placement,
        gpu_memory_fraction=options.gpu_memory_fraction,
        hooks=[Slowed(slowness), Measuring(data.validation), tq.SummaryHook(batch_size=options.batch_size)],
    ) as session:
        source = batches or session.share(data.train, options.batch_size, epochs=options.epochs, seed=options.seed)
        for x, y in source:
            if session.should_stop():
                break
            slowness.begin()
            step(x, y)
        session.pull()
        test_loss, accuracy = evaluate(model, data.test)
        session.record(loss=test_loss, accuracy=accuracy)


def _inner(options: MnistOptions, parameters: Any) -> Any:
    import torch

    kind = getattr(torch.optim, options.optimizer, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ConfigError(f"--optimizer {options.optimizer}: must be a class of torch.optim, such as SGD or Adam")
    arguments: dict[str, Any] = {"lr": options.lr}
    if options.momentum:
        arguments["momentum"] = options.momentum
    try:
        return kind(parameters, **arguments)
    except TypeError as error:
        raise ConfigError(f"--optimizer {options.optimizer}: {error}") from None


if __name__ == "__main__":
    train(MnistOptions.from_json(sys.argv[1]), [])
