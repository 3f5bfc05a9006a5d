"""Read a request's body under a byte limit, whatever its headers promise; how long that may take is
gateway/places'.

Knows ASGI's receive, nothing of JSON. Raises ApiError: 413, 415.
"""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from hadal.gateway.errors import ApiError

_CLOSE = {"Connection": "close"}
_DISCARD_DEADLINE_S = 2.0
"""A client that is still sending often reads no reply: swallow what it sends for this long, then
answer and close.
"""


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the body. Its length is counted while it streams in: Content-Length may be missing or
    a lie.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(
            415,
            f"The content type is {kind[:100]!r}; send 'Content-Type: application/json'.",
            code="unsupported_media_type",
        )
    chunks: list[bytes] = []
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            break
        chunks.append(chunk)
    if num_bytes > max_bytes:
        await _discard(request)
        raise ApiError(
            413,
            f"The body is larger than {max_bytes} bytes; send a shorter prompt.",
            code="body_too_large",
            headers=_CLOSE,
        )
    return b"".join(chunks)


async def _discard(request: Request) -> None:
    try:
        async with asyncio.timeout(_DISCARD_DEADLINE_S):
            while (message := await request.receive())["type"] == "http.request" and message.get(
                "more_body", False
            ):
                continue
    except (TimeoutError, ClientDisconnect):
        return
