"""Lengths and counts as bytes, on connections, in digests and in files: unsigned and little-endian.

Knows no sockets and no files.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")


def delimited(*parts: bytes) -> Iterator[bytes]:
    """Put each part behind its length, so that parts cannot run into each other."""
    for part in parts:
        yield U64.pack(len(part))
        yield part
