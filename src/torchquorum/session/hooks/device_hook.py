"""A session's devices: soft placement while it runs, the placement log of its first step, and errors of devices.

The last hook of a session, which closes it in every case. What always holds: after the first step no operation is slowed down by the
log; the file in the run's folder has one writer: the chief's is placement.txt, that of worker i is placement-worker-i.txt.
"""

from __future__ import annotations

from contextlib import ExitStack

from torch import nn

from torchquorum.devices.cannot_run import SoftMode, explain
from torchquorum.devices.inventory import CPU_DEVICE, accelerators, current, limit_gpu_memory, say_once, setting
from torchquorum.devices.model_placement import Placement, place
from torchquorum.devices.options import DeviceOptions
from torchquorum.devices.placement_log import LogMode, PlacementLog
from torchquorum.errors import DeviceError
from torchquorum.formats.storage import Location, locate, write_whole
from torchquorum.lines import write_line
from torchquorum.session.hooks.hook import Hook, HookSession


class SessionDevices(Hook):
    """The devices of one session, from its beginning to its end."""

    def __init__(self, options: DeviceOptions, model: nn.Module, placement: Placement | None) -> None:
        self._options, self._model = options, model
        self._blocks, self._watching = ExitStack(), False
        self._lines: list[str] = []
        self._mode: LogMode | None = None
        self._file: Location | None = None
        limit_gpu_memory(options.memory_fraction)
        if placement is not None:
            place(model, placement, allow_soft_placement=options.soft)

    def begin(self, session: HookSession) -> None:
        """Sets which task this is, for names of devices."""
        modules = self._model.modules()
        sparse = {id(m.weight) for m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse}
        for name, parameter in self._model.named_parameters():
            if parameter.device.type == "meta" and id(parameter) not in sparse:  # whose rows are made on the ps tasks
                raise DeviceError(
                    f"parameter {name} is on the device meta, where tensors have no data, so it cannot be trained; put it on "
                    "the CPU or a GPU"
                )
        self._blocks.enter_context(setting(task=session.task.id, soft=self._options.soft))

    def after_create_session(self, session: HookSession) -> None:
        """Starts to watch for operations that a device cannot run, and for the log; once, not again after a recovery."""
        if not self._watching and current().soft and accelerators():
            self._watching = True
            self._blocks.enter_context(SoftMode())
        if self._options.log and self._mode is None:
            self._begin_log(session)

    def before_run(self, session: HookSession) -> None:
        """The first step has been computed: prints its operations and stops watching."""
        if self._mode is not None and not self._mode.gone:
            self._end_log()

    def close(self) -> None:
        """Removes everything, also after an exception."""
        if self._mode is not None and not self._mode.gone:
            self._end_log()
        self._blocks.close()

    def explain(self, error: BaseException | None) -> DeviceError | None:
        """Returns the error to raise instead if a device could not run an operation of the block."""
        devices = [p.device for p in self._model.parameters() if p.device != CPU_DEVICE]
        return explain(error, default=devices[0] if devices else None, model=self._model)

    def _begin_log(self, session: HookSession) -> None:
        assert session.flat is not None
        log = PlacementLog(session.task.id, self._lines.append)
        log.header()
        log.variables(session.flat.layout, session.model)
        if session.logdir is not None:
            chief = session.task.is_chief
            self._file = locate(session.logdir) / (
                "placement.txt" if chief else f"placement-worker-{session.task.index}.txt"
            )
        self._mode = LogMode(log)
        self._mode.open()

    def _end_log(self) -> None:
        assert self._mode is not None
        self._mode.close()
        if not self._lines:
            return
        text = "\n".join(self._lines)
        self._lines.clear()
        write_line(text)
        if self._file is not None:
            try:
                write_whole(self._file, text + "\n")
            except OSError as error:
                say_once(f"the placement log is not in {self._file}: {error.strerror or error}", key=str(self._file))
