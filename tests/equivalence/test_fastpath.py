"""Updates that workers make themselves on the fast path are those that the ps would make: the same bits, books and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchquorum as tq
from tests.equivalence.test_one_worker import Net, backward, plain, same
from tests.harness import PATIENCE, Cluster, train
from torchquorum.fastpath import admission, participant, policy
from torchquorum.fastpath import steps as fastpath_steps
from torchquorum.memory.lock import supported
from torchquorum.session.join import Task

pytestmark = pytest.mark.skipif(not supported(), reason="this system has no locks between processes")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The versions that were made on the fast path, as the workers saw them."""
    found: list[int] = []
    step = fastpath_steps.FastPathSteps.step

    def noted(self: Any, *given: Any) -> Any:
        taken = step(self, *given)
        if taken is not None:
            found.append(taken.version)
        return taken

    monkeypatch.setattr(fastpath_steps.FastPathSteps, "step", noted)
    # However busy the machine is, nobody gives the fast path up because others are late.
    monkeypatch.setattr(participant, "WAIT_S", 20.0)
    monkeypatch.setattr(fastpath_steps, "PS_SILENT_S", 20.0)
    return found


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, *rest = model.children()
    others = [p for m in rest for p in m.parameters() if p.requires_grad]
    others = list({id(p): p for p in others}.values())
    return torch.optim.SGD([{"params": first.parameters(), "lr": 0.3}, {"params": others}], lr=0.07)


