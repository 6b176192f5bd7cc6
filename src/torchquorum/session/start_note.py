"""What is needed to repeat a run, noted in its folder when it starts: command, host, versions, batch, seed. Read by the report.

Written by the chief. What always holds: a folder that cannot be written to costs a line, never the run; nothing of the environment is noted
but how the launcher was called.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import socket
import sys
from typing import Any

import numpy as np
import torch

from torchquorum import env
from torchquorum.data.batches import Batches
from torchquorum.formats.storage import locate, write_whole
from torchquorum.session.config import Setup
from torchquorum.version import __version__

NAME = "start.json"


def note_start(setup: Setup) -> None:
    """Writes the note, if this is the chief of a run with a folder."""
    if setup.logdir is None or not setup.task.is_chief or setup.task.replay is not None:
        return
    try:
        write_whole(locate(setup.logdir) / NAME, json.dumps(describe_start(setup), indent=2) + "\n")
    except OSError as error:
        setup.say(f"how this run was started could not be noted in {setup.logdir}: {error.strerror}")


def describe_start(setup: Setup) -> dict[str, Any]:
    """Returns what the note says."""
    batches = [source for source in setup.data.values() if isinstance(source, Batches)]
    return {
        "command": env.command() or shlex.join(["python", *sys.argv] if sys.argv[:1] else sys.orig_argv),
        "working_folder": os.getcwd(),
        "host": socket.gethostname(),
        "cpus": os.cpu_count(),
        "devices": sorted({str(p.device) for p in setup.model.parameters()}),
        "versions": {
            "torchquorum": __version__,
            "torch": str(torch.__version__),
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "batch_size": batches[0].batch_size if batches else None,
        "seed": torch.initial_seed(),
        "started_at": setup.clock.wall(),
    }
