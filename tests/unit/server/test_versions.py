"""The published versions of a shard."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from torchquorum.placement.layout import Variable, place
from torchquorum.server.versions import Versions

REGION = place([Variable(name="a", shape=(10,), dtype="float32")], 1).trained[0]


@dataclass
class Sending:
    """A message on its way."""

    done: bool = False
    on_its_way: bool = True


@pytest.fixture
def versions() -> Iterator[Versions]:
    versions = Versions(REGION, 3)
    yield versions
    versions.close()


def publish(versions: Versions) -> int:
    slot = versions.next_slot()
    versions.publish(slot, versions.version + 1)
    return slot


def test_the_first_version_is_there_from_the_start(versions: Versions) -> None:
    assert versions.version == 0 and versions.slots.holds(versions.current, 0)


def test_a_slot_is_marked_as_gone_before_it_is_written(versions: Versions) -> None:
    old = versions.current
    publish(versions)
    assert versions.next_slot() == old
    assert versions.slots.holds(old, -1)


def test_a_leased_slot_is_not_written_until_the_worker_leases_again_or_is_forgotten(versions: Versions) -> None:
    leased = versions.lease(1)
    assert versions.leased(1) == leased
    assert leased not in [publish(versions) for _ in range(20)]
    assert versions.slots.holds(leased, 0)
    versions.forget(1)
    assert versions.leased(1) is None
    assert leased in [publish(versions) for _ in range(3)]


def test_a_slot_on_its_way_is_not_written_until_it_has_left(versions: Versions) -> None:
    sent, slot = Sending(), versions.current
    versions.sending(slot, sent)
    assert slot not in [publish(versions) for _ in range(20)]
    sent.done = True
    assert slot in [publish(versions) for _ in range(3)]


def test_few_slots_are_used_when_few_workers_read(versions: Versions) -> None:
    used = set()
    for _ in range(50):
        versions.lease(0)
        used.add(publish(versions))
    assert len(used) <= 3  # the others are never touched, so they cost no memory


def test_slow_connections_cannot_use_up_all_slots(versions: Versions) -> None:
    uncopied = 0
    for _ in range(50):
        for worker in range(3):
            versions.lease(worker)
        if versions.may_send_uncopied(versions.current):
            uncopied += 1
            versions.sending(versions.current, Sending())
        publish(versions)
    assert uncopied == 4


def test_a_slot_that_is_already_on_its_way_may_be_sent_again(versions: Versions) -> None:
    last = versions.current
    for _ in range(4):
        last = versions.current
        versions.sending(last, Sending())
        publish(versions)
    assert versions.may_send_uncopied(last) and not versions.may_send_uncopied(versions.current)


def test_whatever_happens_what_may_be_read_is_never_written(versions: Versions) -> None:
    draw = random.Random(5)
    held: dict[int, tuple[int, int]] = {}
    moving: list[tuple[Sending, int, int]] = []
    for _ in range(3000):
        match draw.randrange(5):
            case 0 | 1:
                publish(versions)
            case 2:
                worker = draw.randrange(3)
                held[worker] = versions.lease(worker), versions.version
            case 3 if versions.may_send_uncopied(versions.current):
                moving.append((Sending(), versions.current, versions.version))
                versions.sending(versions.current, moving[-1][0])
            case 4 if moving:
                moving.pop(draw.randrange(len(moving)))[0].done = True
        for slot, version in [*held.values(), *((s, v) for _, s, v in moving)]:
            assert versions.slots.holds(slot, version)


def test_a_version_that_a_worker_published_is_adopted_when_the_log_comes_to_it_and_no_other_is(
    versions: Versions,
) -> None:
    versions.expect(1, 2)
    versions.expect(2, 4)
    assert not versions.adopt(3) and versions.version == 0
    assert versions.adopt(1) and (versions.version, versions.current) == (1, 2)
    assert versions.adopt(2) and (versions.version, versions.current) == (2, 4)
    assert not versions.adopt(2)
