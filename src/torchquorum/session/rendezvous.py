"""How tasks that torchrun has started learn each other's addresses: a store of torch.distributed.

Called by `tq.join()` and `torchquorum join` through `resolve`. Every task listens on a free port, writes host:port under its rank and
reads those of all others. What always holds: the announced socket is the one that is listened on, so no other process can take the port;
the wait has a deadline and names the missing tasks.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torchquorum.clock import SYSTEM, Clock
from torchquorum.cluster.finding import Rendezvous, task_of
from torchquorum.cluster.spec import PS, WORKER, ClusterSpec
from torchquorum.errors import ClusterError, DeadlineError

WAIT_S = 300.0
SAY_EVERY_S = 15.0
POLL_S = 0.1
# A store that rank 0 serves lives as long as its process: a restarted task asks it again.
_stores: list[Any] = []


def exchange_addresses(
    rendezvous: Rendezvous, *, say: Callable[[str], None] = print, wait_s: float = WAIT_S, clock: Clock = SYSTEM
) -> tuple[ClusterSpec, int]:
    """Exchanges addresses with all other processes of the job.

    Args:
        rendezvous: Where the store is, and which task this is.
        say: Prints a line for people.
        wait_s: How long to wait for the others.
        clock: Tells the time.

    Returns:
        The cluster, and the open listening socket of this task.

    Raises:
        ClusterError: The store cannot be reached.
        DeadlineError: Others have not come in time.
    """
    store = _open_store(rendezvous, wait_s)
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.bind(("127.0.0.1" if rendezvous.one_host else "", 0))
    listening.listen(128)
    store.set(f"{rendezvous.prefix}{rendezvous.rank}", f"{_own_host(rendezvous)}:{listening.getsockname()[1]}")
    try:
        addresses = _read_all(store, rendezvous, wait_s, say, clock)
    except BaseException:
        listening.close()
        raise
    cluster = ClusterSpec({PS: addresses[: rendezvous.num_ps], WORKER: addresses[rendezvous.num_ps :]})
    return cluster, listening.detach()


def close_stores() -> None:
    """Closes the stores that this process has used; tasks that have not read from them yet no longer can."""
    _stores.clear()


def _read_all(store: Any, rendezvous: Rendezvous, wait_s: float, say: Callable[[str], None], clock: Clock) -> list[str]:
    """Waits until every task has written its address, and returns them by rank."""
    task, keys = (
        task_of(rendezvous.rank, rendezvous.num_ps),
        [f"{rendezvous.prefix}{r}" for r in range(rendezvous.size)],
    )
    started = said = clock.now()
    while not store.check(keys):
        now = clock.now()
        if now - started > wait_s:
            raise DeadlineError(
                f"{task}: waited {wait_s:.0f} s for the addresses of {_missing(store, rendezvous, keys)} at {rendezvous.host}:"
                f"{rendezvous.port} and gave up. Was every process of the job started, with the same WORLD_SIZE, and does each "
                "call tq.join()?"
            )
        if now - said > SAY_EVERY_S:
            said = now
            say(f"{task}: waiting for the addresses of {_missing(store, rendezvous, keys)}: {now - started:.0f} s")
        clock.sleep(POLL_S)
    return [bytes(store.get(key)).decode() for key in keys]


def _missing(store: Any, rendezvous: Rendezvous, keys: list[str]) -> str:
    return ", ".join(str(task_of(rank, rendezvous.num_ps)) for rank, key in enumerate(keys) if not store.check([key]))


def _open_store(rendezvous: Rendezvous, wait_s: float) -> Any:
    from torch.distributed import TCPStore

    serves = rendezvous.rank == 0 and not rendezvous.hosted
    try:
        store = TCPStore(
            rendezvous.host,
            rendezvous.port,
            is_master=serves,
            timeout=timedelta(seconds=wait_s),
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:
        text = str(error).strip().splitlines()[0][:300]
        raise ClusterError(
            f"MASTER_ADDR={rendezvous.host} MASTER_PORT={rendezvous.port}: {'cannot keep' if serves else 'cannot reach'} the store "
            f"where the tasks exchange their addresses ({text}); name a host and a port that every task can reach"
        ) from None
    _stores.append(store)
    return store


def _own_host(rendezvous: Rendezvous) -> str:
    """Returns the address by which the other hosts reach this one."""
    if rendezvous.one_host:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((rendezvous.host, rendezvous.port))  # sends nothing: it only selects the route
            own = str(probe.getsockname()[0])
        except OSError:
            own = socket.gethostname()
    # The route to the store does not leave this host, so this is the host that the others know by that name.
    return rendezvous.host if own.startswith("127.") else own
