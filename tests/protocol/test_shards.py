"""Several ps tasks wired by hand: what shard 0 decides, the others do, whatever becomes of the messages between them."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torchquorum as tq
import torchquorum.wire.messages as m
from tests.protocol.by_hand import Ps, name, only
from torchquorum.server.reply import LEADER, Reply


class Shards:
    """Ps tasks and the messages on their way between them; what goes to workers is collected."""

    def __init__(self, count: int = 2, workers: int = 2, **changes: Any) -> None:
        self.ps = [Ps(index, ps=count, workers=workers) for index in range(count)]
        self.wire: list[tuple[int, bytes, m.Message]] = []
        self.got: dict[bytes, list[tuple[int, m.Variables]]] = {name(w): [] for w in range(workers)}
        for ps in reversed(self.ps):
            ps.create(slice_bytes=8, **changes)
        for ps in self.ps[1:]:
            self.beat(ps.index)
        self.settle()

    def take(self, index: int, replies: list[Reply]) -> None:
        """Puts what a ps task answered on its way."""
        for reply in replies:
            if reply.peer == LEADER:
                self.wire.append((0, f"shard/{index}".encode(), reply.message))
            elif isinstance(reply.message, m.Alive):
                self.alive(int(reply.peer.split(b"/")[1]), reply.message)
            elif reply.peer.startswith(b"shard/"):
                self.wire.append((int(reply.peer.split(b"/")[1]), LEADER, reply.message))
            elif isinstance(reply.message, m.Variables):
                self.got[reply.peer].append((index, reply.message))

    def alive(self, index: int, message: m.Alive) -> None:
        """Shard 0's sign of life arrives at once, and is not answered."""
        ps = self.ps[index]
        assert ps.send(LEADER, message) == []
        assert ps.service.shard_0.heard_at == ps.now

    def deliver(self, at: int = 0) -> None:
        """Hands over one message that is on its way."""
        to, sender, message = self.wire.pop(at)
        self.take(to, self.ps[to].send(sender, message))

    def settle(self) -> None:
        """Hands over everything that is on its way."""
        while self.wire:
            self.deliver()

    def lose(self) -> list[m.Message]:
        """Loses everything that is on its way; returns it."""
        lost, self.wire = [message for _, _, message in self.wire], []
        return lost

    def beat(self, index: int) -> None:
        """A shard's heartbeat goes out."""
        beat = self.ps[index].service.heartbeat()
        assert beat is not None
        self.take(index, [beat])

    def join(self, worker: int, incarnation: int = 1) -> None:
        """A worker joins everywhere."""
        for ps in self.ps:
            self.take(ps.index, ps.join(worker, incarnation))
        self.settle()

    def push(self, worker: int, step: int, version: int, *, to: list[int] | None = None) -> None:
        """A worker's gradient goes to some shards, or to all."""
        for index in range(len(self.ps)) if to is None else to:
            self.take(index, self.ps[index].push(worker, step, version))

    def probe(self, worker: int, request: int, at: int) -> list[Reply]:
        """A worker asks what became of its request."""
        replies = self.ps[at].send(name(worker), m.Probe(worker, 1, request))
        self.take(at, replies)
        return replies

    @property
    def versions(self) -> list[int]:
        """The version of each shard."""
        return [ps.shard.version for ps in self.ps]

    def log_length(self) -> int:
        """How much of the log shard 0 still keeps."""
        return len(self.ps[0].run.leader.log.entries)


@pytest.fixture
def make() -> Iterator[Callable[..., Shards]]:
    made: list[Shards] = []

    def build(*given: int, **changes: Any) -> Shards:
        made.append(Shards(*given, **changes))
        return made[-1]

    yield build
    for shards in made:
        for ps in shards.ps:
            ps.close()


@pytest.mark.parametrize("count", [2, 3])
def test_every_shard_applies_the_same_gradients_and_answers_at_the_same_version(
    make: Callable[..., Shards], count: int
) -> None:
    shards = make(count)
    shards.join(0)
    shards.join(1)
    shards.push(0, 1, 0)
    shards.push(1, 1, 0)
    shards.settle()
    assert shards.versions == [1] * count
    for ps in shards.ps:
        assert torch.equal(ps.values(), torch.ones_like(ps.values()))
    for answers in shards.got.values():
        assert sorted((index, v.request, v.version) for index, v in answers) == sorted(
            (index, request, request - 1) for index in range(count) for request in (1, 2)
        )


def test_only_shard_0_tells_the_outcome(make: Callable[..., Shards]) -> None:
    shards = make(rule=tq.Async())
    shards.join(0)
    shards.push(0, 1, 0)
    shards.settle()
    outcomes = {index: v.outcome for index, v in shards.got[name(0)] if v.request == 2}
    assert outcomes == {0: m.Outcome(True, "fresh", 0), 1: None}


