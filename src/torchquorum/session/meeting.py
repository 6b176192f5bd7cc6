"""Where tasks that torchrun has started learn each other's addresses: a store of torch.distributed.

Called by `tq.join()` and `torchquorum join` through `resolve`. Every task listens on a free port, writes host:port under its
rank and reads those of all others. What always holds: the socket that was announced is the one that is listened on, so
nobody else can take the port; the wait has a deadline and says who is missing.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torchquorum.cluster.finding import Meeting, task_of
from torchquorum.cluster.spec import PS, WORKER, ClusterSpec
from torchquorum.errors import ClusterError, DeadlineError

WAIT_S = 300.0
SAY_EVERY_S = 15.0
POLL_S = 0.1
# A store that rank 0 keeps lives as long as its process: a task that is started again asks it anew.
_kept: list[Any] = []


def meet(meeting: Meeting, *, say: Callable[[str], None] = print, wait_s: float = WAIT_S) -> tuple[ClusterSpec, int]:
    """Exchanges addresses with all other processes of the job.

    Args:
        meeting: Where, and who this is.
        say: Prints a line for people.
        wait_s: How long to wait for the others.

    Returns:
        The cluster, and the open listening socket of this task.

    Raises:
        ClusterError: The store cannot be reached.
        DeadlineError: Others have not come in time.
    """
    store = _open_store(meeting, wait_s)
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.bind(("127.0.0.1" if meeting.one_host else "", 0))
    held.listen(128)
    store.set(f"{meeting.prefix}{meeting.rank}", f"{_own_host(meeting)}:{held.getsockname()[1]}")
    try:
        addresses = _read_all(store, meeting, wait_s, say)
    except BaseException:
        held.close()
        raise
    cluster = ClusterSpec({PS: addresses[: meeting.num_ps], WORKER: addresses[meeting.num_ps :]})
    return cluster, held.detach()


def _read_all(store: Any, meeting: Meeting, wait_s: float, say: Callable[[str], None]) -> list[str]:
    """Waits until every task has written its address, and returns them by rank."""
    me, keys = task_of(meeting.rank, meeting.num_ps), [f"{meeting.prefix}{rank}" for rank in range(meeting.size)]
    began = told = time.monotonic()
    while not store.check(keys):
        now = time.monotonic()
        if now - began > wait_s:
            raise DeadlineError(
                f"{me}: waited {wait_s:.0f} s for the addresses of {_missing(store, meeting, keys)} at {meeting.host}:"
                f"{meeting.port} and gave up. Was every process of the job started, with the same WORLD_SIZE, and does each "
                "call tq.join()?"
            )
        if now - told > SAY_EVERY_S:
            told = now
            say(f"{me}: waiting for the addresses of {_missing(store, meeting, keys)}: {now - began:.0f} s")
        time.sleep(POLL_S)
    return [bytes(store.get(key)).decode() for key in keys]


def _missing(store: Any, meeting: Meeting, keys: list[str]) -> str:
    return ", ".join(str(task_of(rank, meeting.num_ps)) for rank, key in enumerate(keys) if not store.check([key]))


def _open_store(meeting: Meeting, wait_s: float) -> Any:
    from torch.distributed import TCPStore

    keeps = meeting.rank == 0 and not meeting.hosted
    try:
        store = TCPStore(
            meeting.host,
            meeting.port,
            is_master=keeps,
            timeout=timedelta(seconds=wait_s),
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:
        text = str(error).strip().splitlines()[0][:300]
        raise ClusterError(
            f"MASTER_ADDR={meeting.host} MASTER_PORT={meeting.port}: {'cannot keep' if keeps else 'cannot reach'} the store "
            f"where the tasks exchange their addresses ({text}); name a host and a port that every task can reach"
        ) from None
    _kept.append(store)
    return store


def _own_host(meeting: Meeting) -> str:
    """Returns the address by which the other hosts reach this one."""
    if meeting.one_host:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((meeting.host, meeting.port))  # sends nothing: it only chooses the way
            own = str(probe.getsockname()[0])
        except OSError:
            own = socket.gethostname()
    # The way to the store does not leave this host, so this is the host that the others know by that name.
    return meeting.host if own.startswith("127.") else own
