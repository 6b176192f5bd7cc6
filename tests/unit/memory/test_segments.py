"""Shared memory without names: real memfd segments, opened through /proc, also from another process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.unit.wire.no_files import no_file_left
from torchquorum.errors import SegmentError
from torchquorum.memory.segments import PAGE_BYTES, Segment, host_id
from torchquorum.memory.slots import Slots, section_views
from torchquorum.placement.layout import Variable, place
from torchquorum.wire.frames import frame_tensor, tensor_frame
from torchquorum.wire.messages import MemoryRef

REGION = (
    place(
        [
            Variable(name="a", shape=(3, 5), dtype="float32"),
            Variable(name="b", shape=(7,), dtype="float64"),
            Variable(name="c", shape=(1,), dtype="bfloat16"),
        ],
        1,
    )
).trained[0]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_what_is_written_on_one_side_is_read_on_the_other() -> None:
    made = Segment.create("test", 100)
    opened = Segment.open(made.ref(1))
    made.bytes[:3] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    assert opened.bytes[:4].tolist() == [1, 2, 3, 0]
    opened.bytes[3] = 9
    assert int(made.bytes[3]) == 9
    made.close()


def test_sizes_are_whole_pages() -> None:
    for asked, got in ((0, PAGE_BYTES), (1, PAGE_BYTES), (PAGE_BYTES, PAGE_BYTES), (PAGE_BYTES + 1, 2 * PAGE_BYTES)):
        segment = Segment.create("test", asked)
        assert segment.size_bytes == got
        segment.close()


def test_closing_gives_the_file_up_and_readers_keep_their_mapping() -> None:
    before = open_files()
    made = Segment.create("test", 100)
    ref = made.ref(1)
    opened = Segment.open(ref)
    made.bytes.fill_(5)
    made.close()
    made.close()
    with pytest.raises(SegmentError):
        Segment.open(ref)
    assert int(opened.bytes.sum()) == 5 * PAGE_BYTES
    del made, opened
    assert open_files() == before


def test_nothing_appears_in_dev_shm() -> None:
    before = set(os.listdir("/dev/shm"))
    slots = Slots.create("test", REGION, 3)
    assert not [n for n in set(os.listdir("/dev/shm")) - before if "torchquorum" in n]
    assert "memfd:torchquorum-test" in os.readlink(f"/proc/self/fd/{slots.ref.fd}")
    slots.close()


@pytest.mark.parametrize(
    "ref",
    [
        MemoryRef(os.getpid(), 987654, 4096, 1),
        MemoryRef(2**40, 0, 4096, 1),
        MemoryRef(-1, -1, 4096, 1),
    ],
    ids=["no such file", "no such process", "negative"],
)
def test_memory_that_cannot_be_opened_is_an_error_that_names_the_process(ref: MemoryRef) -> None:
    before = open_files()
    with pytest.raises(SegmentError, match=f"shared memory of process {ref.pid}"):
        Segment.open(ref)
    assert open_files() == before


@pytest.mark.parametrize("size", [PAGE_BYTES + 1, 2**62, 0, -5])
def test_memory_smaller_than_it_was_said_to_be_is_refused(size: int) -> None:
    made = Segment.create("test", 100)
    ref = made.ref(1)
    with pytest.raises(SegmentError, match="smaller than the"):
        Segment.open(MemoryRef(ref.pid, ref.fd, size, 1))
    made.close()


@pytest.mark.parametrize("num_slots", [0, -1, 4, 10**15])
def test_more_slots_than_the_memory_has_room_for_are_refused(num_slots: int) -> None:
    slots = Slots.create("test", REGION, 3)
    ref = slots.ref
    with pytest.raises(SegmentError, match="too small"):
        Slots.open(MemoryRef(ref.pid, ref.fd, ref.size_bytes, num_slots), REGION)
    slots.close()


def test_slots_are_apart_and_aligned_and_typed() -> None:
    slots = Slots.create("test", REGION, 3)
    assert len(slots) == 3
    assert [s.dtype for s in slots.sections[0]] == [torch.float64, torch.float32, torch.bfloat16]
    assert [s.data_ptr() % 64 for sections in slots.sections for s in sections] == [0] * 9
    assert {b.data_ptr() % PAGE_BYTES for b in slots.bytes} == {0}
    for k, sections in enumerate(slots.sections):
        for section in sections:
            section.fill_(k + 1)
    for k, sections in enumerate(slots.sections):
        assert all(bool((section == k + 1).all()) for section in sections)
    slots.close()


def test_a_slot_holds_nothing_until_it_is_marked_and_both_sides_see_the_mark() -> None:
    slots = Slots.create("test", REGION, 2)
    reader = Slots.open(slots.ref, REGION)
    assert not any(reader.holds(k, 0) for k in range(2)) and reader.holds(0, -1)
    slots.mark(1, 42)
    assert reader.holds(1, 42) and not reader.holds(0, 42)
    slots.close()


def test_another_process_opens_slots_through_proc() -> None:
    slots = Slots.create("test", REGION, 2)
    ref = slots.ref
    program = (
        "import sys; from torchquorum.wire.messages import MemoryRef\n"
        "from torchquorum.memory.segments import Segment\n"
        "segment = Segment.open(MemoryRef(*map(int, sys.argv[1:])))\n"
        "assert int(segment.bytes[4096]) == 7; segment.bytes[4097] = 8"
    )
    slots.bytes[0][0] = 7
    words = [str(v) for v in (ref.pid, ref.fd, ref.size_bytes, ref.num_slots)]
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(slots.bytes[0][1]) == 8
    slots.close()


def test_tensors_are_frames_and_back_without_a_copy() -> None:
    tensor = torch.arange(128, dtype=torch.uint8)
    frame = tensor_frame(tensor)
    assert frame_tensor(frame, 128).data_ptr() == tensor.data_ptr()
    assert len(tensor_frame(torch.empty(0, dtype=torch.uint8))) == 0
    assert frame_tensor(b"", 0).numel() == 0


def test_a_frame_that_lies_askew_in_memory_is_copied_to_where_it_can_be_read() -> None:
    whole = memoryview(bytearray(range(100)))
    for start in range(1, 16):
        tensor = frame_tensor(whole[start : start + 64], 64)
        assert tensor.data_ptr() % 8 == 0 and tensor.view(torch.float64).numel() == 8
        assert tensor.tolist() == list(range(start, start + 64))


@pytest.mark.parametrize(("size", "expected"), [(0, 1), (63, 64), (65, 64)])
def test_a_frame_of_another_size_is_refused(size: int, expected: int) -> None:
    with pytest.raises(ValueError, match=f"tensor frame of {size} bytes, expected {expected}"):
        frame_tensor(bytes(size), expected)


def test_sections_are_views_of_the_memory() -> None:
    memory = torch.zeros(REGION.size_bytes, dtype=torch.uint8)
    wide, middle, narrow = section_views(REGION, memory)
    wide[0], middle[0], narrow[0] = 1.0, 2.0, 3.0
    assert int(memory.count_nonzero()) > 0
    assert sum(s.numel() * s.element_size() for s in (wide, middle, narrow)) == REGION.size_bytes


def test_this_host_has_one_name() -> None:
    assert host_id() == host_id() != ""


def test_a_segment_can_neither_shrink_nor_be_read_by_others() -> None:
    segment = Segment.create("sealed", 8192)
    ref = segment.ref(1)
    for size in (0, 4096, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(ref.fd, size)
    assert os.fstat(ref.fd).st_mode & 0o077 == 0
    segment.close()


@pytest.mark.parametrize("kind", ["unsealed", "file"])
def test_what_could_shrink_is_not_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(8192))
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING) if kind == "unsealed" else os.open(path, os.O_RDWR)
    try:
        os.ftruncate(fd, 8192)
        with pytest.raises(SegmentError, match="not a sealed segment"):
            Segment.open(MemoryRef(os.getpid(), fd, 4096, 1))
    finally:
        os.close(fd)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
def test_another_user_does_not_open_a_segment() -> None:
    segment = Segment.create("mine", 4096)
    ref = segment.ref(1)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            try:
                os.open(f"/proc/{ref.pid}/fd/{ref.fd}", os.O_RDONLY)
            except PermissionError:
                code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    segment.close()


def test_no_file_left_for_memory_is_an_error_that_says_where_to_look() -> None:
    with no_file_left(), pytest.raises(SegmentError, match="no shared memory of 4096 bytes for x .*see ulimit -n"):
        Segment.create("x", 1)
