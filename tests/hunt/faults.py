"""Makes the faults of a schedule happen in the world, and counts which state each of them met."""

from __future__ import annotations

from collections import Counter

from tests.hunt.cluster import Cluster
from tests.hunt.schedule import Fault

LOOK_EVERY_S, LONGEST_WAIT_S = 0.002, 30.0


class Faults:
    """What goes wrong in one run.

    Attributes:
        met: How often each kind met each state of the task that it befell.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._world = cluster, cluster.world
        self.met: Counter[tuple[str, str]] = Counter()

    def plan(self, fault: Fault) -> None:
        """The fault will happen at its time."""
        self._world.at(fault.at, lambda: self._await(fault, self._world.now + LONGEST_WAIT_S))

    def _await(self, fault: Fault, until: float) -> None:
        """The fault happens as soon as a task is in the state that it asks for."""
        name, _, state = fault.when.partition(": ")
        place = self._cluster.places.get(name)
        if place is None or (place.running and place.process is not None and place.process.state() == state):
            self._happen(fault)
        elif self._world.now < until and not self._cluster.over:
            self._world.at(LOOK_EVERY_S, lambda: self._await(fault, until))

    def _happen(self, fault: Fault) -> None:
        cluster = self._cluster
        if cluster.over:
            return
        place = cluster.places.get(fault.task)
        if fault.task == "disk":
            ps = cluster.places["ps/0"]
            state = ps.process.state() if ps.running and ps.process is not None else "not running"
            self.met[fault.kind, f"ps: {state}" if ps.running else state] += 1
        if place is not None:
            if not place.running:
                self.met[fault.kind, "not running"] += 1
                return
            assert place.process is not None
            job = fault.task.partition("/")[0]
            self.met[fault.kind, f"{job}: {place.process.state()}"] += 1
        self._world.say(f"FAULT: {fault}")
        getattr(self, f"_{fault.kind}")(fault)

    def _kill(self, fault: Fault) -> None:
        process = self._cluster.places[fault.task].process
        assert process is not None
        process.die()
        self._cluster.start_again(fault.task, fault.back_s)

    def _vanish(self, fault: Fault) -> None:
        process = self._cluster.places[fault.task].process
        for listener in self._cluster.network.listeners.values():
            listener.vanished |= listener.process is process
        self._kill(fault)

    def _kill_at(self, fault: Fault) -> None:
        process = self._cluster.places[fault.task].process
        assert process is not None
        process.dies_after = int(fault.amount)
        process.at_death.append(lambda: self._cluster.start_again(fault.task, fault.back_s))

    def _pause(self, fault: Fault) -> None:
        process = self._cluster.places[fault.task].process
        assert process is not None
        process.paused_until = max(process.paused_until, self._world.now + fault.for_s)

    def _cut(self, fault: Fault) -> None:
        on = self._cluster.network.conditions(fault.task, fault.other)
        on.cut_until, on.keeps = self._world.now + fault.for_s, fault.kind == "hold"

    _hold = _cut

    def _deaf(self, fault: Fault) -> None:
        self._cluster.network.conditions(fault.task, fault.other).from_until = self._world.now + fault.for_s

    def _mute(self, fault: Fault) -> None:
        self._cluster.network.conditions(fault.task, fault.other).to_until = self._world.now + fault.for_s

    def _slow(self, fault: Fault) -> None:
        on = self._cluster.network.conditions(fault.task, fault.other)
        on.slow_until, on.slow_s = self._world.now + fault.for_s, fault.amount

    def _reset(self, fault: Fault) -> None:
        self._cluster.network.reset(fault.task, fault.other)

    def _noise(self, fault: Fault) -> None:
        on = self._cluster.network.conditions(fault.task, fault.other)
        on.noisy_until, on.noise = self._world.now + fault.for_s, fault.amount

    def _clock(self, fault: Fault) -> None:
        process = self._cluster.places[fault.task].process
        assert process is not None
        process.wall_offset += fault.amount

    def _full(self, fault: Fault) -> None:
        disk = self._cluster.disk
        assert disk is not None
        disk.full_until, disk.free_bytes = self._world.now + fault.for_s, int(fault.amount) % 5000
        self._cluster.book.was_full = True

    def _slow_disk(self, fault: Fault) -> None:
        self._cluster.slow_disk_until, self._cluster.slow_disk_s = self._world.now + fault.for_s, fault.amount

    def _flip(self, fault: Fault) -> None:
        disk = self._cluster.disk
        assert disk is not None
        self._world.say(f"the bit is in {disk.flip(int(fault.amount))}")
        self._cluster.book.excuse, self._cluster.book.accepts_loss = "a bit was flipped", True

    def _power(self, fault: Fault) -> None:
        disk = self._cluster.disk
        assert disk is not None
        for place in self._cluster.places.values():
            if place.running and place.process is not None:
                place.process.die()
                self._cluster.start_again(place.name, fault.back_s)
        disk.lose_power(int(fault.amount))
        self._cluster.book.lost_power()

    def _error(self, fault: Fault) -> None:
        program = self._cluster.places[fault.task].program
        if program is not None:
            program.throws = True
