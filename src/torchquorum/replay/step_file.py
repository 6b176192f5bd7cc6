"""What a replay writes when it is asked for a step: the variables there, and the gradients that made it.

What always holds: files are plain safetensors, beside the run's own; tensors have the names of the model's parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from torchquorum.formats.record_file import RunRecordError
from torchquorum.formats.row_file import KEYS
from torchquorum.replay.progress import Place, ReplayProgress


def write(progress: ReplayProgress, place: Place, before: Place, folder: Path, say: Callable[[str], None]) -> None:
    """Writes the variables at a place; where gradients were looked at, also those, and the variables before them.

    Raises:
        RunRecordError: The file cannot be written.
    """
    kept = progress.kept[place]
    step, tensors = kept.versions[0], kept.variables()
    path = folder / f"replay-{step}.safetensors"
    if progress.looked_at[1] == place:
        path = folder / f"dump-{step}.safetensors"
        tensors = {f"after/{name}": values for name, values in tensors.items()}
        if before in progress.kept:
            tensors |= {f"before/{name}": values for name, values in progress.kept[before].variables().items()}
        tensors |= _gradients(progress, place, say)
    try:
        save_file({name: values.contiguous().clone() for name, values in tensors.items()}, path)
    except OSError as error:
        raise RunRecordError(f"{path} cannot be written ({error.strerror})") from error
    say(f"wrote {path}")


def _gradients(progress: ReplayProgress, place: Place, say: Callable[[str], None]) -> dict[str, torch.Tensor]:
    script, names = progress.script, progress.kept[place].plan.names
    found: dict[str, torch.Tensor] = {}
    for update in script.updates_between(*progress.looked_at):
        of = f"{names[update.track]}, version" if names[update.track] else "step"
        for worker, life, local_step in sorted(update.keys):
            values = progress.gradients[worker, life, local_step]
            decided = script.decided.get((worker, life, local_step))
            given = (own for name, own in values.items() if not name.endswith(f"/{KEYS}"))
            norm = float(sum(float(own.double().pow(2).sum()) for own in given) ** 0.5)
            at = f", computed at version {decided.version}, loss {decided.loss}" if decided is not None else ""
            say(
                f"{of} {update.version}: /job:worker/task:{worker}, local step {local_step}{at}, norm of its gradient {norm:.6g}"
            )
            found |= {f"gradient/worker{worker}/{local_step}/{name}": own for name, own in values.items()}
        for name, numbers in update.batches.items():
            say(f"{of} {update.version}: batches {numbers} of share {name!r}")
    return found
