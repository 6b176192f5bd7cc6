import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchquorum as tq
from torchquorum.data import coordinator as module
from torchquorum.errors import ConfigError, DeadlineError


def readers() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("torchquorum-reader-")]


def eventually(condition: Any, timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(condition())


def make_batches(seed: int = 0) -> tq.Batches:
    rows = torch.arange(40)
    return tq.Batches((rows, rows), 8, seed=seed)


def rows_of(batch: tuple[torch.Tensor, torch.Tensor]) -> list[int]:
    return batch[0].tolist()


def failing(after: int) -> Iterator[int]:
    yield from range(after)
    raise ValueError("the disk is gone")


def test_batches_come_in_order_and_the_end_of_the_data_reaches_the_loop() -> None:
    with tq.data.Prefetcher(range(10), depth=3) as batches:
        assert list(batches) == list(range(10))
        with pytest.raises(StopIteration):
            next(batches)
        assert batches.taken == 10


def test_no_more_than_depth_batches_are_read_ahead() -> None:
    read: list[int] = []
    waiting_then: list[int] = []

    def source() -> Iterator[int]:
        for i in range(100):
            waiting_then.append(i - batches.taken)
            read.append(i)
            yield i

    with tq.data.Prefetcher(source(), depth=3) as batches:
        assert next(batches) == 0
        assert eventually(lambda: len(read) == 4)
        assert list(batches) == list(range(1, 100))
    assert max(waiting_then) == 2  # more was read only where there was room, and all the room was used


def test_an_exception_in_a_reader_is_raised_in_the_loop_with_the_readers_name() -> None:
    with tq.data.Prefetcher(failing(0)) as batches, pytest.raises(ValueError, match="the disk is gone") as caught:
        next(batches)
    assert any("torchquorum-reader-" in note for note in caught.value.__notes__)
    assert caught.traceback[-1].name == "failing"


def test_an_exception_in_one_reader_stops_all_of_its_coordinator() -> None:
    coordinator = tq.tensorflow.Coordinator()
    good, bad = tq.data.Prefetcher(iter(int, 1), depth=2), tq.data.Prefetcher(failing(1))
    own: list[bool] = []

    def mine() -> None:
        own.append(coordinator.wait_for_stop(20))

    coordinator.run([good, bad, mine])
    assert coordinator.wait_for_stop(5)
    with pytest.raises(ValueError, match="the disk is gone"):
        next(good)
    with pytest.raises(ValueError, match="the disk is gone"):
        coordinator.join()
    assert own == [True] and eventually(lambda: not readers())


def test_a_coordinator_as_a_block_ends_its_readers() -> None:
    with tq.tensorflow.Coordinator() as coordinator:
        batches = tq.data.Prefetcher(iter(int, 1))
        threads = coordinator.run([batches])
        assert [next(batches) for _ in range(20)] == [0] * 20
        assert all(t.name.startswith("torchquorum-reader-") for t in threads)
    assert not readers()
    with pytest.raises(StopIteration):
        next(batches)


def test_the_blocks_own_exception_is_the_one_to_see() -> None:
    def block() -> None:
        with tq.tensorflow.Coordinator() as coordinator:
            coordinator.run([tq.data.Prefetcher(failing(0))])
            coordinator.wait_for_stop(5)
            raise KeyError("mine")

    with pytest.raises(KeyError):
        block()


def test_a_thread_that_does_not_end_is_named() -> None:
    coordinator, let_go = tq.tensorflow.Coordinator(), threading.Event()
    (thread,) = coordinator.run([lambda: let_go.wait(20)])
    coordinator.request_stop()
    with pytest.raises(DeadlineError, match=f"waited 0.05 s for {thread.name} to end"):
        coordinator.join(timeout_s=0.05)
    let_go.set()
    coordinator.join()


def test_a_source_that_hangs_is_named_at_the_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_S", 0.05)
    let_go = threading.Event()

    def source() -> Iterator[int]:
        yield 1
        let_go.wait(20)

    batches = tq.data.Prefetcher(source())
    assert next(batches) == 1
    with pytest.raises(DeadlineError, match="torchquorum-reader-"):
        batches.close()
    let_go.set()
    assert eventually(lambda: not readers())


def test_a_position_is_that_of_the_next_batch_and_not_of_what_was_read_ahead() -> None:
    plain = make_batches()
    expected = [rows_of(next(plain)) for _ in range(23)]
    with tq.data.Prefetcher(make_batches(), depth=6) as batches:
        seen = [rows_of(next(batches)) for _ in range(9)]
        assert eventually(lambda: batches.waiting == 6)
        state, epoch = batches.state_dict(), batches.epoch
    assert seen == expected[:9]
    assert (epoch, state["epoch"], state["step_in_epoch"]) == (1, 1, 4)
    with tq.data.Prefetcher(make_batches()) as again:
        again.load_state_dict(state)
        assert again.state_dict() == state
        assert [rows_of(next(again)) for _ in range(14)] == expected[9:]


def test_a_position_can_be_loaded_while_the_reader_runs() -> None:
    with tq.data.Prefetcher(make_batches(), depth=5) as batches:
        state = batches.state_dict()
        first = [rows_of(next(batches)) for _ in range(7)]
        batches.load_state_dict(state)
        assert [rows_of(next(batches)) for _ in range(7)] == first
        assert batches.taken == 14


def test_epochs_of_an_iterable_are_counted() -> None:
    loader = DataLoader(TensorDataset(torch.arange(6)), batch_size=2)
    epochs = []
    with tq.data.Prefetcher(loader, epochs=3) as batches:
        for _ in batches:
            epochs.append(batches.epoch)
    assert epochs == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_an_iterable_without_a_position_of_its_own_is_continued_by_reading_it_again() -> None:
    for taken in range(9):
        with tq.data.Prefetcher([10, 11, 12], epochs=3) as batches:
            seen = [next(batches) for _ in range(taken)]
            state = batches.state_dict()
        with tq.data.Prefetcher([10, 11, 12], epochs=3) as again:
            again.load_state_dict(state)
            assert seen + list(again) == [10, 11, 12] * 3


def test_epochs_without_a_batch_do_not_turn_round_for_ever() -> None:
    with tq.data.Prefetcher([], epochs=None) as batches:
        assert list(batches) == []


def test_closing_ends_the_thread_wherever_it_waits() -> None:
    batches = tq.data.Prefetcher(iter(int, 1), depth=1)
    next(batches)
    batches.close()
    assert not readers()
    with pytest.raises(StopIteration):
        next(batches)
    batches.close()


def test_a_prefetcher_that_is_forgotten_leaves_no_thread() -> None:
    batches = tq.data.Prefetcher(iter(int, 1))
    next(batches)
    assert readers()
    del batches
    gc.collect()
    assert eventually(lambda: not readers())


def test_a_prefetcher_whose_reader_failed_is_forgotten_with_all_that_it_held() -> None:
    class Source:
        def __iter__(self) -> Iterator[int]:
            return failing(2)

    source = Source()
    held, batches = weakref.ref(source), tq.data.Prefetcher(source)
    with pytest.raises(ValueError, match="the disk is gone"):
        list(batches)
    del source, batches
    gc.collect()
    assert held() is None


def test_a_reader_that_runs_cannot_be_given_to_another_coordinator() -> None:
    with tq.data.Prefetcher(iter(int, 1)) as batches:
        next(batches)
        with pytest.raises(ConfigError, match="already runs"):
            tq.tensorflow.Coordinator().run([batches])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (([], 0), "depth=0: must be a whole number, 1 or more"),
        (([], 2.0), "depth=2.0"),
        ((3,), "must be an iterable of batches"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        tq.data.Prefetcher(*arguments)


def test_a_position_of_other_batches_is_refused() -> None:
    with tq.data.Prefetcher([1, 2]) as batches, pytest.raises(ConfigError, match="was it saved from other batches"):
        batches.load_state_dict({"offset": 3})
