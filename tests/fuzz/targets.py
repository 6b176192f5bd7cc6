"""What is fuzzed: every place where bytes or words of somebody else come in, and the errors that each may answer with.

`run.py` and `test_fuzz.py` call it. A target takes bytes; whatever it raises beyond its allowed errors is a find. What
always holds: a target needs no stored corpus, its first inputs are made here by our own writers.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import socket
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

import msgspec
import torch
from msgspec import inspect

from tests.leaks import owner
from tests.unit.formats import checkpoints
from torchquorum.cluster import ClusterSpec, TaskId
from torchquorum.cluster.environment import read_launcher
from torchquorum.cluster.flags import parse_flags
from torchquorum.cluster.secret import Secret
from torchquorum.cluster.sources import launcher_task
from torchquorum.cluster.tf_config import read_tf_config
from torchquorum.data.idx import read_idx
from torchquorum.devices import inventory as devices
from torchquorum.errors import ClusterError, ConfigError, DataError, DeviceError, FlagError
from torchquorum.formats.checkpoint import CheckpointReader
from torchquorum.formats.checkpoint_manifest import MANIFEST, CheckpointError
from torchquorum.formats.compression import parse_compression
from torchquorum.formats.crc32c import crc32c, crc32c_loop, crc32c_numpy
from torchquorum.formats.example import Example
from torchquorum.formats.journal import Head, JournalError, Record, find_common, replay_lineage
from torchquorum.formats.journal_write import JournalWriter
from torchquorum.formats.ledger import Entry, Event, encode_line, read_records, told_in_ledger
from torchquorum.formats.ledger_write import LedgerWriter, gap_event
from torchquorum.formats.measures import read_measures
from torchquorum.formats.tfrecord import read_records as read_tfrecords
from torchquorum.formats.tfrecord_write import frame
from torchquorum.graph import graph_messages as g
from torchquorum.graph import tensors
from torchquorum.jobs.slow import parse_slow
from torchquorum.report.history import read_history
from torchquorum.rules.presets import parse_rule
from torchquorum.wire import codec
from torchquorum.wire import messages as m
from torchquorum.wire.codec import WireError
from torchquorum.wire.opening import LOCKED, OPEN, ChannelOpening, ListenerOpening, RefusedConnection
from torchquorum.wire.stream import StreamError, StreamReader, pack
from torchquorum.wire.tls_keys import connecting_side, listening_side


@dataclass(frozen=True)
class Target:
    """A function of bytes.

    Attributes:
        call: Does with the bytes what the program would.
        allowed: What it may raise.
        seeds: Good inputs to begin with.
    """

    call: Callable[[bytes], object]
    allowed: tuple[type[Exception], ...]
    seeds: tuple[bytes, ...]


_folder: Path | None = None


def folder() -> Path:
    """Returns a scratch folder, in memory where there is room for one; who fuzzes removes it."""
    global _folder
    if _folder is None or not _folder.is_dir():
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        _folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{owner()}-", dir=memory))
    return _folder


def _file(name: str, body: bytes) -> Path:
    path = folder() / name
    path.write_bytes(body)
    return path


def _text(body: bytes) -> str:
    return body.decode("utf-8", errors="surrogateescape")


# -- the wire -------------------------------------------------------------------------------------------------------------


def _codec(body: bytes) -> None:
    message = codec.decode(body)
    again = codec.encode(message)  # what was understood can be said again
    assert codec.encode(codec.decode(again)) == again


class _Bytes:
    """A stream whose bytes are all there."""

    def __init__(self, body: bytes) -> None:
        self._left = memoryview(body)

    def recv_into(self, buffer: memoryview | bytearray, /) -> int:
        count = min(len(buffer), len(self._left))
        memoryview(buffer)[:count] = self._left[:count]
        self._left = self._left[count:]
        return count

    def pending(self) -> int:
        return len(self._left)

    def unacknowledged(self) -> int:
        return 0

    def fileno(self) -> int:
        return -1

    def sendmsg(self, parts: Iterable[codec.Frame], /) -> int:
        raise NotImplementedError

    def close(self) -> None:
        pass


def _messages_in(body: bytes) -> Iterator[list[codec.Frame]]:
    """Yields the messages of a stream up to where it ends, perhaps in the middle of one."""
    reader, stream = StreamReader(1 << 20), _Bytes(body)
    with contextlib.suppress(ConnectionResetError):
        while (message := reader.read(stream)) is not None:
            yield message


def _stream(body: bytes) -> None:
    found = list(_messages_in(body))
    assert sum(len(frame) for message in found for frame in message) <= len(body)


SECRET = Secret("the-secret-of-the-fuzzer-0123456789abcdef")


def _opening(body: bytes) -> None:
    """What a stranger says first: byte 0 chooses the side and whether there is a secret; nobody gets in who does not know it."""
    which, said = body[:1] or b"\0", body[1:]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        locked = bool(which[0] & 1)
        theirs.send(said[:100_000])
        theirs.shutdown(socket.SHUT_WR)
        if which[0] & 2:
            opening = ChannelOpening(ours, connecting_side(SECRET) if locked else None)
        else:
            opening = ListenerOpening(ours, listening_side(SECRET) if locked else None)
        for _ in range(100):
            try:
                opening.advance().close()
                assert not locked and said.startswith(OPEN), "somebody got in"
                return
            except BlockingIOError:
                continue
        raise AssertionError("neither let in nor turned away")


def _openings() -> tuple[bytes, ...]:
    """What real peers say first: both greetings, ZeroMQ's, and TLS of both sides."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for each in (ours, theirs):
            each.setblocking(False)
        connecting = ChannelOpening(ours, connecting_side(SECRET))
        hello = theirs.recv(1 << 16, socket.MSG_PEEK)
        listening = ListenerOpening(theirs, listening_side(SECRET))
        with contextlib.suppress(BlockingIOError):
            listening.advance()
        answer = ours.recv(1 << 16, socket.MSG_PEEK)
        with contextlib.suppress(BlockingIOError):
            connecting.advance()
        proof = theirs.recv(1 << 16, socket.MSG_PEEK)
    zeromq = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL" + bytes(48)
    return (
        b"\0" + OPEN,
        b"\1" + hello,
        b"\1" + hello + proof,
        b"\2" + OPEN,
        b"\3" + answer,
        b"\2" + LOCKED,
        b"\0" + zeromq,
        b"\3" + zeromq,
    )


