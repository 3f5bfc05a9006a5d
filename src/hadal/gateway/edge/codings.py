"""Content codings of request bodies: decoded in small pieces, so that a caller can stop in between.

Depends neither on requests nor on limits of their size.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Protocol

from hadal.core.errors import RequestError
from hadal.gateway.edge.errors import ApiError

try:
    from backports import zstd
except ImportError:  # The extra `zstd` is not installed.
    HAS_ZSTD = False
else:
    HAS_ZSTD = True

PIECE_BYTES = 1 << 18
"""Maximum number of bytes decoded at a time, which takes about a millisecond."""
_MAX_WINDOW_LOG = 23
"""Logarithm of the largest window of zstd data, 8 MiB: RFC 9659, 3."""
_MAX_MEMBERS = 64
"""Maximum number of gzip members or zstd frames of a body: each needs a decoder of its own, and may
have a few bytes. Clients send one.
"""


class Decoder(Protocol):
    """Decoder of one body."""

    coding: str

    @property
    def is_complete(self) -> bool:
        """Return True if the data may end here."""
        ...

    def pieces(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the next data in pieces of at most PIECE_BYTES. Raises RequestError."""
        ...


def decoder_of(coding: str) -> Decoder | None:
    """Return the decoder of a Content-Encoding; None if there is none. Raises ApiError 415."""
    listed = (name.strip().lower() for name in coding.split(","))
    name = ", ".join(name for name in listed if name not in ("", "identity"))
    if not name:
        return None
    if name in ("gzip", "x-gzip"):
        return _GzipDecoder()
    if name == "zstd" and HAS_ZSTD:
        return _ZstdDecoder()
    codings = ("zstd", "gzip") if HAS_ZSTD else ("gzip",)
    why = ", which needs the package backports.zstd on the server" if name == "zstd" else ""
    raise ApiError(
        415,
        f"The content encoding is {coding[:100]!r}{why}; send {' or '.join(codings)}, or no"
        " encoding.",
        code="unsupported_media_type",
        headers={"Accept-Encoding": ", ".join(codings)},  # RFC 9110, 15.5.16.
    )


class _GzipDecoder:
    """Decoder of gzip data: members, one after another."""

    coding = "gzip"

    def __init__(self) -> None:
        self.is_complete = False
        self._member = zlib.decompressobj(wbits=31)
        self._num_left = _MAX_MEMBERS

    def pieces(self, chunk: bytes) -> Iterator[bytes]:
        while chunk:
            if self._member.eof:
                self._num_left = _one_less(self._num_left)
                self._member = zlib.decompressobj(wbits=31)
            try:
                piece = self._member.decompress(chunk, PIECE_BYTES)
            except zlib.error as error:
                raise _invalid(self.coding, error) from None
            self.is_complete = self._member.eof
            chunk = self._member.unused_data if self._member.eof else self._member.unconsumed_tail
            yield piece


class _ZstdDecoder:
    """Decoder of zstd data: frames, one after another."""

    coding = "zstd"

    def __init__(self) -> None:
        self._frame = self._new_frame()
        self._num_left = _MAX_MEMBERS

    @property
    def is_complete(self) -> bool:
        return self._frame.eof

    def pieces(self, chunk: bytes) -> Iterator[bytes]:
        while chunk or not (self._frame.eof or self._frame.needs_input):
            if self._frame.eof:
                self._num_left = _one_less(self._num_left)
                self._frame = self._new_frame()
            try:
                piece = self._frame.decompress(chunk, PIECE_BYTES)
            except zstd.ZstdError as error:
                raise _invalid(self.coding, error) from None
            chunk = self._frame.unused_data if self._frame.eof else b""
            yield piece

    @staticmethod
    def _new_frame() -> zstd.ZstdDecompressor:
        window = zstd.DecompressionParameter.window_log_max
        return zstd.ZstdDecompressor(options={window: _MAX_WINDOW_LOG})


def _one_less(num_left: int) -> int:
    if num_left <= 1:
        raise RequestError(f"The body has more than {_MAX_MEMBERS} encoded parts; send one.")
    return num_left - 1


def _invalid(coding: str, error: Exception) -> RequestError:
    return RequestError(f"The body is no valid {coding} data: {error}. Check Content-Encoding.")
