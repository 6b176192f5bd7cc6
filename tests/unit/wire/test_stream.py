"""Framing: messages survive any cutting of their bytes, limits hold before memory is taken, and a stream may behave like TLS."""

import random
import struct
from collections.abc import Iterable, Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from torchquorum.wire.channel import Pieces
from torchquorum.wire.codec import MAX_HEADER_BYTES, Frame
from torchquorum.wire.stream import (
    LARGE_BYTES,
    MOST_FRAMES,
    MOST_PARTS,
    STAGE_BYTES,
    StreamError,
    StreamReader,
    StreamWriter,
    WantRead,
    WantWrite,
    pack,
)

LARGEST = 64 << 20


class Pipe:
    """A stream in memory with the manners of TLS: it reads ahead in records, and wants the other direction now and then."""

    def __init__(self, seed: int = 0, *, record: int = 1 << 14, takes: int = 1 << 30, wants: float = 0.0) -> None:
        self._random, self._record, self._takes, self._wants = random.Random(seed), record, takes, wants
        self.sent = bytearray()
        self._ahead = bytearray()
        self.arrived = bytearray()
        self.ended = False
        self.unseen = 0  # of what was sent, by the other side's system

    def fileno(self) -> int:
        return -1

    def pending(self) -> int:
        return len(self._ahead)

    def unacknowledged(self) -> int:
        return self.unseen

    def close(self) -> None:
        self.ended = True

    def recv_into(self, buffer: memoryview | bytearray, /) -> int:
        if self._random.random() < self._wants:
            raise WantWrite
        if not self._ahead:
            self._ahead += self.arrived[: self._record]
            del self.arrived[: self._record]
        if not self._ahead:
            if self.ended:
                return 0
            raise BlockingIOError
        count = min(len(buffer), len(self._ahead))
        memoryview(buffer)[:count] = self._ahead[:count]
        del self._ahead[:count]
        return count

    def sendmsg(self, parts: Iterable[Frame], /) -> int:
        if self._random.random() < self._wants:
            raise WantRead if self._random.random() < 0.5 else BlockingIOError
        body = b"".join(parts)[: self._takes]
        self.sent += body
        return len(body)


def framed(*messages: Sequence[Frame]) -> bytes:
    return b"".join(b"".join(pack(frames)) for frames in messages)


def read_all(reader: StreamReader, pipe: Pipe) -> list[list[bytes]]:
    """Returns the messages that are there, asking again where the stream wants the other direction."""
    found = []
    while True:
        try:
            message = reader.read(pipe)
        except WantWrite:
            continue
        except BlockingIOError:
            return found
        assert message is not None
        found.append([bytes(f) for f in message])


MESSAGES = st.lists(st.lists(st.binary(max_size=50), min_size=1, max_size=MOST_FRAMES), max_size=5)


@given(MESSAGES, st.integers(1, 60))
def test_messages_survive_any_cutting_of_their_bytes(messages: list[list[bytes]], step: int) -> None:
    body, reader, found = framed(*messages), StreamReader(LARGEST), []
    for at in range(0, len(body), step):
        pipe = Pipe()
        pipe.arrived += body[at : at + step]
        found += read_all(reader, pipe)
    assert found == messages


@pytest.mark.parametrize("record", [1, 1000, STAGE_BYTES, 1 << 20])
@pytest.mark.parametrize("size", [0, 1, STAGE_BYTES - 20, STAGE_BYTES, LARGE_BYTES - 1, LARGE_BYTES, 300_001])
def test_frames_of_all_sizes_come_whole_over_a_stream_with_the_manners_of_tls(size: int, record: int) -> None:
    body = random.Random(size).randbytes(size)
    messages = [[b"head", body, b"", b"tail"], [b"x"], [body or b"y"]]
    pipe = Pipe(record=record, wants=0.2)
    pipe.arrived += framed(*messages)
    assert read_all(StreamReader(LARGEST), pipe) == messages


def test_a_reader_tells_of_bytes_that_polling_does_not_show() -> None:
    """Of two messages in one record the second is in memory already; half a message is none."""
    reader, pipe = StreamReader(LARGEST), Pipe()
    two = framed([b"one"], [b"two"])
    pipe.arrived += two + framed([b"three"])[:-1]
    assert reader.read(pipe) == [b"one"] and reader.more
    assert reader.read(pipe) == [b"two"] and reader.more
    with pytest.raises(BlockingIOError):
        reader.read(pipe)
    assert not reader.more
    large = Pipe(record=1 << 20)
    large.arrived += framed([b"h", bytes(LARGE_BYTES)], [b"next"])
    whole = StreamReader(LARGEST).read(large)
    assert whole is not None and large.pending() > 0  # in the memory of the stream, not in the reader's


def test_the_end_of_a_stream_is_an_error_wherever_it_comes() -> None:
    for body in (b"", framed([b"one"])[:-1], framed([b"h", bytes(LARGE_BYTES)])[:-1]):
        pipe = Pipe()
        pipe.arrived += body
        pipe.close()
        with pytest.raises(ConnectionResetError):
            StreamReader(LARGEST).read(pipe)


