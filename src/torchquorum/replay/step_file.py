"""What a replay writes when it is asked for a step: the variables there, and the gradients that made it.

What always holds: files are plain safetensors, beside the run's own; tensors have the names of the model's parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from torchquorum.formats.record_file import RunRecordError
from torchquorum.replay.progress import Place, ReplayProgress
from torchquorum.wire.messages import Apply


def write(
    progress: ReplayProgress, place: Place, folder: Path, say: Callable[[str], None], *, with_gradients: bool
) -> None:
    """Writes the variables at a place; with the gradients, those before it, too, and says whose batch made what.

    Raises:
        RunRecordError: The file cannot be written.
    """
    step = place[1]
    tensors = {name: values for (kind, name, _), values in progress.kept[place].whole().items() if kind == "variable"}
    path = folder / f"replay-{step}.safetensors"
    if with_gradients:
        path = folder / f"dump-{step}.safetensors"
        before = progress.kept.get((place[0], step - 1))
        tensors = {f"after/{name}": values for name, values in tensors.items()}
        if before is not None:
            found = before.whole()
            tensors |= {f"before/{name}": values for (kind, name, _), values in found.items() if kind == "variable"}
        tensors |= _gradients(progress, place, say)
    try:
        save_file({name: values.contiguous().clone() for name, values in tensors.items()}, path)
    except OSError as error:
        raise RunRecordError(f"{path} cannot be written ({error.strerror})") from error
    say(f"wrote {path}")


def _gradients(progress: ReplayProgress, place: Place, say: Callable[[str], None]) -> dict[str, torch.Tensor]:
    plan = progress.kept[place].plan
    shapes = {variable.name: tuple(variable.shape) for variable in plan.variables}
    batches = next(
        (
            step.item.batches
            for step in progress.script.steps
            if isinstance(step.item, Apply) and (step.generation, step.item.version) == place
        ),
        {},
    )
    found: dict[str, torch.Tensor] = {}
    for key, values in sorted(progress.gradients.items()):
        worker, _, local_step = key
        decided = progress.script.decided.get(key)
        norm = float(sum(float(flat.double().pow(2).sum()) for flat in values.values()) ** 0.5)
        at = f", computed at version {decided.version}, loss {decided.loss}" if decided is not None else ""
        say(f"step {place[1]}: /job:worker/task:{worker}, local step {local_step}{at}, norm of its gradient {norm:.6g}")
        for name, flat in values.items():
            found[f"gradient/worker{worker}/{local_step}/{name}"] = flat.view(shapes[name])
    for name, numbers in batches.items():
        say(f"step {place[1]}: batches {numbers} of share {name!r}")
    return found
