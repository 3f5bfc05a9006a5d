"""Request bodies: read and decoded within a size limit, with a fair share of the places for
incomplete ones.

    headers --Bodies--> whole body --Permits--> answered

A tenant's bodies take no other tenant's places. Does not depend on routes or contents.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import ClientDisconnect, Request

from hadal.core.errors import RequestError
from hadal.gateway.edge.codings import PIECE_BYTES, decoder_of
from hadal.gateway.edge.errors import ApiError
from hadal.policy.admission import share_of

_CLOSE = {"Connection": "close"}
_DISCARD_DEADLINE_S = 2.0
"""Maximum time for discarding the rest of an oversized body. The error is sent afterwards, because
clients often do not read a reply while they are sending; then the connection closes.
"""


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the body, decoded. Raises RequestError, ApiError 413, 415. Bytes are counted as they
    arrive and as they are decoded: Content-Length may be missing or wrong.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(
            415,
            f"The content type is {kind[:100]!r}; send 'Content-Type: application/json'.",
            code="unsupported_media_type",
        )
    decoder = decoder_of(", ".join(request.headers.getlist("content-encoding")))
    chunks: list[bytes] = []
    num_bytes, num_sent = 0, 0
    stream = request.stream()
    async for chunk in stream:
        num_sent += len(chunk)
        pieces = [chunk] if decoder is None else decoder.pieces(chunk)
        for piece in pieces:
            num_bytes += len(piece)
            if num_bytes > max_bytes:
                break
            chunks.append(piece)
            if decoder is not None and len(piece) == PIECE_BYTES:
                await asyncio.sleep(0)  # Other requests run while a long body is decoded.
        if max(num_bytes, num_sent) > max_bytes:
            await discard(stream)
            raise ApiError(
                413,
                f"The body is larger than {max_bytes} bytes; send a shorter prompt.",
                code="body_too_large",
                headers=_CLOSE,
            )
    if decoder is not None and not decoder.is_complete:
        raise RequestError(f"The body ends within its {decoder.coding} data; send all of it.")
    return b"".join(chunks)


async def discard(stream: AsyncIterator[bytes]) -> None:
    """Discard the rest of a body for at most _DISCARD_DEADLINE_S."""
    try:
        async with asyncio.timeout(_DISCARD_DEADLINE_S):
            async for _ in stream:
                continue
    except (TimeoutError, ClientDisconnect):
        return


MAX_BODIES = 256
"""Maximum number of incomplete bodies of a lone tenant; each of k tenants may have 1/k of it. A
body that arrives together with its headers counts only briefly.
"""


class Bodies:
    """Incomplete bodies, each with a deadline. A tenant above its share loses its oldest body."""

    def __init__(self, num_max: int = MAX_BODIES) -> None:
        self._num_max = num_max
        self._tenant_to_waits: dict[str, dict[asyncio.Timeout, None]] = {}
        """Deadlines of each tenant's incomplete bodies, the oldest first."""

    def __len__(self) -> int:
        return sum(len(waits) for waits in self._tenant_to_waits.values())

    @asynccontextmanager
    async def wait(self, tenant: str, deadline_s: float) -> AsyncIterator[None]:
        """Read a body within this context. Raises ApiError 408 after the deadline, and 429 if a
        later body of the same tenant took its place.
        """
        waits = self._tenant_to_waits.setdefault(tenant, {})
        if len(waits) >= share_of(self._num_max, len(self._tenant_to_waits)):
            oldest = next(iter(waits))
            if not oldest.expired():  # An expired one has already been ended by its deadline.
                del waits[oldest]
                oldest.reschedule(asyncio.get_running_loop().time())
        timeout = asyncio.timeout(deadline_s)
        waits[timeout] = None
        try:
            async with timeout:
                yield
        except TimeoutError:
            if timeout in waits:
                raise ApiError(
                    408,
                    f"The body was not complete after {deadline_s:g} s; send it faster.",
                    code="request_timeout",
                    headers=_CLOSE,
                ) from None
            raise ApiError(
                429,
                "This tenant sends too many bodies at the same time; send fewer at once, and faster.",
                code="too_many_bodies",
                headers=_CLOSE,
            ) from None
        finally:
            waits.pop(timeout, None)
            if not waits and self._tenant_to_waits.get(tenant) is waits:
                del self._tenant_to_waits[tenant]