def _graph(body: bytes) -> None:
    size = int.from_bytes(body[:2], "little")
    message, rest = g.split([body[2 : 2 + size], body[2 + size :]])
    specs = getattr(message, "tensors", None)
    if isinstance(specs, list) and all(isinstance(s, g.TensorSpec) for s in specs):
        tensors.unpack(specs, rest)


def _sample(kind: inspect.Type) -> Any:
    """Returns a value of a type, as plain as can be."""
    match kind:
        case inspect.StructType() | inspect.DataclassType():
            return kind.cls(**{f.name: _sample(f.type) for f in kind.fields})
        case inspect.UnionType():
            return _sample(next(t for t in kind.types if not isinstance(t, inspect.NoneType)))
        case inspect.ListType() | inspect.CollectionType():
            return [_sample(kind.item_type)]
        case inspect.VarTupleType():
            return (_sample(kind.item_type),)
        case inspect.TupleType():
            return tuple(_sample(t) for t in kind.item_types)
        case inspect.LiteralType():
            return kind.values[0]
    plain: dict[type, Any] = {
        inspect.IntType: 3, inspect.FloatType: 0.5, inspect.BoolType: True, inspect.StrType: "float32", inspect.DictType: {},
    }  # fmt: skip
    return plain.get(type(kind))


def _messages(kinds: Any) -> list[bytes]:
    """Returns one message of each kind whose checks a plain one passes."""
    made = []
    for kind in get_args(kinds):
        with contextlib.suppress(Exception):
            message = codec.encode(_sample(inspect.type_info(kind)))
            codec.decode_as(msgspec.msgpack.Decoder(kinds), message)
            made.append(message)
    assert len(made) > len(get_args(kinds)) / 2, "most kinds of messages are to be tried"
    return made


