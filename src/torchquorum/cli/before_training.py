"""What `torchquorum train` checks before it starts a task: a mistake costs one line, not a cluster.

Imports torch only for a device, and for a folder that is there. What always holds: what passes here may still fail in a task, which sees
other files and devices.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

from torchquorum.cli.command import nearest
from torchquorum.errors import ConfigError, DeviceError
from torchquorum.formats.storage import check_writable, locate


def check_run_folder(name: str, last_step: int | None) -> None:
    """Checks that a run's folder can be written to, and that its run is not past the last step already.

    Raises:
        ConfigError: It cannot, or it is.
    """
    folder = locate(name)
    check_writable(folder)
    if last_step is None or not folder.is_dir():
        return
    from torchquorum.formats.checkpoint import list_checkpoints

    reached = max((info.step for info in list_checkpoints(folder) if not info.problem), default=0)
    if last_step < reached:
        raise ConfigError(
            f"--steps {last_step}: {name} is at step {reached:,} already; give more steps to go on from there, or another "
            "--logdir to begin at step 0"
        )


def check_optimizer(name: str) -> None:
    """Checks that torch.optim has an optimizer of that name, without the seconds that importing torch takes.

    Raises:
        ConfigError: It has none.
    """
    found = importlib.util.find_spec("torch")
    folders = found.submodule_search_locations if found is not None else None
    texts = [
        path.read_text(encoding="utf-8") for f in folders or () if (path := Path(f, "optim", "__init__.py")).is_file()
    ]
    imported = {node.name for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, ast.alias)}
    classes = sorted(name for name in imported - {"Optimizer"} if name[:1].isupper())
    if classes and name not in classes:
        near = nearest(name, classes) or "; SGD and Adam are two of its classes"
        raise ConfigError(f"--optimizer {name}: torch.optim has no such class{near}")


def check_device(name: str) -> None:
    """Checks that this machine has a device.

    Raises:
        ConfigError: It does not have it.
        DeviceError: No device has such a name.
    """
    from torchquorum.devices.inventory import list_available, parse, resolve

    asked = parse(name)
    try:
        resolve(asked, f"--device {name}", soft=False)
    except DeviceError:
        raise ConfigError(
            f"--device {name}: there is no such device here. Available: {list_available()}; add --allow-soft-placement to use "
            "the CPU where it is missing"
        ) from None
