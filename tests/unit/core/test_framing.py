"""Framing: the bytes that digests and proofs are computed over."""

from __future__ import annotations

import pytest

from hadal.core.framing import U32, U64, delimited


def test_lengths_are_little_endian() -> None:
    assert U32.pack(258) == b"\x02\x01\x00\x00"
    assert U64.pack(258) == b"\x02\x01" + bytes(6)


@pytest.mark.parametrize("other", [(b"a", b"bc"), (b"abc",), (b"ab", b"c", b""), (b"c", b"ab")])
def test_parts_do_not_run_into_each_other(other: tuple[bytes, ...]) -> None:
    whole = b"".join(delimited(b"ab", b"c"))
    assert whole == b"\x02" + bytes(7) + b"ab\x01" + bytes(7) + b"c"
    assert b"".join(delimited(*other)) != whole