def _graph_messages() -> tuple[bytes, ...]:
    _, [tensor] = tensors.pack([torch.arange(3.0)], copy=True)
    return tuple(len(message).to_bytes(2, "little") + message + tensor for message in _messages(g.AnyGraphMessage))


def _streams() -> tuple[bytes, ...]:
    messages = [[b"header"], [b"header", b"x" * 40, b""], [b"h", b"y" * 70_000, b"tail"]]
    return tuple(b"".join(part for frames in messages[k:] for part in pack(frames)) for k in range(len(messages)))


# -- files ----------------------------------------------------------------------------------------------------------------


def _tfrecord(body: bytes) -> None:
    for _ in read_tfrecords(_file("records", body)):
        pass


def _idx(body: bytes) -> None:
    read_idx(_file("file.idx.gz" if body[:2] == b"\x1f\x8b" else "file.idx", body))


def _ledger(body: bytes) -> None:
    path = _file("ledger.jsonl", body)
    numbers: list[int] = []
    records = list(read_records(path, numbers.append))
    assert len(records) + len(numbers) <= body.count(b"\n")
    read_measures(folder())
    told_in_ledger(folder())
    with contextlib.suppress(ConfigError):  # none of the lines can be read
        read_history(folder())
    writer = LedgerWriter(folder(), lambda line: None)  # a run goes on with it
    writer.write(Event("began", 1.0, 7))
    writer.close()
    assert isinstance(list(read_records(path, numbers.append))[-1], Event)


def _journal(body: bytes) -> None:
    """A file that is whole, cut or damaged: what is used of it is a beginning of what was written, and damage is told."""
    path = _file(JOURNAL, body)
    try:
        line = find_common(folder(), 1, 7, 0)
        records = list(replay_lineage(line, 0, line.version))
        assert [r.version for r, _ in records] == list(range(1, line.version + 1))
        written = _journal_seed()
        if not body.startswith(written) and not written.startswith(body) and line.version < 3:
            assert line.damage or line.version == 0 or len(body) < len(written), "damage that nobody hears of"
    finally:
        path.unlink()


JOURNAL = "shard-00000-of-00001-0000000000000007-0.journal"


@cache
def _journal_seed() -> bytes:
    writer = JournalWriter(folder(), Head(0, 1, 7, 0, 0, 1, {"optimizer": "SGD"}), "write")
    for version in (1, 2, 3):
        writer.append(Record(version, [], [(0, 5, version)], told=version - 1), bytes(range(100)))
    writer.close()
    body = writer.path.read_bytes()
    writer.path.unlink()
    return body


def _measures(body: bytes) -> None:
    _file("measures.jsonl", body)
    read_measures(folder())


def _checkpoint(body: bytes) -> None:
    """The first byte says which file is damaged, the rest is its content."""
    path = _pristine()
    files = sorted(p.name for p in path.iterdir())
    name = files[body[0] % len(files)] if body else MANIFEST
    kept = (path / name).read_bytes()
    try:
        content = body[1:]
        if name == MANIFEST:  # that its checksum differs would be all that is tried
            content = re.sub(rb',\s*"checksum": "\w*"', b"", content)
        (path / name).write_bytes(content)
        with CheckpointReader(path) as reader:
            for variable in reader.variables():
                reader.read("variable", variable)
    finally:
        (path / name).write_bytes(kept)


_checkpoint_at: Path | None = None


def _pristine() -> Path:
    global _checkpoint_at
    if _checkpoint_at is None or not _checkpoint_at.is_dir():
        _checkpoint_at = checkpoints.save(folder(), 7, num_ps=2)
    return _checkpoint_at


def _checkpoint_seeds() -> tuple[bytes, ...]:
    path = _pristine()
    return tuple(bytes([n]) + (path / p).read_bytes() for n, p in enumerate(sorted(os.listdir(path))))


def _example(body: bytes) -> None:
    example = Example.FromString(body)
    again = Example.FromString(example.SerializeToString())
    assert again.SerializeToString() == example.SerializeToString()


