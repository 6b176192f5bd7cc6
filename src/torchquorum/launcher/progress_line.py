"""The progress line of a launched run: updated in place in a notebook and in a terminal, printed now and then elsewhere.

Used by `tq.launch`, on its thread. What always holds: it polls ps task 0 and never waits for it.
"""

from __future__ import annotations

import sys
from typing import Any

from torchquorum.clock import SYSTEM, Clock
from torchquorum.launcher.watch import RunWatcher
from torchquorum.lines import write_line

PLAIN_EVERY_S = 10.0
BAR = 24


class ProgressLine:
    """Shows the newest status of a run in one line.

    Args:
        watcher: Polls ps task 0; closed with the line.
        clock: Measures the speed.
    """

    def __init__(self, watcher: RunWatcher, clock: Clock = SYSTEM) -> None:
        self._watcher, self._clock = watcher, clock
        self._handle: Any = None
        self._shown_at = self._clock.now()
        self._drawn = 0
        self._before: tuple[float, int] | None = None

    def poll(self) -> None:
        """Shows the newest status, if there is a new one."""
        if not self._watcher.poll() or "per_worker" not in self._watcher.status:
            return
        status, now = self._watcher.status, self._clock.now()
        line = describe(status, self._speed(now, status["global_step"]))
        if _in_notebook():
            self._show_in_notebook(line)
        elif sys.stdout.isatty():
            sys.stdout.write("\r" + line.ljust(self._drawn))
            sys.stdout.flush()
            self._drawn = len(line)
        elif now - self._shown_at >= PLAIN_EVERY_S:
            self._shown_at = now
            write_line(line)

    def clear(self) -> None:
        """Clears the line in a terminal, so that output can be printed."""
        if self._drawn:
            sys.stdout.write("\r" + " " * self._drawn + "\r")
            self._drawn = 0

    def close(self) -> None:
        """Ends the line and the connection."""
        self.clear()
        self._watcher.close()

    def _speed(self, now: float, step: int) -> float:
        before, self._before = self._before, (now, step)
        return max(0.0, (step - before[1]) / (now - before[0])) if before is not None and now > before[0] else 0.0

    def _show_in_notebook(self, line: str) -> None:
        from IPython.display import Pretty, display  # pyright: ignore[reportMissingImports]

        class Shown(Pretty):
            def __repr__(self) -> str:
                return line

        if self._handle is None:
            self._handle = display(Shown(line), display_id=True)
        else:
            self._handle.update(Shown(line))


def describe(status: dict[str, Any], updates_per_s: float) -> str:
    """Returns the line for a status."""
    step, last = status["global_step"], status.get("last_step")
    parts = [f"global step {step} of {last}" if last else f"global step {step}"]
    if last:
        full = min(BAR, BAR * step // last)
        parts[0] = f"[{'#' * full}{'.' * (BAR - full)}] " + parts[0]
    if updates_per_s:
        parts.append(f"{updates_per_s:.0f} updates/s")
        if last and step < last:
            parts.append(f"{(last - step) / updates_per_s:.0f} s left")
    if optimizers := status.get("optimizers"):
        losses = {name: f" loss {of['loss']:.4g}" if of["loss"] is not None else "" for name, of in optimizers.items()}
        parts += [f"{name} {of['version']}{losses[name]}" for name, of in optimizers.items()]
    elif status.get("loss") is not None:
        parts.append(f"loss {status['loss']:.4g}")
    parts.append(f"{len(status['live'])} of {status['workers']} workers")
    return ", ".join(parts)


def _in_notebook() -> bool:
    kernel = sys.modules.get("ipykernel.zmqshell")
    ipython = sys.modules.get("IPython")
    if kernel is None or ipython is None:
        return False
    return isinstance(ipython.get_ipython(), kernel.ZMQInteractiveShell)