def in_groups(kind: Any, **options: Any) -> Any:
    """Two parameter groups of one class, with different options."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        groups = two_groups(model).param_groups
        first, second = ({"params": group["params"], "lr": group["lr"] / 10} for group in groups)
        return kind([{**first, "weight_decay": 0.01}, second], **options)

    return make


STATEFUL = {
    "momentum": in_groups(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True),
    "Adam": in_groups(torch.optim.Adam),
    "AdamW": in_groups(torch.optim.AdamW, amsgrad=True),
    "Adagrad": in_groups(torch.optim.Adagrad, lr_decay=0.1, initial_accumulator_value=0.1),
    "RMSprop": in_groups(torch.optim.RMSprop, momentum=0.5, centered=True),
    "decay": in_groups(torch.optim.SGD, maximize=False),
}


def whole(model: nn.Module, worker: int, step: int) -> None:
    """Every variable has a gradient in every step."""
    generator = torch.Generator().manual_seed(100 * worker + step)
    x = torch.randn(11, 37, generator=generator).to(next(model.parameters()).dtype)
    nn.functional.cross_entropy(model(x, True).float(), torch.randint(0, 5, (11,), generator=generator)).backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("workers", [2, 3, 5])
def test_a_round_made_by_the_workers_has_the_bits_of_one_made_by_the_ps(
    workers: int, dtype: torch.dtype, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"steps": 20, "workers": workers, "schedule": tq.schedule("StepLR", step_size=3)}
    ours, steps = train(lambda: Net(dtype), two_groups, whole, **options)
    assert len(made) > 10, "the fast path was not used"
    monkeypatch.setattr(policy, "supported", lambda: False)
    theirs, their_steps = train(lambda: Net(dtype), two_groups, whole, **options)
    assert same(ours, theirs)
    assert [(s.version, s.lr, s.accepted) for s in steps] == [(s.version, s.lr, s.accepted) for s in their_steps]


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("name", STATEFUL)
def test_rounds_of_an_optimizer_with_state_have_the_bits_of_those_made_by_the_ps(
    name: str, workers: int, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, _ = train(Net, STATEFUL[name], whole, steps=20, workers=workers)
    assert len(made) > 10, "the fast path was not used"
    monkeypatch.setattr(policy, "supported", lambda: False)
    theirs, _ = train(Net, STATEFUL[name], whole, steps=20, workers=workers)
    assert same(ours, theirs)


@pytest.mark.parametrize("rule", [tq.Async(), tq.Sync()])
@pytest.mark.parametrize("name", STATEFUL)
def test_one_worker_on_the_fast_path_equals_plain_torch_also_across_checkpoints_and_messages(
    name: str, rule: Any, made: list[int], tmp_path: Path
) -> None:
    def work(task: Task, last: int) -> list[torch.Tensor]:
        model = Net()
        optimizer = tq.Optimizer(STATEFUL[name](model), rule=rule)
        with tq.Session(task, model, optimizer, last_step=last, logdir=str(tmp_path), patience=PATIENCE) as session:
            while not session.should_stop():
                optimizer.zero_grad()
                whole(model, 0, session.global_step)
                optimizer.step()
                if session.global_step % 5 == 0:
                    session.pull()  # by message: the page is closed and opened again
        return [p.detach().clone() for p in model.parameters()]

    Cluster().run(lambda task: work(task, 14))
    (ours,) = Cluster().run(lambda task: work(task, 30))  # it goes on from the first one's checkpoint
    model = Net()
    optimizer = STATEFUL[name](model)
    for step in range(30):
        optimizer.zero_grad()
        whole(model, 0, step)
        optimizer.step()
    assert same(ours, [p.detach() for p in model.parameters()])
    assert len(made) > 15, "the fast path was not used"


def test_a_variable_without_a_gradient_keeps_its_state_and_the_ps_makes_that_update(made: list[int]) -> None:
    ours, _ = train(Net, STATEFUL["Adam"], backward, steps=12, rule=tq.Async())
    assert same(ours, plain(STATEFUL["Adam"], steps=12))


@pytest.mark.parametrize("rule", [tq.Async(), tq.Sync()])
@pytest.mark.parametrize("name", ["CosineAnnealingLR", "ExponentialLR", "OneCycleLR", "CyclicLR"])
def test_one_worker_on_the_board_follows_the_schedule_as_plain_torch_does(
    name: str, rule: Any, made: list[int]
) -> None:
    arguments: dict[str, Any] = {
        "CosineAnnealingLR": {"T_max": 7},
        "ExponentialLR": {"gamma": 0.83},
        "OneCycleLR": {"max_lr": 0.5, "total_steps": 60, "cycle_momentum": False},
        "CyclicLR": {"base_lr": 0.01, "max_lr": 0.2, "step_size_up": 4, "cycle_momentum": False},
    }[name]
    ours, _ = train(Net, two_groups, backward, steps=30, rule=rule, schedule=tq.schedule(name, **arguments))
    make = getattr(torch.optim.lr_scheduler, name)
    theirs = plain(two_groups, steps=30, schedule=lambda o: make(o, **arguments))
    assert same(ours, theirs)
    assert len(made) > 20, "the fast path was not used"


class Counter(nn.Module):
    """Its gradient is -1 and the learning rate 1, so it always equals the version."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(300))


def count(cluster: Cluster, rule: Any, steps: int, folder: Path | None = None, **options: Any) -> None:
    def work(task: Task) -> None:
        model = Counter()
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=1.0), rule=rule)
        model.count.grad = -torch.ones(300)
        logdir = str(folder) if folder else None
        with tq.Session(
            task, model, optimizer, last_step=steps, logdir=logdir, patience=PATIENCE, wait_for_workers=3, **options
        ) as session:
            while not session.should_stop():
                optimizer.step(loss=1.0)
                step = optimizer.last
                assert set(model.count.tolist()) == {step.version}
            assert session.pull() == steps == int(model.count[0])

    cluster.run(*[work] * 3)


