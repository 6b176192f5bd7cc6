"""Messages between a client and compute tasks."""

from typing import get_args

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from torchquorum.graph import graph_messages as g
from torchquorum.wire.codec import WireError


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | st.integers(-(1 << 63), (1 << 63) - 1) | st.text(), lambda s: st.lists(s)).map(
        msgspec.msgpack.encode
    )
)
def test_any_bytes_are_a_message_or_a_wire_error(header: bytes) -> None:
    try:
        answer = type(g.split([header])[0])
    except WireError as error:  # any other goes through
        answer = type(error)
    assert answer in {*get_args(g.AnyGraphMessage), WireError}
