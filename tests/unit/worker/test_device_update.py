"""Updates where the parameters are: the GPU's forms of a turn and of a round give the kernel's bits, in parameters and slots.

On a machine without a GPU the same code runs on CPU tensors, with copies that are made at once.
"""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import torchquorum.wire.messages as m
from torchquorum.fastpath.page import OPEN, FastPage
from torchquorum.fastpath.participant import MadeVersion, Participant
from torchquorum.fastpath.records import GradientId
from torchquorum.fastpath.steps import FastPathSteps, WorkerMemory, round_steps, turn_steps
from torchquorum.memory.lock import supported
from torchquorum.memory.slots import Slots
from torchquorum.placement.layout import Layout, place
from torchquorum.update.kernels import Sgd
from torchquorum.worker.device_update import DeviceRound, DeviceTurn
from torchquorum.worker.exchange import Exchange
from torchquorum.worker.flat import FlatParameters, describe

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none")
pytestmark = [
    pytest.mark.skipif(not supported(), reason="this system has no locks between processes"),
    pytest.mark.library_keeps_sockets,  # of pipes and sockets: those that CUDA opens once
]
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
RATES = [0.3, 0.07]
WAIT_S = 60.0


class Worker:
    """One worker with parameters on a device, on the page of a host."""

    def __init__(self, host: "Host", index: int, device: str) -> None:
        model = nn.Sequential(nn.Linear(37, 50), nn.Linear(50, 11)).to(device)
        groups = [{"params": layer.parameters(), "lr": rate} for layer, rate in zip(model, RATES, strict=True)]
        variables, parameters = describe(model, torch.optim.SGD(groups))
        self.layout: Layout = place(variables, 1)
        self.flat = FlatParameters(self.layout, parameters)
        self.exchange = Exchange(self.flat, [True])
        own = self.exchange.memory_of(0)
        assert own is not None
        self.own, self.index, self.host, self.number, self.version = own, index, host, 0, 0

    def begin(self, versions: Slots, *, rounds: bool) -> None:
        """Loads the first version and takes part."""
        page, flat, exchange, kernels = self.host.page, self.flat, self.exchange, [Sgd({}), Sgd({})]
        first = m.Variables(1, 0, False, 0, versions.ref, None, RATES)
        assert exchange.load(0, first, [], lambda ring: None)
        page.workers.admit(self.index, 1, self.own.ref)
        memory = WorkerMemory(
            layout=self.layout,
            parameters=flat.parameters,
            versions=versions,
            own=self.own,
            kernels=kernels,
            states={},
        )
        user = Participant(page, self.index, 1, versions, wait_s=WAIT_S)
        if rounds:
            device = DeviceRound(flat, exchange, versions, kernels, self.index, page.num_workers)
            self.steps: FastPathSteps = round_steps(user, memory, device)
        else:
            self.steps = turn_steps(user, memory, DeviceTurn(flat, exchange, kernels, lambda: False))

    def gradients(self, version: int) -> list[torch.Tensor]:
        """Puts gradients into the parameters, in one piece as `tq.capture` leaves them, and returns them."""
        room = self.flat.flat_gradients()
        assert room is not None
        generator = torch.Generator().manual_seed(10 * version + self.index)
        for parameter, view in zip(self.flat.parameters, room.views, strict=True):
            view.copy_(torch.randn(view.shape, generator=generator))
            parameter.grad = view
        return [view.clone() for view in room.views]

    def step(self) -> MadeVersion:
        """Makes one update of a gradient that was computed at the version that it holds."""
        self.number += 1
        made = self.steps.step(GradientId(1, self.number, self.number, self.version))
        assert made is not None
        self.version = made.version
        if not made.loaded:
            self.exchange.pull(0, made.slot)
        self.exchange.settle()
        self.steps.done()
        return made

    @property
    def values(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.flat.parameters]


