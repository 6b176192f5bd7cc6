"""What the output of tasks says of their failures: equal tracebacks once, and the first failure with its place."""

import threading
from pathlib import Path

from torchquorum.cluster import TaskId
from torchquorum.launcher import failures
from torchquorum.launcher.failures import Failures

FIRST, SECOND, PS = TaskId("worker", 0), TaskId("worker", 1), TaskId("ps", 0)


def traceback(message: str, kind: str = "ValueError") -> list[str]:
    library = Path(threading.__file__)
    package = Path(failures.__file__)
    return [
        "Traceback (most recent call last):",
        '  File "/home/me/train.py", line 30, in <module>',
        "    main()",
        '  File "/home/me/model.py", line 7, in forward',
        "    return self.layer(x)",
        f'  File "{library}", line 99, in run',
        "    self.target()",
        f'  File "{package}", line 3, in helps',
        "    raise it",
        f"{kind}: {message}",
    ]


def read(found: Failures, task: TaskId, lines: list[str]) -> list[str]:
    return [shown for line in lines for shown in found.read(task, line)]


def test_an_equal_traceback_of_another_task_is_one_line_that_names_the_first() -> None:
    found = Failures()
    assert read(found, FIRST, ["step 1", *traceback("bad shape"), "bye"]) == ["step 1", *traceback("bad shape"), "bye"]
    assert read(found, SECOND, traceback("bad shape of batch 3")) == [
        "ValueError: bad shape of batch 3 (the traceback is the same as that of /job:worker/task:0)"
    ]
    other = traceback("bad", kind="KeyError")
    assert read(found, SECOND, other) == other


def test_a_failure_has_the_innermost_place_of_the_program_and_its_turn() -> None:
    found = Failures()
    read(found, SECOND, traceback("bad shape"))
    read(found, FIRST, ["torchquorum: error: --steps 3: is not enough"])
    second, first = found.of(SECOND), found.of(FIRST)
    assert second is not None and first is not None and found.of(PS) is None
    assert str(second) == "model.py, line 7, in forward: ValueError: bad shape"
    assert str(first) == "--steps 3: is not enough"
    assert second.order < first.order


def test_our_own_error_is_shown_once_too() -> None:
    found = Failures()
    line = "torchquorum: error: --optimizer Adamm: no such class"
    assert read(found, FIRST, [line]) == [line]
    assert read(found, SECOND, [line]) == ["torchquorum: error: the same as /job:worker/task:0"]


def test_no_line_is_lost_when_a_task_dies_in_the_middle_or_writes_what_looks_like_a_traceback() -> None:
    found = Failures()
    torn = traceback("bad")[:4]
    assert read(found, FIRST, torn) == [] and found.end(FIRST) == torn and found.end(FIRST) == []
    odd = ["Traceback (most recent call last):", "is what Python writes"]
    assert read(found, FIRST, odd) == odd and found.of(FIRST) is None
    long = ["Traceback (most recent call last):", *["  and so on"] * failures.MOST_LINES]
    assert read(found, FIRST, long) == long
