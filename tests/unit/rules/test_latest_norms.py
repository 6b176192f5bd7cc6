"""Which of the latest gradients stands out."""

from torchquorum.rules.latest_norms import LATEST, LatestNorms


def test_the_one_that_is_far_larger_than_the_others_is_told_once() -> None:
    norms = LatestNorms()
    for step in range(1, 20):
        norms.note(3e38 if step == 7 else 0.5 + step / 100, worker=1, local_step=step, version=step - 1)
    found = norms.take_largest()
    assert found is not None and (found.worker, found.local_step, found.version, found.norm) == (1, 7, 6, 3e38)
    assert "/job:worker/task:1, local step 7, at global step 6 has the norm 3e+38, 4.9e+38 times" in str(found)
    assert norms.take_largest() is None


def test_none_stands_out_where_all_are_alike_or_none_is_known() -> None:
    norms = LatestNorms()
    assert norms.take_largest() is None
    for step in range(10):
        norms.note(2.0**step, 0, step, step)
    assert norms.take_largest() is None


def test_the_only_one_is_told_without_a_comparison() -> None:
    norms = LatestNorms()
    norms.note(3e38, 0, 1, 0)
    assert str(norms.take_largest()).endswith("has the norm 3e+38")


def test_only_the_latest_are_kept() -> None:
    norms = LatestNorms()
    norms.note(3e38, 0, 1, 0)
    for step in range(LATEST):
        norms.note(1.0, 0, step, step)
    assert norms.take_largest() is None


def test_one_stands_out_from_a_thousand_times_the_median_on() -> None:
    for norm, told in [(999.9, False), (1000.0, True), (1000.1, True)]:
        norms = LatestNorms()
        for of in (1.0, 1.0, norm):
            norms.note(of, 0, 1, 0)
        assert (norms.take_largest() is not None) == told
    norms = LatestNorms()
    for of in (3.0, 3.0, 2000.0):
        norms.note(of, 0, 1, 0)
    assert norms.take_largest() is None


def test_the_latest_are_256() -> None:
    for more, told in [(255, True), (256, False)]:
        norms = LatestNorms()
        norms.note(3e38, 0, 1, 0)
        for step in range(more):
            norms.note(1.0, 0, step, step)
        assert (norms.take_largest() is not None) == told
