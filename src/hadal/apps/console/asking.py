"""HTTP client of the pages for the gateway: streamed answers, and pages such as /status."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import msgspec
from httpx_sse import EventSource

from hadal.core.errors import HadalError

_CONNECT_S = 5.0
_SILENCE_S = 120.0
"""Seconds without any byte, even a keep-alive, after which a request fails."""
_PAGE_S = 5.0
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=20)
"""No limit on connections, because every running answer needs one."""
_BUSY = (429, 503)
"""HTTP statuses after which a retry may succeed."""
_MAX_AGAIN = 5
_MAX_AGAIN_S = 60.0
"""Longest Retry-After, in seconds, that is waited for; a longer one fails the request."""


class AskError(HadalError):
    """Error: the gateway is unreachable, refuses or breaks off; the text is for the user."""

    def __init__(
        self, message: str, status: int = 0, param: str = "", again_s: float | None = None
    ) -> None:
        """`again_s`: wait before a retry, from the gateway's Retry-After; None: do not retry."""
        super().__init__(message)
        self.status = status
        self.param = param
        self.again_s = again_s


class _ModelName(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_ModelName]


class Asking:
    """Client of one gateway. `url`: with or without /v1."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        timeout = httpx.Timeout(_SILENCE_S, connect=_CONNECT_S)
        # A proxy from the environment must not be used for this machine's own gateway.
        self._client = httpx.AsyncClient(
            base_url=self.url, timeout=timeout, limits=_LIMITS, trust_env=False
        )

    async def close(self) -> None:
        """Close the connections to the gateway."""
        await self._client.aclose()

    async def page(self, path: str, key: str, timeout_s: float = _PAGE_S, **query: str) -> bytes:
        """Return the body of GET `path`. Raises AskError."""
        try:
            reply = await self._client.get(
                path, params=query, headers=_headers(key), timeout=timeout_s
            )
        except httpx.HTTPError as error:
            raise AskError(f"No answer from the server ({_named(error)}).") from error
        if reply.status_code != 200:
            raise _refusal(reply)
        return reply.content

    async def model(self, key: str) -> str:
        """Return the name of the first served model; empty if there is none. Raises AskError."""
        try:
            found = msgspec.json.decode(await self.page("/v1/models", key), type=_Models)
        except msgspec.MsgspecError as error:
            raise AskError(f"{self.url} is not an OpenAI-compatible server ({error}).") from error
        return found.data[0].id if found.data else ""

    async def stream(self, body: dict[str, Any], key: str) -> AsyncIterator[dict[str, Any]]:
        """Yield an answer's events; leaving the loop cancels it on the server. Raises AskError."""
        try:
            async with self._client.stream(
                "POST", "/v1/chat/completions", json=body, headers=_headers(key)
            ) as reply:
                if reply.status_code != 200:
                    await reply.aread()
                    raise _refusal(reply)
                async for sent in EventSource(reply).aiter_sse():
                    if sent.data == "[DONE]":
                        return
                    event = msgspec.json.decode(sent.data, type=dict[str, Any])
                    if "error" in event:
                        raise AskError(str(event["error"].get("message", event["error"])))
                    yield event
        except (httpx.HTTPError, msgspec.MsgspecError) as error:
            raise AskError(f"The connection to the server broke ({_named(error)}).") from error


class ChatModel:
    """Access of one page to the served model, with the user's key."""

    def __init__(self, asking: Asking) -> None:
        self.name = ""
        self.can_call = True
        """True until the server refuses tools, because its model was not trained to call them."""
        self._asking = asking
        self._key = ""

    async def knock(self, key: str) -> None:
        """Check a key at the gateway, and use it for later requests. Raises AskError if the gateway
        refuses it or does not answer.
        """
        self.name = await self._asking.model(key)
        self._key = key

    async def answer(
        self, body: dict[str, Any], say: Callable[[str], None]
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of an answer; if the gateway is busy, retry after its Retry-After, up to
        _MAX_AGAIN times. `say` shows a note during that wait. Raises AskError.
        """
        for num_tries in itertools.count():
            try:
                async for event in self._asking.stream(body, self._key):
                    yield event
                return
            except AskError as error:
                again_s = error.again_s
                if again_s is None or again_s > _MAX_AGAIN_S or num_tries == _MAX_AGAIN:
                    raise
                say(f"The server is busy; retrying in {again_s:.0f} s.")
                await asyncio.sleep(again_s)
                say("")

    def refuses_tools(self, body: dict[str, Any], error: AskError) -> bool:
        """Return True, and clear `can_call`, if a request failed as the model cannot call tools."""
        is_refused = "tools" in body and error.status == 400 and error.param.startswith("tool")
        self.can_call = self.can_call and not is_refused
        return is_refused


def _headers(key: str) -> dict[bytes, bytes]:
    return {b"Authorization": b"Bearer " + key.encode()} if key else {}


def _named(error: Exception) -> str:
    return str(error) or type(error).__name__


def _refusal(reply: httpx.Response) -> AskError:
    again = reply.headers.get("retry-after", "")
    again_s = float(again) if reply.status_code in _BUSY and again.isdecimal() else None
    try:
        error = reply.json()["error"]
        said, param = str(error["message"]), str(error.get("param") or "")
    except (ValueError, KeyError, TypeError):
        said, param = f"The server answered {reply.status_code}.", ""
    return AskError(said, reply.status_code, param, again_s)
