"""What the pages ask of the gateway, over its HTTP API as any client: answers as they are made, and
what the key of whoever looks may see.
"""

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
"""A server that says nothing for so long, not even a keep-alive, is given up."""
_PAGE_S = 5.0
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=20)
"""Every answer that comes in has a connection, however many pages are open."""
_BUSY = (429, 503)
"""Statuses of a server that may have room later."""
_MAX_AGAIN = 5
_MAX_AGAIN_S = 60.0
"""A server that is busy for longer is not waited for."""


class AskError(HadalError):
    """The gateway cannot be reached, or refuses; the text is for the user."""

    def __init__(
        self, message: str, status: int = 0, param: str = "", again_s: float | None = None
    ) -> None:
        """`again_s`: when the gateway says that it may be asked again; None: it does not."""
        super().__init__(message)
        self.status = status
        self.param = param
        self.again_s = again_s


class _ModelName(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_ModelName]


class Asking:
    """A client of one gateway. `url`: without /v1."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        timeout = httpx.Timeout(_SILENCE_S, connect=_CONNECT_S)
        # A proxy in the environment is not for this machine's own gateway.
        self._client = httpx.AsyncClient(
            base_url=self.url, timeout=timeout, limits=_LIMITS, trust_env=False
        )

    async def close(self) -> None:
        """Close its connections."""
        await self._client.aclose()

    async def page(self, path: str, key: str, timeout_s: float = _PAGE_S, **query: str) -> bytes:
        """The body of GET `path`. Raises AskError."""
        try:
            reply = await self._client.get(
                path, params=query, headers=_headers(key), timeout=timeout_s
            )
        except httpx.HTTPError as error:
            raise AskError(f"The server does not answer ({_named(error)}).") from error
        if reply.status_code != 200:
            raise _refusal(reply)
        return reply.content

    async def model(self, key: str) -> str:
        """Name of the model that is served. Raises AskError."""
        try:
            found = msgspec.json.decode(await self.page("/v1/models", key), type=_Models)
        except msgspec.MsgspecError as error:
            raise AskError(f"{self.url} is no server of this kind ({error}).") from error
        return found.data[0].id if found.data else ""

    async def stream(self, body: dict[str, Any], key: str) -> AsyncIterator[dict[str, Any]]:
        """Events of an answer; leaving the loop makes the server stop its work. Raises AskError."""
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
    """The served model, as one page asks it with one key."""

    def __init__(self, asking: Asking) -> None:
        self.name = ""
        self.can_call = True
        """Until the server refuses tools: its model was not taught any."""
        self._asking = asking
        self._key = ""

    async def knock(self, key: str) -> None:
        """Ask with this key from now on. Raises AskError if the gateway does not take it."""
        self.name = await self._asking.model(key)
        self._key = key

    async def answer(
        self, body: dict[str, Any], say: Callable[[str], None]
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of an answer; a busy gateway is asked again when it wants. `say`: shows
        that. Raises AskError.
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
                say(f"Busy, trying again in {again_s:.0f} s.")
                await asyncio.sleep(again_s)
                say("")

    def refuses_tools(self, body: dict[str, Any], error: AskError) -> bool:
        """Return whether a request failed because the model was not taught to call tools, and
        remember it.
        """
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