def test_a_gradient_that_reached_only_some_shards_is_not_applied_until_the_others_have_it(
    make: Callable[..., Shards],
) -> None:
    shards = make(3, rule=tq.Async())
    shards.join(0)
    shards.push(0, 1, 0, to=[0, 2])
    shards.settle()
    assert shards.versions == [0, 0, 0]
    assert only(shards.probe(0, 2, at=0), m.Held).what == "the other ps tasks"
    assert isinstance(shards.probe(0, 2, at=1)[0].message, m.Unknown)
    shards.settle()
    shards.push(0, 1, 0, to=[1])
    shards.settle()
    assert shards.versions == [1, 1, 1]


def test_a_gradient_that_reached_the_others_before_shard_0_waits_for_it(make: Callable[..., Shards]) -> None:
    shards = make(rule=tq.Async())
    shards.join(0)
    shards.push(0, 1, 0, to=[1])
    shards.settle()
    assert shards.versions == [0, 0]
    shards.push(0, 1, 0, to=[0])
    shards.settle()
    assert shards.versions == [1, 1]


def test_a_dead_workers_half_gradient_does_not_stop_the_others(make: Callable[..., Shards]) -> None:
    shards = make(rule=tq.Sync(aggregate=1))
    shards.join(0)
    shards.join(1)
    shards.push(1, 1, 0, to=[0])  # and then it is gone
    shards.take(0, shards.ps[0].service.process_ended(1, 1, shards.ps[0].now, shards.ps[0].wall))
    shards.push(0, 1, 0)
    shards.settle()
    assert shards.versions == [1, 1]


def test_what_a_dead_worker_left_on_some_shards_is_gone_when_its_successor_comes(make: Callable[..., Shards]) -> None:
    shards = make(rule=tq.Async())
    shards.join(0)
    for life in range(1, 6):
        shards.take(1, shards.ps[1].push(0, 1, 0, incarnation=life))  # the other half never comes
        shards.lose()
        for ps in shards.ps:
            shards.take(ps.index, ps.join(0, incarnation=life + 1))
        shards.settle()
        shards.beat(1)
        shards.settle()
        assert all(len(ps.shard.gradients) == 0 for ps in shards.ps)


def test_a_lost_log_is_repaired_by_the_next_heartbeat(make: Callable[..., Shards]) -> None:
    shards = make(rule=tq.Async())
    shards.join(0)
    shards.push(0, 1, 0)
    shards.deliver()  # Have
    [log] = shards.lose()
    assert isinstance(log, m.Log) and shards.versions == [1, 0]
    shards.beat(1)
    shards.settle()
    assert shards.versions == [1, 1]


def test_a_lost_log_is_repaired_by_a_workers_probe(make: Callable[..., Shards]) -> None:
    shards = make(rule=tq.Async())
    shards.join(0)
    shards.push(0, 1, 0)
    shards.deliver()
    shards.lose()
    assert only(shards.probe(0, 2, at=1)[:1], m.Held).what == "the other ps tasks"
    shards.settle()
    assert shards.versions == [1, 1]
    assert [v.version for index, v in shards.got[name(0)] if index == 1] == [0, 1]


def test_a_lost_word_of_a_gradients_arrival_is_repaired_by_a_probe(make: Callable[..., Shards]) -> None:
    shards = make(rule=tq.Async())
    shards.join(0)
    shards.push(0, 1, 0)
    [have] = shards.lose()
    assert isinstance(have, m.Have)
    shards.probe(0, 2, at=1)
    shards.settle()
    assert shards.versions == [1, 1]


def test_a_log_that_comes_twice_or_too_early_is_followed_once_and_in_order(make: Callable[..., Shards]) -> None:
    shards = make(rule=tq.Async())
    shards.join(0)
    first_end = shards.ps[1].shard
    followed = first_end.followed
    shards.push(0, 1, 0)
    shards.deliver()
    [(to, sender, log)] = shards.wire
    assert isinstance(log, m.Log)
    early = m.Log(log.generation, log.first + len(log.entries), [m.Drop([(0, 1, 5)])])
    shards.ps[1].send(LEADER, early)
    assert first_end.followed == followed
    shards.wire += [(to, sender, log), (to, sender, log)]
    shards.settle()
    assert shards.versions == [1, 1]
    assert first_end.followed == followed + len(log.entries)


def test_the_log_is_forgotten_once_everybody_has_followed_it(make: Callable[..., Shards]) -> None:
    shards = make(3, rule=tq.Async())
    shards.join(0)
    for step in range(1, 30):
        shards.push(0, step, step - 1)
        shards.settle()
        assert shards.log_length() <= 6
    for shard in (1, 2):
        shards.beat(shard)
    shards.settle()
    assert shards.log_length() == 0
    assert shards.versions == [29, 29, 29]


def test_the_log_is_kept_while_one_shard_is_behind(make: Callable[..., Shards]) -> None:
    shards = make(3, rule=tq.Async())
    shards.join(0)
    shards.push(0, 1, 0)
    while shards.wire:
        to, _, message = shards.wire[0]
        if to == 2 and isinstance(message, m.Log):
            shards.wire.pop(0)
        else:
            shards.deliver()
    shards.beat(1)
    shards.settle()
    assert shards.versions == [1, 1, 0] and shards.log_length() == 2
    shards.beat(2)
    shards.settle()
    assert shards.versions == [1, 1, 1]