@pytest.mark.parametrize("rule", [tq.Async(), tq.Sync()])
def test_the_ledger_has_every_gradient_once_also_while_checkpoints_are_made(
    rule: Any, made: list[int], tmp_path: Path
) -> None:
    count(Cluster(workers=3), rule, 400, tmp_path, save_every_steps=60)
    assert len(made) > 30, "the fast path was not used"  # while a checkpoint is written it is closed
    entries = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    gradients = [e for e in entries if "local_step" in e]
    keys = [(e["worker"], e["local_step"]) for e in gradients]
    assert len(keys) == len(set(keys))
    accepted = [e for e in gradients if e["accepted"]]
    assert len(accepted) == (1200 if rule.once_per_round else 400)
    for worker in range(3):
        local_steps = [e["local_step"] for e in gradients if e["worker"] == worker]
        assert local_steps == list(range(1, len(local_steps) + 1))
    assert [e["met"] for e in accepted] == sorted(e["met"] for e in accepted)
    assert all(e["staleness"] == e["met"] - e["version"] >= 0 for e in accepted)
    assert {e["norm"] for e in accepted} == {17.3205}  # of 300 ones


def test_workers_that_share_one_core_take_turns_and_nothing_is_lost(
    made: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(participant, "usable_cores", lambda: 1)
    monkeypatch.setattr(admission, "TIMES", admission.SeatTimes(stay_s=0.001))
    count(Cluster(workers=3), tq.Async(), 1500, tmp_path)
    assert len(made) > 500, "the fast path was not used"
    entries = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    by = [e["worker"] for e in entries if e.get("accepted")]
    assert len(by) == 1500 and set(by) == {0, 1, 2}


def test_a_gradient_that_is_not_finite_is_refused_and_the_board_is_used_again(made: list[int]) -> None:
    reasons = []

    def work(task: Task) -> None:
        model = Counter()
        optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=1.0), rule=tq.Async())
        with tq.Session(task, model, optimizer, last_step=20, patience=PATIENCE) as session:
            while not session.should_stop():
                model.count.grad = -torch.ones(300)
                if session.local_step in (5, 6, 9):
                    model.count.grad[17] = float("inf") if session.local_step == 6 else float("nan")
                optimizer.step()
                step = optimizer.last
                reasons.append((step.accepted, step.reason))
                assert model.count[17].item() == step.version

    Cluster().run(work)
    assert [k for k, (accepted, _) in enumerate(reasons) if not accepted] == [5, 6, 9]
    assert {reason for accepted, reason in reasons if not accepted} == {"not finite"}
    assert max(made) > 10


@pytest.mark.parametrize(
    ("rule", "optimizer", "options"),
    [
        (tq.Bounded(2), torch.optim.SGD, {}),
        (tq.Sync(2), torch.optim.SGD, {}),
        (tq.Buffered(2), torch.optim.SGD, {}),
        (tq.Async(pipeline=True), torch.optim.SGD, {}),
        (tq.Async(), torch.optim.Adadelta, {}),
        (tq.Async(), torch.optim.SGD, {"average": tq.ExponentialMovingAverage(0.9)}),
    ],
)
def test_where_the_ps_has_something_to_decide_the_board_stays_closed(
    rule: Any, optimizer: Any, options: dict[str, Any], made: list[int]
) -> None:
    train(Net, lambda m: optimizer(m.parameters(), lr=0.01), whole, steps=6, workers=3, rule=rule, **options)
    assert not made


@pytest.mark.parametrize(("rule", "workers"), [(tq.Sync(), 2), (tq.Async(), 1)], ids=str)
def test_a_clamp_after_each_update_is_made_by_the_workers_with_the_bits_of_the_ps(
    rule: Any, workers: int, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"steps": 20, "workers": workers, "rule": rule, "after_update": tq.Clamp(-0.1, 0.1)}
    ours, _ = train(Net, two_groups, whole if workers > 1 else backward, **options)
    assert len(made) > 10, "the fast path was not used"
    assert max(p.abs().max() for p in ours[:2]) == torch.tensor(0.1)
    monkeypatch.setattr(policy, "supported", lambda: False)
    theirs, _ = train(Net, two_groups, whole if workers > 1 else backward, **options)
    assert same(ours, theirs)