class Host:
    """An open page, its slots, and two workers."""

    def __init__(self, device: str, *, rounds: bool) -> None:
        self.page = FastPage.create(2, len(RATES))
        self.workers = [Worker(self, index, device) for index in range(2)]
        region = self.workers[0].layout.trained[0]
        self.versions = Slots.create("versions", region, 8)
        self.workers[0].flat.store(region, self.versions.sections[0])
        self.versions.mark(0, 0)
        for _ in range(20):
            self.page.rates.add(RATES)
        self.page.workers.begin_rounds()
        for worker in self.workers:
            worker.begin(self.versions, rounds=rounds)
        words = self.page.words
        words.limit, words.full, words.opening_id, words.state = 1000, -1, 1, OPEN
        self.page.publish(0, 0)
        self.page.ps_looks()

    def in_slot(self, slot: int) -> list[torch.Tensor]:
        """Returns a slot's values, variable by variable, in the order of the parameters."""
        found: dict[int, torch.Tensor] = {}
        region = self.workers[0].layout.trained[0]
        for section, values in zip(region.sections, self.versions.sections[slot], strict=True):
            for piece in section.pieces:
                shape = self.workers[0].flat.parameters[piece.variable].shape
                found[piece.variable] = values[piece.offset : piece.offset + piece.numel].view(shape)
        return [found[k].clone() for k in sorted(found)]

    def updated(self, values: list[torch.Tensor], gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns what torch.optim makes of values and gradients, on their device."""
        parameters = [nn.Parameter(value.clone()) for value in values]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        of_layer = zip((parameters[:2], parameters[2:]), RATES, strict=True)
        torch.optim.SGD([{"params": params, "lr": rate} for params, rate in of_layer]).step()
        return [p.detach() for p in parameters]

    def close(self) -> None:
        for worker in self.workers:
            worker.exchange.close()
        self.page.close()
        self.versions.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Host]]:
    """Makes hosts, and closes them."""
    made: list[Host] = []

    def one(device: str, *, rounds: bool) -> Host:
        made.append(Host(device, rounds=rounds))
        return made[-1]

    yield one
    for host in made:
        host.close()


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_turns_make_the_versions_of_torch_optim_whoever_made_the_one_before(
    make: Callable[..., Host], device: str
) -> None:
    host = make(device, rounds=False)
    expected = host.workers[0].values
    for version, index in enumerate([0, 0, 1, 0, 1, 1]):
        worker = host.workers[index]
        expected = host.updated(expected, worker.gradients(version))
        made = worker.step()
        assert (made.met, made.version, made.loaded) == (version, version + 1, True)
        assert same(worker.values, expected) and same(host.in_slot(made.slot), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_parameters_that_the_program_has_changed_are_read_again_from_the_version(
    make: Callable[..., Host], device: str
) -> None:
    host = make(device, rounds=False)
    worker = host.workers[0]
    expected = host.updated(worker.values, worker.gradients(0))
    with torch.no_grad():
        worker.flat.parameters[0].fill_(9.0)
    made = worker.step()
    assert same(worker.values, expected) and same(host.in_slot(made.slot), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_turn_with_a_gradient_that_is_not_finite_makes_no_version(make: Callable[..., Host], device: str) -> None:
    host = make(device, rounds=False)
    worker = host.workers[0]
    worker.gradients(0)
    gradient = worker.flat.parameters[1].grad
    assert gradient is not None
    gradient[3] = float("nan")
    assert worker.steps.step(GradientId(1, 1, 1, 0)) is None
    assert host.page.version == 0 and host.page.workers.busy_slots() == [-1] * 4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("changed", [None, 0, 1])
def test_rounds_make_the_mean_in_order_then_the_update_also_if_one_worker_writes_on_the_cpu(
    make: Callable[..., Host], device: str, changed: int | None
) -> None:
    host = make(device, rounds=True)
    expected = host.workers[0].values
    for version in range(4):
        given = [worker.gradients(version) for worker in host.workers]
        mean = [(a + b).div_(2) for a, b in zip(*given, strict=True)]
        expected = host.updated(expected, mean)
        for worker in host.workers:
            worker.exchange.fill()
        if changed is not None and version == 2:
            with torch.no_grad():
                host.workers[changed].flat.parameters[0].fill_(9.0)  # so its part is made on the CPU
        made: dict[int, MadeVersion] = {}
        threads = [threading.Thread(target=_step, args=(worker, made)) for worker in host.workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert {k: v.version for k, v in made.items()} == {0: version + 1, 1: version + 1}
        assert [made[k].loaded for k in range(2)] == [not (version == 2 and k == changed) for k in range(2)]
        for worker in host.workers:
            assert same(worker.values, expected)
        assert same(host.in_slot(made[0].slot), expected)


def _step(worker: Worker, made: dict[int, MadeVersion]) -> None:
    made[worker.index] = worker.step()