@pytest.mark.parametrize(
    "message",
    [
        m.ShardHello(2, 1, 0, 1, "here"),
        m.ShardHello(0, 1, 0, 1, "here"),
        m.ShardHello(-1, 1, 0, 1, "here"),
        m.ShardHello(1, 1, 10**9, 1, "here"),
        m.ShardHello(1, 1, -1, 1, "here"),
        m.Have(7, 0, 1, 2, 1, 0),
        m.Have(1, 0, 1, 2, 1, 10**9),
    ],
    ids=str,
)
def test_a_shard_that_cannot_be_is_refused_and_changes_nothing(make: Callable[..., Shards], message: m.Message) -> None:
    shards = make()
    shards.join(0)
    before = shards.ps[0].state()
    only(shards.ps[0].send(b"stranger", message), m.Fault)
    assert shards.ps[0].state() == before


def test_only_shard_0_hears_of_other_shards(make: Callable[..., Shards]) -> None:
    shards = make()
    fault = only(shards.ps[1].send(b"x", m.ShardHello(1, 1, 0, 1, "here")), m.Fault)
    assert "only shard 0" in fault.text


def test_a_log_for_a_shard_without_variables_ends_in_silence_and_not_in_a_quarrel() -> None:
    fresh, leader = Ps(1, ps=2), Ps(0, ps=2)
    fault = only(fresh.send(LEADER, m.Log(0, 0, [m.Drop([])])), m.Fault, LEADER)
    assert leader.send(b"shard/1", fault) == []


def test_the_end_reaches_every_shard(make: Callable[..., Shards]) -> None:
    shards = make(3)
    shards.join(0)
    shards.join(1)
    for worker in (1, 0):
        for ps in reversed(shards.ps):
            shards.take(ps.index, ps.leave(worker))
    shards.settle()
    assert [ps.service.ended for ps in shards.ps] == [m.End(True, "the run is over")] * 3


def test_a_worker_whose_join_a_shard_missed_gets_its_answer_when_it_joins_there_again(
    make: Callable[..., Shards],
) -> None:
    shards = make()
    shards.take(0, shards.ps[0].join(0))
    shards.settle()
    assert [index for index, _ in shards.got[name(0)]] == [0]
    shards.take(1, shards.ps[1].join(0))
    assert [index for index, _ in shards.got[name(0)]] == [0, 1]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    "rule",
    [tq.Sync(), tq.Sync(aggregate=1), tq.Async(), tq.Buffered(3), tq.Bounded(1), tq.Sync("auto", floor=1)],
    ids=str,
)
def test_lost_doubled_and_reordered_messages_between_shards_change_no_outcome(
    make: Callable[..., Shards], rule: tq.Rule, seed: int
) -> None:
    draw = random.Random(seed)
    shards = make(3, rule=rule, last_step=8)
    workers: list[int] = [0, 1]
    for worker in workers:
        shards.join(worker)
    step: dict[int, int] = dict.fromkeys(workers, 0)
    version: dict[int, int] = dict.fromkeys(workers, 0)
    opened: dict[int, int] = {}
    stopped: set[int] = set()
    for _ in range(20_000):
        for worker in workers:
            answers = {i: v for i, v in shards.got[name(worker)] if v.request == step[worker] + 1}
            if len(answers) == 3:
                [version[worker]] = {v.version for v in answers.values()}
                opened.pop(worker, None)
                stopped |= {worker} if answers[0].stop else set()
        if len(stopped) == len(workers):
            break
        match draw.choice(["push", "probe", "beat", "deliver", "deliver", "deliver", "lose", "double", "swap"]):
            case "push":
                ready = [w for w in workers if w not in opened and w not in stopped]
                if ready:
                    worker = draw.choice(ready)
                    step[worker] += 1
                    opened[worker] = version[worker]
                    shards.push(worker, step[worker], version[worker], to=draw.sample([0, 1, 2], draw.randint(1, 3)))
            case "probe" if opened:
                worker, at = draw.choice(list(opened)), draw.randrange(3)
                replies = shards.probe(worker, step[worker] + 1, at)
                if isinstance(replies[0].message, m.Unknown):
                    shards.push(worker, step[worker], opened[worker], to=[at])
            case "beat":
                shards.beat(draw.choice([1, 2]))
            case "deliver" if shards.wire:
                shards.deliver(0)
            case "lose" if shards.wire:
                shards.wire.pop(draw.randrange(len(shards.wire)))
            case "double" if shards.wire:
                shards.wire.append(draw.choice(shards.wire))
            case "swap":
                draw.shuffle(shards.wire)
    assert stopped == set(workers), "a worker waits for ever"
    shards.settle()
    for shard in (1, 2):
        shards.beat(shard)
    shards.settle()
    assert shards.versions == [8, 8, 8]
    for ps in shards.ps:
        assert torch.equal(ps.values(), torch.full_like(ps.values(), 8.0))
    assert shards.ps[0].service.life.tally.updates == 8
