"""Facts of docs/protocol.md, compared with the code: the number of the protocol, and the table of messages."""

import re
from pathlib import Path

import msgspec
import pytest

from tests.documents.markdown import ROOT, documents, tables
from torchquorum.graph import graph_messages
from torchquorum.wire import messages

PAGE = ROOT / "docs" / "protocol.md"
STRUCTS = {
    name: found
    for module in (messages, graph_messages)
    for name, found in vars(module).items()
    if isinstance(found, type) and issubclass(found, msgspec.Struct)
}
MESSAGES = {name for name, found in STRUCTS.items() if issubclass(found, messages.Message)} - {"Message"}
HEADS = ("message", "entry", "value")


def test_the_page_states_the_number_of_the_protocol() -> None:
    assert re.findall(r"^Protocol (\d+)\. ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE) == [
        str(messages.PROTOCOL)
    ]


def test_the_page_says_what_each_protocol_changed() -> None:
    table = next(table for table in tables(PAGE) if table[0][0] == "protocol")
    assert [int(row[0]) for row in table[1:]] == list(range(messages.PROTOCOL, 0, -1))


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_no_document_knows_a_newer_protocol(path: Path) -> None:
    numbers = [
        int(number)
        for number in re.findall(r"\bprotocol (\d+)\b", path.read_text(encoding="utf-8"), flags=re.IGNORECASE)
    ]
    assert all(number <= messages.PROTOCOL for number in numbers)


def test_every_message_is_in_a_table_and_the_other_way_round() -> None:
    rows = [row for table in tables(PAGE) if table[0][0] in HEADS for row in table[1:]]
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    assert not listed - STRUCTS.keys(), f"no such message: {sorted(listed - STRUCTS.keys())}"
    mentioned = {name for row in rows for cell in row for name in re.findall(r"`(\w+)`", cell)}
    assert len(MESSAGES) > 50
    assert not MESSAGES - mentioned, f"in no table: {sorted(MESSAGES - mentioned)}"
