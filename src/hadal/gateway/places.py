"""Room for requests in the gateway, by tenant: bodies on their way, then requests that are worked
on.

    headers --Bodies--> whole body --Places--> answered

What one tenant does to them costs no other a place. Generations are counted by the front
(policy/admission).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from starlette.requests import ClientDisconnect, Request

from hadal.gateway.errors import ApiError, overloaded
from hadal.policy.admission import share_of

# Read a request's body under a byte limit, whatever its headers promise; how long that may take is
# gateway/places'.
#
# Knows ASGI's receive, nothing of JSON. Raises ApiError: 413, 415.


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


MAX_BODIES = 256
"""Most bodies on their way at once. One that was sent with its headers is there as soon as it is
asked for.
"""
LEFT_S = 10.0
"""How long generations that were given up still take places. To begin and to end one costs the
gateway half a millisecond of its one thread: a tenant that does nothing else may have 5 % of it
where there are a thousand places.
"""


class Bodies:
    """Bodies that are waited for, each until its deadline. One more than its tenant's share pushes
    out its oldest.
    """

    def __init__(self, num_max: int = MAX_BODIES) -> None:
        self._num_max = num_max
        self._tenant_to_waits: dict[str, dict[asyncio.Timeout, None]] = {}
        """Deadlines of the bodies that each tenant sends, the oldest first."""

    def __len__(self) -> int:
        return sum(len(waits) for waits in self._tenant_to_waits.values())

    @asynccontextmanager
    async def wait(self, tenant: str, deadline_s: float) -> AsyncIterator[None]:
        """Read a body within this. Raises ApiError 408 after the deadline, 429 if its place is
        taken from it.
        """
        waits = self._tenant_to_waits.setdefault(tenant, {})
        if len(waits) >= share_of(self._num_max, len(self._tenant_to_waits)):
            oldest = next(iter(waits))
            if not oldest.expired():  # Else its deadline was quicker: it leaves by itself.
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
                "Too many bodies of this tenant are on their way; send fewer at once, and faster.",
                code="too_many_bodies",
                headers=_CLOSE,
            ) from None
        finally:
            waits.pop(timeout, None)
            if not waits and self._tenant_to_waits.get(tenant) is waits:
                del self._tenant_to_waits[tenant]


class Places:
    """HTTP requests that are worked on, from their whole body to the end of their answer."""

    def __init__(self, num_max: int, retry_after_s: float) -> None:
        self._num_max = num_max
        self._retry_after_s = retry_after_s
        self._tenant_to_num: Counter[str] = Counter()
        self._tenant_to_left: Counter[str] = Counter()
        """Generations whose clients went away a moment ago."""

    def __len__(self) -> int:
        return self._tenant_to_num.total()

    def check(self, tenant: str) -> None:
        """Raises ApiError 429 for a tenant that has its share. Asked before a body is read, it
        spares reading it.
        """
        num_held, num_left = self._tenant_to_num[tenant], self._tenant_to_left[tenant]
        if num_held + num_left >= share_of(
            self._num_max, len(self._tenant_to_num.keys() | {tenant})
        ):
            raise overloaded(
                429,
                f"This tenant has {num_held} requests that are worked on, and {num_left}"
                f" generations that it gave up in the last {LEFT_S:g} s count as well; try again.",
                self._retry_after_s,
                "too_many_requests",
            )

    @contextmanager
    def take(self, tenant: str) -> Iterator[None]:
        """Hold a place. Raises as `check` does."""
        self.check(tenant)
        self._tenant_to_num[tenant] += 1
        try:
            yield
        finally:
            self._tenant_to_num[tenant] -= 1
            if not self._tenant_to_num[tenant]:
                del self._tenant_to_num[tenant]

    def left(self, tenant: str, num: int) -> None:
        """A client went away from so many generations: they take places for LEFT_S more, so that to
        begin and give up again and again costs the tenant that does it and not the others.
        """
        self._tenant_to_left[tenant] += num
        asyncio.get_running_loop().call_later(LEFT_S, self._forget, tenant, num)

    def _forget(self, tenant: str, num: int) -> None:
        self._tenant_to_left[tenant] -= num
        if not self._tenant_to_left[tenant]:
            del self._tenant_to_left[tenant]
