"""Every order in which the workers of the fast path can take their stages, with a death, a freeze and a closing at every point.

The model is `tests.hunt.fastpath_model`. Three things keep the number of states down, and lose none that differs: a state that was met is
not followed again, by `tests.hunt.fastpath_state`, which also gives workers that have changed places the same name; what a worker does
alone is not mixed with what others do (`Model.moves_alone`); a death that nobody could have seen happens right after what its worker did
last. What a freeze is, apart from being slow: the lock is held meanwhile, or the ps counts its worker as dead.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torchquorum as tq
from tests.hunt.fastpath_model import Action, Budget, Memory, Model, Worker
from tests.hunt.fastpath_state import check_known
from torchquorum.fastpath.stages import Sleep
from torchquorum.rules.presets import Rule


@dataclass
class Explored:
    """What came of an exploration.

    Attributes:
        states: How many states there are.
        runs: How often a run was begun anew to come to one of them.
        ends: In how many of them nothing can happen any more.
        broken: What is not as it must be, at the end of `path`; None if all is.
        complete: Whether every state was met.
    """

    states: int = 0
    runs: int = 0
    ends: int = 0
    broken: str | None = None
    path: list[Action] = field(default_factory=list)
    complete: bool = True


def explore(
    rule: Rule, num_workers: int, steps: int, budget: Budget, most_states: int = 10**9, *, renames: bool = True
) -> Explored:
    """Follows every order of actions; stops at the first that breaks something. `renames`: workers that change places are alike."""
    memory, found, seen = Memory(rule, num_workers), Explored(), set[int]()
    numbers = tuple(range(num_workers))
    names = list(itertools.permutations(numbers)) if renames else [numbers]
    left: list[list[Action]] = [[]]
    try:
        while left and found.broken is None:
            path = left.pop()
            model = Model(memory, steps, budget)
            if not found.runs:
                check_known(model.leader.quorum)
            found.runs += 1
            try:
                for action in path:
                    model.do(action)
                while (state := min(map(model.key, names))) not in seen:
                    seen.add(state)
                    model.check()
                    actions = enabled(model)
                    if not actions:
                        found.ends += 1
                        model.check_end()
                        break
                    left += [[*path, action] for action in actions[1:]]
                    path = [*path, actions[0]]
                    model.do(actions[0])
            except AssertionError as error:
                found.broken, found.path = str(error), path
            finally:
                model.close()
            if len(seen) >= most_states:
                found.complete = not left
                break
    finally:
        memory.close()
    found.states = len(seen)
    return found


def enabled(model: Model) -> list[Action]:
    """Returns what can happen next, of what has to be told apart."""
    alone = next((worker for worker in model.crew if model.moves_alone(worker)), None)
    if alone is not None:
        before = model.last
        dies = [("kill", before)] if model.budget.deaths and before >= 0 and before != alone.index else []
        return [("go", alone.index), *_faults_of(model, alone), *(d for d in dies if _is_alive(model, before))]
    # One that is frozen without the lock differs from a slow one only by this.
    frozen = next((w for w in model.crew if w.frozen and not w.gone and model.owner != w.index), None)
    if frozen is not None:
        return [("bury", frozen.index)]
    found: list[Action] = []
    late: list[Action] = []
    for worker in model.crew:
        w = worker.index
        if w in model.dead or worker.frozen:
            if not worker.gone and not model.ps_waits:
                found.append(("bury", w))
            if worker.frozen:
                found.append(("thaw", w))
        elif not worker.finished:
            if worker.gone and not model.ps_waits:
                found.append(("beat", w))
            if model.can_move(worker):
                found.append(("go", w))
            elif isinstance(worker.stage, Sleep) and not model.budget.timeouts:
                late.append(("timeout", w))
            found += _faults_of(model, worker)
    if model.budget.closings and model.host.is_open and not model.ps_waits:
        found.append(("close", 0))
    if not model.host.is_open and not model.ps_waits and model.host.may_open():
        found.append(("open", 0))
    moving = any(kind in ("go", "open", "bury") for kind, _ in found)
    return found + (late if not moving else [])


def _is_alive(model: Model, w: int) -> bool:
    return not (model.crew[w].finished or model.crew[w].frozen or w in model.dead)


def _faults_of(model: Model, worker: Worker) -> list[Action]:
    """Returns what may befall a worker now."""
    w, found = worker.index, list[Action]()
    if model.budget.timeouts and isinstance(worker.stage, Sleep):
        found.append(("timeout", w))
    if model.budget.deaths and (model.last in (w, -1) or model.moves_alone(worker) or _is_looked_at(model, w)):
        found.append(("kill", w))
    if model.budget.freezes and not worker.gone and (model.owner == w or not model.ps_waits):
        found.append(("freeze", w))
    return found


def _is_looked_at(model: Model, w: int) -> bool:
    """Whether another worker may still find that a worker's memory has gone with it."""
    alive = [other.index for other in model.crew if other.index not in model.dead]
    return model.rounds and any(w not in model.opened[other] for other in alive)


RULES: dict[str, Rule] = {"async": tq.Async(), "sync": tq.Sync()}
