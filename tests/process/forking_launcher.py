"""The command line with a launcher that forks its tasks, for tests of what the tasks do and not of how they start.

`python -m tests.process.forking_launcher run SCRIPT ...`, itself a fork of the zygote, is `torchquorum run SCRIPT ...` but
for the second or two per task that a new interpreter takes. Everything else is the product's: the arguments, the
environment that says who a task is, the output, deaths, restarts and the end.
"""

from __future__ import annotations

import gc
import os
import sys

from tests.process import zygote
from torchquorum import env
from torchquorum.cli.main import main
from torchquorum.cluster import TaskId
from torchquorum.launcher.fork import Forked, fork
from torchquorum.launcher.local import LocalCluster
from torchquorum.launcher.process import die_with_parent


def spawn(self: LocalCluster, task: TaskId, extra: dict[str, str | None], fds: list[int]) -> Forked:
    """Starts the process of a task, in place of LocalCluster.spawn."""
    out, child_out = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = fork()
    if pid == 0:
        os.setsid()
        die_with_parent()
        os.dup2(child_out, 1)
        os.dup2(child_out, 2)
        gc.freeze()  # what is garbage here would close its files some time later, whose numbers others have by then
        kept = {0, 1, 2, *fds}
        for number in map(int, os.listdir("/proc/self/fd")):
            if number not in kept:
                os.closerange(number, number + 1)
        # New streams: a thread of the launcher, which is not here, may have held the lock of the old ones.
        sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="replace")
        sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="replace")
        zygote.disinherit()
        env.become_child(**extra)
        zygote.run(list(self.options.command))
    os.close(child_out)
    return Forked(pid, os.fdopen(out, "rb", buffering=0))


if __name__ == "__main__":
    LocalCluster.spawn = spawn  # type: ignore[method-assign]
    main()
