"""Opens the fast path for one worker: the ps's page, the memory, and the GPU if the parameters are on one.

Called by the worker's connection when the first answer of a ps brings the page. What always holds: there is a page only where
workers make the updates, see `torchquorum.fastpath.policy`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torchquorum.clock import SYSTEM, Clock
from torchquorum.fastpath.page import FastPage
from torchquorum.fastpath.participant import Participant
from torchquorum.fastpath.policy import fastpath_kernel, mode_of
from torchquorum.fastpath.steps import FastPathSteps, WorkerMemory, round_steps, turn_steps
from torchquorum.memory.slots import Slots
from torchquorum.wire.messages import MemoryRef, Plan
from torchquorum.worker.device_update import DeviceRound, DeviceTurn
from torchquorum.worker.exchange import Exchange
from torchquorum.worker.flat import FlatParameters


def open_fastpath(
    ref: MemoryRef,
    who: tuple[int, int],
    plan: Plan,
    flat: FlatParameters,
    exchange: Exchange,
    versions: Slots,
    clock: Clock = SYSTEM,
    confirm: Callable[[], None] = lambda: None,
) -> FastPathSteps | None:
    """Returns the steps of a worker on the page of its ps; None if it shares no gradient memory with the ps.

    Args:
        ref: Where the page is.
        who: Which worker this is, and its incarnation.
        plan: The plan of the run.
        flat: The worker's parameters.
        exchange: Moves the worker's gradients and variables.
        versions: The ps's slots.
        clock: Tells the time.
        confirm: Is called once a GPU has been waited for; raises if the program has written to the parameters.
    """
    own, kernel = exchange.memory_of(0), fastpath_kernel(plan)
    if own is None:
        return None
    assert kernel is not None, "a ps has no page for an optimizer that workers cannot run"
    page = FastPage.open(ref, plan.num_workers, len(plan.optimizer.groups), clock)
    worker, user = who[0], Participant(page, *who, versions, clock=clock)
    memory = WorkerMemory(layout=flat.layout, parameters=flat.parameters, versions=versions, own=own, kernel=kernel)
    on_gpu = exchange.device is not None
    if mode_of(plan) == "rounds":
        device_round = DeviceRound(flat, exchange, versions, kernel, worker, plan.num_workers) if on_gpu else None
        return round_steps(user, memory, device_round)
    alone = partial(page.workers.alone, worker)
    return turn_steps(user, memory, DeviceTurn(flat, exchange, kernel, alone, confirm) if on_gpu else None, clock)
