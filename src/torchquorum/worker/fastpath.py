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
from torchquorum.fastpath.policy import fastpath_kernels, mode_of
from torchquorum.fastpath.steps import FastPathSteps, WorkerMemory, round_steps, turn_steps
from torchquorum.fastpath.update_journal import UpdateJournal
from torchquorum.memory.lock import supported
from torchquorum.memory.slots import Slots
from torchquorum.update.kernels import states_of
from torchquorum.wire.messages import Plan, Variables
from torchquorum.worker.device_update import DeviceRound, DeviceTurn
from torchquorum.worker.exchange import Exchange
from torchquorum.worker.flat import FlatParameters


def can_use_fastpath(plan: Plan, *, on_gpu: bool) -> bool:
    """Whether a worker can make updates by itself: on a GPU only those of one operation, else the ps makes them."""
    kernels = fastpath_kernels(plan) or []
    if (plan.record or plan.durable) and on_gpu:
        return False  # a replay, as one from the journal, makes the updates where the ps makes them
    return supported() and (not on_gpu or all(kernel.plain for kernel in kernels))


def open_fastpath(
    answer: Variables,
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
        answer: The answer to the worker's join: it says where the page is, and the optimizer's state.
        who: Which worker this is, and its incarnation.
        plan: The plan of the run.
        flat: The worker's parameters.
        exchange: Moves the worker's gradients and variables.
        versions: The ps's slots.
        clock: Tells the time.
        confirm: Is called once a GPU has been waited for; raises if the program has written to the parameters.
    """
    own, kernels = exchange.memory_of(0), fastpath_kernels(plan)
    if own is None or answer.fastpath is None:
        return None
    assert kernels is not None, "a ps has no page for an optimizer that workers cannot run"
    region, names = flat.layout.trained[0], states_of(kernels)
    states = {name: Slots.open(ref, region) for name, ref in zip(names, answer.states, strict=True)}
    page = FastPage.open(answer.fastpath, plan.num_workers, len(plan.optimizer.groups), clock)
    worker, user = who[0], Participant(page, *who, versions, clock=clock)
    memory = WorkerMemory(
        layout=flat.layout,
        parameters=flat.parameters,
        versions=versions,
        own=own,
        kernels=kernels,
        states=states,
        journal=UpdateJournal(page, clock) if plan.durable else None,
    )
    on_gpu = exchange.device is not None
    if mode_of(plan) == "rounds":
        device_round = DeviceRound(flat, exchange, versions, kernels, worker, plan.num_workers) if on_gpu else None
        return round_steps(user, memory, device_round)
    alone = partial(page.workers.alone, worker)
    return turn_steps(user, memory, DeviceTurn(flat, exchange, kernels, alone, confirm) if on_gpu else None, clock)
