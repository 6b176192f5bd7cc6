"""`tq.Local` against the same algorithm in a plain loop: several workers, outer optimizers, transports, compression."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchquorum as tq
from tests.equivalence.test_one_worker import OPTIMIZERS, Net, backward, plain, same
from tests.harness import train
from torchquorum.compress.compressor import read_compressor
from torchquorum.compress.feedback import Feedback

Make = Callable[[nn.Module], torch.optim.Optimizer]
ONE = functools.partial(torch.optim.SGD, lr=1.0)


def diloco(
    make_inner: Make, outer: Any, *, h: int, workers: int, outer_steps: int, compress: str = ""
) -> list[torch.Tensor]:
    """Local steps in a plain loop: every worker from the same values, the mean of the changes, one outer step."""
    shared = Net()
    optimizer = outer([p for p in shared.parameters() if p.requires_grad])
    models = [Net() for _ in range(workers)]
    inners = [make_inner(model) for model in models]
    kept: list[list[Feedback]] = [
        [Feedback(read_compressor(compress), p.numel()) for p in shared.parameters()] if compress else []
        for _ in models
    ]
    for k in range(outer_steps):
        changes = []
        for w, (model, inner) in enumerate(zip(models, inners, strict=True)):
            with torch.no_grad():
                for p, x in zip(model.parameters(), shared.parameters(), strict=True):
                    p.copy_(x)
            for step in range(h):
                inner.zero_grad()
                backward(model, w, k * h + step)
                inner.step()
            change = [(x - p).detach() for p, x in zip(model.parameters(), shared.parameters(), strict=True)]
            for feedback, values in zip(kept[w], change, strict=False):
                feedback.send(values.reshape(-1), values.view(-1))
            changes.append(change)
        for i, x in enumerate(shared.parameters()):
            total = changes[0][i]
            for change in changes[1:]:
                total = total + change[i]
            x.grad = total / workers if x.requires_grad else None
        optimizer.step()
    return [p.detach() for p in shared.parameters()]


def ours(
    make_inner: Make, rule: tq.Rule, *, workers: int, outer_steps: int, **options: Any
) -> tuple[list[torch.Tensor], list[Any]]:
    """The same with torchquorum; every worker's inner steps are numbered from 0."""
    counts = [0] * workers

    def numbered(model: nn.Module, worker: int, _step: int) -> None:
        backward(model, worker, counts[worker])
        counts[worker] += 1

    return train(Net, make_inner, numbered, steps=outer_steps, workers=workers, rule=rule, **options)


OUTERS = {
    "diloco": functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True),
    "sgd": ONE,
    "adam": functools.partial(torch.optim.Adam, lr=0.01),
}


@pytest.mark.parametrize("outer", OUTERS)
@pytest.mark.parametrize("workers", [1, 2])
def test_local_steps_equal_a_plain_loop(outer: str, workers: int) -> None:
    rule = tq.Local(3, OUTERS[outer])
    found, _ = ours(OPTIMIZERS["adamw"], rule, workers=workers, outer_steps=4)
    assert same(found, diloco(OPTIMIZERS["adamw"], OUTERS[outer], h=3, workers=workers, outer_steps=4))


@pytest.mark.parametrize("name", ["sgd", "nesterov", "adam", "rmsprop", "groups", "adafactor"])
def test_one_worker_whose_changes_are_taken_over_equals_plain_pytorch(name: str) -> None:
    found, _ = ours(OPTIMIZERS[name], tq.Local(4, ONE), workers=1, outer_steps=3)
    # x - (x - y) is y but for the rounding of x - y.
    for a, b in zip(found, plain(OPTIMIZERS[name], steps=12), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


def test_one_local_step_and_plain_sgd_outside_equal_sync() -> None:
    local, _ = ours(OPTIMIZERS["sgd"], tq.Local(1, ONE), workers=2, outer_steps=8)
    sync, _ = train(Net, OPTIMIZERS["sgd"], backward, steps=8, workers=2, rule=tq.Sync())
    for a, b in zip(local, sync, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


@pytest.mark.parametrize("compress", ["int8", "int4", "bfloat16", "topk:4/64+2bit"])
@pytest.mark.parametrize(
    "options", [{"transport": "tcp"}, {"transport": "auto"}, {"transport": "tcp", "ps": 2}], ids=str
)
def test_compression_is_the_same_on_every_way(compress: str, options: dict[str, Any]) -> None:
    rule = tq.Local(2, OUTERS["diloco"])
    found, _ = ours(OPTIMIZERS["adam"], rule, workers=2, outer_steps=4, compress=compress, **options)
    again, _ = ours(
        OPTIMIZERS["adam"], rule, workers=2, outer_steps=4, compress=compress, transport="tcp", ps=options.get("ps", 1)
    )
    assert same(found, again)
    exact = diloco(OPTIMIZERS["adam"], OUTERS["diloco"], h=2, workers=2, outer_steps=4)
    moved = sum(float((a - b).norm()) for a, b in zip(exact, [p.detach() for p in Net().parameters()], strict=True))
    apart = sum(float((a - b).norm()) for a, b in zip(found, exact, strict=True))
    assert 0 < apart < moved


@pytest.mark.parametrize("compress", ["int8", "bfloat16"])
@pytest.mark.parametrize("rule", [tq.Sync(), tq.Async(), tq.Buffered(2)], ids=str)
def test_gradients_of_any_rule_are_compressed(rule: tq.Rule, compress: str) -> None:
    found, _ = train(Net, OPTIMIZERS["sgd"], backward, steps=8, workers=1, rule=rule, compress=compress)
    exact, _ = train(Net, OPTIMIZERS["sgd"], backward, steps=8, workers=1, rule=rule)
    assert not same(found, exact)
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    "rule", [tq.Local(2, ONE, rule=r) for r in (tq.Async(), tq.Bounded(1), tq.Sync(1), tq.Buffered(2))], ids=str
)
def test_every_preset_decides_on_outer_steps(rule: tq.Rule) -> None:
    _, steps = ours(OPTIMIZERS["sgd"], rule, workers=2, outer_steps=6)
    assert steps[-1].version == 6
    assert [s.reason for s in steps].count("inner") == len(steps) // 2
