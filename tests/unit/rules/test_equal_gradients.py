"""Workers that give equal gradients round after round are found once; nobody else is."""

from torchquorum.rules.decisions import Key
from torchquorum.rules.equal_gradients import ROUNDS, EqualGradients


def rounds(equal: EqualGradients, *samples: tuple[int, ...], norm: float | None = 1.0, track: int = 0) -> list[tuple]:
    """Plays rounds: of each, the sample that each worker gives."""
    found = []
    for number, given in enumerate(samples):
        keys = [Key(worker, 7, number + 1) for worker in range(len(given))]
        for key, sample in zip(keys, given, strict=True):
            equal.given(key, sample, norm)
        found.append(equal.applied(keys, track))
    return found


def test_several_rounds_running_are_told_once():
    equal = EqualGradients()
    assert rounds(equal, *[(5, 5)] * (ROUNDS - 1)) == [()] * (ROUNDS - 1)
    assert rounds(equal, (6, 6), (6, 6)) == [(0, 1), ()] and equal.told


def test_rounds_with_a_difference_between_begin_the_count_again():
    equal = EqualGradients()
    assert not any(rounds(equal, *([(5, 5)] * (ROUNDS - 1) + [(5, 6)]) * 3))


def test_all_that_are_equal_are_named_and_no_other():
    assert rounds(EqualGradients(), *[(5, 4, 5, 5)] * ROUNDS)[-1] == (0, 2, 3)


def test_zeros_and_gradients_that_nobody_looked_at_say_nothing():
    assert not any(rounds(EqualGradients(), *[(5, 5)] * 9, norm=0.0))
    assert not any(rounds(EqualGradients(), *[(0, 0)] * 9))


def test_one_worker_that_gives_twice_is_not_two():
    equal = EqualGradients()
    for number in range(9):
        keys = [Key(0, 7, 2 * number + k) for k in (1, 2)]
        for key in keys:
            equal.given(key, 5, 1.0)
        assert equal.applied(keys, 0) == ()


def test_optimizers_are_counted_apart():
    equal = EqualGradients()
    for _ in range(ROUNDS - 1):
        assert rounds(equal, (5, 5), track=0) == rounds(equal, (5, 6), track=1) == [()]
    assert rounds(equal, (5, 5), track=0) == [(0, 1)]


def test_it_takes_four_rounds():
    assert rounds(EqualGradients(), *[(5, 5)] * 4) == [(), (), (), (0, 1)]
