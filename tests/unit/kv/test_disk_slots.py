"""Test DiskSlots against a plain model at random: runs, blocks being written, recovery."""

from __future__ import annotations

from random import Random

import pytest

from hadal.core.cache import NAME_BYTES, DiskLocation, split
from hadal.core.errors import InvariantError
from hadal.kv.disk_slots import DiskSlots
from tests.fresh import fresh


def names_of(*numbers: int) -> list[bytes]:
    return [number.to_bytes(NAME_BYTES, "big") for number in numbers]


def full(num_slots: int) -> DiskSlots:
    """Return slots of one segment, number 7, that hold blocks 0, 1, 2, ... of one text."""
    slots = DiskSlots()
    slots.add_segment(7, num_slots)
    names = names_of(*range(num_slots))
    slots.take(names, range(num_slots))
    slots.wrote(names)
    return slots


def test_new_blocks_lie_side_by_side() -> None:
    slots = DiskSlots()
    slots.add_segment(3, 4)
    slots.add_segment(9, 8)
    found = slots.take(names_of(*range(6)), range(6))
    assert found == ([DiskLocation(9, slot) for slot in range(6)], b"")
    found = slots.take(names_of(*range(10, 14)), range(4))
    assert found == ([DiskLocation(3, slot) for slot in range(4)], b"")
    assert (slots.num_slots, slots.num_free, len(slots), slots.check()) == (12, 2, 10, [])


def test_what_is_being_written_never_makes_room() -> None:
    slots = DiskSlots()
    slots.add_segment(7, 3)
    slots.take(names_of(0, 1), (0, 1))
    locations, dropped = slots.take(names_of(2, 3), (0, 1))
    assert (locations, dropped) == ([DiskLocation(7, 2), None], b"")
    slots.wrote(names_of(0))
    assert slots.take(names_of(4, 5), (0, 1)) == ([DiskLocation(7, 0), None], names_of(0)[0])
    assert slots.check() == []


def test_the_end_of_a_text_makes_room_first() -> None:
    slots = full(4)
    locations, dropped = slots.take(names_of(10, 11), (0, 1))
    assert list(split(dropped)) == names_of(3, 2)
    assert locations == [DiskLocation(7, 2), DiskLocation(7, 3)]


def test_a_use_saves_a_block() -> None:
    slots = full(4)
    slots.used(7, (3, 1), (2, 0))
    assert list(split(slots.take(names_of(10, 11), (0, 1))[1])) == names_of(2, 1)
    assert slots.find(names_of(3)[0]) == DiskLocation(7, 3)


def test_what_was_written_earlier_makes_room_first() -> None:
    slots = DiskSlots()
    slots.add_segment(7, 4)
    for numbers in ((0, 1), (2, 3)):
        slots.take(names_of(*numbers), numbers)
        slots.wrote(names_of(*numbers))
    assert list(split(slots.take(names_of(10, 11), (0, 1))[1])) == names_of(1, 0)


def test_a_block_has_one_slot() -> None:
    slots = full(2)
    with pytest.raises(InvariantError, match="has a slot already"):
        slots.take(names_of(1), (0,))
    with pytest.raises(InvariantError, match="has a slot already"):
        slots.take(names_of(5, 5), (0, 1))
    assert slots.check() == []


def test_dropped_blocks_leave_their_slots_whatever_they_were_in() -> None:
    slots = full(3)
    slots.drop(names_of(1, 99))
    assert (slots.find(names_of(1)[0]), slots.num_free) == (None, 1)
    slots.take(names_of(5), (0,))
    slots.drop(names_of(5))
    slots.wrote(names_of(5))
    assert (slots.num_free, slots.check()) == (1, [])


def test_recovery_takes_each_name_once() -> None:
    slots = full(2)
    slots.add_segment(8, 4)
    slots.restore(8, (0, 2, 3), names_of(1, 20, 21), (1, 0, 1), uses=(0, 0, 5))
    found = [slots.find(name) for name in names_of(1, 20, 21)]
    assert found == [DiskLocation(7, 1), DiskLocation(8, 2), DiskLocation(8, 3)]
    assert (slots.num_free, slots.check()) == (2, [])
    # Block 21 was used before; block 20 was not.
    dropped = slots.take(names_of(*range(30, 35)), range(5))[1]
    assert list(split(dropped)) == names_of(1, 0, 20)
    with pytest.raises(InvariantError, match="already"):
        slots.restore(8, (1,), names_of(40), (0,))


def test_a_lost_segment_takes_its_blocks_along() -> None:
    slots = full(2)
    slots.add_segment(8, 2)
    slots.take(names_of(5), (0,))
    slots.remove_segment(7)
    assert [slots.find(name) is None for name in names_of(0, 1, 5)] == [True, True, False]
    assert (slots.num_slots, slots.num_free, slots.check()) == (2, 1, [])
    with pytest.raises(ValueError, match="exists, or cannot have"):
        slots.add_segment(8, 2)


def test_check_sees_a_slot_that_is_lost() -> None:
    slots = full(3)
    slots._name_to_number.pop(names_of(1)[0])
    assert slots.check()


@pytest.mark.parametrize("seed", [1, 2, fresh().getrandbits(32)])
def test_any_use_adds_up(seed: int) -> None:
    print(f"seed {seed}")
    random = Random(seed)
    slots, next_segment, next_name = DiskSlots(), 0, 0
    kept: dict[bytes, DiskLocation] = {}
    writing: dict[bytes, DiskLocation] = {}
    for _ in range(700):
        if random.random() < 0.05 or not slots.num_slots:
            slots.add_segment(next_segment, random.randrange(1, 12))
            next_segment += 1
        elif random.random() < 0.03:
            gone = random.choice(list(slots._segment_to_names))
            slots.remove_segment(gone)
            kept, writing = (
                {n: p for n, p in them.items() if p.segment != gone} for them in (kept, writing)
            )
        new = names_of(*range(next_name, next_name + random.randrange(8)))
        next_name += len(new)
        locations, dropped = slots.take(new, range(len(new)))
        assert set(split(dropped)) <= kept.keys()
        for name in split(dropped):
            del kept[name]
        got = {
            name: location
            for name, location in zip(new, locations, strict=True)
            if location is not None
        }
        assert not set(got.values()) & (set(kept.values()) | set(writing.values()))
        assert len(got) == len(new) or not kept
        writing |= got
        for name in [name for name in writing if random.random() < 0.4]:
            slots.wrote([name])
            kept[name] = writing.pop(name)
        for name in [name for name in (*kept, *writing) if random.random() < 0.05]:
            slots.drop([name])
            kept.pop(name, None)
            writing.pop(name, None)
        for location in random.sample(
            sorted(kept.values(), key=lambda p: (p.segment, p.disk_slot)), len(kept) // 4
        ):
            slots.used(location.segment, (location.disk_slot,), (1,))
        assert all(slots.find(name) == location for name, location in (kept | writing).items())
        assert (len(slots), slots.check()) == (len(kept) + len(writing), [])
