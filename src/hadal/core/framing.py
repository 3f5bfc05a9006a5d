"""Lengths and counts as bytes, unsigned and little-endian, for connections, digests and files.

Does not depend on sockets or files.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")


def delimited(*parts: bytes) -> Iterator[bytes]:
    """Yield each part after its length in bytes (U64), so that parts cannot run into each other."""
    for part in parts:
        yield U64.pack(len(part))
        yield part
