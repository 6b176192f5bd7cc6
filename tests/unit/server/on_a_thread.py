"""A ps task on a thread of its own, and what became of it."""

from __future__ import annotations

import threading

from torchquorum.server.serve import PsTask

DEADLINE_S = 60.0


class OnAThread:
    """Serves until the server ends by itself, fails, or is closed."""

    def __init__(self, server: PsTask, said: list[str]) -> None:
        self.server, self.said = server, said
        self.ok: bool | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="torchquorum-test-ps")
        self._thread.start()

    def _run(self) -> None:
        try:
            self.ok = self.server.serve()
        except BaseException as error:
            self.error = error
        finally:
            self.server.close()

    def ends(self) -> BaseException | None:
        """Waits for the end; returns the error that was the reason."""
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), self.said
        return self.error

    def close(self) -> None:
        """Ends one that would go on."""
        if self._thread.is_alive():
            self.server.end("the test is over")
        self.ends()
