"""The saver's results belong to who asked for them, and can be had without a thread."""

import threading

from tests.manual_clock import Inline
from torchquorum.server.saver import Published, Saver

DEADLINE_S = 60.0


def test_an_inline_saver_has_done_a_job_when_it_was_submitted() -> None:
    saver, where = Saver(jobs=Inline()), []
    saver.submit(lambda: where.append(threading.current_thread()), answered=False)
    assert where == [threading.current_thread()] and not saver.busy
    saver.submit(lambda: Published(1, None, "no disk"))
    assert saver.busy and saver.results() == [Published(1, None, "no disk")] and not saver.busy
    saver.close()


def test_what_is_finished_for_a_run_that_is_over_is_not_taken_for_the_next_ones() -> None:
    saver, goes_on = Saver(), threading.Event()

    def late() -> Published:
        assert goes_on.wait(DEADLINE_S)
        return Published(1, None, "of the old run")

    saver.submit(late)
    saver.drop_results()
    assert not saver.busy
    saver.submit(lambda: Published(2, None, "of the new run"))
    goes_on.set()
    saver.close()  # after both
    assert saver.results() == [Published(2, None, "of the new run")] and not saver.busy