@pytest.mark.parametrize(
    "head",
    [
        struct.pack("<I", 0),
        struct.pack("<I", MOST_FRAMES + 1),
        struct.pack("<I", 2**32 - 1),
        struct.pack("<IQ", 1, 1 << 60),
        struct.pack("<IQQ", 2, 5, LARGEST + 1),
        struct.pack("<IQ", 1, MAX_HEADER_BYTES + 1),
    ],
)
def test_what_is_not_a_message_is_refused_before_any_memory_is_taken(head: bytes) -> None:
    pipe = Pipe()
    pipe.arrived += head
    with pytest.raises(StreamError):
        StreamReader(LARGEST).read(pipe)


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes_are_messages_or_refused(body: bytes) -> None:
    pipe = Pipe()
    pipe.arrived += body
    try:
        found = read_all(StreamReader(1000), pipe)
    except StreamError:
        return
    assert sum(len(f) for message in found for f in message) <= len(body)


def test_a_large_frame_stays_as_it_is_until_the_next_but_one_and_its_memory_is_used_again() -> None:
    reader, pipe, seen = StreamReader(LARGEST), Pipe(), []
    for letter in (b"a", b"b", b"c"):
        pipe.arrived += framed([b"h", letter * LARGE_BYTES])
        message = reader.read(pipe)
        assert message is not None
        seen.append(message[1])
        assert [bytes(f[:1]) for f in seen[-2:]] == [b"a", b"b", b"c"][max(0, len(seen) - 2) : len(seen)]
    assert seen[0].obj is seen[2].obj is not seen[1].obj


def test_a_frame_of_a_size_that_is_to_be_left_is_begun_and_not_read() -> None:
    reader, pipe = StreamReader(LARGEST), Pipe()
    pipe.arrived += framed([b"h", bytes(LARGE_BYTES)])
    assert reader.read(pipe, range(LARGE_BYTES, LARGEST)) is None and reader.wanted_bytes == LARGE_BYTES
    message = reader.read(pipe)
    assert message is not None and len(message[1]) == LARGE_BYTES and reader.wanted_bytes == 0


@pytest.mark.parametrize("wanted", [True, False])
def test_the_receiver_chooses_where_a_large_frame_goes(wanted: bool) -> None:
    large = random.Random(1).randbytes(200_000)
    memory = bytearray(len(large))
    pieces = [memoryview(memory)[:70_001], memoryview(memory)[70_001:]]
    asked: list[tuple[bytes, list[int]]] = []

    def choose(header: Frame, sizes: Sequence[int]) -> Sequence[memoryview] | None:
        asked.append((bytes(header), list(sizes)))
        return pieces if wanted else None

    pipe = Pipe(wants=0.2)
    pipe.arrived += framed([b"head", large, b"tail"], [b"small", b"x"])
    messages = read_all(StreamReader(LARGEST, choose), pipe)
    assert asked == [(b"head", [200_000, 4])]
    assert (bytes(memory) == large) is wanted
    assert messages[0][1] == (large[:70_001] if wanted else large) and messages[0][2] == b"tail"
    assert messages[1] == [b"small", b"x"]


# -- sending --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("takes", [1, 7, 1000, 1 << 30])
def test_a_writer_sends_what_fits_and_says_when_memory_is_free(takes: int) -> None:
    pipe = Pipe(takes=takes, wants=0.3)
    writer, large = StreamWriter(pipe), random.Random(2).randbytes(3000)
    pieces = Pieces([memoryview(large)[:5], memoryview(large)[5:]])
    first = writer.send([b"one", pieces, b""])
    second = writer.put([b"two"])
    while not writer.flush():
        assert writer.waiting
    assert first is None or first.done
    assert second.done and writer.waiting == 0
    assert bytes(pipe.sent) == framed([b"one", large, b""], [b"two"])


def test_a_frame_of_very_many_pieces_is_sent_in_several_calls() -> None:
    pipe, body = Pipe(), bytes(range(256)) * 8
    pieces = Pieces([memoryview(body)[i : i + 1] for i in range(len(body))])
    assert len(pieces) > 2 * MOST_PARTS
    assert StreamWriter(pipe).send([b"h", pieces]) is None
    assert bytes(pipe.sent) == framed([b"h", body])


def test_what_waits_is_counted_and_free_when_the_connection_is_given_up() -> None:
    pipe = Pipe(wants=1.0)
    writer = StreamWriter(pipe)
    waiting = [writer.send([b"h", bytes(size)]) for size in (LARGE_BYTES, 10, LARGE_BYTES)]
    assert writer.waiting == 3 and writer.large_waiting == 2
    assert not any(message is None or message.done for message in waiting)
    writer.give_up()
    assert all(message is not None and message.done for message in waiting)


def test_a_write_that_waits_for_a_read_says_so() -> None:
    class Handshake(Pipe):
        def sendmsg(self, parts: Iterable[Frame], /) -> int:
            raise WantRead

    writer = StreamWriter(Handshake())
    assert writer.send([b"x"]) is not None and writer.wants_read
    writer = StreamWriter(Pipe(wants=0.0))
    assert writer.send([b"x"]) is None and not writer.wants_read