def _crc(body: bytes) -> None:
    assert crc32c(body) == crc32c_numpy(body) == crc32c_loop(body[:4096]) or len(body) > 4096


# -- words ----------------------------------------------------------------------------------------------------------------


def _flags(body: bytes) -> None:
    parse_flags(_text(body).split("\0"))


def _cluster(body: bytes) -> None:
    text = _text(body)
    spec = ClusterSpec({"ps": text.split("\0")[0], "worker": text.split("\0")[-1]})
    ClusterSpec(spec.as_dict())


def _environment(body: bytes) -> None:
    (read_launcher if body[:1] == b"L" else read_tf_config)(_text(body[1:]))


def _words(body: bytes) -> None:
    kind, text = body[:1], _text(body[1:])
    readers: list[Callable[[str], object]] = [parse_rule, parse_slow, parse_compression, devices.parse, TaskId.parse]
    readers[(kind or b"\0")[0] % len(readers)](text)


SPEC = ClusterSpec({"ps": ["localhost:1"], "worker": ["localhost:2", "[::1]:3"]})
TF_CONFIG = json.dumps({"cluster": SPEC.as_dict(), "task": {"type": "worker", "index": 1}}).encode()
RECORDS = b"".join(frame(Example({"n": n, "x": [0.5, n], "b": b"abc"}).SerializeToString()) for n in range(3))
IDX = b"\0\0\x08\x03\0\0\0\x02\0\0\0\x02\0\0\0\x03" + bytes(range(12))


def make_targets() -> dict[str, Target]:
    """Returns every target by its name."""
    words = [
        b"\0sync:2of3", b"\0bounded:3", b"\0buffered:2", b"\1worker1:3x,2:1.5", b"\2gzip",
        b"\3/job:worker/task:0/gpu:1", b"\4/job:ps/task:3",
    ]  # fmt: skip
    return {
        "codec": Target(_codec, (WireError,), tuple(_messages(m.AnyMessage))),
        "stream": Target(_stream, (StreamError,), _streams()),
        "opening": Target(_opening, (RefusedConnection, OSError), _openings()),
        "graph messages": Target(_graph, (WireError,), _graph_messages()),
        "tfrecord": Target(_tfrecord, (DataError,), (RECORDS, gzip.compress(RECORDS, mtime=0), zlib.compress(RECORDS))),
        "example": Target(_example, (DataError,), (Example({"n": [1, 2], "x": 0.5, "b": b"a"}).SerializeToString(),)),
        "crc32c": Target(_crc, (), (b"123456789", bytes(300))),
        "checkpoint": Target(_checkpoint, (CheckpointError,), _checkpoint_seeds()),
        "idx": Target(_idx, (DataError,), (IDX, gzip.compress(IDX, mtime=0))),
        "ledger": Target(_ledger, (), (b"".join(_ledger_lines()),)),
        "journal": Target(_journal, (JournalError,), (_journal_seed(), _journal_seed()[:-40])),
        "measures": Target(_measures, (), (b'{"step":1,"name":"loss","value":0.5}\n',)),
        "flags": Target(
            _flags,
            (FlagError, ClusterError),
            (b"--job_name=ps\0--task_id=0\0--ps_hosts=a:1,b:2\0--x", b"--task_index\x003"),
        ),
        "cluster": Target(_cluster, (ClusterError,), (b"a:1,b:2\0[::1]:3,c.d:65535", b"['h:1', 'i:2']\0j:3")),
        "environment": Target(
            _environment, (FlagError, ClusterError, ConfigError), (b"T" + TF_CONFIG, b"L" + _launcher_text())
        ),
        "words": Target(_words, (ConfigError, ClusterError, FlagError, DeviceError), tuple(words)),
    }


def _launcher_text() -> bytes:
    return launcher_task(SPEC, TaskId("ps", 0), "tcp", 5).encode()


def _ledger_lines() -> list[bytes]:
    gap = gap_event(2.0, 9, (3, 9), "No space left on device", gradients=12)
    return [msgspec.json.encode(_sample(inspect.type_info(kind))) + b"\n" for kind in (Entry, Event)] + [
        encode_line(gap)
    ]
