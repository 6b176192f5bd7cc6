"""`optimizer.load_state_dict()`: a run goes on from a plain checkpoint with the same bits, before it begins and inside it."""

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import torchquorum as tq
from tests.equivalence.test_one_worker import OPTIMIZERS, Net, backward, plain, same
from tests.harness import PATIENCE, Cluster
from torchquorum.formats.ledger import read_records
from torchquorum.session.join import Task

FIRST, LAST = 4, 9
LOCK = threading.Lock()  # threads share torch's random state


def checkpoint(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a plain program has after its first steps."""
    model = Net()
    optimizer = OPTIMIZERS[name](model)
    for step in range(FIRST):
        optimizer.zero_grad()
        backward(model, 0, step)
        optimizer.step()
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


def go_on(model: nn.Module, optimizer: Any, worker: int = 0) -> None:
    for step in range(FIRST, LAST):
        optimizer.zero_grad()
        backward(model, worker, step)
        optimizer.step()


def load_inside(
    name: str, *, ps: int = 1, transport: str = "auto", rule: Any = None, restarts: bool = False, **options: Any
) -> tuple[list[torch.Tensor], int]:
    variables, state = checkpoint(name)
    cluster, slice_bytes = Cluster(ps=ps, transport=transport), options.pop("slice_bytes", None)

    def work(task: Task) -> tuple[list[torch.Tensor], int]:
        model = Net()
        optimizer = tq.Optimizer(OPTIMIZERS[name](model), rule=rule or tq.Sync(), slice_bytes=slice_bytes)
        with tq.Session(task, model, optimizer, last_step=50, patience=PATIENCE, **options) as session:
            backward(model, 0, 77)
            optimizer.step()
            model.load_state_dict(variables)  # before: it goes with the optimizer's state
            optimizer.load_state_dict(state)
            if restarts:
                for index in range(ps):
                    cluster.restart(index)
            go_on(model, optimizer)
            session.pull()
            reached = session.global_step
        return [p.detach().clone() for p in model.parameters()], reached

    return cluster.run(work)[0]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_goes_on_from_what_is_loaded_inside_it(name: str) -> None:
    ours, reached = load_inside(name)
    assert same(ours, plain(OPTIMIZERS[name], steps=LAST))
    assert reached == 1 + 1 + LAST - FIRST, "what is loaded is a version of its own"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adam", {"transport": "tcp"}),
        ("adam groups", {"ps": 3, "transport": "tcp", "slice_bytes": 500}),
        ("momentum", {"ps": 2}),
        ("adafactor", {"ps": 2}),
        ("adamw", {"rule": tq.Async()}),
        ("momentum", {"rule": tq.Async(pipeline=False), "ps": 2}),
    ],
    ids=str,
)
def test_on_every_path(name: str, options: dict[str, Any]) -> None:
    assert same(load_inside(name, **options)[0], plain(OPTIMIZERS[name], steps=LAST))


@pytest.mark.parametrize("name", ["adam groups", "adafactor"])
@pytest.mark.parametrize("ps", [1, 2])
def test_a_durable_run_makes_it_again_from_its_journal(name: str, ps: int, tmp_path: Path) -> None:
    ours, _ = load_inside(name, ps=ps, durable=True, logdir=tmp_path, restarts=True)
    assert same(ours, plain(OPTIMIZERS[name], steps=LAST))
    [event] = [r for r in read_records(tmp_path, lambda _: None) if getattr(r, "event", "") == "assigned"][:1]
    assert "the optimizer's state" in event.text  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("name", "ps", "transport", "slice_bytes"),
    [(name, 1, "auto", None) for name in OPTIMIZERS] + [("adam groups", 3, "tcp", 500), ("adafactor", 2, "auto", None)],
)
def test_a_run_begins_with_what_is_loaded_before_it(
    name: str, ps: int, transport: str, slice_bytes: int | None
) -> None:
    variables, state = checkpoint(name)

    def work(task: Task) -> list[torch.Tensor]:
        model = Net()
        optimizer = tq.Optimizer(OPTIMIZERS[name](model), slice_bytes=slice_bytes)
        model.load_state_dict(variables)
        optimizer.load_state_dict(state)
        assert str(optimizer.state_dict()["param_groups"]) == str(state["param_groups"])
        with tq.Session(task, model, optimizer, last_step=LAST - FIRST, patience=PATIENCE):
            go_on(model, optimizer)
        return [p.detach().clone() for p in model.parameters()]

    assert same(Cluster(ps=ps, transport=transport).run(work)[0], plain(OPTIMIZERS[name], steps=LAST))


def test_an_optimizer_that_has_made_steps_goes_on_in_a_run() -> None:
    def work(task: Task) -> list[torch.Tensor]:
        model = Net()
        inner = OPTIMIZERS["adam"](model)
        for step in range(FIRST):
            inner.zero_grad()
            backward(model, 0, step)
            inner.step()
        optimizer = tq.Optimizer(inner)
        with tq.Session(task, model, optimizer, patience=PATIENCE):
            go_on(model, optimizer)
        return [p.detach().clone() for p in model.parameters()]

    assert same(Cluster().run(work)[0], plain(OPTIMIZERS["adam"], steps=LAST))


@pytest.mark.parametrize(("ps", "transport"), [(1, "auto"), (1, "tcp"), (2, "auto")])
def test_in_sync_the_chiefs_counts_and_the_others_say_so(
    ps: int, transport: str, capsys: pytest.CaptureFixture[str]
) -> None:
    variables, state = checkpoint("adam groups")
    other = copy.deepcopy(state)
    other["param_groups"][0]["lr"] = 7.0
    for of in other["state"].values():
        of["exp_avg"].fill_(3.0)
    cluster, all_in = Cluster(ps=ps, workers=2, transport=transport), threading.Barrier(2)

    def work(task: Task) -> tuple[list[torch.Tensor], float]:
        with LOCK:
            model = Net()
        optimizer = tq.Optimizer(OPTIMIZERS["adam groups"](model), tq.Sync())
        with tq.Session(task, model, optimizer, patience=PATIENCE) as session:
            all_in.wait(20)
            model.load_state_dict(variables)
            optimizer.load_state_dict(state if task.is_chief else other)
            rate = optimizer.param_groups[0]["lr"]
            go_on(model, optimizer)  # both on the same batches, whose mean has the bits of one
            session.pull()
        return [p.detach().clone() for p in model.parameters()], rate

    for ours, rate in cluster.run(work, work):
        assert same(ours, plain(OPTIMIZERS["adam groups"], steps=LAST))
        assert rate == state["param_groups"][0]["lr"]
    said = capsys.readouterr().err
    assert said.count("the chief's state and options are taken over, at global step 1") == 1
    assert "/job:worker/task:1: optimizer.load_state_dict()" in said


def test_while_the_chief_is_gone_the_state_of_the_worker_that_stands_in_counts() -> None:
    cluster, gone, all_in = Cluster(workers=3), threading.Event(), threading.Barrier(3)

    def make(task: Task) -> tuple[Any, Any, Any]:
        with LOCK:
            model = Net()
        optimizer = tq.Optimizer(OPTIMIZERS["momentum"](model))
        return model, optimizer, tq.Session(task, model, optimizer, last_step=50, patience=PATIENCE)

    def chief(task: Task) -> None:
        with make(task)[2]:
            all_in.wait(20)
        gone.set()

    def other(task: Task) -> tuple[float, float]:
        _, optimizer, session = make(task)
        _, state = checkpoint("momentum")
        state["param_groups"][0]["lr"] = 0.5 + task.index
        for of in state["state"].values():
            of["momentum_buffer"].fill_(float(task.index))
        with session:
            all_in.wait(20)
            if task.index == 2:
                assert gone.wait(20)
            optimizer.load_state_dict(state)
            found = optimizer.state_dict()
            session.request_stop()
        return optimizer.param_groups[0]["lr"], float(found["state"][0]["momentum_buffer"].mean())

    assert cluster.run(chief, other, other)[1:] == [(1.5, 1.0), (1.5, 1.0)]


def test_a_scheduler_object_goes_on_from_what_was_loaded() -> None:
    def program(make: Any, session: Any) -> list[torch.Tensor]:
        model = Net()
        optimizer = make(model)
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, LAST)
        with session(model, optimizer):
            for step in range(FIRST):
                optimizer.zero_grad()
                backward(model, 0, step)
                optimizer.step()
                scheduler.step()
            kept = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
            go_on(model, optimizer)
            optimizer.load_state_dict(kept[0])
            scheduler.load_state_dict(kept[1])
            for step in range(FIRST, LAST):
                optimizer.zero_grad()
                backward(model, 0, step)
                optimizer.step()
                scheduler.step()
        return [p.detach().clone() for p in model.parameters()]

    class Nothing:
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    def ours(task: Task) -> list[torch.Tensor]:
        return program(
            lambda model: tq.Optimizer(OPTIMIZERS["adam"](model)),
            lambda model, optimizer: tq.Session(task, model, optimizer, patience=PATIENCE),
        )

    expected = program(OPTIMIZERS["adam"], lambda model, optimizer: Nothing())
    assert same(Cluster().run(ours)[0], expected)


def test_an_empty_state_begins_anew_and_a_schedule_keeps_its_rates() -> None:
    def work(task: Task) -> Any:
        model = Net()
        optimizer = tq.Optimizer(OPTIMIZERS["adam"](model), schedule=tq.schedule("StepLR", step_size=2, gamma=0.5))
        fresh = copy.deepcopy(optimizer.state_dict())
        fresh["param_groups"][0]["lr"] = 9.0
        with tq.Session(task, model, optimizer, patience=PATIENCE):
            go_on(model, optimizer)
            assert len(optimizer.state) == len([p for p in model.parameters() if p.grad is not None])
            optimizer.load_state_dict(fresh)
            assert len(optimizer.state) == 0 == len(optimizer.state_dict()["state"])
            assert optimizer.lr[0] == 0.01 * 0.5 ** ((LAST - FIRST + 1) // 2)
            go_on(model, optimizer)
            return [int(of["step"]) for of in optimizer.state_dict()["state"].values()]

    assert max(Cluster().run(work)[0]) == LAST - FIRST


def wrong(state: dict[str, Any], what: str) -> dict[str, Any]:
    if what == "optimizer":
        return checkpoint("momentum")[1]
    if what == "options":
        del state["param_groups"][0]["betas"]
    if what == "model":
        state["state"][0]["exp_avg"] = torch.zeros(3, 3)
    if what == "names":
        del state["state"][0]["exp_avg_sq"]
    if what == "groups":
        state["param_groups"].append(copy.deepcopy(state["param_groups"][0]))
    if what == "value":
        state["state"][0]["more"] = object()
    return state


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("optimizer", "Adam cannot load this .KeyError: 'step'.: is it the state of another optimizer"),
        ("options", "param_groups.0. has no betas, which Adam needs .* the state of another optimizer"),
        ("model", "exp_avg of .* has the shape .3, 3., and the parameter"),
        ("names", "the state of .* has no exp_avg_sq"),
        ("groups", "different number of parameter groups"),
        ("value", "cannot travel to a ps"),
    ],
)
def test_what_does_not_fit_is_refused_in_words_and_changes_nothing(what: str, text: str) -> None:
    def work(task: Task) -> Any:
        model = Net()
        optimizer = tq.Optimizer(OPTIMIZERS["adam"](model))
        with tq.Session(task, model, optimizer, patience=PATIENCE) as session:
            for step in range(FIRST):
                optimizer.zero_grad()
                backward(model, 0, step)
                optimizer.step()
            with pytest.raises((tq.errors.ConfigError, ValueError), match=text):
                optimizer.load_state_dict(wrong(checkpoint("adam")[1], what))
            assert session.global_step == FIRST
            go_on(model, optimizer)
        return [p.detach().clone() for p in model.parameters()]

    assert same(Cluster().run(work)[0], plain(OPTIMIZERS["adam"], steps=LAST))


def test_what_has_no_effect_is_an_error() -> None:
    def work(task: Task) -> None:
        model = Net()
        optimizer = tq.Optimizer(OPTIMIZERS["adam"](model))
        with pytest.raises(tq.errors.ConfigError, match="cannot be copied or pickled"):
            copy.deepcopy(optimizer)
        with tq.Session(task, model, optimizer, patience=PATIENCE):
            with pytest.raises(tq.errors.ConfigError, match="use load_state_dict"):
                optimizer.state = {}  # pyright: ignore[reportAttributeAccessIssue]
            with pytest.raises(tq.errors.ConfigError, match="a copy inside a session"):
                optimizer.state[next(model.parameters())] = {}  # pyright: ignore[reportIndexIssue]
            with pytest.raises(tq.errors.ConfigError, match="cannot be copied or pickled"):
                copy.deepcopy(optimizer)
            optimizer.inner.load_state_dict(checkpoint("adam")[1])
            with pytest.raises(tq.errors.ConfigError, match="call those of the tq.Optimizer"):
                go_on(model, optimizer)

    Cluster().run(work)


def test_a_run_that_goes_on_from_its_checkpoint_says_that_a_loaded_state_is_not_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(task: Task) -> list[torch.Tensor]:
        model = Net()
        optimizer = tq.Optimizer(OPTIMIZERS["adam"](model))
        variables, state = checkpoint("adam")
        model.load_state_dict(variables)
        optimizer.load_state_dict(state)
        with tq.Session(task, model, optimizer, logdir=tmp_path, patience=PATIENCE) as session:
            for step in range(FIRST + session.global_step, FIRST + session.global_step + 2):
                optimizer.zero_grad()
                backward(model, 0, step)
                optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    Cluster().run(work)
    assert "not used" not in capsys.readouterr().err
    ours = Cluster().run(work)[0]
    assert "the state that it had before is not used" in capsys.readouterr().err
    assert same(ours, plain(OPTIMIZERS["adam"], steps=FIRST + 4))
