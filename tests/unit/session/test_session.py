"""A session begins and ends by itself too, and leaves the model's parameters as ordinary tensors."""

import contextlib
import io
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn

import torchquorum as tq
from tests.harness import PATIENCE, Cluster
from torchquorum.errors import ConfigError
from torchquorum.session.join import Task
from torchquorum.session.states import SessionState


def make(task: Task, **options: Any) -> tuple[nn.Module, tq.Optimizer, tq.Session]:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2))
    optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    return model, optimizer, tq.Session(task, model, optimizer, patience=PATIENCE, **options)


def train(model: nn.Module, optimizer: tq.Optimizer, session: tq.Session) -> None:
    while not session.should_stop():
        optimizer.zero_grad()
        model(torch.ones(4, 64)).square().mean().backward()
        optimizer.step()


def saved_bytes(module: nn.Module) -> int:
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    return len(file.getvalue())


def test_a_session_begins_with_start_and_ends_with_close() -> None:
    def work(task: Task) -> None:
        model, optimizer, session = make(task, last_step=3)
        assert session.start() is session
        train(model, optimizer, session)
        session.close()
        assert session.state is SessionState.CLOSED
        session.close()  # harmless
        with pytest.raises(ConfigError, match="has begun already"):
            session.start()

    Cluster().run(work)


def test_close_before_start_is_refused() -> None:
    _, _, session = make(tq.join([]))
    with pytest.raises(ConfigError, match=r"session\.close\(\) before session\.start\(\)"):
        session.close()


def test_close_while_an_exception_passes_ends_the_run_as_failed() -> None:
    def work(task: Task) -> SessionState:
        session = make(task)[2].start()
        try:
            try:
                raise ValueError("mine")
            finally:
                session.close()
        except ValueError:
            return session.state

    cluster = Cluster()
    state = work(cluster.task(0))
    cluster.stop()
    assert state is SessionState.FAILED


@pytest.mark.parametrize(
    ("last_line", "said", "code"),
    [("raise ValueError('mine')", "ValueError: mine", 1), ("", "the program ended without session.close()", 0)],
)
def test_a_program_that_ends_without_close_ends_and_says_so(last_line: str, said: str, code: int) -> None:
    program = f"""
import torch, torchquorum as tq
model = torch.nn.Linear(2, 2)
optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
session = tq.Session(tq.join(), model, optimizer).start()
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
{last_line}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    assert said in done.stderr, done.stderr


def test_a_part_that_is_saved_inside_the_run_and_after_it_does_not_take_the_model_with_it() -> None:
    def work(task: Task) -> tuple[int, int, list[int]]:
        model, optimizer, session = make(task, last_step=2)
        with session:
            train(model, optimizer, session)
            inside = saved_bytes(model[1])  # pyright: ignore[reportIndexIssue]
        after = saved_bytes(model[1])  # pyright: ignore[reportIndexIssue]
        return inside, after, [p.untyped_storage().nbytes() - p.nbytes for p in model.parameters()]

    inside, after, extra = Cluster().run(work)[0]
    assert inside < 6_000 and after < 6_000, (inside, after)
    assert extra == [0, 0, 0, 0]


def test_after_the_run_parameters_share_no_memory_and_hold_the_last_version() -> None:
    def work(task: Task) -> None:
        model, optimizer, session = make(task, last_step=2)
        with session:
            train(model, optimizer, session)
            session.pull()
            at_the_end = [p.detach().clone() for p in model.parameters()]
            pooled = [p.data_ptr() for p in model.parameters()]
        assert all(map(torch.equal, model.parameters(), at_the_end))
        assert not set(pooled) & {p.data_ptr() for p in model.parameters()}
        assert isinstance(model[0].weight, nn.Parameter)  # pyright: ignore[reportIndexIssue]

    Cluster().run(work)


@pytest.mark.parametrize("where", ["in the loop", "at the beginning"])
def test_a_program_alone_whose_session_failed_begins_another(where: str) -> None:
    task = tq.join([])
    for _ in range(2):
        model, optimizer, session = make(task, last_step=4)
        if where == "at the beginning":
            model.get_parameter("0.weight").requires_grad_(False)
            optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(2)))  # which is not the model's
        with pytest.raises(ValueError if where == "in the loop" else ConfigError), session:
            raise ValueError("mine")
        assert not [thread for thread in threading.enumerate() if thread.name == "torchquorum-ps"]
    model, optimizer, session = make(task, last_step=4)
    with session:
        train(model, optimizer, session)
    assert session.global_step == 4


@pytest.mark.parametrize("kept", [True, False])
def test_a_second_session_goes_on_with_the_optimizers_state_if_that_is_loaded_and_says_so_if_not(
    kept: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    def trained(sessions: bool) -> list[torch.Tensor]:
        model, x = nn.Linear(3, 1), torch.arange(3.0)
        with torch.no_grad():
            model.weight.fill_(0.1)
            model.bias.zero_()
        inner = torch.optim.Adam(model.parameters(), lr=0.1)
        task, optimizer, state = tq.join([]), tq.Optimizer(inner) if sessions else inner, None
        for _ in range(2):
            if state is not None and kept and sessions:
                optimizer.load_state_dict(state)
            with tq.Session(task, model, optimizer) if sessions else contextlib.nullcontext():  # type: ignore[arg-type]
                for _ in range(3):
                    optimizer.zero_grad()
                    model(x).square().sum().backward()
                    optimizer.step()
                state = optimizer.state_dict()
        return [p.detach().clone() for p in model.parameters()]

    ours, plain = trained(True), trained(False)
    assert all(map(torch.equal, ours, plain)) == kept
    said = "the optimizer begins without the state that it had in the session before" in capfd.readouterr().err
    assert said == (not kept)
