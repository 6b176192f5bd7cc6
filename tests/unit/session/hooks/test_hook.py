"""The order in which hooks are called, and what happens when one fails."""

from typing import Any

import pytest

import torchquorum as tq
from tests.unit.session.runs import train
from torchquorum.session.hooks.hook import Hook, HookCalls, evaluates


class Noted(tq.Hook):
    def __init__(self, name: str, calls: list[str], *, fails: bool = False) -> None:
        self._name, self._calls, self._fails = name, calls, fails

    def begin(self, session: tq.hooks.HookSession) -> None:
        self._calls.append(f"{self._name} begin")

    def after_create_session(self, session: tq.hooks.HookSession) -> None:
        self._calls.append(f"{self._name} created")

    def after_run(self, session: tq.hooks.HookSession, ran: tq.hooks.Ran) -> None:
        self._calls.append(f"{self._name} ran {ran.step.version}")

    def end(self, session: tq.hooks.HookSession) -> None:
        self._calls.append(f"{self._name} end")
        if self._fails:
            raise ValueError(f"{self._name} fails")


def test_hooks_are_called_in_order_around_the_loop() -> None:
    calls: list[str] = []
    train(lambda _: [Noted("a", calls), Noted("b", calls)], last_step=1)
    assert calls == ["a begin", "b begin", "a created", "b created", "a ran 1", "b ran 1", "a end", "b end"]


def test_every_end_is_called_and_the_first_failure_is_raised() -> None:
    calls: list[str] = []
    session: Any = type("Pretended", (), {})()
    session.hooks = [Noted("a", calls, fails=True), Noted("b", calls, fails=True), Noted("c", calls)]
    with pytest.raises(ValueError, match="a fails"):
        HookCalls(session).end()
    assert calls == ["a end", "b end", "c end"]


def test_a_hook_that_does_nothing_with_a_checkpoint_is_known() -> None:
    assert not evaluates(Hook()) and evaluates(tq.EvaluateHook(1, lambda _: 0.5))
