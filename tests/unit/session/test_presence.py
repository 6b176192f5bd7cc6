"""A program between two sessions: the ps tasks hear that it goes on, and that it has ended, also those that are slow to answer."""

import threading
import time

from tests.ports import free_port
from tests.unit.wire.streams import until
from torchquorum.cluster import ClusterSpec
from torchquorum.session.presence import Presence
from torchquorum.wire import codec
from torchquorum.wire.entry_channel import EntryChannel
from torchquorum.wire.messages import Stay
from torchquorum.wire.transport import Listening
from torchquorum.wire.transports import listen_at_entry


def test_a_ps_that_is_slow_to_accept_hears_all_the_same_that_the_program_has_ended() -> None:
    address = f"127.0.0.1:{free_port()}"
    listener = listen_at_entry(Listening(address=address))
    presence = Presence(ClusterSpec({"ps": [address], "worker": ["localhost:1"]}), 0, lambda a, _: EntryChannel(a))
    heard: list[object] = []

    def has_heard() -> bool:
        if (message := listener.receive(0.01)) is not None:
            heard.append(codec.split(message[1])[0])
        return Stay(0, gone=True) in heard

    try:
        presence.begin(1)
        time.sleep(0.3)  # a busy ps: the connection is there, and nobody has looked at it
        program = threading.Thread(target=presence.end)
        program.start()
        time.sleep(0.2)
        until(has_heard)
        program.join()
        assert not program.is_alive()
    finally:
        presence.pause()
        listener.close()
