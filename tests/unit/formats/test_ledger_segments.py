"""The names of segments sort by the clock that is given."""

from tests.manual_clock import ManualClock
from torchquorum.formats.ledger_segments import is_segment, segment_name


def test_names_sort_by_the_time_when_the_segments_were_begun() -> None:
    clock, names = ManualClock(999.0), list[str]()
    for _ in range(3):  # also from three digits to four
        names.append(segment_name("ledger.jsonl", clock))
        clock.advance(0.5)
    assert names == sorted(names) and all(is_segment(name, "ledger.jsonl") for name in names)
    assert names[1].startswith("ledger-00000000999500000000-") and not is_segment("measures.jsonl", "ledger.jsonl")
