"""A worker that comes back compares what it has seen with what is in the run's past."""

import pytest

from torchquorum.worker.run_view import RunView, TrackView


@pytest.mark.parametrize(
    ("generation", "version", "kept", "lost"),
    [
        (1, 29, [], 0),  # the connection was lost, not the variables
        (2, 20, [(1, 20)], 9),  # they went back
        (2, 35, [(1, 20)], 9),  # and others have gone on since
        (2, 29, [(1, 29)], 0),  # a durable run
        (2, 40, [(1, 31)], 0),  # which had more
        (3, 40, [(1, 30), (2, 33)], 0),
        (3, 40, [(1, 25), (2, 33)], 4),
        (3, 40, [(2, 33)], 29),  # of what it had seen nothing is known any more
        (2, 3, [], 29),  # begun anew
    ],
)
def test_what_is_lost_is_what_the_generations_since_did_not_go_on_from(
    generation: int, version: int, kept: list[tuple[int, int]], lost: int
) -> None:
    before = RunView([TrackView(29)], generation=1)
    assert RunView([TrackView(version)], generation=generation, kept=kept).lost_since(before) == lost


def test_a_view_of_nothing_has_nothing_to_lose() -> None:
    assert RunView([TrackView(7)], generation=2).lost_since(RunView()) == 0
