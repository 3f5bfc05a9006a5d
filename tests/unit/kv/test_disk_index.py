"""Test DiskIndex: it takes in news of the folder and returns the locations of the longest prefix."""

from __future__ import annotations

import pytest

from hadal.core.cache import NAME_BYTES, DiskLocation
from hadal.kv.disk_index import DiskIndex

A, B, C = (bytes([letter]) * NAME_BYTES for letter in b"abc")
FAR = DiskLocation(123_456, (1 << 32) - 2)


def test_the_longest_prefix_is_found() -> None:
    index = DiskIndex()
    index.put(A + C, (DiskLocation(0, 0), FAR))
    assert (index.lookup(A + B + C), index.num_found(A + B + C)) == ((DiskLocation(0, 0),), 1)
    assert index.found(A + B + C + A) == (*index.lookup(A), *index.lookup(C), *index.lookup(A))
    index.put(B, (DiskLocation(1, 2),))
    assert index.lookup(A + B + C) == (DiskLocation(0, 0), DiskLocation(1, 2), FAR)
    assert (index.num_found(A + B + C), index.num_found(b""), index.lookup(b"")) == (3, 0, ())
    assert (len(index), A in index, A[:-1] in index) == (3, True, False)


def test_a_known_name_moves_and_a_dropped_one_is_gone() -> None:
    index = DiskIndex()
    index.put(A + B, (DiskLocation(0, 0), None))
    index.put(A, (FAR,))
    assert (index.find(A), index.find(B)) == (FAR, None)
    index.drop(A + C)
    assert (index.find(A), len(index)) == (None, 0)


def test_every_name_needs_a_place() -> None:
    with pytest.raises(ValueError, match="1 locations do not fit 2 names"):
        DiskIndex().put(A + B, (FAR,))
