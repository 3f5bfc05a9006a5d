"""Block names concatenated in bytes are cut and counted; a location and its number convert both ways."""

from __future__ import annotations

from hadal.core.cache import DiskLocation, location_of, num_names, number_of, slice_of, split


def test_names_are_cut_by_number() -> None:
    a, b, c = (bytes([letter]) * 16 for letter in b"abc")
    names = a + b + c
    assert list(split(names)) == [a, b, c]
    assert (num_names(names), num_names(b"")) == (3, 0)
    assert slice_of(names, 0, 2) + slice_of(names, 2, 9) == names
    assert slice_of(names, 1, 2) == b


def test_locations_are_numbers_in_the_order_of_their_slots() -> None:
    for segment, slot in [(0, 0), (7, 5), ((1 << 62) - 1, (1 << 31) - 1)]:
        assert location_of(number_of(segment, slot)) == DiskLocation(segment, slot)
    assert number_of(7, 5) + 1 == number_of(7, 6) < number_of(8, 0)
